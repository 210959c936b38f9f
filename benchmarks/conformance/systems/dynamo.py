"""Dynamo's selection service, from PyPI."""

from ..environments import BENCHMARKS, python_of
from .selection_service import SelectionService


class DynamoSelectService(SelectionService):
    """Forgets its workers when it dies; they are registered again, as an orchestrator would."""

    title = "Dynamo select_service 1.6.1"

    def command(self, port: int) -> list[str]:
        python = python_of(BENCHMARKS / ".peer-venv", BENCHMARKS / "peer-requirements.txt")
        return [str(python), "-m", "dynamo.select_service", "--port", str(port)]

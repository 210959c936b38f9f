"""Dynamo's selection service, from PyPI."""

from router.tools.conformance.steps import Marks
from router.tools.conformance.systems.selection_service import SelectionService

from .environments import BENCHMARKS, python_of

MARKS = Marks(salt_prefix="dynamo-cache-salt:", image_digits=16)
"""Dynamo's vLLM worker marks salts and pads image hashes; its event reader knows these alone."""


class DynamoSelectService(SelectionService):
    """Forgets its workers when it dies; they are registered again, as an orchestrator does."""

    title = "Dynamo select_service 1.6.1"
    marks = MARKS

    def command(self, port: int) -> list[str]:
        python = python_of(BENCHMARKS / ".peer-venv", BENCHMARKS / "peer-requirements.txt")
        return [str(python), "-m", "dynamo.select_service", "--port", str(port)]

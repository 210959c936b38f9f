"""Above what a rank is busy: asked and changed per model, and who is busy now."""

from msgspec import UNSET, Struct, structs

from router.core import RouterCore
from router.protocol.requests import BusyThresholdRequest
from router.scheduler.busy import BusyThresholds


class BusyRank(Struct, frozen=True):
    """A rank that gets nothing more for now."""

    worker_id: int
    dp_rank: int
    routing_group: str


class ModelThresholds(Struct, frozen=True, kw_only=True):
    """The thresholds of a model, null for those that are not looked at, and its busy ranks."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | None
    busy: list[BusyRank]


class BusyThresholdsReply(Struct, frozen=True):
    """Of every model that is served, or has thresholds of its own."""

    thresholds: list[ModelThresholds]


class BusyCommands:
    """Commands about thresholds, on one core. They last as long as the process."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def all(self) -> BusyThresholdsReply:
        """Every model's. O(ranks)."""
        served = {worker.announcement.model_name for worker in self._core.fleet}
        models = sorted(served | set(self._core.gate.models))
        return BusyThresholdsReply([self._of(model) for model in models])

    def change(self, request: BusyThresholdRequest) -> ModelThresholds:
        """Set what the request names, null for no threshold; then a model's."""
        named = {
            name: getattr(request, name)
            for name in BusyThresholds.__struct_fields__
            if getattr(request, name) is not UNSET
        }
        if named:
            before = self._core.gate.thresholds(request.model)
            self._core.set_busy_thresholds(request.model, structs.replace(before, **named))
        return self._of(request.model)

    def _of(self, model: str) -> ModelThresholds:
        thresholds = self._core.gate.thresholds(model)
        return ModelThresholds(model=model, busy=self._busy(model), **structs.asdict(thresholds))

    def _busy(self, model: str) -> list[BusyRank]:
        announced = (worker.announcement for worker in self._core.fleet)
        scopes = sorted({each.scope for each in announced if each.model_name == model})
        return [
            BusyRank(rank.worker_id, rank.dp_rank, scope.routing_group)
            for scope in scopes
            for rank in self._core.busy_ranks(scope)
        ]

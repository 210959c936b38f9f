"""The observations of one engine, which the checks judge."""

from msgspec import Struct

from router.discovery.attach.engine_server import ObservedServer
from router.publisher.engine_metrics.dialects import EngineKind
from router.tools.doctor.config import DoctorConfig
from router.tools.doctor.event_totals import EventTotals
from router.tools.doctor.messages import ObservedLive, ObservedReplay
from router.tools.doctor.observed_probe import ObservedProbe
from router.tools.doctor.ports import ObservedPort
from router.tools.doctor.trial import ObservedTrial
from router.tools.doctor.wire_forms import WireForms

_SGLANG_MEDIUMS = frozenset({"CPU_PINNED", "DISK", "EXTERNAL"})


class ObservedEngine(Struct, frozen=True):
    """Observations; `replay` and the following fields are None if they were not examined."""

    config: DoctorConfig
    events_port: ObservedPort
    replay_port: ObservedPort | None
    live: ObservedLive
    replay: ObservedReplay | None
    contents: EventTotals
    forms: WireForms
    trial: ObservedTrial | None
    server: ObservedServer | None
    probe: ObservedProbe | None

    @property
    def is_publisher(self) -> bool:
        """True if live events may be received."""
        return self.events_port.is_publisher

    @property
    def engine(self) -> EngineKind | None:
        """The kind of engine: as configured, else by its metrics, else by the form of events."""
        if self.config.engine:
            return self.config.engine
        if self.server is not None and self.server.engine is not None:
            return self.server.engine
        return engine_of(self.forms, self.contents)

    @property
    def model(self) -> str | None:
        """The model to register."""
        return self.config.model or (self.server.base_model if self.server else None)

    @property
    def block_size(self) -> int | None:
        """The block size of most received blocks; None without any."""
        sizes = self.contents.block_sizes
        return sizes.most_common(1)[0][0] if sizes else None

    @property
    def dp_rank(self) -> int:
        """The rank that publishes here; 0 if the batches contain none."""
        ranks = self.contents.dp_ranks
        return ranks.most_common(1)[0][0] if ranks else 0


def engine_of(forms: WireForms, contents: EventTotals) -> EngineKind | None:
    """Return the kind of engine that sends events of this form. Returns None if unclear."""
    if forms.hash_kinds["signed"] or contents.mediums.keys() & _SGLANG_MEDIUMS:
        return "sglang"
    if forms.maps_without_lora_name:
        return "sglang"
    if forms.longest_array > _SGLANG_ARRAY or forms.hash_kinds["32 bytes"] or forms.maps:
        return "vllm"
    return None


_SGLANG_ARRAY = 10

"""Everything that was observed of one engine: what the checks judge."""

from msgspec import Struct

from router.publisher.metrics_dialects import EngineKind
from router.tools.doctor.config import DoctorConfig
from router.tools.doctor.contents import Contents
from router.tools.doctor.messages import LiveSeen, ReplaySeen
from router.tools.doctor.ports import PortSeen
from router.tools.doctor.probe_seen import ProbeSeen
from router.tools.doctor.server import ServerSeen
from router.tools.doctor.trial import TrialSeen
from router.tools.doctor.wire_forms import WireForms

_SGLANG_MEDIUMS = frozenset({"CPU_PINNED", "DISK", "EXTERNAL"})


class EngineSeen(Struct, frozen=True):
    """Observations. Of `replay` and what follows None means that it was not looked at."""

    config: DoctorConfig
    events_port: PortSeen
    replay_port: PortSeen | None
    live: LiveSeen
    replay: ReplaySeen | None
    contents: Contents
    forms: WireForms
    trial: TrialSeen | None
    server: ServerSeen | None
    probe: ProbeSeen | None

    @property
    def is_publisher(self) -> bool:
        """Are there live events to be had?"""
        return self.events_port.is_publisher

    @property
    def engine(self) -> EngineKind | None:
        """Whose it is: as told, as its metrics are named, or as its events look."""
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
        """Tokens of most blocks that were heard of."""
        sizes = self.contents.block_sizes
        return sizes.most_common(1)[0][0] if sizes else None

    @property
    def dp_rank(self) -> int:
        """The rank that publishes here; 0 where none is named."""
        ranks = self.contents.dp_ranks
        return ranks.most_common(1)[0][0] if ranks else 0


def engine_of(forms: WireForms, contents: Contents) -> EngineKind | None:
    """Which engine sends events that look like this; None if that cannot be told."""
    if forms.hash_kinds["signed"] or contents.mediums.keys() & _SGLANG_MEDIUMS:
        return "sglang"
    if forms.maps_without_lora_name:
        return "sglang"
    if forms.longest_array > _SGLANG_ARRAY or forms.hash_kinds["32 bytes"] or forms.maps:
        return "vllm"
    return None


_SGLANG_ARRAY = 10

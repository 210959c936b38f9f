"""Objectives for the requests of any trace: some are watched by people, the others are batches."""

from random import Random
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from router.simulator.traces import Trace

_Milliseconds = Annotated[float, Meta(gt=0)]


class ObjectiveMix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mix of tight and loose objectives.

    `interactive`: the fraction of prompts of at most `interactive_isl_tokens` that are watched;
    longer ones take longer on any idle worker, and are batches.
    """

    interactive: Annotated[float, Meta(ge=0, le=1)] = 0.7
    interactive_isl_tokens: Annotated[int, Meta(ge=1)] = 16_000
    interactive_ttft_ms: _Milliseconds = 3_000.0
    interactive_tpot_ms: _Milliseconds = 60.0
    batch_ttft_ms: _Milliseconds = 30_000.0
    batch_tpot_ms: _Milliseconds = 200.0

    def given_to(self, trace: Trace, rng: Random) -> Trace:
        """Return the trace with objectives. O(requests)."""
        tight = (self.interactive_ttft_ms, self.interactive_tpot_ms)
        requests = []
        for each in trace.requests:
            is_watched = rng.random() < self.interactive
            is_watched &= each.isl_tokens <= self.interactive_isl_tokens
            ttft_ms, tpot_ms = tight if is_watched else (self.batch_ttft_ms, self.batch_tpot_ms)
            requests.append(replace(each, slo_ttft_ms=ttft_ms, slo_tpot_ms=tpot_ms))
        return replace(trace, requests=requests)

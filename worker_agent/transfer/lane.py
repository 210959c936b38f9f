"""Copies beside the engine's own work: on a CUDA stream of their own, in order on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lane:
    """One direction of copies. The engine's stream is waited for, never made to wait."""

    __slots__ = ("_engine_stream", "_stream")

    def __init__(
        self, device: torch.device, engine_stream: "torch.cuda.Stream | None" = None
    ) -> None:
        """`engine_stream`: where blocks are computed; None: the device's default stream."""
        self._stream = _stream_of(device) if device.type == "cuda" else None
        self._engine_stream = engine_stream

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies begun in the body come after what the engine has begun, and are done at its end.

        An event is waited for; no stream of the engine's is.
        """
        if self._stream is None:
            yield
            return
        engine = self._engine_stream or torch.cuda.default_stream(self._stream.device)
        self._stream.wait_event(engine.record_event())
        with torch.cuda.stream(self._stream):
            yield
            done = self._stream.record_event()
        done.synchronize()


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

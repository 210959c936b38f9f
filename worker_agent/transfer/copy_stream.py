"""The order of copies and computation on a device: streams, events, and the rules between them.

    stream of the calling thread   ── compute ──●────────────── compute ──●── compute ─▶
                                                │ begins after            ▲ hold_back: rule 3
    one stream for each direction               └─▶ copy ─▶ copy ─▶ ● done┘
                                                                    └─▶ the host: rule 4

1. A copy begins after all work that the calling thread has queued: an engine's kernels may still
   write the blocks to be stored, or read or clear the blocks to be filled. The stream is that of
   the calling thread at the time of the call; engines compute on streams of their own.
2. Copies of one direction run one after another, because they share staging rows.
3. Blocks that are reused while a copy may still access them: the caller calls `hold_back`, and
   work that it queues from then on begins after the copy.
   Loads layer by layer hold back each layer.
4. Everything else follows the host, which may use the rows or the blocks once `is_done` is true.

No call waits for the device, except `wait`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor

from worker_agent.transfer.slots import aligned_rows


class CopyEvent(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""


class Stream(Protocol):
    """A queue of work on a device, which runs in order."""

    def record_event(self) -> CopyEvent:
        """Return an event after the work queued so far."""

    def wait_event(self, event: CopyEvent) -> None:
        """Let work queued from now on begin after the event. Returns at once."""


class CopyDevice(Protocol):
    """A device as copies need it. The calls of torch are queued in the current stream."""

    def current_stream(self) -> Stream:
        """Return the stream in which the calling thread queues its work now."""

    def create_stream(self) -> Stream:
        """Return a new stream."""

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        """Make it the calling thread's current stream in the context."""

    def staging(self, count: int, row_bytes: int) -> Tensor | None:
        """Return rows on the device. Returns None if the host addresses its memory directly."""

    def host_rows(self, count: int, row_bytes: int) -> Tensor:
        """Return rows on the host that the device copies without another buffer; not zeroed."""


class CudaDevice:
    """A CUDA device, with torch's own streams and events."""

    __slots__ = ("_device",)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> Stream:
        """See `CopyDevice`. vLLM sets its stream with `torch.cuda.set_stream`."""
        return cast(Stream, torch.cuda.current_stream(self._device))

    def create_stream(self) -> Stream:
        """See `CopyDevice`."""
        return cast(Stream, torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        """See `CopyDevice`."""
        return torch.cuda.stream(cast("torch.cuda.Stream", stream))

    def staging(self, count: int, row_bytes: int) -> Tensor:
        """See `CopyDevice`."""
        return torch.empty((count, row_bytes), dtype=torch.uint8, device=self._device)

    def host_rows(self, count: int, row_bytes: int) -> Tensor:
        """Return pinned rows.

        torch keeps pinned memory that is freed, by size rounded up to a power of two, and returns
        it again when the copies that use it are complete.
        """
        with torch.inference_mode(mode=False):  # An engine may be in it, a tier's thread is not.
            return torch.empty((count, row_bytes), dtype=torch.uint8, pin_memory=True)


class _Passed:
    """An event and a stream of the host, where a copy is complete when its call returns."""

    __slots__ = ()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def record_event(self) -> CopyEvent:
        return self

    def wait_event(self, event: CopyEvent) -> None:
        del event


class HostDevice:
    """The host's own memory: blocks are copied directly, at once."""

    __slots__ = ("_stream",)

    def __init__(self) -> None:
        self._stream = _Passed()

    def current_stream(self) -> Stream:
        """See `CopyDevice`."""
        return self._stream

    def create_stream(self) -> Stream:
        """See `CopyDevice`."""
        return self._stream

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        """See `CopyDevice`."""
        del stream
        return nullcontext()

    def staging(self, count: int, row_bytes: int) -> None:
        """See `CopyDevice`."""
        del count, row_bytes

    def host_rows(self, count: int, row_bytes: int) -> Tensor:
        """Return rows that suit direct reads and writes by a disk."""
        return aligned_rows(count, row_bytes)


def copy_device(device: torch.device) -> CopyDevice:
    """Return the streams of a torch device."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


class DeviceCopy:
    """A copy in progress between blocks and `rows` on the host, which it keeps allocated."""

    __slots__ = ("_device", "_done", "rows")

    def __init__(self, device: CopyDevice, done: CopyEvent, rows: Tensor) -> None:
        self._device = device
        self._done = done
        self.rows = rows

    @property
    def is_done(self) -> bool:
        """True if the copy is complete: the host may read its rows, the engine reuse its blocks."""
        return self._done.query()

    def wait(self) -> None:
        """Wait until the copy is complete. Any thread may call it."""
        self._done.synchronize()

    def hold_back(self) -> None:
        """Let the work that the calling thread queues from now on begin after the copy."""
        self._device.current_stream().wait_event(self._done)


class CopyStream:
    """One direction of copies, ordered as the module's rules say."""

    __slots__ = ("_device", "_stream")

    def __init__(self, device: CopyDevice) -> None:
        self._device = device
        self._stream = device.create_stream()

    @contextmanager
    def after_queued_work(self) -> Iterator[None]:
        """Queue the copies of the body after the calling thread's work so far."""
        self._stream.wait_event(self._device.current_stream().record_event())
        with self._device.using(self._stream):
            yield

    def copy_of(self, rows: Tensor) -> DeviceCopy:
        """Return the copies queued so far as one."""
        return DeviceCopy(self._device, self._stream.record_event(), rows)

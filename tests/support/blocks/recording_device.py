"""A device whose copies happen as late as their order allows, and which notices every race.

It runs on the CPU: inside `recording()` the calls of torch on memory that it watches count as
queued in the current stream. Those of a copy stream are carried out when they must be: when the
host finds their event passed, or the engine's stream waits for it. Each access is compared with the
earlier ones of the same bytes: two of which one writes must be ordered, by their stream, by events,
or by what the host knew to be over when it queued the later one (vector clocks).
"""

from collections import deque
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from worker_agent.transfer.slots import aligned_rows

CELL_BYTES = 16
HOST = "host"
IGNORED = {
    "engine": "held back",
    "loads": "loads begin after the engine's work",
    "stores": "stores begin after the engine's work",
}
"""The rule that is left out if a stream waits for no event."""


class RaceError(AssertionError):
    """Two accesses of the same bytes in no order, one of which writes."""


class RecordedEvent:
    def __init__(self, device, stream, late):
        self.device, self.stream = device, stream
        self.clock = stream.clock | {}
        self.passed = stream.queued
        self.late = late

    def query(self):
        if self.device.left_out == "the host waits":
            return True
        self.late -= 1
        if self.late >= 0:
            return False
        self.synchronize()
        return True

    def synchronize(self):
        self.late = 0
        self.stream.run_to(self.passed)
        merge(self.device.clocks[HOST], self.clock)


class RecordedStream:
    def __init__(self, device, name):
        self.device, self.name = device, name
        self.clock = device.clocks[name] = {name: 0}
        self.pending = deque()
        self.queued = self.done = 0

    def record_event(self):
        return RecordedEvent(self.device, self, self.device.late_queries)

    def wait_event(self, event):
        if self.device.left_out != IGNORED[self.name]:
            event.stream.run_to(event.passed)
            merge(self.clock, event.clock)

    def run(self, call):
        """A copy, when it is awaited."""
        self.pending.append(call)
        self.queued += 1

    def run_to(self, count):
        while self.done < count:
            self.done += 1
            with _disable_current_modes():
                self.pending.popleft()()


class RecordingDevice:
    """See `CopyDevice`. `late_queries`: how often an event is found not to have passed.

    `left_out`: a rule of the order that it does not keep, one of `IGNORED`, "the host waits" or
    "own staging".
    """

    def __init__(self, late_queries=2, left_out=None):
        self.late_queries, self.left_out = late_queries, left_out
        self.clocks = {HOST: {}}
        self.current = RecordedStream(self, "engine")
        self.names = deque(["loads", "stores"])
        self.memory, self.written, self.read = [], {}, {}
        self.races = []
        self.rows = None

    def current_stream(self):
        return self.current

    def create_stream(self):
        return RecordedStream(self, self.names.popleft())

    @contextmanager
    def using(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def staging(self, count, row_bytes):
        if self.rows is None or self.left_out != "own staging":
            self.rows = self.host_rows(count, row_bytes)
        return self.rows

    def host_rows(self, count, row_bytes):
        rows = aligned_rows(count, row_bytes).fill_(0xAA)
        self.watch(rows)
        return rows

    def watch(self, tensor):
        """From now on its accesses count; it is kept, so that nothing else gets its addresses."""
        self.memory.append(tensor)

    @contextmanager
    def recording(self):
        with _Recorder(self):
            yield

    def access(self, cells, is_write):
        """Of the current stream."""
        name, clock = self.current.name, self.current.clock
        merge(clock, self.clocks[HOST])
        for cell in cells:
            others = dict([self.written[cell]] if cell in self.written else [])
            if is_write:
                for other, tick in self.read.pop(cell, {}).items():
                    others[other] = max(tick, others.get(other, 0))
            for other, tick in others.items():
                if clock.get(other, 0) < tick:
                    raise RaceError(f"{name} {'writes' if is_write else 'reads'} what {other} uses")
            if is_write:
                self.written[cell] = name, clock[name]
            else:
                self.read.setdefault(cell, {})[name] = clock[name]

    def is_watched(self, tensor):
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == each.untyped_storage().data_ptr() for each in self.memory)


class _Recorder(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False  # Nothing is compiled here, and its import takes seconds.

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        reads, writes = _accesses(func, args, kwargs)
        watched = [each for each in (*reads, *writes) if self.device.is_watched(each[0])]
        if not watched:
            return func(*args, **kwargs)
        stream = self.device.current
        stream.clock[stream.name] += 1
        for accesses, is_write in ((reads, False), (writes, True)):
            for tensor, rows in accesses:
                if self.device.is_watched(tensor):
                    self.device.access(cells_of(tensor, rows), is_write)
        if stream.name == "engine" or not writes:
            return func(*args, **kwargs)
        stream.run(lambda: func(*args, **kwargs))
        return writes[0][0]


def _accesses(func, args, kwargs):
    """Tensors that a call reads and writes, with the rows of those that it indexes."""
    if any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):
        return [], []  # It is a view.
    reads, writes = [], []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        is_indexed = number == 0 and func.overloadpacket.__name__ in {"index_select", "index_copy_"}
        rows = args[2].tolist() if is_indexed else None
        tensors = [(each, rows) for each in values if isinstance(each, torch.Tensor)]
        (writes if is_write else reads).extend(tensors)
    return reads, writes


def cells_of(tensor, rows=None):
    """The cells of memory that hold these rows of a tensor, or all of it."""
    width = tensor.element_size()
    places = torch.tensor([tensor.data_ptr()])
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.tensor(rows) if dim == 0 and rows is not None else torch.arange(size)
        places = (places[:, None] + steps * stride * width).flatten()
    return set((places // CELL_BYTES).tolist())


def merge(clock, other):
    for name, tick in other.items():
        clock[name] = max(clock.get(name, 0), tick)

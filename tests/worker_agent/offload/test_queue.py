"""The queue of blocks to be copied, against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from worker_agent.blocks.names import BlockName
from worker_agent.offload.queue import OffloadQueue

MAX_BLOCKS = 5


def name(number):
    return BlockName(number.to_bytes(16, "little"), number)


def number_of(waiting):
    return waiting.name.sequence_hash


class Model:
    """Rows of (−priority, arrival, number, container), in order."""

    def __init__(self):
        self.rows, self.arrivals = [], 0

    def add(self, numbers, priority, container):
        for number in numbers:
            if number not in [row[2] for row in self.rows]:
                self.arrivals += 1
                self.rows.append((-priority, self.arrivals, number, container))
        self.rows.sort()
        dropped = [row[2] for row in reversed(self.rows[MAX_BLOCKS:])]
        del self.rows[MAX_BLOCKS:]
        return dropped


numbers = st.lists(st.integers(0, 9), max_size=4)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), numbers, st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("take"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 2)),
    ),
    max_size=25,
)


@given(steps)
def test_agrees_with_a_sorted_list(steps):
    queue, model, dropped = OffloadQueue(MAX_BLOCKS), Model(), 0
    for step, *arguments in steps:
        match step, *arguments:
            case "add", numbers, priority, container:
                gone = queue.add([name(number) for number in numbers], priority, container)
                assert [each.sequence_hash for each in gone] == model.add(*arguments)
                dropped += len(gone)
            case "take", count:
                taken = [number_of(each) for each in queue.take(count)]
                assert taken == [row[2] for row in model.rows[:count]]
                del model.rows[:count]
            case "cancel", container:
                left = [row for row in model.rows if row[3] != container]
                assert queue.cancel(container) == len(model.rows) - len(left)
                model.rows = left
        assert (len(queue), queue.dropped_blocks) == (len(model.rows), dropped)
        queue.check_invariants()


def test_urgent_first_then_in_order():
    queue = OffloadQueue(MAX_BLOCKS)
    queue.add([name(1), name(2)], priority=0, container=1)
    queue.add([name(3)], priority=7, container=2)
    assert [number_of(each) for each in queue.take(9)] == [3, 1, 2]

"""Memory that is reserved, grown and given back, and what is left in it."""

import mmap
import resource

import numpy as np
import pytest

from router.runtime.kernels import reserved_memory
from router.runtime.kernels.reserved_memory import (
    GrowingWords,
    NextTable,
    PreviousTable,
    reserve,
    zeros,
)


@pytest.fixture(autouse=True)
def parts_are_small(monkeypatch):
    monkeypatch.setattr(reserved_memory, "LARGE_BYTES", 1 << 15)
    monkeypatch.setattr(reserved_memory, "PART_BYTES", 1 << 12)


@pytest.mark.parametrize("length", [10, 100_000])
def test_fresh_memory_is_zero_and_keeps_writes(length):
    for make in (reserve, zeros):
        words = make(length, np.uint64)
        assert len(words) == length
        assert not words.any()
        words[-1] = 7
        assert words[-1] == 7


def test_grown_memory_keeps_its_values():
    growing = GrowingWords(1_000, np.uint32)
    growing.words[:] = np.arange(1_000)
    growing.grow(1_000_000)
    assert growing.words[:1_000].tolist() == list(range(1_000))
    assert not growing.words[1_000:].any()


def test_views_taken_before_growth_keep_their_values():
    growing = GrowingWords(1_000, np.uint64)
    growing.words[:] = 7
    seen = growing.words
    growing.grow(2_000)
    growing.words[0] = 8
    assert (seen == 7).all()
    assert growing.words[:2].tolist() == [8, 7]


def test_next_table_is_paged_in_before_writes(monkeypatch):
    monkeypatch.setattr(reserved_memory, "PART_BYTES", 1 << 23)
    coming = NextTable(1 << 20, np.uint64)
    faults = []
    for share in (0.3, 0.3, 0.7, 1.0):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        coming.touch(share)
        coming.slots[: int(share * (1 << 20)) : mmap.PAGESIZE // 8] = 7
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    pages = coming.slots.nbytes // mmap.PAGESIZE
    assert pages <= sum(faults) < 1.2 * pages
    assert faults[1] < 0.1 * pages
    assert np.count_nonzero(coming.slots) == pages


def test_next_table_is_paged_in_part_by_part():
    coming = NextTable(1 << 16, np.uint64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    coming.touch(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 50


def pages_given_back(slots):
    """The pages that must be allocated again, now that they are read."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for start in range(0, len(slots), mmap.PAGESIZE // slots.itemsize):
        assert slots[start] >= 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_behind_what_has_moved_is_given_back():
    slots = reserve(200 * 1_024, np.uint32)
    slots[:] = 5
    assert pages_given_back(slots) < 10
    former = PreviousTable(slots, 1, 0, 0)
    slots[: 100 * 1_024] = 0
    former.release(100 * 1_024)
    assert pages_given_back(slots[100 * 1_024 :]) < 10
    assert 100 <= pages_given_back(slots) < 110


def test_a_former_table_is_given_back_behind_what_has_moved():
    slots = reserve(10 * 1_024, np.uint32)
    slots[:] = 5
    former = PreviousTable(slots, 1, 0, 1_500)
    slots[1_500:5_000] = 0
    former.release(5_000)
    assert np.flatnonzero(slots == 0).tolist() == list(range(1_500, 5_000))
    slots[5_000:] = 0
    former.release(20_000)
    assert slots.any()
    assert not slots[1_500:].any()


def test_keys_that_came_around_the_end_are_not_given_back():
    slots = reserve(10 * 1_024, np.uint32)
    slots[:] = 0
    former = PreviousTable(slots, 1, 0, 0)
    slots[3] = slots[9_000] = 1
    former.release(4_000)
    assert slots[3] == 1
    assert pages_given_back(slots) == 0
    former.release(10_000)
    assert slots[9_000] == 1


def test_small_table_is_kept_until_its_end():
    slots = zeros(64, np.uint32)
    slots[7] = 3
    PreviousTable(slots, 1, 0, 0).release(64)
    assert np.flatnonzero(slots).tolist() == [7]

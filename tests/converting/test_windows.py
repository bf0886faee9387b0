"""Windows of a file that is read ahead: any stretch, in memory that is used again."""

from __future__ import annotations

import gc
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.converting.windows import ALIVE, Windows

SIZE = 4096


def numbered(low, high, out):
    """Bytes that tell where they belong."""
    out[:] = (np.arange(low, high) * 7 + np.arange(low, high) // 251).astype(np.uint8)


def expected(low, high):
    out = np.empty(high - low, np.uint8)
    numbered(low, high, out)
    return out


@given(st.integers(0, 3 * SIZE), st.integers(1, 8 * SIZE), st.integers(1, 2 * SIZE))
def test_every_byte_in_order(begin, length, unit):
    windows = Windows(begin, begin + length, SIZE, numbered)
    try:
        for low in range(begin, begin + length, unit):
            high = min(low + unit, begin + length)
            found = windows.find(low, high)
            assert found is None or np.array_equal(found, expected(low, high))
        assert windows.find(begin - 1, begin + 1) is None
    finally:
        windows.close()


def test_memory_is_used_again_once_nobody_has_it():
    made = []

    def fill(low, high, out):
        made.append(out.ctypes.data)
        numbered(low, high, out)

    windows = Windows(0, 64 * SIZE, SIZE, fill)
    held = [windows.find(0, SIZE)]
    for low in range(SIZE, 64 * SIZE, SIZE):
        assert np.array_equal(windows.find(low, low + SIZE), expected(low, low + SIZE))
    windows.close()
    assert len(set(made)) <= ALIVE + 1
    assert np.array_equal(held[0], expected(0, SIZE))


def test_what_the_collector_gives_back_waits_for_no_lock():
    """It may run on any thread at any time, also on one that holds the lock."""
    windows = Windows(0, 8 * SIZE, SIZE, numbered)
    cycle = [windows.find(0, SIZE)]
    cycle.append(cycle)

    def collect():
        nonlocal cycle
        with windows._lock:
            cycle = None
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    windows.close()


def test_what_lies_in_two_windows_is_as_aligned_as_one_of_them():
    """Direct I/O ends for a whole file with the first write from anywhere else."""
    windows = Windows(0, 8 * SIZE, 2 * SIZE, numbered)
    try:
        found = windows.find(SIZE, 3 * SIZE)
        assert found.ctypes.data % 4096 == 0
        assert np.array_equal(found, expected(SIZE, 3 * SIZE))
    finally:
        windows.close()

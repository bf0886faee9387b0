"""The budget: how much, how it is cut, and that it is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.engine.budget import (
    MINIMUM_BUDGET,
    BufferPool,
    available_memory,
    checked_budget,
    default_budget,
    io_threads,
)
from shardkeep.engine.digests import CONTENT_PIECE


@given(st.integers(MINIMUM_BUDGET, 1 << 34), st.integers(1, 8), st.sampled_from([4096, 1 << 17]))
def test_a_pool_stays_within_its_budget(budget, threads, block):
    pool = BufferPool(budget, threads, block)
    assert 1 <= pool.threads <= threads
    assert pool.unit % block == 0
    assert pool.unit >= block
    assert pool.threads * (2 * pool.unit + 2 * CONTENT_PIECE) <= budget


def test_defaults():
    assert MINIMUM_BUDGET <= default_budget() <= 1 << 30
    assert default_budget(1000) >= MINIMUM_BUDGET
    assert checked_budget(None) == default_budget() or available_memory() > 0
    assert checked_budget(9 << 20) == 9 << 20
    with pytest.raises(ValueError, match="memory_budget"):
        checked_budget(MINIMUM_BUDGET - 1)
    assert 1 <= io_threads() <= 4
    assert io_threads(1000) == 1


def test_buffers_are_reused_and_waited_for():
    pool = BufferPool(MINIMUM_BUDGET, 2, 4096)
    most, now = [0], [0]
    lock = threading.Lock()

    def use():
        with pool.buffer() as buffer:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            buffer[:8] = 1
            time.sleep(0.001)
            with lock:
                now[0] -= 1

    threads = [threading.Thread(target=use) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] <= pool.threads


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
@pytest.mark.parametrize("how", ["contiguous", "strided"])
def test_save_load_and_verify_keep_the_budget(tmp_path, how):
    code = f"""
import resource, sys
import numpy as np, shardkeep
rows = np.ones((1 << 13, 1 << 14), np.float32)  # 512 MiB
source = rows if {how!r} == "contiguous" else rows.T
target = np.zeros(source.shape, np.float32)
target[:] = 2
shardkeep.save({{"x": np.ones(3)}}, {str(tmp_path / "warm")!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shardkeep.save({{"x": source}}, {str(tmp_path / "c")!r}, memory_budget=16 << 20)
shardkeep.load({{"x": target}}, {str(tmp_path / "c")!r}, memory_budget=16 << 20)
assert shardkeep.verify({str(tmp_path / "c")!r}, memory_budget=16 << 20).ok
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert target[5, 7] == 1
print(grown)
assert grown < 24 << 10, grown
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )

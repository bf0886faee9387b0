"""The budget: how much, how it is cut, and that it is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep.engine.budget import (
    MINIMUM_BUDGET,
    BufferPool,
    Spares,
    available_memory,
    checked_budget,
    default_budget,
    io_threads,
)
from shardkeep.engine.digests import CONTENT_PIECE
from shardkeep.formats.native import writer as native_writer
from shardkeep.formats.native.reader import NativeReader


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
    with pytest.raises(TypeError, match="memory_budget is '1GB'; use a whole number of bytes"):
        checked_budget("1GB")
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


def test_a_buffer_that_could_not_be_made_may_be_made_by_another(monkeypatch):
    pool = BufferPool(MINIMUM_BUDGET, 1, 4096)
    answers = [MemoryError, None]

    def allocate(nbytes):
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return np.zeros(nbytes, np.uint8)

    monkeypatch.setattr(pool, "_allocate", allocate)
    with pytest.raises(MemoryError):
        pool.take()
    assert pool.take(wait=False) is not None
    assert pool.take(wait=False) is None


def test_spare_buffers_are_used_again():
    spares = Spares()
    first = BufferPool(8 << 20, 1, 4096, 1 << 20, spares=spares)
    taken = first.take()
    taken[:] = 1
    first.give(taken)
    first.close()
    again = BufferPool(8 << 20, 1, 4096, 1 << 20, spares=spares).take()
    assert again is taken
    other = BufferPool(8 << 20, 1, 4096, 2 << 20, spares=spares).take()
    assert len(other) == 2 << 20
    assert BufferPool(8 << 20, 1, 4096, 1 << 20, spares=spares).take() is not taken


def test_what_is_kept_for_others_is_a_small_part_of_a_budget_or_nothing():
    spares = Spares()
    reader = NativeReader(memory_budget=64 << 20)
    reader.kept = spares
    assert reader.budget == 64 << 20
    spares.keep(np.zeros(4 << 20, np.uint8))
    assert reader.budget == 60 << 20
    spares.keep(np.zeros(1, np.uint8))
    assert reader.budget == 64 << 20
    assert spares.at_most(1 << 30) == 0


def test_no_more_buffers_are_kept_than_a_smaller_budget_has():
    spares = Spares()
    for budget, most in ((64 << 20, 9), (8 << 20, 2), (64 << 20, 9)):
        pool = BufferPool(budget, 9, 4096, 1 << 20, spares=spares)
        assert pool.threads == most
        assert len(spares._free) <= most
        for buffer in [pool.take() for _ in range(most)]:
            pool.give(buffer)
        pool.close()
        assert [len(buffer) for buffer in spares._free] == [1 << 20] * most


def test_buffers_that_a_save_does_not_use_are_kept_within_its_budget(tmp_path, monkeypatch):
    state = {"w": np.arange(8 << 20, dtype=np.float32)}
    with shardkeep.Checkpointer() as keeper:
        keeper.save(state, tmp_path / "a", memory_budget=1 << 30)
        spares = keeper.coordinator.memory["buffers"]
        assert spares._free
        seen = []

        def compare(*args, **options):
            seen.append(spares.at_most(1 << 40))
            return real(*args, **options)

        real = native_writer.compare
        monkeypatch.setattr(native_writer, "compare", compare)
        keeper.save(state, tmp_path / "b", base=tmp_path / "a", memory_budget=8 << 20)
        assert seen == [0]


def test_buffers_of_another_size_go_with_a_smaller_budget():
    spares = Spares()
    for nbytes in (4 << 20, 1 << 20, 4 << 20, 1 << 20, 1 << 20):
        spares.keep(np.zeros(nbytes, np.uint8))
    spares.trim(2, 1 << 20)
    assert [len(buffer) for buffer in spares._free] == [1 << 20] * 2


def test_pools_of_one_size_that_are_used_at_a_time_keep_what_they_need():
    spares = Spares(pools=2)
    for _ in range(3):
        pools = [BufferPool(16 << 20, 2, 1 << 20, 1 << 20, spares=spares) for _ in range(2)]
        taken = [(pool, pool.take()) for pool in pools for _ in range(2)]
        used = {id(buffer) for _, buffer in taken}
        for pool, buffer in taken:
            pool.give(buffer)
        for pool in pools:
            pool.close()
        assert {id(buffer) for buffer in spares._free} == used
    spares.trim(1, 1 << 20)
    assert len(spares._free) == 2


def test_buffers_of_a_save_are_there_for_the_next_one(tmp_path):
    state = {"a": np.zeros(4 << 20, np.uint8)}
    with shardkeep.Checkpointer() as keeper:
        kept = []
        for step in range(3):
            state["a"][:] = step
            keeper.save(state, tmp_path / str(step))
            kept.append({id(one) for one in keeper.coordinator.memory["buffers"]._free})
        assert kept[0] == kept[1] == kept[2] != set()
        for step, budget, stay in ((1, 1 << 30, True), (0, 64 << 20, False), (2, 8 << 20, False)):
            keeper.load(state, tmp_path / str(step), memory_budget=budget)
            assert (state["a"] == step).all()
            left = {id(one) for one in keeper.coordinator.memory["buffers"]._free}
            assert left == (kept[0] if stay else set())
        for step in range(3):
            assert shardkeep.verify(tmp_path / str(step)).ok

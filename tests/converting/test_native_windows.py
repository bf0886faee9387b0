"""What is converted into our own format is read ahead, once, and is let go of file by file."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import shardkeep
from shardkeep.converting import native
from shardkeep.converting.contents import READERS
from shardkeep.converting.windows import Windows
from shardkeep.engine import budget, parallel
from shardkeep.formats.native import writer


@pytest.fixture
def watched(monkeypatch):
    """All windows that are alive, the most at a time, and bytes that were not found in any."""

    class Watched(Windows):
        most = 0
        missed = 0

        def __init__(self, *given):
            super().__init__(*given)
            Watched.alive.add(self)
            Watched.most = max(Watched.most, len(Watched.alive))

        def find(self, low, high):
            found = super().find(low, high)
            if found is None and low >= self._begin and high <= self._end:
                Watched.missed += high - low
            return found

    Watched.alive = weakref.WeakSet()
    monkeypatch.setattr(native, "Windows", Watched)
    return Watched


def saved(path, count, nbytes):
    rng = np.random.default_rng(3)
    state = {f"t{at}": rng.integers(0, 255, nbytes, np.uint8) for at in range(count)}
    shardkeep.save(state, path, no_dist=True)
    return path


@pytest.mark.parametrize("cores", [2, 8])
@pytest.mark.parametrize("budget", [32 << 20, 128 << 20])
def test_one_large_file_is_read_once_by_however_many(tmp_path, watched, monkeypatch, cores, budget):
    for module in (native, writer):
        monkeypatch.setattr(module, "usable_cores", lambda ranks=1: cores // ranks)
    source = saved(tmp_path / "source", 32, 6 << 20)
    shardkeep.convert(source, tmp_path / "made", memory_budget=budget)
    assert watched.missed <= 16 << 20  # a thread that is long overtaken reads for itself
    assert shardkeep.verify(tmp_path / "made").ok
    assert shardkeep.diff(source, tmp_path / "made").same


def test_a_window_costs_neither_threads_nor_buffers_of_its_own(tmp_path, watched, monkeypatch):
    begun, made = [], []

    def start(thread, started):
        begun.append(threading.current_thread().name)
        return really_start(thread, started)

    def allocate(nbytes):
        made.append(nbytes)
        return really_allocate(nbytes)

    really_start, really_allocate = parallel._start, budget.page_aligned
    monkeypatch.setattr(parallel, "_start", start)
    source = saved(tmp_path / "source", 64, 3 << 20)
    monkeypatch.setattr(budget, "page_aligned", allocate)
    shardkeep.convert(source, tmp_path / "made", memory_budget=32 << 20)
    assert [name for name in begun if "ahead" in name] == []
    assert 0 < len(made) <= READERS + 12  # each reader's, and those of the writer
    assert shardkeep.diff(source, tmp_path / "made").same


def test_windows_go_with_their_file_though_nobody_collects(tmp_path, watched):
    source = saved(tmp_path / "source", 24, 1 << 20)
    gc.collect()
    gc.disable()
    try:
        shardkeep.convert(source, tmp_path / "made", max_shard_size=1 << 20)
        assert watched.most <= native.MOST_BUSY
        assert not watched.alive
    finally:
        gc.enable()
    assert len(list((tmp_path / "made" / "data").iterdir())) > 20

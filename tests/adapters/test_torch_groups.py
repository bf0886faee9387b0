"""The bulk plane of torch: a gloo group that ends whoever waits in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time

import numpy as np
import pytest
import torch.distributed as dist

from shardkeep.adapters import torch_groups
from shardkeep.adapters.torch_groups import _Connections, _GlooBulk, _StoreLine
from shardkeep.collector import paused_collector
from shardkeep.errors import RankError


def connected(world):
    """Of ranks that are threads."""
    store, made = dist.HashStore(), {}

    def connect(rank):
        made[rank] = _GlooBulk(store, rank, world, 60.0)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(world)]


def test_closing_ends_a_wait_for_one_rank_after_another_has_hung_up():
    """Else its thread would stay until gloo gives up by itself, ten minutes later."""
    first, second, third = connected(3)
    nothing = np.zeros(0, np.uint8)
    ended = []

    def wait():
        try:
            second.exchange([nothing] * 3, [0, 0, 5])
        except RuntimeError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not second._is_busy:
        time.sleep(0.01)
    first._is_busy = True  # so that it closes its connections
    first.close()
    time.sleep(0.2)
    assert waiting.is_alive()
    second.close()
    waiting.join(10)
    assert ended
    third.close()


class Locked:
    """A store that is a file, whose lock somebody holds for a while."""

    def __init__(self):
        self.free = threading.Event()
        self.last = None
        self.posts = 0

    def set(self, key, value):
        self.posts += 1
        if self.posts == 1:  # whoever comes later may get the lock before
            assert self.free.wait(20)
        self.last = value


def test_posts_to_a_file_that_was_locked_come_in_order(tmp_path, monkeypatch):
    """A post that was given up is made when the lock is free: before those that followed it."""
    monkeypatch.setattr(torch_groups, "LAST_WORD_S", 0.1)
    before = threading.active_count()
    line = _StoreLine(dist.FileStore(str(tmp_path / "store"), 1), "session", (0,), 0.2)
    store = Locked()
    line._store = _Connections(None, store)
    for value in (b"first", b"second", b"third"):
        with pytest.raises(RankError, match="locked the file"):
            line.set("beat", value)
    assert threading.active_count() <= before + 1  # one that waits, not one for each
    store.free.set()
    line.set("beat", b"last")
    assert (store.last, store.posts) == (b"last", 4)
    line.close()


def test_a_post_that_was_begun_before_the_store_was_lost_says_nothing_of_it_once_it_is_found_again(
    tmp_path,
):
    """A heart may hang in it while the next call begins, whose wait would end with the old one."""
    path = tmp_path / "store"
    line = _StoreLine(dist.FileStore(str(path), 1), "session", (0,), 0.6)
    line.open()
    line.set("beat", b"first")
    refused = []

    def beat():
        time.sleep(0.3)
        try:
            line.set("beat", b"second")
        except RankError as error:
            refused.append(error)

    heart = threading.Thread(target=beat)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        heart.start()
        with pytest.raises(RankError, match="locked the file"):
            line.add("count", 1)
        line.open()
        heart.join()
        assert refused
        threading.Timer(0.2, file.close).start()
        line.add("other", 1)
    line.set("beat", b"third")
    assert line.get("beat", 0) == b"third"
    line.close()


def sockets():
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("socket:")}


def test_connections_to_a_store_that_died_are_closed_with_the_line():
    """Without the collector: they know of the error, whose frames know of them."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    line = _StoreLine(job, "session", (0, 1), 5.0)
    before = sockets()
    line.open()
    assert line.add("count", 1) == 1
    connections = sockets() - before
    assert connections
    del server
    with paused_collector():
        text = ""
        try:
            line.add("count", 1)
        except RankError as error:
            text = str(error)
        assert "store host" in text
        line.close()
        end = time.monotonic() + 5  # a thread that asked ends by itself
        while connections & sockets() and time.monotonic() < end:
            time.sleep(0.01)
        assert not connections & sockets()


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append((self.now, seconds))
        self.now += seconds


@pytest.mark.parametrize(("ranks", "most"), [(1, 80), (4, 80), (1024, 25), (16384, 3)])
def test_looks_at_the_store_are_as_frequent_as_the_wait_is_short(monkeypatch, ranks, most):
    """Every step of every call waits for the slowest rank, and all ranks ask one store."""
    clock = Clock()
    monkeypatch.setattr(torch_groups, "time", clock)
    line = _StoreLine(dist.HashStore(), "session", range(ranks), 60.0)
    looks = sum(1 for _ in line._until(1.0))
    assert clock.now == pytest.approx(1.0)
    assert looks == len(clock.slept) + 1 <= most
    for waited, pause in clock.slept:
        assert pause <= max(0.1 * waited, 5e-5 * ranks, 0.001) + 1e-9

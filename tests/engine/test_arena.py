"""The arena: what it takes, and that nothing of it is left."""

import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from shardkeep.engine import arena as engine_arena
from shardkeep.engine.arena import Arena
from shardkeep.engine.process import can_start

MIB = 1 << 20

needs_sharing = pytest.mark.skipif(not can_start(), reason="no shared memory by descriptor")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("shardkeep-arena")


class Device:
    """Looks at memory when it is to forget it: that must not be gone."""

    def __init__(self, fails=False):
        self.known = 0
        self.fails = fails

    def pin(self, memory):
        address, size = memory.__array_interface__["data"][0], len(memory)
        self.known += 1

        def unpin():
            lines = Path("/proc/self/maps").read_text().splitlines()
            spans = [[int(edge, 16) for edge in line.split()[0].split("-")] for line in lines]
            assert any(low <= address < high for low, high in spans), "unmapped before"
            assert size
            self.known -= 1
            if self.fails:
                raise RuntimeError("the device is lost")

        return unpin


def taken(shared, device=None) -> Arena:
    arena = Arena(shared=shared)
    arena.reserve(5 * MIB)
    arena.prepare(5 * MIB, device, 2)
    arena.memory[:] = 7
    return arena


KINDS = [False, pytest.param(True, marks=needs_sharing)]


@pytest.mark.parametrize("shared", KINDS)
@pytest.mark.parametrize("end", ["dropped", "closed", "in a cycle"])
def test_nothing_is_left_of_an_arena(shared, end, monkeypatch):
    monkeypatch.setattr(engine_arena, "SEGMENT", 2 * MIB)
    gc.collect()
    before, device = (descriptors(), mapped()), Device()
    arena = taken(shared, device)
    assert device.known == 3
    memory = weakref.ref(arena.memory.base if arena.memory.base is not None else arena.memory)
    if end == "closed":
        arena.close()
    elif end == "in a cycle":
        arena.itself = arena
    del arena
    gc.collect()
    assert device.known == 0
    assert (descriptors(), mapped()) == before
    assert memory() is None


@pytest.mark.parametrize("shared", KINDS)
def test_views_keep_the_memory(shared):
    arena = taken(shared)
    view = arena.memory[MIB : 2 * MIB]
    arena.close()
    del arena
    assert (view == 7).all()
    view[:] = 8
    assert (view == 8).all()


@needs_sharing
def test_a_device_that_fails_keeps_nothing_back(monkeypatch):
    monkeypatch.setattr(engine_arena, "SEGMENT", 2 * MIB)
    gc.collect()  # what tests before it left
    before, device = (descriptors(), mapped()), Device(fails=True)
    arena = taken(True, device)
    with pytest.raises(RuntimeError, match="device is lost"):
        arena.close()
    gc.collect()  # the error held it
    assert device.known == 0
    assert (descriptors(), mapped()) == before
    arena.close()


def test_another_device_is_told_in_place_of_the_first():
    first, second = Device(), Device()
    arena = taken(False, first)
    arena.prepare(5 * MIB, second, 1)
    assert (first.known, second.known) == (0, 1)
    arena.close()
    assert second.known == 0


@needs_sharing
def test_a_fork_asks_nothing_of_the_device_and_leaves_the_memory():
    device = Device()
    arena = taken(True, device)
    child = os.fork()
    if child == 0:
        arena.close()
        os._exit(0 if device.known == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (arena.memory == 7).all()
    arena.close()


@needs_sharing
def test_shared_memory_is_that_of_its_descriptor():
    arena = taken(True)
    arena.memory[3 * MIB : 3 * MIB + 5] = np.frombuffer(b"hello", np.uint8)
    assert os.pread(arena.fd, 6, 3 * MIB) == b"hello\x07"
    assert arena.fd > 2
    assert not os.get_inheritable(arena.fd)
    assert os.fstat(arena.fd).st_size == len(arena.memory)
    arena.close()


def test_more_than_there_is_is_refused_before_it_is_taken(monkeypatch):
    arena = taken(False)
    monkeypatch.setattr(engine_arena, "available_memory", lambda: 8 * MIB)
    with pytest.raises(MemoryError, match=r"takes 8388609 bytes .* 8388608 are available"):
        arena.reserve(8 * MIB + 1)
    monkeypatch.setattr(engine_arena, "available_memory", lambda: None)
    assert arena.reserve(9 * MIB)


def test_ready_is_what_was_touched_and_told(monkeypatch):
    monkeypatch.setattr(engine_arena, "_populate", lambda memory: False)
    arena, device = Arena(shared=False), Device()
    arena.reserve(3 * MIB)
    assert not arena.is_ready(MIB, None)
    arena.prepare(MIB, None, 1)
    assert arena.is_ready(MIB, None)
    assert not arena.is_ready(MIB, device)
    assert not arena.is_ready(len(arena.memory) + 1, None)
    arena.prepare(MIB, device, 1)
    assert arena.is_ready(len(arena.memory), device)
    assert not arena.is_ready(MIB, Device())
    arena.prepare(2 * MIB, device, 1)
    assert device.known == 1
    arena.close()
    assert device.known == 0

"""A disk that fails: in short, at length with `--all`; and real ones that are full."""

import errno
import os
import shutil
import subprocess

import numpy as np
import pytest
from faults import assert_held, held, sweep
from generations import OPTIONS, assert_clean, generation_at, save
from machine import scratch_folder
from scenarios import readings, scenarios

import shardkeep
from shardkeep import CheckpointManager, StorageError

SCENARIOS = scenarios() | readings()


@pytest.mark.parametrize("name", SCENARIOS)
def test_short(name):
    with scratch_folder() as folder:
        report = sweep(SCENARIOS[name], folder, count=6, seed=sum(map(ord, name)))
    assert report.faults == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_long(name):
    with scratch_folder() as folder:
        assert sweep(SCENARIOS[name], folder).faults > 50


def fill_up(disk, how):
    place, state = disk / "ckpt", {f"t{number}": np.ones(1 << 16) for number in range(4)}
    if how == "save":
        shardkeep.save(state, place, overwrite=True, **OPTIONS)
    elif how == "hf":
        writer = shardkeep.HuggingFaceWriter()
        shardkeep.save(state, place, storage_writer=writer, **OPTIONS)
    elif how == "manager":
        with CheckpointManager(disk / "run", **OPTIONS) as manager:
            manager.save(1, state)
    else:
        kind = "process" if how == "process" else "thread"
        with shardkeep.Checkpointer(no_dist=True, writer=kind) as keeper:
            keeper.async_save(state, place, overwrite=True).result()


@pytest.mark.parametrize("how", ["save", "async", "process", "hf", "manager"])
def test_a_disk_that_is_full(small_disk, how):
    """The error says so, nothing of it stays, and what was there before does."""
    place = small_disk / "ckpt"
    if how != "hf":
        save(place, 1)
    before = held()
    with pytest.raises(StorageError, match="No space left") as caught:
        fill_up(small_disk, how)
    assert caught.value.errno == errno.ENOSPC
    del caught
    assert_held(before)
    if how == "hf":
        assert not list(small_disk.iterdir())
        return
    assert generation_at(place) == 1
    assert_clean(place)
    # What was given back is there for the next one.
    save(place, 2, overwrite=True)
    assert generation_at(place) == 2


def test_a_disk_that_gets_full_bit_by_bit(small_disk):
    """However little room is left, a save comes whole or not at all."""
    place, ballast = small_disk / "ckpt", small_disk / "ballast"
    save(place, 1)
    there, outcomes = 1, set()
    for number, free in enumerate(range(0, 60, 4)):
        usage = shutil.disk_usage(small_disk)
        ballast.write_bytes(bytes(max(0, usage.free - (free << 10))))
        try:
            save(place, 2 + number, overwrite=True)
        except StorageError as error:
            outcomes.add(error.errno)
        else:
            there = 2 + number
            outcomes.add(0)
        ballast.unlink()
        assert generation_at(place) == there
        assert_clean(place)
    assert outcomes == {errno.ENOSPC, 0}


def test_a_disk_that_is_read_only(small_disk):
    place = small_disk / "ckpt"
    save(place, 1)
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    if subprocess.run(remount, capture_output=True, check=False).returncode:
        pytest.skip("not allowed to mount")
    with pytest.raises(StorageError, match="Read-only") as caught:
        save(place, 2, overwrite=True)
    assert caught.value.errno == errno.EROFS
    with pytest.raises(StorageError, match="Read-only"):
        shardkeep.convert(place, small_disk / "out")
    assert generation_at(place) == 1
    assert os.listdir(small_disk) == ["ckpt"]

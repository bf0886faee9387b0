"""A fast tier on real processes: all use one copy, and an error reaches all of them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

import shardkeep
from shardkeep import (
    CheckpointManager,
    CorruptionError,
    FastTier,
    RankError,
    ShardedArray,
    StorageError,
)
from shardkeep.formats.native import claiming, copying
from shardkeep.manager import copier

WORLD = 3
ROWS = 12
HERE = "/proc/self/cwd/fast"
"""A folder that each process has for itself, as hosts have their RAM disks."""


def state(rank, world, step):
    low, high = ROWS * rank // world, ROWS * (rank + 1) // world
    local = np.arange(low, high, dtype=np.float64).repeat(4).reshape(-1, 4) + 1000 * step
    return {"w": ShardedArray.from_local(local, (low, 0), (ROWS, 4)), "step": step}


def is_state(found, rank, world, step):
    (mine,) = found["w"].local_shards
    (expected,) = state(rank, world, step)["w"].local_shards
    return found["step"] == step and np.array_equal(mine.array, expected.array)


def at_home(rank, folder):
    """Be on a host of one's own."""
    os.makedirs(f"{folder}/host-{rank}", exist_ok=True)
    os.chdir(f"{folder}/host-{rank}")


def train(rank, world, root, fast, steps):
    with CheckpointManager(root, fast=FastTier(fast, keep=9)) as manager:
        manager.restore(state(rank, world, 0))
        for step in steps:
            manager.async_save(step, state(rank, world, step))
        manager.checkpointer.close()
        return [manager.wait_copied(step, timeout=60) for step in steps]


def restored(rank, world, root, fast, folder=None, drop_newer=False):
    if folder is not None:
        at_home(rank, folder)
    target = state(rank, world, 0)
    try:
        found = CheckpointManager(root, fast=fast).restore(target, drop_newer=drop_newer)
    except shardkeep.CheckpointError as error:
        return type(error).__name__, str(error)
    assert is_state(target, rank, world, found.step)
    return found.step, found.path


def test_ranks_save_to_one_tier_and_any_number_of_them_resume(processes, tmp_path):
    root, fast = str(tmp_path / "run"), str(tmp_path / "fast")
    assert processes.run(WORLD, train, WORLD, root, fast, [1, 2]) == [[True, True]] * WORLD
    for world in (1, 4):
        found = processes.run(world, restored, world, root, fast)
        assert found == [(2, f"{fast}/step-2")] * world
    data = sorted((tmp_path / "fast/step-2/data").glob("*-r0*"))[1]
    found = bytearray(data.read_bytes())
    found[4096] ^= 1
    data.write_bytes(found)
    assert processes.run(2, restored, 2, root, fast) == [(2, f"{root}/step-2")] * 2


@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="hosts are made with /proc")
def test_a_tier_of_another_host_is_not_mixed_with_this_ones(processes, tmp_path):
    """As after a restart on other hosts: each has the folder, and not the same in it."""
    root, fast = str(tmp_path / "run"), str(tmp_path / "fast")
    processes.run(WORLD, train, WORLD, root, fast, [1, 2])
    home = tmp_path / "host-0/fast"
    shutil.copytree(fast, home)
    # Rank 0 sees it alone: the durable copy of the same step is as good.
    ask = (WORLD, restored, WORLD, root, HERE, str(tmp_path))
    assert processes.run(*ask) == [(2, f"{root}/step-2")] * WORLD
    # What it has alone is passed over; an older one is what all can load.
    shutil.rmtree(tmp_path / "run/step-2")
    outcomes = processes.outcomes(*ask)
    assert [each.value for each in outcomes] == [(1, f"{root}/step-1")] * WORLD
    assert "step 2 (/proc/self/cwd/fast/step-2) is not seen by all ranks" in outcomes[0].log
    # Nobody went back from there on purpose: where its host is, a restart can resume from it.
    assert processes.run(*ask, True) == [(1, f"{root}/step-1")] * WORLD
    assert (home / "step-2/checkpoint.json").exists()
    # Another save of the step, as another host may have it, is not taken for this one.
    for rank in (1, 2):
        shutil.copytree(home, tmp_path / f"host-{rank}/fast")
        shutil.rmtree(tmp_path / f"host-{rank}/fast/step-2")
        shardkeep.save({"other": 1}, tmp_path / f"host-{rank}/fast/step-2")
    assert processes.run(*ask) == [(1, f"{HERE}/step-1")] * WORLD  # which they all see
    # No run begins anew because its steps are somewhere else.
    shutil.rmtree(tmp_path / "run/step-1")
    shutil.rmtree(home / "step-1")
    found = processes.run(*ask)
    assert found == [found[0]] * WORLD
    assert found[0][0] == "StorageError"
    assert "step 2 lies only in /proc/self/cwd/fast/step-2, which not all ranks see" in found[0][1]


def refused(rank, root, folder):
    at_home(rank, folder)
    claiming.LEASE_SEEN_S = 0.2
    manager = CheckpointManager(root, fast=HERE)
    try:
        manager.save(1, state(rank, WORLD, 1))
    except StorageError as error:
        return str(error)


@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="hosts are made with /proc")
def test_a_tier_that_not_all_ranks_see_is_refused_before_anything_is_written(processes, tmp_path):
    texts = processes.run(WORLD, refused, str(tmp_path / "run"), str(tmp_path))
    assert texts == [texts[0]] * WORLD
    assert "does not see the directory /proc/self/cwd/fast/step-1" in texts[0]
    assert os.listdir(tmp_path / "host-0/fast/step-1/data") == []


def waits(rank, root, fast):
    """Rank 0 waits for its copies, longer than the others wait for a rank that does nothing."""
    copying.UNIT = 128 << 10
    tier = FastTier(fast, most_waiting=0, copy_rate=600e3)
    with CheckpointManager(root, fast=tier, timeout_s=1.0) as manager:
        large = {"w": np.arange(150_000, dtype=np.float64)}
        manager.save(1, large)
        began = time.monotonic()
        manager.save(2, {"step": 2})
        return time.monotonic() - began


def test_ranks_wait_together_for_copies_that_go_on(processes, tmp_path):
    seconds = processes.run(WORLD, waits, str(tmp_path / "run"), str(tmp_path / "fast"))
    assert min(seconds) > 1.2
    assert sorted(name for name in os.listdir(tmp_path / "run") if "step" in name) == [
        "step-1",
        "step-2",
    ]


def damaged(rank, root, fast):
    """The copy is made on rank 0; what it finds there reaches all at the next save."""
    plain, manager = copier.copy_step, CheckpointManager(root, fast=fast)

    def copy_step(step, *args, **options):
        data = sorted(os.listdir(f"{step.path}/data"))[-1]
        with open(f"{step.path}/data/{data}", "r+b") as file:
            file.write(b"\xff")
        copier.copy_step = plain
        return plain(step, *args, **options)

    copier.copy_step = copy_step
    manager.save(1, state(rank, WORLD, 1))
    with pytest.raises(CorruptionError):
        manager.wait_copied(1)
    if rank == 0:
        manager._upkeep.copier._unseen = CorruptionError("as nobody has looked")
    try:
        manager.save(2, state(rank, WORLD, 2))
    except CorruptionError as error:
        first = str(error)
    manager.save(2, state(rank, WORLD, 2))
    assert manager.wait_copied(2, timeout=60)
    manager.close()
    return first


def test_what_goes_wrong_with_a_copy_reaches_all_ranks(processes, tmp_path):
    texts = processes.run(WORLD, damaged, str(tmp_path / "run"), str(tmp_path / "fast"))
    assert texts == [texts[0]] * WORLD
    assert "as nobody has looked" in texts[0]
    assert [name for name in os.listdir(tmp_path / "run") if "step" in name] == ["step-2"]


def killed(rank, root, fast):
    """Rank 0 goes while the others wait for what it copies."""
    manager = CheckpointManager(root, fast=FastTier(fast, copy_rate=1e3), timeout_s=2.0)
    manager.save(1, {"w": np.zeros(100_000)})
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        manager.wait_copied()
    except RankError as error:
        return str(error), time.monotonic() - began


def test_nobody_waits_for_copies_of_a_rank_that_is_dead(processes, tmp_path):
    outcomes = processes.outcomes(WORLD, killed, str(tmp_path / "run"), str(tmp_path / "fast"))
    assert outcomes[0].died == signal.SIGKILL
    for outcome in outcomes[1:]:
        text, seconds = outcome.value
        assert "rank 0" in text
        assert seconds < 20


def waits_longer(rank, root, fast):
    """Longer than ranks wait for one that does nothing."""
    tier = FastTier(fast, copy_rate=600e3)
    manager = CheckpointManager(root, fast=tier, timeout_s=2.0)
    manager.save(np.int64(1), {"w": np.arange(300_000, dtype=np.float64)})
    found = [manager.wait_copied(1, timeout=0.1), manager.wait_copied(1)]
    manager.close()
    return found


def test_all_ranks_wait_for_copies_that_go_on(processes, tmp_path):
    ask = (WORLD, waits_longer, str(tmp_path / "run"), str(tmp_path / "fast"))
    assert processes.run(*ask) == [[False, True]] * WORLD

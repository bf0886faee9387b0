"""What two tiers must not do to a step that was acknowledged: orders of events that lost one."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time

import pytest
from runs import blank, damage, fill, is_state, killed_save, state

import shardkeep
from shardkeep import (
    CheckpointExistsError,
    CheckpointManager,
    CorruptionError,
    FastTier,
    StorageError,
)
from shardkeep.formats.native import commit as commit_module
from shardkeep.formats.native.commit import Lease
from shardkeep.manager import copier, publishing
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.naming import StepNames
from shardkeep.stores.local import LocalStore


@pytest.fixture
def places(tmp_path):
    return tmp_path / "fast", tmp_path / "run"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(copier, "RETRY_S", 0.05)
    monkeypatch.setattr(copier, "GRACE_S", 0.5)


@pytest.fixture
def held_copy(monkeypatch):
    """Copies are made, and wait before they appear."""
    reached, go = threading.Event(), threading.Event()
    plain = publishing.copy_checkpoint

    def waits(*args, **options):
        done = plain(*args, **options)
        reached.set()
        assert go.wait(60)
        return done

    monkeypatch.setattr(publishing, "copy_checkpoint", waits)
    yield reached, go
    go.set()


class Held:
    """A call that waits until it may go on."""

    def __init__(self, call):
        self.call, self.reached, self.go = call, threading.Event(), threading.Event()

    def __call__(self, *args, **options):
        self.reached.set()
        assert self.go.wait(60)
        return self.call(*args, **options)


def newest(root, fast=None):
    target = blank()
    CheckpointManager(root, fast=fast).restore(target)
    return int(target["step"])


# --- two saves of one step, one in each tier


def test_a_copy_does_not_replace_a_later_durable_save_of_its_step(places, held_copy):
    fast, root = places
    reached, go = held_copy
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(10, state(1))
        assert reached.wait(60)
        later = manager.save(10, state(2), overwrite=True, durable=True)
        go.set()
        assert manager.wait_copied(10, timeout=60)
    assert shardkeep.open(root / "step-10").save_id == later.save_id
    assert newest(root) == newest(root, fast) == 2


def test_a_step_of_the_fast_tier_is_not_saved_beside_it_unasked(places, held_copy):
    fast, root = places
    reached, go = held_copy
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(10, state(1))
        assert reached.wait(60)
        with pytest.raises(CheckpointExistsError, match="already holds a checkpoint"):
            manager.save(10, state(2), durable=True)
        go.set()
    assert newest(root) == newest(root, fast) == 1


@pytest.mark.parametrize("durable", [False, True])
def test_the_later_save_counts_though_the_clock_went_back(places, monkeypatch, durable):
    """A virtual machine that was paused, or another host: the time is an hour less."""
    fast, root = places
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(10, state(1))
        manager.wait_copied(10, timeout=60)
        now -= 3600
        later = manager.save(10, state(2), overwrite=True, durable=durable)
        assert manager.wait_copied(10, timeout=60)
        assert newest(root, fast) == 2
    assert newest(root) == newest(root, fast) == 2
    assert shardkeep.open(root / "step-10").save_id == later.save_id


# --- the last step before a preemption


def test_a_durable_save_does_not_wait_for_copies(places, held_copy):
    """It needs no room in the fast tier, and there may be seconds left."""
    fast, root = places
    reached, go = held_copy
    with CheckpointManager(root, fast=FastTier(fast, most_waiting=0)) as manager:
        manager.save(1, state(1))
        assert reached.wait(60)
        saving = threading.Thread(
            target=manager.save, args=(2, state(2)), kwargs={"durable": True}, daemon=True
        )
        saving.start()
        saving.join(20)
        assert not saving.is_alive()
        assert newest(root) == 2
        go.set()
    assert newest(root) == newest(root, fast) == 2


def test_a_durable_save_does_not_fail_for_a_copy_that_did(places, monkeypatch):
    fast, root = places
    failed = threading.Event()

    def fails(*args, **options):
        failed.set()
        raise StorageError("the network is away")

    monkeypatch.setattr(copier, "copy_step", fails)
    manager = CheckpointManager(root, fast=FastTier(fast, most_waiting=0))
    manager.save(1, state(1))
    assert failed.wait(60)
    manager.save(2, state(2), durable=True)
    assert newest(root) == 2
    with pytest.raises(StorageError, match="the network is away"):  # and is not forgotten
        manager.close()


# --- a fast tier that goes while the program runs


def test_a_fast_tier_that_is_cleared_under_a_run_is_this_runs_again(places):
    """As `RemoveIPC` of systemd does, or somebody who needs the room."""
    fast, root = places
    manager = CheckpointManager(root, fast=FastTier(fast, close_s=60), full_every=8)
    manager.save(1, state(1))
    assert manager.wait_copied(1, timeout=60)
    shutil.rmtree(fast)
    manager.save(2, state(2))
    assert manager.wait_copied(2, timeout=60)
    target = blank()
    with CheckpointManager(root, fast=fast) as after:  # refused if it were another run's
        assert after.restore(target).step == 2
        assert is_state(target, 2)
        after.save(3, state(3))
    manager.close()
    assert newest(root) == 3


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_step_that_went_before_it_was_copied_is_told_of(places, held_copy, how):
    fast, root = places
    reached, go = held_copy
    manager = CheckpointManager(root, fast=fast)
    getattr(manager, how)(1, state(1))
    assert reached.wait(60)
    shutil.rmtree(fast)
    go.set()
    for call in (manager.wait_copied, manager.close):
        with pytest.raises(StorageError, match=r"step 1 .* is in neither"):
            call()
    assert CheckpointManager(root).restore(blank()) is None


def test_a_step_that_was_deleted_is_not_missed(places, held_copy):
    fast, root = places
    reached, go = held_copy
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        assert reached.wait(60)
        manager.delete(2)
        go.set()
        assert manager.wait_copied(timeout=60)
    assert newest(root) == 1


def test_what_a_killed_job_left_takes_no_room_in_the_fast_tier(places):
    """A RAM disk has room for a few steps, and a job that is started again soon needs it."""
    fast, root = places
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(1, state(1))
    for step, age_s in ((2, 200), (3, 20)):  # the latter may be alive
        killed_save(fast / f"step-{step}", age_s)
        killed_save(root / f"step-{step}", age_s)
    manager = CheckpointManager(root, fast=fast, save=10)
    manager.restore(blank())
    assert not manager.should_save(2)
    assert manager.wait_retention(60)
    assert not os.path.exists(fast / "step-2")
    for place in (fast / "step-3", root / "step-2", root / "step-3"):
        assert os.listdir(place / "data")
    manager.close()


# --- what is told to be durable


def test_who_waits_for_a_copy_waits_until_its_name_is_durable(places, monkeypatch):
    fast, root = places
    held, reached = threading.Event(), threading.Event()
    plain = LocalStore.sync_directory
    synced = []

    def syncs(self, name=""):
        if threading.current_thread().name == "shardkeep-copier" and self.root == root and not name:
            reached.set()
            held.wait(60)
        plain(self, name)
        synced.append((self.root, name))

    monkeypatch.setattr(LocalStore, "sync_directory", syncs)
    manager = CheckpointManager(root, fast=fast)
    manager.save(1, state(1))
    assert reached.wait(60)
    assert (root / "step-1").is_dir()
    synced.clear()
    assert manager.wait_copied(1, timeout=60)
    assert (root, "") in synced  # by who was asked, as the copier has not come to it
    held.set()
    manager.close()


def test_who_waits_for_a_copy_hears_of_damage_that_is_found_just_then(places, monkeypatch):
    fast, root = places
    monkeypatch.setattr(copier, "copy_step", damaged := Held(copier.copy_step))
    manager = CheckpointManager(root, fast=fast)
    manager.save(1, state(1))
    assert damaged.reached.wait(60)
    damage(fast, 1)
    upkeep = manager._upkeep
    plain = upkeep._uncopied

    def uncopied():
        if threading.current_thread() is threading.main_thread():
            damaged.go.set()
            while not upkeep.copier.damaged:
                time.sleep(0.01)
        return plain()

    monkeypatch.setattr(upkeep, "_uncopied", uncopied)
    with pytest.raises(CorruptionError, match="differs from its digest"):
        manager.wait_copied(1, timeout=60)
    manager.close()


def test_where_nothing_was_saved_nothing_is_waited_for(places):
    fast, root = places
    with CheckpointManager(root, fast=fast) as manager:
        assert manager.wait_copied(timeout=0)
    assert not root.exists()
    assert not fast.exists()


def test_a_copy_whose_commit_may_have_happened_keeps_its_files(places, monkeypatch):
    """It has replaced another save, and then the disk does not answer for a while."""
    fast, root = places
    fill(root, [1])
    fill(fast, [1])
    source, target = (Catalog(place, StepNames()) for place in (fast, root))
    commits, reads = Lease.commit, commit_module.read_record
    broken = threading.Event()

    def commit(self, data, *, overwrite, same):
        commits(self, data, overwrite=overwrite, same=same)
        if overwrite:
            broken.set()
            raise StorageError("Input/output error")

    def read(store):
        if broken.is_set():
            raise StorageError("Input/output error")
        return reads(store)

    with monkeypatch.context() as patched:
        patched.setattr(Lease, "commit", commit)
        patched.setattr(commit_module, "read_record", read)
        with pytest.raises(StorageError, match="Input/output"):
            publishing.copy_step(
                source.find(1),
                source,
                target,
                moving=contextlib.nullcontext(),
                may_appear=lambda: True,
            )
    assert target.find(1).save_id == source.find(1).save_id
    assert shardkeep.verify(root / "step-1").ok

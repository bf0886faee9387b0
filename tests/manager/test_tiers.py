"""A fast tier before the durable root: saved there, copied behind the program, found in both."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time

import numpy as np
import pytest
from runs import blank, damage, damage_record, fill, is_state, state

import shardkeep
from shardkeep import (
    CheckpointExistsError,
    CheckpointManager,
    CheckpointNotFoundError,
    CorruptionError,
    FastTier,
    KeepBest,
    KeepEvery,
    KeepLast,
    StorageError,
)
from shardkeep.manager import copier
from shardkeep.manager.pins import Pins
from shardkeep.stores.local import LocalStore, WriteFile


@pytest.fixture
def places(tmp_path):
    return tmp_path / "fast", tmp_path / "run"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(copier, "RETRY_S", 0.05)
    monkeypatch.setattr(copier, "GRACE_S", 0.5)


def numbers(root):
    return sorted(int(name[5:]) for name in os.listdir(root) if name.startswith("step-"))


def clean_names(root):
    return [name for name in os.listdir(root) if not name.startswith("step-")]


class Gate:
    """Copies wait until it is opened."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.reached = threading.Event()
        self.copied = []
        plain = copier.copy_step

        def waits(step, *args, **options):
            self.reached.set()
            assert self.open.wait(60)
            self.copied.append(step.step)
            return plain(step, *args, **options)

        monkeypatch.setattr(copier, "copy_step", waits)


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open.set()


# --- a run


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_steps_are_saved_fast_and_copied_behind_the_program(places, how):
    fast, root = places
    keep = KeepLast(2) | KeepBest(1, "loss")
    with CheckpointManager(root, save=3, keep=keep, fast=FastTier(fast, keep=2)) as manager:
        assert manager.restore(blank()) is None
        for step in range(1, 23):
            if manager.should_save(step):
                getattr(manager, how)(step, state(step), {"loss": abs(step - 10)})
    assert numbers(root) == [9, 18, 21]
    assert numbers(fast) == [18, 21]
    assert clean_names(root) == clean_names(fast) == [".shardkeep"]
    for step in manager.steps():
        assert step.path == step.copies[0]
        for path in step.copies:
            assert shardkeep.verify(path).ok
    assert manager.latest().copies == (str(fast / "step-21"), str(root / "step-21"))
    assert manager.best().copies == (str(root / "step-9"),)
    for name in os.listdir(root / "step-21/data"):
        mine, theirs = root / "step-21/data" / name, fast / "step-21/data" / name
        assert mine.read_bytes() == theirs.read_bytes()
    one, other = (place / "step-21/checkpoint.json" for place in places)
    assert one.read_bytes() == other.read_bytes()
    # The durable root works alone, and so does a manager that knows both.
    for options, path in (({}, root), ({"fast": fast}, fast)):
        target = blank()
        found = CheckpointManager(root, **options).restore(target)
        assert (found.step, found.path) == (21, str(path / "step-21"))
        assert is_state(target, 21)


def test_a_save_is_acknowledged_before_it_is_copied(places, gate):
    fast, root = places
    manager = CheckpointManager(root, fast=fast)
    result = manager.save(1, state(1))
    assert result.checkpoint_id == str(fast / "step-1")
    assert gate.reached.wait(60)
    assert manager.steps()[0].copies == (str(fast / "step-1"),)
    assert not manager.wait_copied(1, timeout=0.05)
    assert not manager.wait_copied(timeout=0.05)
    target = blank()
    assert CheckpointManager(root, fast=fast).restore(target).step == 1
    assert is_state(target, 1)
    gate.open.set()
    assert manager.wait_copied(1, timeout=60)
    assert manager.wait_copied(timeout=60)
    with pytest.raises(CheckpointNotFoundError, match="no step 7 in"):
        manager.wait_copied(7)
    manager.close()
    assert numbers(root) == [1]


def test_what_was_left_uncopied_is_copied_by_who_trains_next(places, gate):
    fast, root = places
    manager = CheckpointManager(root, fast=FastTier(fast, close_s=0.05))
    manager.save(1, state(1))
    with pytest.raises(StorageError, match=r"steps 1 were not copied from .* within 0.05 s"):
        manager.close()
    gate.open.set()
    with CheckpointManager(root, fast=fast) as reader:  # who only reads copies nothing
        assert reader.restore(blank()).step == 1
    assert not os.path.exists(root / "step-1")
    with CheckpointManager(root, fast=fast, save=10) as trainer:
        trainer.restore(blank())
        trainer.should_save(2)
        assert trainer.wait_copied(1, timeout=60)
    assert numbers(root) == [1]


def test_a_lost_fast_tier_costs_what_was_not_copied_and_no_more(places):
    fast, root = places
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(1, state(1))
    shutil.rmtree(fast)
    with CheckpointManager(root, fast=fast) as manager:
        target = blank()
        assert manager.restore(target).step == 1
        manager.save(2, state(2))
    assert numbers(root) == [1, 2]
    assert numbers(fast) == [2]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_step_may_leave_the_fast_tier_out(places, how):
    fast, root = places
    with CheckpointManager(root, keep=2, fast=FastTier(fast, keep=1), full_every=9) as manager:
        manager.save(1, state(1))
        getattr(manager, how)(2, state(2), durable=True)
        manager.checkpointer.close()
        assert numbers(fast) == [1]
        assert manager.latest().copies == (str(root / "step-2"),)
        assert manager.wait_copied(2, timeout=60)
        with pytest.raises(CheckpointExistsError):
            manager.save(2, state(2))
        manager.save(3, state(3))
    assert numbers(root) == [2, 3]
    assert numbers(fast) == [3]
    with CheckpointManager(root) as manager:
        manager.save(4, state(4), durable=True)
    assert numbers(root) == [2, 3, 4]


# --- what is copied, and what stays


def test_what_newer_steps_have_replaced_is_not_copied(places, gate):
    fast, root = places
    with CheckpointManager(root, keep=1, fast=FastTier(fast, keep=1)) as manager:
        manager.save(1, state(1))
        assert gate.reached.wait(60)
        for step in range(2, 6):
            manager.save(step, state(step))
        manager.wait_retention()
        assert numbers(fast) == [1, 5]  # the one that is being copied, and the newest
        gate.open.set()
    assert gate.copied == [1, 5]
    assert numbers(root) == [5]
    assert numbers(fast) == [5]


def test_nothing_leaves_the_fast_tier_that_is_to_be_copied(places, gate):
    fast, root = places
    keep = KeepLast(1) | KeepEvery(2)
    tier = FastTier(fast, keep=1, most_waiting=9)
    with CheckpointManager(root, keep=keep, fast=tier) as manager:
        for step in range(1, 8):
            manager.save(step, state(step))
            manager.wait_retention()
        # 1 is being copied; 2, 4 and 6 are to be kept.
        assert numbers(fast) == [1, 2, 4, 6, 7]
        gate.open.set()
    assert gate.copied == [1, 7, 6, 4, 2]
    assert numbers(root) == [2, 4, 6, 7]
    assert numbers(fast) == [7]


def test_a_pin_for_good_in_the_fast_tier_has_a_step_copied_and_kept(places, gate):
    fast, root = places
    with CheckpointManager(root, keep=1, fast=FastTier(fast, keep=1)) as manager:
        manager.save(1, state(1))
        assert gate.reached.wait(60)
        manager.save(2, state(2))
        Pins(LocalStore(fast)).hold("step-2", "for the paper")
        manager.save(3, state(3))
        manager.wait_retention()
        gate.open.set()
    assert numbers(root) == [2, 3]
    assert numbers(fast) == [2, 3]


def test_saves_wait_while_too_much_is_to_be_copied(places, gate):
    fast, root = places
    manager = CheckpointManager(root, fast=FastTier(fast, most_waiting=1))
    manager.save(1, state(1))
    manager.save(2, state(2))
    third = threading.Thread(target=manager.save, args=(3, state(3)))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    gate.open.set()
    third.join(60)
    manager.close()
    assert numbers(root) == [1, 2, 3]


def test_the_durable_root_keeps_what_it_would_be_resumed_from(places, gate):
    fast, root = places
    root.mkdir()
    fill(root, [5, 10, 20])
    gate.open.set()
    with CheckpointManager(root, keep=1, fast=fast) as manager:
        manager.restore(blank(), 5)
        gate.open.clear()
        manager.save(6, state(6))
        manager.wait_retention()
        assert numbers(root) == [5, 20]  # not 5, until 6 is there
        gate.open.set()
        assert manager.wait_copied(6, timeout=60)
        manager.wait_retention()
        assert numbers(root) == [6, 20]


def test_nothing_goes_from_the_durable_root_before_something_of_this_run_is_there(places, gate):
    fast, root = places
    root.mkdir()
    fill(root, [10, 20])
    manager = CheckpointManager(root, keep=1, fast=fast)
    manager.save(30, state(30))
    manager.wait_retention()
    assert numbers(root) == [10, 20]  # what is there may be damaged, all of it
    gate.open.set()
    manager.close()
    assert numbers(root) == [30]


# --- going back


def test_a_step_that_is_reached_again_replaces_its_durable_copy(places):
    fast, root = places
    with CheckpointManager(root, fast=FastTier(fast, keep=9)) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step))
    old = shardkeep.open(root / "step-20")
    with CheckpointManager(root, fast=FastTier(fast, keep=9)) as manager:
        manager.restore(blank(), 10)
        manager.save(20, {**state(20), "step": -20})
        assert manager.wait_copied(20, timeout=60)
        with pytest.raises(CheckpointExistsError):
            manager.save(20, state(20))
    old.close()
    for place in places:
        with shardkeep.open(place / "step-20") as found:
            assert found["step"] == -20
        assert shardkeep.verify(place / "step-20").ok
        assert len(os.listdir(place / "step-20/data")) == 2
    assert clean_names(root) == [".shardkeep"]


def test_a_step_that_is_pinned_at_the_durable_root_is_not_replaced(places):
    fast, root = places
    root.mkdir()
    fill(root, [10, 20])
    Pins(LocalStore(root)).hold("step-20", "the paper's figures")
    with CheckpointManager(root, fast=fast) as manager:
        manager.restore(blank(), 10)
        with pytest.raises(CheckpointExistsError, match=r"pinned by .*figures"):
            manager.save(20, state(-20))
    target = blank()
    CheckpointManager(root).restore(target, 20)
    assert is_state(target, 20)


def test_a_step_of_the_durable_root_is_not_replaced_unasked(places):
    fast, root = places
    root.mkdir()
    fill(root, [20])
    with CheckpointManager(root, fast=fast) as manager:
        with pytest.raises(CheckpointExistsError, match="step-20 already holds"):
            manager.save(20, state(-20))
        manager.save(20, state(-20), overwrite=True)
    target = blank()
    CheckpointManager(root).restore(target)
    assert is_state(target, -20)


def test_the_later_of_two_saves_of_one_step_counts(places):
    fast, root = places
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(10, state(10))
    # Another host reached the step again, and this one still has its own.
    with CheckpointManager(root) as elsewhere:
        elsewhere.save(10, state(-10), overwrite=True)
    with CheckpointManager(root, fast=fast, save=1) as manager:
        target = blank()
        assert manager.restore(target).path == str(root / "step-10")
        assert is_state(target, -10)
        manager.should_save(11)
        assert manager.wait_copied(timeout=60)
        manager.save(11, state(11))
    with shardkeep.open(root / "step-10") as found:
        assert found["step"] == -10
    assert numbers(fast) == [11]


def test_dropping_newer_steps_and_deleting_reach_both_tiers(places, gate):
    fast, root = places
    gate.open.set()
    with CheckpointManager(root, fast=FastTier(fast, keep=9)) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step))
        assert manager.wait_copied(timeout=60)
        manager.restore(blank(), 20, drop_newer=True)
        assert numbers(fast) == numbers(root) == [10, 20]
        manager.delete(10)
        assert numbers(fast) == numbers(root) == [20]
        with pytest.raises(StorageError, match="only whole one"):
            manager.delete(20)
        gate.open.clear()
        gate.reached.clear()
        manager.save(40, state(40))
        assert gate.reached.wait(60)
        manager.delete(40)  # while it is copied
        gate.open.set()
    assert numbers(fast) == numbers(root) == [20]


# --- damage


@pytest.mark.parametrize("what", [damage, damage_record])
@pytest.mark.parametrize("options", [{}, {"fall_back": False}, {"step": 20}], ids=str)
def test_a_damaged_fast_copy_is_passed_over_for_the_durable_one(places, caplog, what, options):
    fast, root = places
    with CheckpointManager(root, fast=FastTier(fast, keep=9)) as manager:
        for step in (10, 20):
            manager.save(step, state(step))
    what(fast, 20)
    target = blank()
    found = CheckpointManager(root, fast=fast).restore(target, **options)
    assert (found.step, found.path) == (20, str(root / "step-20"))
    assert is_state(target, 20)
    assert [(bad.step, bad.path) for bad in found.damaged] == [(20, str(fast / "step-20"))]
    assert "passed over for another copy of it" in caplog.text


def test_a_fast_copy_that_cannot_be_read_is_passed_over_for_the_durable_one(places, monkeypatch):
    fast, root = places
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(10, state(10))
    plain = LocalStore.open

    def broken(self, name):
        if self.root.is_relative_to(fast) and name.startswith("data/"):
            raise OSError(errno.EIO, "Input/output error")
        return plain(self, name)

    monkeypatch.setattr(LocalStore, "open", broken)
    target = blank()
    found = CheckpointManager(root, fast=fast).restore(target)
    assert found.path == str(root / "step-10")
    assert is_state(target, 10)
    assert "Input/output error" in found.damaged[0].problem
    shutil.rmtree(root / "step-10")
    with pytest.raises(StorageError, match="Input/output"):
        CheckpointManager(root, fast=fast).restore(blank())


def test_where_both_copies_are_damaged_the_step_before_is_loaded(places):
    fast, root = places
    with CheckpointManager(root, fast=FastTier(fast, keep=1)) as manager:
        for step in (10, 20):
            manager.save(step, state(step))
    damage(fast, 20)
    damage_record(root, 20)
    target = blank()
    manager = CheckpointManager(root, fast=fast)
    found = manager.restore(target)
    assert (found.step, found.path) == (10, str(root / "step-10"))
    assert {bad.path for bad in found.damaged} == {str(fast / "step-20"), str(root / "step-20")}
    with pytest.raises(CorruptionError):
        manager.restore(blank(), fall_back=False)
    damage(root, 10)
    with pytest.raises(CorruptionError, match=r"no step in .* and .* is whole"):
        manager.restore(blank())


def test_a_damaged_durable_copy_is_not_looked_at(places):
    fast, root = places
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(10, state(10))
    damage_record(root, 10)
    found = CheckpointManager(root, fast=fast, fall_back=False).restore(blank())
    assert (found.path, found.damaged) == (str(fast / "step-10"), ())


def test_damage_is_not_copied_on(places, gate, caplog):
    fast, root = places
    manager = CheckpointManager(root, fast=FastTier(fast, keep=1))
    manager.save(10, state(10))
    assert gate.reached.wait(60)
    damage(fast, 10)
    gate.open.set()
    with pytest.raises(CorruptionError, match=r"block 0 .* differs from its digest") as caught:
        manager.wait_copied(10, timeout=60)
    assert "step 10" in caught.value.__notes__[0]
    assert "step 10 could not be copied" in caplog.text
    assert numbers(root) == []
    assert clean_names(root) == [".shardkeep"]
    manager.save(20, state(20))  # it was said, and training goes on
    assert manager.wait_copied(20, timeout=60)
    manager.close()
    assert numbers(root) == [20]
    assert numbers(fast) == [10, 20]  # what is damaged is the user's to look at


def test_what_a_copy_found_damaged_is_no_base(places, gate):
    fast, root = places
    now = {"frozen": np.random.default_rng(0).random(200_000)}
    with CheckpointManager(root, fast=FastTier(fast, keep=1), full_every=10) as manager:
        manager.save(10, now)
        assert gate.reached.wait(60)
        damage(fast, 10)
        gate.open.set()
        while not manager._upkeep.copier.damaged:
            time.sleep(0.01)
        with pytest.raises(CorruptionError, match="differs from its digest"):
            manager.save(20, now)
        manager.save(20, now)  # it was said, and training goes on
        assert manager.wait_copied(20, timeout=60)
    assert numbers(root) == [20]


def test_what_is_damaged_at_the_durable_root_holds_nobodys_place(places):
    fast, root = places
    root.mkdir()
    fill(root, [10, 20])
    damage(root, 20)
    with CheckpointManager(root, keep=1, fast=fast) as manager:
        assert manager.restore(blank()).step == 10
        manager.save(12, state(12))
        manager.save(15, state(15))
        assert manager.wait_copied(15, timeout=60)
    assert numbers(root) == [15, 20]
    assert numbers(fast) == [15]


# --- when copying fails


@pytest.fixture
def full_disk(places, monkeypatch):
    """Nothing can be written under the durable root, as long as it is set."""
    full = threading.Event()
    plain = WriteFile.write_at

    def write_at(self, data, offset):
        if full.is_set() and str(self.path).startswith(f"{places[1]}/.copying"):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(self, data, offset)

    monkeypatch.setattr(WriteFile, "write_at", write_at)
    full.set()
    return full


def eventually(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_full_disk_is_told_of_at_once_and_at_the_next_save(places, full_disk, caplog):
    fast, root = places
    manager = CheckpointManager(root, fast=fast)
    manager.save(10, state(10))
    eventually(lambda: "could not be copied" in caplog.text)
    with pytest.raises(StorageError, match="No space left") as caught:
        manager.save(20, state(20))
    assert caught.value.errno == errno.ENOSPC
    assert numbers(root) == []
    assert numbers(fast) == [10]
    manager.save(20, state(20))  # who goes on, goes on
    with pytest.raises(StorageError, match="No space left"):
        manager.close()
    assert clean_names(root) == [".shardkeep"]  # what did not fit takes no room
    full_disk.clear()
    with CheckpointManager(root, fast=fast, save=1) as again:
        again.restore(blank())
        again.should_save(21)
        assert again.wait_copied(timeout=60)
    assert numbers(root) == [10, 20]


def test_a_disk_that_has_room_again_is_used_again(places, full_disk, caplog):
    fast, root = places
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(10, state(10))
        eventually(lambda: "will be tried again" in caplog.text)
        full_disk.clear()
        eventually(lambda: (root / "step-10/checkpoint.json").exists())
        eventually(lambda: manager._upkeep.copier._unseen is None)
        manager.save(20, state(20))  # it goes well again
    assert numbers(root) == [10, 20]


def test_saves_do_not_wait_for_what_does_not_come(places, full_disk):
    fast, root = places
    manager = CheckpointManager(root, fast=FastTier(fast, most_waiting=0))
    manager.save(10, state(10))
    for _ in range(2):
        with pytest.raises(StorageError, match="No space left"):
            manager.save(20, state(20))
    full_disk.clear()
    manager.close()
    assert numbers(root) == [10]


def test_progress_and_a_line_in_the_log(places, caplog):
    fast, root = places
    told = []
    with (
        caplog.at_level(logging.INFO, "shardkeep"),
        CheckpointManager(root, fast=FastTier(fast, progress=lambda *x: told.append(x))) as manager,
    ):
        manager.save(1, state(1))
    size = sum(path.stat().st_size for path in (root / "step-1/data").iterdir())
    assert told[-1] == (size, size)
    assert f"copied step 1 to {root}: {size} bytes, 0 linked" in caplog.text


def test_a_manager_that_nobody_closes_leaves_no_thread(places):
    fast, root = places
    manager = CheckpointManager(root, keep=1, fast=fast)
    for step in (1, 2):
        manager.save(step, state(step))
        assert manager.wait_copied(step, timeout=60)
    del manager
    eventually(lambda: not any("copier" in thread.name for thread in threading.enumerate()))


# --- files that steps share


def test_what_steps_share_is_copied_once(places):
    fast, root = places
    frozen = np.random.default_rng(0).random(300_000)
    with CheckpointManager(
        root, fast=FastTier(fast, keep=9, most_waiting=9), full_every=10
    ) as manager:
        for step in range(1, 5):
            manager.save(step, {"frozen": frozen, "w": np.full(1000, step), "step": step})
            assert manager.wait_copied(step, timeout=60)
    for place in places:
        blocks = {
            (found.st_ino, found.st_blocks)
            for path in place.rglob("*")
            if path.is_file()
            for found in [path.stat()]
        }
        assert sum(each for _, each in blocks) * 512 < 2 * frozen.nbytes
    for step in manager.steps():
        for path in step.copies:
            assert shardkeep.verify(path).ok
    # Of a step that goes, what others share stays.
    manager = CheckpointManager(root)
    manager.delete(1)
    assert shardkeep.verify(root / "step-2").ok


def test_a_shared_file_that_is_damaged_there_is_copied_anew(places, gate):
    fast, root = places
    frozen = np.random.default_rng(0).random(300_000)
    gate.open.set()
    with CheckpointManager(root, fast=FastTier(fast, keep=9), full_every=10) as manager:
        manager.save(1, {"frozen": frozen, "step": 1})
        assert manager.wait_copied(1, timeout=60)
        (large,) = (p for p in (root / "step-1/data").iterdir() if p.stat().st_size > 2_000_000)
        with open(large, "r+b") as file:  # its digests
            file.seek(-4096, os.SEEK_END)
            file.write(b"\xff" * 16)
        manager.save(2, {"frozen": frozen, "step": 2})
    assert shardkeep.verify(root / "step-2").ok


# --- whose it is


def test_a_fast_tier_of_another_run_is_refused(places, tmp_path):
    fast, root = places
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(10, state(10))
    other = CheckpointManager(tmp_path / "other", fast=fast)
    for use in (
        lambda: other.restore(blank()),
        other.steps,
        lambda: other.save(1, state(1)),
        lambda: other.delete(10),
    ):
        with pytest.raises(StorageError, match="holds steps of another run"):
            use()
    other.close()
    assert numbers(fast) == [10]
    # The same folder, begun anew: what was removed does not come back.
    shutil.rmtree(root)
    with pytest.raises(StorageError, match="begun anew"):
        CheckpointManager(root, fast=fast).restore(blank())
    shutil.rmtree(fast)
    with CheckpointManager(root, fast=fast) as manager:
        assert manager.restore(blank()) is None
        manager.save(1, state(1))
    assert numbers(root) == numbers(fast) == [1]


def test_a_root_that_had_no_fast_tier_gets_one(places):
    fast, root = places
    with CheckpointManager(root) as manager:
        manager.save(1, state(1))
    with CheckpointManager(root, fast=fast) as manager:
        assert manager.restore(blank()).step == 1
        manager.save(2, state(2))
    with CheckpointManager(root) as manager:
        assert manager.restore(blank()).step == 2


@pytest.mark.parametrize(
    "given",
    [{"copy_rate": 0}, {"most_waiting": -1}, {"most_waiting": True}, {"close_s": -1}, {"keep": 0}],
    ids=str,
)
def test_what_makes_no_sense_is_refused(tmp_path, given):
    with pytest.raises(ValueError, match=r".+"):
        FastTier(tmp_path, **given)


def test_two_tiers_are_two_folders(tmp_path):
    os.symlink(tmp_path, tmp_path / "again")
    with pytest.raises(ValueError, match="are both"):
        CheckpointManager(tmp_path, fast=tmp_path / "again")


# --- who reads


def test_steps_are_watched_wherever_they_are(places, gate):
    fast, root = places
    reader = CheckpointManager(root, fast=fast)
    alone = CheckpointManager(root)
    with CheckpointManager(root, keep=1, fast=FastTier(fast, keep=1)) as manager:
        manager.save(1, state(1))
        with reader.wait_for(1, timeout=60) as step:
            assert step.path == str(fast / "step-1")
            with pytest.raises(TimeoutError):
                alone.wait_for(1, timeout=0.05)
            gate.open.set()
            assert manager.wait_copied(1, timeout=60)
            manager.save(2, state(2))
            assert manager.wait_copied(2, timeout=60)
            manager.wait_retention()
            assert numbers(fast) == [1, 2]  # pinned where it is read
        with alone.wait_for(2, timeout=60) as step:
            assert step.path == str(root / "step-2")


# --- no threads to be had


@pytest.fixture
def threadless(monkeypatch):
    """The system refuses threads to upkeep, as long as the event is not set."""
    allowed, start = threading.Event(), threading.Thread.start

    def refused(self):
        if self.name in ("shardkeep-copier", "shardkeep-retention") and not allowed.is_set():
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    return allowed


def test_what_nobody_copied_is_not_said_to_be(places, threadless):
    fast, root = places
    manager = CheckpointManager(root, fast=fast, keep=1, no_dist=True)
    manager.save(1, state(1))
    assert not manager.wait_copied(timeout=0.05)
    assert not manager.wait_retention(timeout=0.05)
    with pytest.raises(StorageError, match="steps 1 were not copied"):
        manager.close()
    assert manager.wait_retention(timeout=0.05)  # done when it was closed
    assert not root.exists() or numbers(root) == []


@pytest.mark.parametrize("step", [None, 1])
def test_what_is_waited_for_is_copied_again_if_it_went(places, step):
    fast, root = places
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(1, state(1))
        assert manager.wait_copied(step, timeout=60)
        damage_record(root, 1)
        assert manager.wait_copied(step, timeout=60)
        assert shardkeep.verify(root / "step-1").ok


def test_what_is_waited_for_is_copied_once_there_are_threads(places, threadless):
    fast, root = places
    with CheckpointManager(root, fast=fast, no_dist=True) as manager:
        manager.save(1, state(1))
        threading.Timer(0.2, threadless.set).start()
        assert manager.wait_copied(timeout=60)
        assert numbers(root) == [1]


# --- a fast tier that does not answer for a moment


class Unread:
    """The record of a step of the fast tier cannot be read, so many times, or by nobody."""

    def __init__(self, monkeypatch, fast, step):
        self.left = 0
        plain = LocalStore.stat

        def stat(store, name=""):
            if self.left and (str(store.root), name) == (str(fast), f"step-{step}/checkpoint.json"):
                self.left -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return plain(store, name)

        monkeypatch.setattr(LocalStore, "stat", stat)


def test_a_step_that_cannot_be_read_once_is_waited_for_all_the_same(places, gate, monkeypatch):
    """It was taken for none, and its copy for one that nobody wants."""
    fast, root = places
    unread = Unread(monkeypatch, fast, 2)
    with CheckpointManager(root, fast=fast) as manager:
        gate.open.set()
        manager.save(1, state(1))
        assert manager.wait_copied()
        for wanted in (None, 2):
            gate.open.clear()
            manager.save(2, state(2), overwrite=True)
            opening = threading.Timer(0.3, gate.open.set)
            opening.start()
            unread.left = 1
            assert manager.wait_copied(wanted)
            assert numbers(root) == [1, 2]
            assert (
                shardkeep.open(root / "step-2").save_id == shardkeep.open(fast / "step-2").save_id
            )
            opening.join()


@pytest.mark.parametrize("wanted", [None, 2])
def test_a_step_that_cannot_be_read_at_all_is_told_of(places, monkeypatch, caplog, wanted):
    fast, root = places
    unread = Unread(monkeypatch, fast, 2)
    manager = CheckpointManager(root, fast=fast)
    manager.save(1, state(1))
    assert manager.wait_copied()
    with monkeypatch.context() as patched:
        patched.setattr(copier, "copy_step", refuses)
        manager.save(2, state(2))
        unread.left = 10**9
        for _ in range(2):
            with pytest.raises(StorageError, match=r"step-2.*cannot be read|nobody copies"):
                manager.wait_copied(wanted)
        with pytest.raises(StorageError, match=r"not known: step-2.*cannot be read"):
            manager.wait_copied(wanted)
        with pytest.raises(StorageError, match=r"step-2.*cannot be read"):
            manager.close()
    assert numbers(root) == [1]
    unread.left = 0
    with CheckpointManager(root, fast=fast) as manager:
        manager.should_save(3)
        assert manager.wait_copied()
    assert numbers(root) == [1, 2]


def refuses(*args, **options):
    raise StorageError("nobody copies")


def test_an_old_step_that_cannot_be_read_keeps_nobody_waiting(places, monkeypatch):
    fast, root = places
    unread = Unread(monkeypatch, fast, 1)
    with CheckpointManager(root, keep=2, fast=FastTier(fast, keep=5)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            assert manager.wait_copied()
        unread.left = 10**9
        assert manager.wait_copied()
        manager.save(4, state(4))
        assert manager.wait_copied()


def test_what_cannot_be_read_just_now_does_not_leave_the_fast_tier(places, gate, monkeypatch):
    fast, root = places
    unread = Unread(monkeypatch, fast, 1)
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        unread.left = 10**9
        assert 1 in manager._upkeep._spared_fast()
        unread.left = 0
        gate.open.set()

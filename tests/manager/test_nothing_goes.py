"""Steps that must not go, whatever happens at the same time."""

from __future__ import annotations

import errno
import time

import pytest
from runs import blank, fill, is_state, state

import shardkeep
from shardkeep import CheckpointExistsError, CheckpointManager, KeepLast, StorageError


def numbers(root):
    return [step.step for step in CheckpointManager(root).steps()]


def lose_a_file(root, step):
    next((root / f"step-{step}" / "data").glob("*r0*.safetensors")).unlink()


@pytest.fixture
def full_disk(monkeypatch):
    def fail(self, plan, planner):
        raise OSError(errno.ENOSPC, "no space")

    def begin():
        monkeypatch.setattr(shardkeep.NativeWriter, "write_data", fail)

    return begin


class Slow(KeepLast):
    """Takes its time to decide, while the program goes on."""

    def holds(self, steps, now):
        held = super().holds(steps, now)
        time.sleep(0.4)
        return held


def test_what_is_saved_while_a_pass_decides(tmp_path):
    fill(tmp_path, range(1, 11))
    with CheckpointManager(tmp_path, keep=Slow(1)) as manager:
        manager.restore(blank(), 5)
        manager.save(6, state(-6))
        time.sleep(0.1)  # a pass is deciding over what it has listed
        manager.save(7, state(-7))
        manager.wait_retention()
        assert {6, 7} & set(numbers(tmp_path)) == {7}
        target = blank()
        manager.restore(target, 7)
        assert target["step"] == -7


@pytest.mark.parametrize("behind", [True, False])
def test_what_was_restored_stays_until_a_save_is_committed(tmp_path, full_disk, behind):
    fill(tmp_path, range(1, 11))
    manager = CheckpointManager(tmp_path, keep=2)
    manager.restore(blank(), 5)
    full_disk()
    with pytest.raises((OSError, StorageError)):
        manager.async_save(6, state(6)).result() if behind else manager.save(6, state(6))
    manager.close()
    target = blank()
    CheckpointManager(tmp_path).restore(target, 5)
    assert is_state(target, 5)


def test_a_failed_step_is_saved_again(tmp_path, monkeypatch, full_disk):
    fill(tmp_path, range(1, 11))
    with CheckpointManager(tmp_path) as manager:
        manager.restore(blank(), 5)
        with monkeypatch.context():
            full_disk()
            with pytest.raises(OSError, match="no space"):
                manager.async_save(6, state(6)).result()
        monkeypatch.undo()
        manager.save(6, state(-6))
        target = blank()
        manager.restore(target, 6)
        assert target["step"] == -6


def test_nothing_goes_before_something_is_known_to_be_whole(tmp_path):
    fill(tmp_path, [10, 20, 30])
    lose_a_file(tmp_path, 30)
    manager = CheckpointManager(tmp_path, keep=1)
    with pytest.raises(shardkeep.UnsupportedValueError):
        manager.save(40, {"w": object()})
    manager.close()
    target = blank()
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(target).step == 20


def test_the_last_whole_step_is_not_deleted_for_a_damaged_one(tmp_path):
    fill(tmp_path, [10, 20])
    lose_a_file(tmp_path, 20)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(StorageError, match="only whole one"):
            manager.delete(10)
        manager.delete(20)
    assert numbers(tmp_path) == [10]


def test_what_could_not_be_read_is_not_dropped(tmp_path):
    fill(tmp_path, [10, 20, 30])
    lose_a_file(tmp_path, 30)
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(blank(), drop_newer=True).step == 20
    assert numbers(tmp_path) == [10, 20, 30]


def test_what_is_pinned_is_not_dropped(tmp_path):
    fill(tmp_path, [10, 20, 30])
    with CheckpointManager(tmp_path) as evaluation, evaluation.wait_for(30, timeout=5):
        with CheckpointManager(tmp_path) as manager:
            manager.restore(blank(), 10, drop_newer=True)
        assert numbers(tmp_path) == [10, 30]


def test_who_has_not_looked_replaces_nothing(tmp_path):
    fill(tmp_path, [100, 200])
    with CheckpointManager(tmp_path) as manager:
        manager.save(50, state(50))
        with pytest.raises(CheckpointExistsError):
            manager.save(100, state(-100))
    target = blank()
    CheckpointManager(tmp_path).restore(target, 100)
    assert is_state(target, 100)

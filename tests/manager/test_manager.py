"""The manager of one process: saving, keeping, resuming, evaluating."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
from runs import blank, damage, damage_record, fill, is_state, killed_save, state
from slow_disks import faulty_disk

import shardkeep
from shardkeep import (
    AtSteps,
    CheckpointExistsError,
    CheckpointManager,
    CheckpointNotFoundError,
    CorruptionError,
    EverySeconds,
    EverySteps,
    FormatError,
    KeepBest,
    KeepLast,
    MismatchError,
    OnPreemption,
    StorageError,
    UnsupportedValueError,
    WhenIdle,
)
from shardkeep.formats.native.commit import read_record
from shardkeep.formats.native.names import RECORD
from shardkeep.formats.native.record import encode_record
from shardkeep.stores.local import LocalStore


def numbers(manager):
    return [step.step for step in manager.steps()]


def names(root):
    return sorted(name for name in os.listdir(root) if not name.startswith(".shardkeep"))


# --- a run


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_run_saves_keeps_and_resumes(tmp_path, how):
    keep = KeepLast(2) | KeepBest(1, "loss")
    with CheckpointManager(tmp_path / "run", save=EverySteps(3), keep=keep) as manager:
        assert manager.restore(blank()) is None
        assert manager.latest() is None
        for step in range(1, 23):
            if manager.should_save(step):
                loss = abs(step - 10)
                getattr(manager, how)(step, state(step), {"loss": loss}, metadata={"at": [step]})
                assert not manager.should_save(step)
    assert numbers(manager) == [9, 18, 21]
    assert names(tmp_path / "run") == ["step-18", "step-21", "step-9"]
    assert manager.latest().step == 21
    assert manager.best().step == 9
    assert manager.best("loss", highest=True).step == 21
    assert manager.latest().metrics == {"loss": 11.0}
    assert manager.latest().metadata == {"at": [21]}
    assert manager.latest().nbytes == sum(
        path.stat().st_size for path in (tmp_path / "run/step-21").rglob("*") if path.is_file()
    )
    with CheckpointManager(tmp_path / "run", save=3) as manager:
        target = blank()
        found = manager.restore(target)
        assert (found.step, found.damaged, found.metadata) == (21, (), {"at": [21]})
        assert is_state(target, 21)
        assert is_state(found.state_dict, 21)
        assert [step for step in range(22, 31) if manager.should_save(step)] == [24, 27, 30]
        target = blank()
        assert manager.restore(target, 9).step == 9
        assert is_state(target, 9)
        with pytest.raises(CheckpointNotFoundError, match="no step 10 in"):
            manager.restore(blank(), 10)


def test_metrics_may_be_anything_that_is_a_number(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        metrics = {"a": np.float32(0.5), "b": 3, "c": math.nan, "d": -math.inf, "e": np.array(2)}
        manager.save(1, state(1), metrics)
        found = manager.latest().metrics
        assert math.isnan(found.pop("c"))
        assert found == {"a": 0.5, "b": 3.0, "d": -math.inf, "e": 2.0}
        with pytest.raises(UnsupportedValueError, match="metric 'x' is a list"):
            manager.save(2, state(2), {"x": [1, 2]})
        with pytest.raises(UnsupportedValueError, match=r"user_metadata\['metadata'\]\['k'\]"):
            manager.save(2, state(2), metadata={"k": {1, 2}})
        assert numbers(manager) == [1]
        assert manager.best("nothing", highest=True) is None
        with pytest.raises(ValueError, match="name of a metric"):
            manager.best()


def test_user_metadata_goes_with_any_save(tmp_path):
    shardkeep.save(state(1), tmp_path / "a", user_metadata={"by": "hand", "n": [1, None, 2.5]})
    with shardkeep.open(tmp_path / "a") as found:
        assert found.user_metadata == {"by": "hand", "n": [1, None, 2.5]}
    handle = shardkeep.async_save(state(2), tmp_path / "b", user_metadata={"x": 1})
    handle.result(60)
    with shardkeep.open(tmp_path / "b") as found:
        assert found.user_metadata == {"x": 1}
    assert shardkeep.verify(tmp_path / "b").ok
    for bad in ({1: 2}, {"a": math.nan}, {"a": b"x"}, {"a": 2**64}, {"a": "x" * 2_000_000}, [1]):
        with pytest.raises(UnsupportedValueError, match="user_metadata"):
            shardkeep.save(state(1), tmp_path / "c", user_metadata=bad)
    assert not (tmp_path / "c").exists()


def test_a_step_that_exists_is_not_replaced_unless_the_run_went_back(tmp_path):
    fill(tmp_path, [10, 20, 30])
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointExistsError, match="step-20 already holds"):
        manager.save(20, state(20))
    assert manager.restore(blank(), 10).step == 10
    other = {**state(20), "step": -20}
    manager.save(20, other)
    with pytest.raises(CheckpointExistsError):
        manager.save(20, state(20))
    manager.save(20, state(20), overwrite=True)
    with shardkeep.open(tmp_path / "step-20") as found:
        assert found["step"] == 20


def test_going_back_for_good(tmp_path, caplog):
    fill(tmp_path, [10, 20, 30, 40])
    with CheckpointManager(tmp_path, keep=2) as manager:
        manager.restore(blank(), 10)
        assert caplog.text == ""  # who only reads need not know
        manager.save(15, state(15))
        assert "steps 20 to 40 of" in caplog.text
        assert "lie beyond step 10" in caplog.text
        manager.wait_retention()
        assert numbers(manager) == [15, 30, 40]  # the one this run would go on from stays
    with CheckpointManager(tmp_path, keep=2) as manager:
        manager.restore(blank(), 15, drop_newer=True)
        assert numbers(manager) == [15]


# --- resuming


def test_a_damaged_step_is_named_and_the_one_before_is_loaded(tmp_path, caplog):
    fill(tmp_path, [10, 20, 30])
    damage(tmp_path, 30)
    target = blank()
    with CheckpointManager(tmp_path, keep=1) as manager:
        found = manager.restore(target)
        assert found.step == 20
        assert is_state(target, 20)
        assert [bad.step for bad in found.damaged] == [30]
        assert found.damaged[0].path == str(tmp_path / "step-30")
        assert "differs from its digest" in found.damaged[0].problem
        assert f"step 30 ({tmp_path / 'step-30'}) is damaged" in caplog.text
        # What is damaged holds nobody's place: 20 is what there is.
        manager._retention.run()
        assert 20 in numbers(manager)
        manager.save(30, state(30))
        manager.wait_retention()
    assert numbers(manager) == [30]
    assert shardkeep.verify(tmp_path / "step-30").ok


def test_falling_back_is_a_setting(tmp_path):
    fill(tmp_path, [10, 20])
    damage(tmp_path, 20)
    with pytest.raises(CorruptionError, match="differs") as caught:
        CheckpointManager(tmp_path, fall_back=False).restore(blank())
    assert any("step-20" in note for note in caught.value.__notes__)
    with pytest.raises(CorruptionError, match="differs"):
        CheckpointManager(tmp_path).restore(blank(), fall_back=False)
    with pytest.raises(CorruptionError, match="differs"):
        CheckpointManager(tmp_path).restore(blank(), 20)
    damage_record(tmp_path, 20)
    with pytest.raises(CorruptionError, match="step-20"):
        CheckpointManager(tmp_path, fall_back=False).restore(blank())
    with pytest.raises(CorruptionError, match="step-20"):
        CheckpointManager(tmp_path).restore(blank(), 20)


@pytest.mark.parametrize("what", ["record", "file gone", "file cut", "no data"])
def test_damage_of_any_kind_is_passed_over(tmp_path, what):
    fill(tmp_path, [10, 20, 30])
    for step in (20, 30):
        data = next((tmp_path / f"step-{step}/data").glob("*r0*"))
        match what:
            case "record":
                damage_record(tmp_path, step)
            case "file gone":
                data.unlink()
            case "file cut":
                os.truncate(data, 5000)
            case "no data":
                shutil.rmtree(tmp_path / f"step-{step}/data")
    target = blank()
    found = CheckpointManager(tmp_path).restore(target)
    assert found.step == 10
    assert is_state(target, 10)
    assert [bad.step for bad in found.damaged] == [30, 20]


def test_where_nothing_is_whole_training_does_not_silently_begin_anew(tmp_path):
    fill(tmp_path, [10, 20])
    damage(tmp_path, 10)
    damage_record(tmp_path, 20)
    with pytest.raises(CorruptionError, match=r"no step in .* is whole:\n  step 20 .*\n  step 10"):
        CheckpointManager(tmp_path).restore(blank())


def test_what_a_newer_version_wrote_is_not_passed_over(tmp_path):
    fill(tmp_path, [10, 20])
    record = read_record(LocalStore(tmp_path / "step-20"))
    (tmp_path / "step-20" / RECORD).write_bytes(
        encode_record(dataclasses.replace(record, requires=("tomorrow",)))
    )
    manager = CheckpointManager(tmp_path)
    with pytest.raises(FormatError, match=r"step 20 is the newest, .* lacks: tomorrow.*by its num"):
        manager.restore(blank())
    assert manager.restore(blank(), 10).step == 10


def test_what_does_not_fit_is_not_passed_over(tmp_path):
    fill(tmp_path, [10, 20])
    with pytest.raises(MismatchError):
        CheckpointManager(tmp_path).restore({"w": np.zeros(3, np.float32), "step": 0})


def test_leftovers_are_no_steps(tmp_path):
    fill(tmp_path, [10])
    killed_save(tmp_path / "step-20")
    (tmp_path / "step-30").mkdir()
    (tmp_path / "step-40").write_text("a file")
    (tmp_path / "step-050").mkdir()
    (tmp_path / ".deleted-0123456789abcdef-step-5").mkdir()
    manager = CheckpointManager(tmp_path)
    assert numbers(manager) == [10]
    assert manager.restore(blank()).step == 10


# --- keeping


def test_what_killed_saves_left_goes_by_age(tmp_path):
    fill(tmp_path, [10])
    killed_save(tmp_path / "step-10", age_s=7200)
    killed_save(tmp_path / "step-20", age_s=7200)
    killed_save(tmp_path / "step-30", age_s=60)
    (tmp_path / "step-40").mkdir()
    fill(tmp_path, [5])
    os.rename(tmp_path / "step-5", tmp_path / ".deleted-0123456789abcdef-step-5")
    (tmp_path / "mine.txt").write_text("stays")
    with CheckpointManager(tmp_path) as manager:
        manager.save(50, state(50))
    left = ["mine.txt", "step-10", "step-30", "step-40", "step-50"]
    assert names(tmp_path) == left
    assert shardkeep.verify(tmp_path / "step-10").ok
    assert len(os.listdir(tmp_path / "step-10/data")) == 2


def test_only_who_saves_removes(tmp_path):
    fill(tmp_path, [10])
    killed_save(tmp_path / "step-20", age_s=7200)
    with CheckpointManager(tmp_path, keep=1) as manager:
        manager.restore(blank())
        list(manager.watch(timeout=0))
    assert names(tmp_path) == ["step-10", "step-20"]


def test_delete(tmp_path):
    fill(tmp_path, [10, 20])
    manager = CheckpointManager(tmp_path)
    with manager.wait_for(10, 0), pytest.raises(StorageError, match=r"pinned by process \d+"):
        manager.delete(10)
    manager.delete(10)
    assert names(tmp_path) == ["step-20"]
    with pytest.raises(StorageError, match="only whole one"):
        manager.delete(20)
    with pytest.raises(CheckpointNotFoundError, match="no step 10"):
        manager.delete(10)
    with manager.wait_for(20, 0):
        manager.delete(20, force=True)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", ["latest", 2**64])
def test_what_is_no_step_is_refused(tmp_path, step):
    fill(tmp_path, [10])
    manager = CheckpointManager(tmp_path)
    for ask in (manager.delete, partial(manager.restore, blank()), manager.wait_copied):
        with pytest.raises(ValueError, match=f"step is {step!r}"):
            ask(step)


def test_retention_leaves_what_is_pinned_until_it_is_not(tmp_path):
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            if step == 1:
                pinned = manager.wait_for(1, 0)
        assert manager.wait_retention(60)
        assert numbers(manager) == [1, 3]
        pinned.release()
        pinned.release()
        manager.save(4, state(4))
    assert numbers(manager) == [4]
    assert os.listdir(tmp_path / ".shardkeep/pins") == []


def test_steps_that_share_files_go_one_by_one(tmp_path):
    with CheckpointManager(tmp_path, keep=2) as manager:
        same = np.arange(100_000, dtype=np.float32)
        for step in range(1, 6):
            base = None if step == 1 else tmp_path / f"step-{step - 1}"
            manager.save(step, {"same": same, **state(step)}, base=base)
            manager.wait_retention()
            for found in manager.steps():
                assert shardkeep.verify(found.path).ok
    assert numbers(manager) == [4, 5]
    shared = [p for p in (tmp_path / "step-5/data").iterdir() if p.stat().st_nlink == 2]
    assert sum(path.stat().st_size for path in shared) > 400_000


def test_a_save_does_not_wait_for_a_removal(tmp_path, monkeypatch):
    begun, go = threading.Event(), threading.Event()
    from shardkeep.manager import retention

    remove = retention.remove_steps

    def slow(*args, **options):
        begun.set()
        assert go.wait(60)
        return remove(*args, **options)

    monkeypatch.setattr(retention, "remove_steps", slow)
    with CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        assert begun.wait(60)
        manager.save(3, state(3))
        assert not manager.wait_retention(0)
        go.set()
    assert numbers(manager) == [3]


def test_a_removal_that_fails_fails_nothing_else(tmp_path, monkeypatch, caplog):
    from shardkeep.manager import retention

    def broken(*args, **options):
        raise OSError(5, "broken disk")

    monkeypatch.setattr(retention, "remove_steps", broken)
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    assert numbers(manager) == [1, 2]
    assert "removing old steps" in caplog.text
    assert "broken disk" in caplog.text


# --- deciding


def test_time_and_idleness(tmp_path):
    with CheckpointManager(tmp_path, save=EverySeconds(0.2) & WhenIdle()) as manager:
        assert not manager.should_save(1)
        time.sleep(0.25)
        assert manager.should_save(2)
        manager.save(2, state(2))
        assert not manager.should_save(3)
    with CheckpointManager(tmp_path / "b", save=WhenIdle()) as manager:
        assert manager.should_save(1)
        manager.async_save(1, state(1)).result(60)
        assert manager.should_save(2)


def test_preemption_saves_and_stops(tmp_path):
    with (
        shardkeep.catch_preemption([signal.SIGUSR1]),
        CheckpointManager(tmp_path, save=AtSteps([2]) | OnPreemption(), ask_every=2) as manager,
    ):
        seen = []
        for step in range(1, 10):
            if step == 5:
                signal.raise_signal(signal.SIGUSR1)
            if manager.should_save(step):
                manager.async_save(step, state(step))
                seen.append(step)
            if manager.should_stop():
                break
        assert seen == [2, 6]
        assert step == 6
    assert numbers(manager) == [2, 6]
    with CheckpointManager(tmp_path, save=2) as manager:
        assert not manager.should_stop()
        with shardkeep.catch_preemption([signal.SIGUSR1]):
            signal.raise_signal(signal.SIGUSR1)
            assert manager.should_stop()


# --- evaluating


def test_an_evaluation_sees_every_step_and_none_goes_while_it_reads(tmp_path):
    seen = []

    def evaluate():
        reader = CheckpointManager(tmp_path)
        for step in reader.watch(timeout=20, poll_s=0.01):
            target = blank()
            shardkeep.load(target, step.path)
            assert is_state(target, step.step)
            assert step.metrics == {"n": step.step}
            seen.append(step.step)
            if step.step == 12:
                return

    thread = threading.Thread(target=evaluate)
    thread.start()
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step in range(1, 13):
            manager.async_save(step, state(step), {"n": step})
    thread.join(60)
    assert seen[-1] == 12
    assert seen == sorted(set(seen))


def test_waiting(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(TimeoutError, match=r"step 7 or a newer one did not appear .* within 0.1 s"):
        manager.wait_for(7, 0.1)
    timer = threading.Timer(0.2, fill, (tmp_path, [3, 8, 9]))
    timer.start()
    with manager.wait_for(7, 60, poll_s=0.05) as found:
        assert found.step == 8
        assert found.path == str(tmp_path / "step-8")
    timer.join()
    with manager.wait_for(timeout=0) as found:
        assert found.step == 9
    with manager.wait_for(3, 0) as found:
        assert found.step == 3
    assert [step.step for step in manager.watch(timeout=0)] == [3, 8, 9]
    assert [step.step for step in manager.watch(3, timeout=0)] == [8, 9]
    assert [step.step for step in manager.watch(newest=True, timeout=0)] == [9]
    assert os.listdir(tmp_path / ".shardkeep/pins") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_who_may_not_write_reads_without_a_pin(tmp_path, caplog):
    fill(tmp_path, [1])
    tmp_path.chmod(0o500)
    try:
        manager = CheckpointManager(tmp_path)
        assert manager.restore(blank()).step == 1
        assert "cannot be pinned" in caplog.text
    finally:
        tmp_path.chmod(0o700)


# --- the end


def test_closing_tells_what_failed_behind(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "shardkeep")
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, state(1))
    (tmp_path / "step-2").write_text("in the way")
    with pytest.raises(StorageError, match="is a file"):
        manager.async_save(2, state(2))
    manager.close()
    manager.close()
    with pytest.raises(ValueError, match="was closed"):
        manager.save(3, state(3))
    assert numbers(manager) == [1]


def test_a_checkpointer_of_the_caller_stays_open(tmp_path):
    with shardkeep.Checkpointer() as keeper:
        with CheckpointManager(tmp_path, keep=1, checkpointer=keeper) as manager:
            for step in (1, 2, 3):
                manager.async_save(step, state(step))
        assert numbers(manager) == [3]
        assert manager.checkpointer is keeper
        keeper.save(state(4), tmp_path / "other")


def test_a_cancelled_save_leaves_nothing(tmp_path):
    with CheckpointManager(tmp_path, keep=2) as manager:
        manager.save(1, state(1))
        handle = manager.async_save(2, state(2, size=1_000_000))
        handle.cancel()
        with contextlib.suppress(BaseException):
            handle.result(60)
        manager.save(3, state(3))
    assert numbers(manager) in ([1, 3], [2, 3])


@pytest.mark.parametrize("behind", [False, True])
def test_what_did_not_change_is_used_again(tmp_path, behind):
    frozen = np.random.default_rng(0).standard_normal(20_000)
    with CheckpointManager(tmp_path, keep=2, full_every=3) as manager:
        kept = []
        for step in range(1, 9):
            now = {"frozen": frozen, "moving": np.full(10, step), "step": step}
            if behind:
                result = manager.async_save(step, now).result()
            else:
                result = manager.save(step, now)
            kept.append(result.stats.get("kept_bytes", 0) > 0)
        manager.wait_retention()
    assert kept == [False, True, True, False, True, True, False, True]
    assert [one.step for one in CheckpointManager(tmp_path).steps()] == [7, 8]
    for step in (7, 8):
        assert shardkeep.verify(tmp_path / f"step-{step}").ok
    target = {"frozen": np.zeros(20_000), "moving": np.zeros(10, int), "step": 0}
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(target).step == 8
    assert np.array_equal(target["frozen"], frozen)


def test_a_base_that_is_still_being_saved_is_waited_for(tmp_path):
    now = {"frozen": np.random.default_rng(0).random(2_000_000), "step": 1}
    with CheckpointManager(tmp_path, full_every=9) as manager:
        manager.async_save(1, now)
        assert manager.save(2, {**now, "step": 2}).stats["kept_bytes"] > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("what", ["save", "restore"])
def test_a_fork_waits_for_no_base_of_its_parent(tmp_path, what):
    with faulty_disk() as disk, CheckpointManager(tmp_path, full_every=9) as manager:
        manager.save(1, state(1))
        disk.hold()
        manager.async_save(2, state(2))
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            disk.release()
            if what == "save":
                manager.save(3, state(3))
            elif manager.restore(blank()).step != 1:
                os._exit(1)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        disk.release()


def test_a_base_that_failed_is_no_base(tmp_path, monkeypatch):
    now = {"frozen": np.arange(20_000), "step": 1}
    with CheckpointManager(tmp_path, full_every=9) as manager:
        manager.save(1, now)
        with monkeypatch.context() as patch:
            patch.setattr(shardkeep.NativeWriter, "finish", lambda self, metadata, results: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                manager.async_save(2, now).result()
        assert manager.save(3, {**now, "step": 3}).stats["kept_bytes"] == 0
        assert manager.save(4, {**now, "step": 4}).stats["kept_bytes"] > 0
        assert [one.step for one in manager.steps()] == [1, 3, 4]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_full_every_is_a_number_of_saves(tmp_path, wrong):
    with pytest.raises(ValueError, match="full_every"):
        CheckpointManager(tmp_path, full_every=wrong)

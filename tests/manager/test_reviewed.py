"""What a long run meets: clocks that jump, resumed loops, rollbacks, odd values, other readers."""

from __future__ import annotations

import multiprocessing
import os
import time

import numpy as np
import pytest
from runs import blank, described, fill, state

import shardkeep
from shardkeep import (
    AtSteps,
    CheckpointManager,
    CorruptionError,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    OnPreemption,
    UnsupportedValueError,
    WhenIdle,
)
from shardkeep.manager.pins import FOLDER, TOUCH_S, TOUCHES, Pins
from shardkeep.manager.steps import metrics_of
from shardkeep.stores.local import LocalStore


def wanted(manager, steps):
    """The steps that are saved; nothing is written."""
    found = []
    for step in steps:
        if manager.should_save(step):
            found.append(step)
            manager._decider.saved(step)
    return found


def test_a_clock_that_jumped_once_costs_no_later_steps():
    year = 365 * 86400.0
    steps = [described(n, n * 1800.0 + year * (n == 3)) for n in range(12)]
    held = KeepEvery(seconds=3600).holds(steps, 0.0)
    assert held == {0, 2, 3, 4, 6, 8, 10}
    left = [step for step in steps if step.step in held]
    assert KeepEvery(seconds=3600).holds(left, 0.0) == held


def test_a_step_between_two_questions_is_saved_at_the_next(tmp_path):
    fill(tmp_path, [55])
    with CheckpointManager(tmp_path, save=EverySteps(50) & WhenIdle(), ask_every=10) as manager:
        manager.restore(blank())
        assert wanted(manager, range(56, 400)) == [105, 155, 205, 255, 305, 355]


def test_single_steps_wait_for_the_next_question_too(tmp_path):
    policy = (AtSteps([7, 33]) & WhenIdle()) | (EverySteps(20) & EverySeconds(3600))
    with CheckpointManager(tmp_path, save=policy, ask_every=10) as manager:
        assert wanted(manager, range(1, 60)) == [10, 40]


def test_what_was_saved_between_two_questions_is_not_saved_again(tmp_path):
    policy = EverySteps(15) | (AtSteps([14]) & WhenIdle())
    with CheckpointManager(tmp_path, save=policy, ask_every=10) as manager:
        assert wanted(manager, range(1, 50)) == [15, 30, 45]


def test_a_hit_that_all_ranks_were_asked_about_is_over(tmp_path):
    with CheckpointManager(tmp_path, save=EverySteps(5) & WhenIdle(), ask_every=4) as manager:
        manager._decider._is_busy = lambda: True
        assert wanted(manager, range(1, 9)) == []
        manager._decider._is_busy = lambda: False
        assert wanted(manager, range(9, 21)) == [12, 16, 20]


def test_a_hit_before_a_rollback_does_not_count_after_it(tmp_path):
    fill(tmp_path, [1])
    with CheckpointManager(tmp_path, save=EverySteps(5) & WhenIdle(), ask_every=4) as manager:
        assert wanted(manager, range(1, 7)) == []
        manager.restore(blank(), 1)
        assert wanted(manager, range(2, 5)) == []


def test_steps_reached_again_after_a_rollback_are_saved_again(tmp_path):
    with CheckpointManager(tmp_path, save=5) as manager:
        for step in range(1, 11):
            if manager.should_save(step):
                manager.save(step, state(step))
        manager.restore(blank(), 5)
        again = [step for step in range(6, 11) if manager.should_save(step)]
        assert again == [10]
        manager.save(10, state(1000))
        found = blank()
        assert manager.restore(found).step == 10
        assert found["step"] == 1000
        assert not manager.should_save(10)


@pytest.mark.parametrize("first", ["loss", "acc"])
def test_the_best_by_a_metric_follows_the_rule_for_it(tmp_path, first):
    rules = {"loss": KeepBest(1, "loss"), "acc": KeepBest(1, "acc", highest=True)}
    metrics = {1: {"loss": 3, "acc": 0.1}, 2: {"loss": 2, "acc": 0.9}, 3: {"loss": 1, "acc": 0.5}}
    fill(tmp_path, [1, 2, 3], metrics)
    keep = KeepLast(9) | rules.pop(first) | next(iter(rules.values()))
    with CheckpointManager(tmp_path, keep=keep) as manager:
        assert manager.best("loss").step == 3
        assert manager.best("acc").step == 2
        assert manager.best("acc", highest=False).step == 1
        assert manager.best().step == {"loss": 3, "acc": 2}[first]
        assert manager.best("other", highest=False) is None


@pytest.mark.parametrize("given", [[1, 2], [], "v3", "", 0, ("a", 1)])
def test_metadata_that_is_no_mapping_is_refused(tmp_path, given):
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(UnsupportedValueError, match="metadata is a"):
            manager.save(1, state(1), metadata=given)
        assert manager.steps() == []


def test_a_metric_that_no_float_holds_is_refused_by_name(tmp_path):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(UnsupportedValueError, match="'perplexity' is too large"),
    ):
        manager.save(1, state(1), {"loss": 1.0, "perplexity": 10**400})
    assert metrics_of({"metrics": {"loss": 1, "perplexity": 10**400}}) == {"loss": 1.0}


def test_a_readers_pin_outlives_the_small_limit_of_a_trainer(tmp_path):
    fill(tmp_path, [1, 2, 3])
    store = LocalStore(tmp_path)
    reader, trainer = Pins(store), Pins(store, stale_s=1)

    def grow_old(seconds):
        for name in os.listdir(tmp_path / FOLDER):
            os.utime(tmp_path / FOLDER / name, (time.time() - seconds,) * 2)

    with reader.take("step-1"), trainer.take("step-2"):
        grow_old(TOUCH_S + 5)
        assert "step-1" in trainer.held()
        grow_old(TOUCHES * TOUCH_S + 5)
        assert "step-1" not in trainer.held()
        assert "step-1" in reader.held()
        assert trainer.remove_dead() >= 1
    assert os.listdir(tmp_path / FOLDER) == []


def test_a_pin_that_says_nothing_counts_as_a_readers(tmp_path):
    pins = Pins(LocalStore(tmp_path), stale_s=1)
    os.makedirs(tmp_path / FOLDER)
    name = tmp_path / FOLDER / f"step-1.{'0' * 16}.lease"
    name.write_bytes(b"")
    os.utime(name, (time.time() - TOUCH_S,) * 2)
    assert set(pins.held()) == {"step-1"}
    assert pins.remove_dead() == 0
    os.utime(name, (time.time() - TOUCHES * TOUCH_S - 5,) * 2)
    assert pins.held() == {}
    assert pins.remove_dead() == 1


def train_on(manager, steps):
    with manager:
        manager.restore(blank())
        for step in steps:
            assert manager.should_save(step)
            manager.save(step, state(step))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("fast", [None, "fast"])
def test_a_manager_that_a_fork_inherits_copies_and_removes_there(tmp_path, fast):
    there = None if fast is None else tmp_path / fast
    manager = CheckpointManager(tmp_path / "run", save=1, keep=1, fast=there)
    manager.restore(blank())
    for lock in (manager._moving, manager._catalog._lock):
        lock.acquire()  # as if one of the threads had it at that moment
    child = multiprocessing.get_context("fork").Process(
        target=train_on, args=(manager, range(1, 7))
    )
    child.start()
    child.join(60)
    ended = child.exitcode
    child.kill()
    for lock in (manager._moving, manager._catalog._lock):
        lock.release()
    assert ended == 0
    assert [name for name in os.listdir(tmp_path / "run") if name[0] != "."] == ["step-6"]


def save_elsewhere(manager, folder):
    os.chdir(folder)
    manager.save(2, state(2))
    assert manager.root == str(folder.parent / "run")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_that_goes_elsewhere_saves_to_the_same_folder(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("run", fast="fast") as manager:
        manager.save(1, state(1))
        assert manager.wait_copied()
        child = multiprocessing.get_context("fork").Process(
            target=save_elsewhere, args=(manager, tmp_path / "other")
        )
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert [one.step for one in manager.steps()] == [1, 2]
    assert os.listdir(tmp_path / "other") == []


def ask_in_fork(manager, what):
    {
        "delete": lambda: manager.delete(1, force=True),
        "clean": manager.clean,
        "wait_copied": manager.wait_copied,
        "wait_retention": manager.wait_retention,
        "close": manager.close,
    }[what]()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("what", ["delete", "clean", "wait_copied", "wait_retention", "close"])
def test_no_lock_of_its_parent_holds_up_a_fork(tmp_path, what):
    with CheckpointManager(tmp_path / "run", fast=tmp_path / "fast") as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        assert manager.wait_copied()
        locks = (manager._moving, manager._upkeep._noting, manager._catalog._lock)
        for lock in locks:
            lock.acquire()
        child = multiprocessing.get_context("fork").Process(
            target=ask_in_fork, args=(manager, what)
        )
        child.start()
        child.join(60)
        ended = child.exitcode
        child.kill()
        for lock in locks:
            lock.release()
        assert ended == 0


def test_who_looks_twice_whether_to_stop_asks_once(tmp_path):
    with CheckpointManager(tmp_path, save=OnPreemption()) as manager:
        asked = []
        manager._keeper.should_stop = lambda: bool(asked.append(1))
        for step in (1, 2):
            assert not manager.should_save(step)
            assert not manager.should_stop()
            assert not manager.should_stop()
        assert asked == []
        manager.save(3, state(3))
        assert not manager.should_save(3)
        assert [manager.should_stop() for _ in range(3)] == [False] * 3
        assert asked == [1]
    with CheckpointManager(tmp_path, save=OnPreemption()) as manager:
        manager._keeper.should_stop = lambda: bool(asked.append(1))
        assert [manager.should_stop() for _ in range(3)] == [False] * 3
        assert asked == [1] * 4  # where it is all that is asked, it is asked each time


def test_what_does_not_fit_the_step_before_a_damaged_one_is_not_said_to_be_untouched(tmp_path):
    large = {"a": np.full(1 << 20, 20.0), "b": np.full(1 << 20, 20.0)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(10, {"a": np.full(1 << 20, 10.0)})
        manager.save(20, large)
    (data,) = (tmp_path / "step-20/data").glob("*-r00000-0.safetensors")
    found = bytearray(data.read_bytes())
    found[12 << 20] ^= 1
    data.write_bytes(found)
    target = {"a": np.zeros(1 << 20), "b": np.zeros(1 << 20)}
    with pytest.raises(CorruptionError, match=r"step 20 is damaged, and .* does not fit step 10"):
        CheckpointManager(tmp_path).restore(target)
    with pytest.raises(shardkeep.MismatchError):  # by its number, nothing else was begun
        CheckpointManager(tmp_path).restore(target, 10)


def test_a_run_that_never_looked_is_told_of_steps_beyond_its_own(tmp_path, caplog):
    fill(tmp_path, [900, 1000])
    with CheckpointManager(tmp_path) as manager:
        manager.save(10, state(10))
        assert "steps 900 to 1000 of" in caplog.text
        assert "lie beyond step 10, where this run stands" in caplog.text
        caplog.clear()
        manager.save(20, state(20))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1001, state(1001))
    assert caplog.text == ""


def test_a_run_that_begins_anew_beside_other_checkpoints_says_so(tmp_path, caplog):
    with CheckpointManager(tmp_path, step_name="ckpt_{step:08}") as other:
        assert other.restore(blank()) is None
        assert caplog.text == ""
        other.save(3, state(3))
    (tmp_path / "logs").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").touch()
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(blank()) is None
    (said,) = [record.message for record in caplog.records]
    assert "begins anew, though checkpoints are there" in said
    assert "ckpt_00000003" in said
    assert "dcp (torch.distributed.checkpoint or HyperParallel)" in said
    assert "logs" not in said

"""The manager on four real processes: one decision, one step, one outcome for all."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import shardkeep
from shardkeep import (
    CheckpointManager,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepLast,
    OnPreemption,
    PlanError,
    ShardedArray,
)
from shardkeep.manager.pins import Pins
from shardkeep.stores.local import LocalStore

WORLD = 4
ROWS = 12


def state(rank, world, step):
    low, high = ROWS * rank // world, ROWS * (rank + 1) // world
    local = np.arange(low, high, dtype=np.float64).repeat(4).reshape(-1, 4) + 1000 * step
    return {"w": ShardedArray.from_local(local, (low, 0), (ROWS, 4)), "step": step}


def is_state(found, rank, world, step):
    (mine,) = found["w"].local_shards
    (expected,) = state(rank, world, step)["w"].local_shards
    return found["step"] == step and np.array_equal(mine.array, expected.array)


def train(rank, world, root, first, last):
    keep = KeepLast(2) | KeepBest(1, "loss")
    with CheckpointManager(root, save=EverySteps(2), keep=keep) as manager:
        target = state(rank, world, 0)
        found = manager.restore(target)
        assert (None if found is None else found.step) == first
        if found is not None:
            assert is_state(target, rank, world, first)
        saved = []
        for step in range((first or 0) + 1, last + 1):
            if manager.should_save(step):
                # Metrics of the other ranks do not count.
                manager.async_save(step, state(rank, world, step), {"loss": abs(step - 4) + rank})
                saved.append(step)
    return saved


def test_a_run_goes_on_on_other_numbers_of_ranks(processes, tmp_path):
    root = str(tmp_path / "run")
    assert processes.run(4, train, 4, root, None, 10) == [[2, 4, 6, 8, 10]] * 4
    manager = CheckpointManager(root, keep=KeepBest(1, "loss"), no_dist=True)
    assert [step.step for step in manager.steps()] == [4, 8, 10]
    assert manager.best().metrics == {"loss": 0.0}
    assert processes.run(3, train, 3, root, 10, 12) == [[12]] * 3
    assert processes.run(1, train, 1, root, 12, 14) == [[14]]
    assert [step.step for step in manager.steps()] == [4, 12, 14]
    assert sorted(os.listdir(root)) == [".shardkeep", "step-12", "step-14", "step-4"]


def restore(rank, root, options):
    manager = CheckpointManager(root)
    target = state(rank, WORLD, 0)
    try:
        found = manager.restore(target, **options)
    except shardkeep.CheckpointError as error:
        return type(error).__name__, str(error)
    assert is_state(target, rank, WORLD, found.step)
    return found.step, [(bad.step, bad.problem) for bad in found.damaged]


@pytest.mark.parametrize("ranks", [(2,), (0, 1, 2, 3)], ids=str)
def test_a_damaged_newest_step_is_named_and_passed_over_on_all_ranks(processes, tmp_path, ranks):
    root = tmp_path / "run"
    processes.run(WORLD, train, WORLD, str(root), None, 6)
    for rank in ranks:
        (data,) = (root / "step-6/data").glob(f"*-r{rank:05}-*")
        found = bytearray(data.read_bytes())
        found[4096] ^= 0x10
        data.write_bytes(found)
    outcomes = processes.run(WORLD, restore, str(root), {})
    assert outcomes == [outcomes[0]] * WORLD
    step, damaged = outcomes[0]
    assert step == 4
    assert [bad for bad, _ in damaged] == [6]
    assert "differs from its digest" in damaged[0][1]
    outcomes = processes.run(WORLD, restore, str(root), {"fall_back": False})
    assert outcomes == [outcomes[0]] * WORLD
    assert outcomes[0][0] == "CorruptionError"


def slow_clock(rank, root):
    """Each rank's own clock would say something else."""
    time.sleep(0.15 * rank)
    manager = CheckpointManager(root, save=EverySeconds(0.4))
    answers = []
    for step in range(1, 30):
        time.sleep(0.03)
        answers.append(manager.should_save(step))
        if answers[-1]:
            manager.save(step, state(rank, WORLD, step))
    return answers


def test_one_clock_decides(processes, tmp_path):
    answers = processes.run(WORLD, slow_clock, str(tmp_path))
    assert answers == [answers[0]] * WORLD
    assert any(answers[0])
    assert not all(answers[0])


def preempted(rank, root):
    shardkeep.catch_preemption()
    with CheckpointManager(root, save=EverySteps(1000) | OnPreemption()) as manager:
        for step in range(1, 1000):
            if step == 5 and rank == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                manager.async_save(step, state(rank, WORLD, step))
            if manager.should_stop():
                return step
    return -1


def test_a_signal_to_one_rank_saves_and_stops_all(processes, tmp_path):
    assert processes.run(WORLD, preempted, str(tmp_path)) == [5] * WORLD
    assert os.path.exists(tmp_path / "step-5/checkpoint.json")


def out_of_step(rank, root):
    manager = CheckpointManager(root, save=EverySeconds(1000))
    try:
        manager.should_save(7 if rank == 1 else 8)
    except PlanError as error:
        return str(error)


def test_ranks_that_are_not_at_the_same_step_are_told(processes, tmp_path):
    texts = processes.run(WORLD, out_of_step, str(tmp_path))
    assert texts == [texts[0]] * WORLD
    assert "8 on rank 0, 7 on rank 1" in texts[0]


def evaluate(rank, root):
    manager = CheckpointManager(root)
    seen = []
    for step in manager.watch(timeout=1.5, poll_s=0.05):
        target = state(rank, 2, 0)
        assert manager.restore(target, step.step).step == step.step
        assert is_state(target, rank, 2, step.step)
        seen.append((step.step, step.metrics["loss"]))
    return seen


def test_an_evaluation_on_several_ranks_sees_the_same_steps(processes, tmp_path):
    processes.run(WORLD, train, WORLD, str(tmp_path), None, 8)
    seen = processes.run(2, evaluate, str(tmp_path))
    assert seen == [[(4, 0.0), (6, 2.0), (8, 4.0)]] * 2
    assert os.listdir(tmp_path / ".shardkeep/pins") == []


def delete(rank, root):
    manager = CheckpointManager(root)
    manager.delete(4)
    try:
        manager.delete(4)
    except shardkeep.CheckpointNotFoundError:
        return [step.step for step in manager.steps()]


def test_all_ranks_learn_what_became_of_a_deletion(processes, tmp_path):
    processes.run(WORLD, train, WORLD, str(tmp_path), None, 6)
    assert processes.run(WORLD, delete, str(tmp_path)) == [[6]] * WORLD


ASKED = [
    lambda manager, target, rank: manager.restore(target, 4 if rank == 2 else 6),
    lambda manager, target, rank: manager.restore(target, 4 if rank == 2 else None),
    lambda manager, target, rank: manager.restore(target, fall_back=rank != 2),
    lambda manager, target, rank: manager.restore(target, drop_newer=rank == 2),
    lambda manager, target, rank: manager.delete(4 if rank == 2 else 6),
]


def differ(rank, root, number):
    manager = CheckpointManager(root)
    target = state(rank, WORLD, 0)
    with pytest.raises(PlanError, match=r"on rank 0 and .* on rank 2"):
        ASKED[number](manager, target, rank)
    assert is_state(target, rank, WORLD, 0)
    return manager.restore(target).step


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_ranks_that_ask_for_different_things_are_told(processes, tmp_path, number):
    processes.run(WORLD, train, WORLD, str(tmp_path), None, 6)
    assert processes.run(WORLD, differ, str(tmp_path), number) == [6] * WORLD


# --- what one rank refuses, all refuse at once


REFUSED = {
    "no number": ({"loss": "high"}, None, 1),
    "no mapping": ([1.0], None, 2),
    "no JSON": ({"loss": 1.0}, {"when": object()}, 3),
    "too much": (None, {"notes": "x" * (2 << 20)}, 0),
}


def refused(rank, root, what, how):
    metrics, metadata, victim = REFUSED[what]
    manager = CheckpointManager(root, timeout_s=60)
    begun = time.monotonic()
    if rank != victim:
        metrics, metadata = {"loss": 1.0}, None
    with pytest.raises(shardkeep.UnsupportedValueError) as caught:
        getattr(manager, how)(1, state(rank, WORLD, 1), metrics, metadata=metadata)
    assert time.monotonic() - begun < 10
    # And the ranks are together again.
    getattr(manager, how)(2, state(rank, WORLD, 2), {"loss": 1.0})
    manager.close()
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_what_one_rank_cannot_tell_is_the_same_error_on_all(processes, tmp_path, what, how):
    texts = processes.run(WORLD, refused, str(tmp_path), what, how)
    assert texts == [texts[0]] * WORLD
    assert f"rank {REFUSED[what][2]}" in texts[0]
    assert sorted(os.listdir(tmp_path)) == ["step-2"]


def pinned(rank, root):
    manager = CheckpointManager(root, timeout_s=60)
    target = state(rank, WORLD, 0)
    manager.restore(target, 2)
    begun = time.monotonic()
    with pytest.raises(shardkeep.CheckpointExistsError) as caught:
        manager.async_save(4, state(rank, WORLD, 999))
    assert time.monotonic() - begun < 10
    target = state(rank, WORLD, 0)
    manager.restore(target, 4)
    assert is_state(target, rank, WORLD, 4)
    manager.close()
    return str(caught.value)


def test_a_pinned_step_is_not_replaced_on_any_rank(processes, tmp_path):
    processes.run(WORLD, train, WORLD, str(tmp_path), None, 4)
    Pins(LocalStore(tmp_path)).hold("step-4", "published")
    texts = processes.run(WORLD, pinned, str(tmp_path))
    assert texts == [texts[0]] * WORLD
    assert "published" in texts[0]


def unlisted(rank, root):
    """The leader cannot list the folder when it would warn of newer steps."""
    manager = CheckpointManager(root, timeout_s=60)
    manager.restore(state(rank, WORLD, 0), 2)
    look = manager._catalog.look

    def refuse():
        manager._catalog.look = look
        raise shardkeep.StorageError("listing: Input/output error")

    if rank == 0:
        manager._catalog.look = refuse
    manager.save(3, state(rank, WORLD, 3))
    manager.close()
    return [step.step for step in manager.steps()]


def test_a_leader_that_cannot_list_the_folder_stalls_nobody(processes, tmp_path):
    processes.run(WORLD, train, WORLD, str(tmp_path), None, 4)
    assert processes.run(WORLD, unlisted, str(tmp_path)) == [[2, 3, 4]] * WORLD


def mixed(rank, root):
    manager = CheckpointManager(root)
    target = {**state(rank, WORLD, 0), "late": np.zeros(9)}
    try:
        manager.restore(target, strict=False)
    except shardkeep.CorruptionError as error:
        return str(error)


def save_late(rank, root):
    CheckpointManager(root).save(6, {**state(rank, WORLD, 6), "late": np.ones(9)})


def test_ranks_agree_on_what_a_damaged_step_may_have_left(processes, tmp_path):
    processes.run(WORLD, train, WORLD, str(tmp_path), None, 4)
    processes.run(WORLD, save_late, str(tmp_path))
    (data,) = (tmp_path / "step-6/data").glob("*-r00002-*")
    found = bytearray(data.read_bytes())
    found[4096] ^= 0x10
    data.write_bytes(found)
    texts = processes.run(WORLD, mixed, str(tmp_path))
    assert texts == [texts[0]] * WORLD
    assert "late may hold parts of step 6" in texts[0]

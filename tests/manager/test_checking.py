"""What a manager is given and cannot use: said at once, and before anything is touched."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from runs import fill, state

import shardkeep
from shardkeep import (
    AtSteps,
    CheckpointManager,
    EverySeconds,
    EverySteps,
    FastTier,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepNewer,
    Moment,
    OnPreemption,
    StorageError,
    ThreadRanks,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.checking import MOST, checked_step
from shardkeep.manager.naming import StepNames

URL = "s3://bucket/run"


# --- places


@pytest.mark.parametrize(
    ("root", "fast"), [(URL, None), ("run", URL), ("run", {"path": URL}), (URL, "fast")], ids=str
)
def test_a_url_is_no_folder(tmp_path, monkeypatch, root, fast):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="no storage knows the checkpoint id 's3://bucket/run'"):
        CheckpointManager(root, fast=FastTier(**fast) if isinstance(fast, dict) else fast)
    with pytest.raises(StorageError, match="no storage knows"):
        Catalog(URL, StepNames())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("given", ["", b"run", 5, None], ids=repr)
def test_what_is_no_place(given):
    kind = TypeError if given != "" else ValueError
    with pytest.raises(kind, match="the root of a run is"):
        CheckpointManager(given)
    if given is not None:
        with pytest.raises(kind, match="fast"):
            CheckpointManager("run", fast=given)
    with pytest.raises(kind, match="fast"):
        FastTier(given)


# --- steps and other numbers


@pytest.mark.parametrize("step", [10, np.int64(10), np.uint8(10), np.array(10)], ids=repr)
def test_any_integer_is_the_number_of_a_step(tmp_path, step):
    assert type(checked_step(step)) is int
    with CheckpointManager(tmp_path, save=AtSteps([step]) | OnPreemption()) as manager:
        assert manager.should_save(step)
        manager.save(step, state(10))
        manager.async_save(step, state(10), overwrite=True).result(60)
        assert not manager.should_save(step)
        assert type(manager.restore(state(0), step).step) is int
        assert manager.wait_copied(step)
        with manager.wait_for(step, timeout=0) as found:
            assert found.step == 10
        manager.delete(step, force=True)
        assert manager.steps() == []


def test_the_number_of_a_step_may_be_a_tensor(tmp_path):
    torch = pytest.importorskip("torch")
    with CheckpointManager(tmp_path, save=AtSteps(torch.arange(0, 30, 10))) as manager:
        assert [step for step in range(40) if manager.should_save(torch.tensor(step))] == [
            0,
            10,
            20,
        ]
        with pytest.raises(ValueError, match="step is tensor"):
            manager.should_save(torch.tensor(True))


@pytest.mark.parametrize(
    "step", [True, np.True_, 1.0, np.float32(1), "1", None, -1, MOST + 1, [1]], ids=repr
)
def test_what_is_no_step(tmp_path, step):
    with CheckpointManager(tmp_path, save=EverySteps(1) | OnPreemption()) as manager:
        saves = [lambda step: manager.save(step, {}), lambda step: manager.async_save(step, {})]
        for ask in (manager.should_save, manager.delete, lambda step: AtSteps([step]), *saves):
            with pytest.raises(ValueError, match="step is"):
                ask(step)
        if step is not None:
            with pytest.raises(ValueError, match="step is"):
                manager.wait_for(step, timeout=0)


def test_at_steps_takes_a_collection():
    for given in (10, "50", b"50"):
        with pytest.raises(TypeError, match="use a collection of steps"):
            AtSteps(given)
    assert AtSteps(np.arange(0, 100, 10)).wants(Moment(50))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (EverySeconds, {"seconds": "a"}),
        (EverySeconds, {"seconds": True}),
        (KeepNewer, {"seconds": "1"}),
        (KeepEvery, {"seconds": "1"}),
        (KeepBest, {"n": 1, "metric": None}),
        (KeepBest, {"n": 1, "metric": ""}),
        (FastTier, {"path": "x", "copy_rate": "5"}),
        (FastTier, {"path": "x", "close_s": "5"}),
    ],
    ids=str,
)
def test_what_is_no_number_and_no_name(kind, given):
    with pytest.raises(ValueError, match=r"use|must be"):
        kind(**given)


@pytest.mark.parametrize("what", ["stale_s", "pin_stale_s"])
def test_an_age_is_a_number(tmp_path, what):
    with pytest.raises(ValueError, match=f"{what} is 'x'"):
        CheckpointManager(tmp_path, **{what: "x"})


@pytest.mark.parametrize("template", ["{step:{n}}", "{step:{step}}", "{", "{step:zz}", "{step!x}"])
def test_templates_that_format_refuses(template):
    with pytest.raises(ValueError, match="step_name is"):
        StepNames(template)


@pytest.mark.parametrize("template", [None, 5, b"{step}"])
def test_a_template_is_text(template):
    with pytest.raises(TypeError, match="step_name is"):
        StepNames(template)


@pytest.mark.parametrize("told", [{"metrics": {"\ud800": 1}}, {"metadata": {"\ud800": 1}}])
def test_a_name_that_no_record_can_carry(tmp_path, told):
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(UnsupportedValueError, match="UTF-8 cannot carry"):
            manager.save(1, state(1), **told)
        assert manager.steps() == []


# --- the best


def test_who_asks_for_the_best_says_what_is_better(tmp_path):
    fill(tmp_path, [1, 2], {1: {"accuracy": 0.5}, 2: {"accuracy": 0.9}})
    reader = CheckpointManager(tmp_path, keep=KeepBest(1, "loss"))
    with pytest.raises(ValueError, match="which 'accuracy' is better; pass highest=True"):
        reader.best("accuracy")
    assert reader.best("accuracy", highest=True).step == 2
    assert reader.best("accuracy", highest=False).step == 1
    assert reader.best("loss") is None  # as its rule says


def test_a_metric_that_keep_ranks_by_and_no_save_has_is_told_once(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "shardkeep")
    keep = KeepLast(3) | (KeepBest(1, "val_loss") | KeepBest(2, "accuracy", highest=True))
    manager = CheckpointManager(tmp_path, keep=keep)
    manager.save(1, state(1), {"val_loss": 1, "accuracy": 1})
    assert not caplog.records
    for step in (2, 3):
        manager.save(step, state(step), {"loss": 1, "accuracy": 1})
    (record,) = caplog.records
    assert "step 2" in record.getMessage()
    assert "no metric val_loss," in record.getMessage()
    assert "It has accuracy, loss" in record.getMessage()


# --- told to stop


def stopped_at(root, ask_every, loop):
    """The step at which a loop ends that is told to in step 5."""
    policy = EverySteps(100) | OnPreemption()
    with CheckpointManager(root, save=policy, ask_every=ask_every) as manager:
        for step in range(1, 20):
            if step == 5:
                signal.raise_signal(signal.SIGUSR1)
            if loop(manager, step):
                return step
    return None


def saves_first(manager, step):
    manager.save(step, {"step": step})
    assert not manager.should_save(step)
    return manager.should_stop()


def only_asks(manager, step):
    return manager.should_stop()


@pytest.mark.parametrize("loop", [saves_first, only_asks])
@pytest.mark.parametrize("ask_every", [1, 3])
def test_a_loop_that_saves_by_itself_is_told_to_stop(tmp_path, ask_every, loop):
    with shardkeep.catch_preemption([signal.SIGUSR1]):
        assert stopped_at(tmp_path, ask_every, loop) == 5


def test_a_url_that_was_made_a_path_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for where in ({"root": Path(URL)}, {"root": "run", "fast": Path(URL)}):
        with pytest.raises(StorageError, match="no storage knows the checkpoint id 's3:/bucket"):
            CheckpointManager(**where)
    CheckpointManager("C:/run").close()  # a drive, or a folder of that name


def test_numbers_of_other_libraries_are_rates_and_steps(tmp_path):
    fast = FastTier(tmp_path / "fast", copy_rate=np.float32(1e9))
    with CheckpointManager(tmp_path / "run", fast=fast) as manager:
        manager.save(255, {"a": np.arange(10)})
        assert manager.wait_copied(np.uint8(255))
        assert list(manager.watch(after=np.uint8(255), timeout=0)) == []
        with pytest.raises(ValueError, match="step is '1'"):
            next(manager.watch(after="1", timeout=0))


@pytest.mark.parametrize("what", ["restore", "delete", "wait_copied"])
def test_what_is_no_step_on_one_rank_is_an_error_of_all(tmp_path, what):
    fill(tmp_path, [1])

    def ask(ranks):
        manager = CheckpointManager(tmp_path, process_group=ranks)
        step = 1.5 if ranks.rank == 1 else 1
        given = (state(0), step) if what == "restore" else (step,)
        with pytest.raises(shardkeep.RankError, match=r"step is 1.5; use an integer"):
            getattr(manager, what)(*given)

    ThreadRanks(2).run(ask)


def test_should_stop_asks_nobody_where_should_save_has(tmp_path):
    with (
        shardkeep.catch_preemption([signal.SIGUSR1]),
        CheckpointManager(tmp_path, save=OnPreemption(), ask_every=2) as manager,
    ):
        asked = []
        manager._decider._keeper = Asked(manager.checkpointer, asked)
        for step in range(1, 5):
            assert not manager.should_save(step)
            assert not manager.should_stop()
        assert asked == []


class Asked:
    """A checkpointer that notes who asks."""

    def __init__(self, keeper, asked):
        self.coordinator = keeper.coordinator
        self._asked = asked

    def should_stop(self):
        self._asked.append("stop")
        return False


def test_all_ranks_stop_where_one_was_told_after_a_save_by_hand(tmp_path, monkeypatch):
    told = threading.local()
    monkeypatch.setattr("shardkeep.checkpointer.is_preempted", lambda: told.now)

    def loop(ranks):
        with CheckpointManager(tmp_path, save=OnPreemption(), process_group=ranks) as manager:
            for step in range(1, 9):
                told.now = step >= 5 and ranks.rank == 1
                if saves_first(manager, step):
                    return step
        return None

    assert ThreadRanks(2).run(loop) == [5, 5]


# --- what is whole


def test_a_step_that_no_reader_takes_is_no_reason_to_delete_the_last(tmp_path):
    fill(tmp_path, [1, 2])
    shutil.move(tmp_path / "step-2/data", tmp_path / "elsewhere")
    os.symlink("../elsewhere", tmp_path / "step-2/data")
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(StorageError, match="step 1 is the only whole one"):
            manager.delete(1)
        with pytest.raises(UnsafeCheckpointError):
            manager.restore(state(0))
        assert manager.restore(state(0), 1).step == 1

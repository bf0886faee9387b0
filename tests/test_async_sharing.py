"""Saves in the background share nothing by accident: arenas, planners, storages, memory."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch
from slow_disks import LONG_S, faulty_disk

import shardkeep
from shardkeep import DefaultSavePlanner, NativeWriter, PlanError
from shardkeep.behind import Run
from shardkeep.engine.snapshot import Snapshot
from shardkeep.handles import SaveHandle
from shardkeep.saving import Saving
from shardkeep.stores.local import WriteFile


@pytest.fixture
def disk():
    """Data files are written once it is released."""
    with faulty_disk() as disk:
        disk.hold()
        yield disk


def test_threads_that_save_at_the_same_time_get_what_they_asked_for(tmp_path):
    failed = []

    def save(number):
        try:
            for step in range(6):
                state = {"w": torch.full((200_000,), float(number * 100 + step))}
                handle = shardkeep.async_save(state, tmp_path / f"{number}-{step}")
                handle.result(LONG_S)
                found = shardkeep.open(tmp_path / f"{number}-{step}")["w"][...]
                assert (found == number * 100 + step).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shardkeep.flush()
    assert not failed


@pytest.mark.parametrize("keyword", ["planner", "storage_writer"])
def test_what_a_save_still_uses_is_not_taken_by_another(tmp_path, disk, keyword):
    given = {"planner": DefaultSavePlanner, "storage_writer": NativeWriter}[keyword]()
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save({"w": np.ones(9)}, tmp_path / "a", **{keyword: given})
        with pytest.raises(PlanError, match=f"the {keyword} is still used"):
            keeper.save({"w": np.zeros(9)}, tmp_path / "b", **{keyword: given})
        disk.release()
        handle.result(LONG_S)
        keeper.save({"w": np.zeros(9)}, tmp_path / "b", **{keyword: given})
    assert (shardkeep.open(tmp_path / "a")["w"][...] == 1).all()
    assert (shardkeep.open(tmp_path / "b")["w"][...] == 0).all()


def test_a_planner_waits_for_devices_again_after_a_save_in_the_background(tmp_path):
    planner = DefaultSavePlanner()
    with shardkeep.Checkpointer() as keeper:
        keeper.async_save({"w": np.ones(9)}, tmp_path / "a", planner=planner).result(LONG_S)
    assert planner.waits


def test_a_planner_with_sources_of_its_own_is_asked_for_them(tmp_path):
    class Sevens(DefaultSavePlanner):
        def sources(self, items, rows):
            found = super().sources(items, rows)
            return [type(one)(np.full_like(one.array, 7)) for one in found]

    with shardkeep.Checkpointer() as keeper:
        state = {"w": np.arange(5, dtype=np.uint8)}
        keeper.async_save(state, tmp_path / "a", planner=Sevens()).result(LONG_S)
    assert (shardkeep.open(tmp_path / "a")["w"][...] == 7).all()


def test_a_local_shard_that_is_smaller_than_it_says_is_an_error(tmp_path, monkeypatch):
    from shardkeep.adapters import numpy_arrays

    real = numpy_arrays.NumpyArrays.form

    def larger(self, value, where):
        form = real(self, np.zeros(1000), where)
        return form if value.size == 10 else real(self, value, where)

    monkeypatch.setattr(numpy_arrays.NumpyArrays, "form", larger)
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save({"w": np.ones(10)}, tmp_path / "a")
        assert isinstance(handle.exception(LONG_S), ValueError)
    with pytest.raises(shardkeep.CheckpointNotFoundError):
        shardkeep.open(tmp_path / "a")


def test_statistics_beside_a_parameter_are_not_deferred_with_it(tmp_path, monkeypatch):
    flat = torch.zeros(20)
    parameter = torch.nn.Parameter(flat[:10])
    statistics = flat[10:]
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    go = threading.Event()
    real = Snapshot.copy

    def copy_late(self, copying):
        if threading.current_thread().name == "shardkeep-stage":
            assert go.wait(LONG_S)
        real(self, copying)

    monkeypatch.setattr(Snapshot, "copy", copy_late)
    with shardkeep.Checkpointer() as keeper:
        state = {"parameter": parameter, "statistics": statistics, "view": parameter.detach()[2:4]}
        handle = keeper.async_save(state, tmp_path / "a", snapshot="lazy")
        assert not handle.staged.done()
        statistics.data.fill_(5.0)
        go.set()
        handle.result(LONG_S)
    assert (shardkeep.open(tmp_path / "a")["statistics"][...] == 0).all()
    assert optimizer is not None


def test_an_optimizer_that_goes_away_changed_nothing(tmp_path, monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizers = [torch.optim.SGD([parameter], lr=1.0)]
    optimizers[0].step()
    real = Snapshot.copy

    def copy_after(self, copying):
        if threading.current_thread().name == "shardkeep-stage":
            optimizers.clear()
        real(self, copying)

    monkeypatch.setattr(Snapshot, "copy", copy_after)
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save({"w": parameter}, tmp_path / "a", snapshot="lazy")
        handle.result(LONG_S)


def test_an_interrupt_before_there_is_a_thread_ends_the_save(tmp_path, monkeypatch):
    def interrupt(self, inside):
        raise KeyboardInterrupt

    with shardkeep.Checkpointer() as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(Run, "_stop_when_cancelled", interrupt)
            with pytest.raises(KeyboardInterrupt):
                keeper.async_save({"w": np.ones(9)}, tmp_path / "a")
        assert not list((tmp_path / "a").glob("*.json*"))
        assert keeper._background.wait(LONG_S)
        keeper.async_save({"w": np.ones(9)}, tmp_path / "b").result(LONG_S)
    assert shardkeep.verify(tmp_path / "b").ok


@pytest.mark.parametrize("moment", ["before", "during"])
def test_an_interrupt_between_the_threads_ends_the_save(tmp_path, monkeypatch, moment):
    real = Run._take

    def interrupted(self):
        if moment == "during":
            real(self)
        raise KeyboardInterrupt

    with shardkeep.Checkpointer() as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(Run, "_take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                keeper.async_save({"w": np.ones(9)}, tmp_path / "a")
        keeper.async_save({"w": np.ones(9)}, tmp_path / "b").result(LONG_S)
    assert shardkeep.verify(tmp_path / "b").ok


@pytest.mark.parametrize("moment", ["before it is noted", "once it is noted", "later"])
def test_a_second_interrupt_leaves_nobody_waiting(tmp_path, monkeypatch, moment):
    """It comes while the first is dealt with, and the thread that writes has come to its end."""
    place, name = (Saving, "release_state") if moment == "later" else (Snapshot, "fail")
    real, came = getattr(place, name), []

    def interrupt(self):
        time.sleep(0.2)
        raise KeyboardInterrupt

    def interrupted(self, *args):
        here = threading.current_thread() is threading.main_thread()
        came.extend([moment] * here)
        now = here and len(came) == (2 if moment == "later" else 1)
        if not (now and moment == "before it is noted"):
            real(self, *args)
        if now:
            raise KeyboardInterrupt

    with shardkeep.Checkpointer() as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(Run, "_complete", interrupt)
            patch.setattr(place, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                keeper.async_save({"w": np.ones(9)}, tmp_path / "a")
        assert keeper._background.wait(LONG_S)
        keeper.async_save({"w": np.ones(9)}, tmp_path / "b").result(LONG_S)
    assert came
    assert shardkeep.verify(tmp_path / "b").ok


def test_an_interrupt_while_a_future_is_told_leaves_nobody_waiting(tmp_path, monkeypatch):
    """A condition is Python's, so that one may come between its lock and who holds that."""
    real = SaveHandle.tell_staged

    def interrupted(self):
        self._is_staged = True
        self.staged._condition.acquire()
        raise KeyboardInterrupt

    with shardkeep.Checkpointer() as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(SaveHandle, "tell_staged", interrupted)
            with pytest.raises(KeyboardInterrupt):
                keeper.async_save({"w": np.ones(9)}, tmp_path / "a")
        assert keeper._background.wait(LONG_S)
        keeper.async_save({"w": np.ones(9)}, tmp_path / "b").result(LONG_S)
    assert real is SaveHandle.tell_staged


def test_two_interrupts_do_not_hide_what_changed(tmp_path, monkeypatch):
    """The stager is copying, and the program goes on with its step."""
    parameter, other = torch.nn.Parameter(torch.zeros(1000)), torch.ones(1000)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(1000)
    copying, stepped = threading.Event(), threading.Event()
    real, fail, left = Snapshot.copy, Snapshot.fail, [1]

    def copy(self, what):
        if threading.current_thread().name == "shardkeep-stage":
            copying.set()
            assert stepped.wait(LONG_S)
        real(self, what)

    def interrupted(self, error):
        if threading.current_thread() is threading.main_thread() and left:
            left.pop()
            raise KeyboardInterrupt
        fail(self, error)

    def interrupt(self):
        assert copying.wait(LONG_S)
        raise KeyboardInterrupt

    begin = threading.Thread.start

    def start(self):
        begin(self)
        if self.name == "shardkeep-stage":
            interrupt(self)

    with shardkeep.Checkpointer() as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(Snapshot, "copy", copy)
            patch.setattr(Snapshot, "fail", interrupted)
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                keeper.async_save({"w": parameter, "o": other}, tmp_path / "a", snapshot="lazy")
            optimizer.step()
            stepped.set()
            assert keeper._background.wait(LONG_S)
        with pytest.raises(shardkeep.CheckpointNotFoundError):
            shardkeep.open(tmp_path / "a")
        keeper.async_save({"w": other}, tmp_path / "b").result(LONG_S)


def test_the_state_may_go_after_an_interrupt(tmp_path, monkeypatch):
    def interrupt(self, inside):
        raise KeyboardInterrupt

    def save(keeper):
        state = {"w": np.ones(9)}
        with monkeypatch.context() as patch:
            patch.setattr(Run, "begin", interrupt)
            with pytest.raises(KeyboardInterrupt):
                keeper.async_save(state, tmp_path / "a")
        return weakref.ref(state["w"])

    with shardkeep.Checkpointer() as keeper:
        alive = save(keeper)
        gc.collect()
        assert alive() is None


def test_a_thread_that_does_not_start_is_an_error_of_the_call(tmp_path, monkeypatch):
    real = threading.Thread.start

    def start(self):
        if self.name == "shardkeep-save":
            raise RuntimeError("can't start new thread")
        real(self)

    with shardkeep.Checkpointer() as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start"):
                keeper.async_save({"w": np.ones(9)}, tmp_path / "a")
        assert not list((tmp_path / "a").glob("*.json*"))
        keeper.async_save({"w": np.ones(9)}, tmp_path / "a").result(LONG_S)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_for_no_save_of_its_parent(tmp_path, disk):
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save({"w": np.ones(9)}, tmp_path / "a")
        child = os.fork()
        if child == 0:
            keeper.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        disk.release()
        handle.result(LONG_S)


def test_a_callback_of_a_staged_save_may_wait_for_it(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    results = []
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save({"w": parameter}, tmp_path / "a", snapshot="lazy")
        handle.staged.add_done_callback(lambda _: results.append(handle.result(LONG_S)))
        handle.result(LONG_S)
    assert optimizer.param_groups
    assert len(results) == 1


def test_a_cancelled_save_leaves_the_progress_of_its_storage_alone(tmp_path, disk):
    seen = []
    writer = NativeWriter(progress=seen.append)
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save({"w": np.ones(9)}, tmp_path / "a", storage_writer=writer)
        handle.cancel()
        disk.release()
        with pytest.raises(CancelledError):
            handle.result(LONG_S)
        keeper.save({"w": np.ones(9)}, tmp_path / "a", storage_writer=writer)
    assert sum(seen) > 0
    assert writer.progress == seen.append


def test_a_checkpointer_used_again_after_a_flush_is_flushed_again(tmp_path, disk):
    disk.release()
    with shardkeep.Checkpointer() as keeper:
        keeper.async_save({"w": np.ones(9)}, tmp_path / "a").result(LONG_S)
        shardkeep.flush()
        handle = keeper.async_save({"w": np.ones(9)}, tmp_path / "b")
        shardkeep.flush()
        assert handle.done()


def test_the_stall_holds_the_wait_for_the_save_before(tmp_path, disk):
    with shardkeep.Checkpointer() as keeper:
        keeper.async_save({"w": np.ones(9)}, tmp_path / "a")
        threading.Timer(0.5, disk.release).start()
        result = keeper.async_save({"w": np.ones(9)}, tmp_path / "b").result(LONG_S)
    assert result.stats["stall_s"] > 0.4


def test_a_save_tells_of_a_failure_behind_the_module_functions(tmp_path, monkeypatch):
    def fail(self, data, offset):
        raise OSError(5, "no disk")

    with monkeypatch.context() as patch:
        patch.setattr(WriteFile, "write_at", fail)
        handle = shardkeep.async_save({"w": np.ones(9)}, tmp_path / "a")
        while not handle.done():
            pass
    with pytest.raises(shardkeep.StorageError, match="no disk"):
        shardkeep.save({"w": np.ones(9)}, tmp_path / "b")
    shardkeep.save({"w": np.ones(9)}, tmp_path / "b")

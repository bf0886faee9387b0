"""What the caller holds of a save in the background: waiting, cancelling, overlaps, failures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import shutil
import threading
import time

import numpy as np
import pytest
from slow_disks import LONG_S, faulty_disk

import shardkeep
from shardkeep import (
    CheckpointNotFoundError,
    DefaultSavePlanner,
    NativeReader,
    NativeWriter,
    PlanError,
    StorageError,
    ThreadRanks,
    UnsupportedValueError,
)
from shardkeep.dtypes import lookup
from shardkeep.formats.native.layout import Limits
from shardkeep.storage import StorageWriter


@pytest.fixture
def disk():
    with faulty_disk() as disk:
        yield disk


@pytest.fixture
def keeper():
    keeper = shardkeep.Checkpointer()
    yield keeper
    keeper.close()


def state(value=1.0):
    return {"w": np.full(1000, value), "step": int(value)}


def files(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def check_absent(path):
    assert files(path) == []
    with pytest.raises(CheckpointNotFoundError):
        shardkeep.open(path)


# --- a future


def test_a_handle_is_a_future(tmp_path, keeper, disk):
    disk.hold()
    handle = keeper.async_save(state(), tmp_path)
    told = []
    handle.add_done_callback(told.append)
    handle.add_done_callback(lambda done: told.append(done.result().checkpoint_id))
    assert isinstance(handle, concurrent.futures.Future)
    assert handle.running()
    assert not handle.done()
    for ask in (handle.result, handle.exception):
        with pytest.raises(TimeoutError):
            ask(timeout=0.02)
    assert concurrent.futures.wait([handle], 0.01).not_done == {handle}
    assert told == []
    disk.release()
    result = handle.result(LONG_S)
    assert next(concurrent.futures.as_completed([handle])) is handle
    assert handle.exception() is None
    assert handle.done()
    assert not handle.running()
    assert not handle.cancelled()
    assert not handle.cancel()
    assert told == [handle, str(tmp_path)]
    late = []
    handle.add_done_callback(late.append)
    assert late == [handle]
    assert result.digest == shardkeep.open(tmp_path).digest
    assert result.stats["stall_s"] > 0
    assert result.nbytes == 8000


def test_staged_comes_before_written(tmp_path, keeper, disk):
    disk.hold()
    handle = keeper.async_save(state(), tmp_path)
    handle.wait_staged(LONG_S)
    assert handle.staged.done()
    assert handle.staging_completion is handle.staged
    assert handle.upload_completion is handle
    assert not handle.done()
    assert not handle.staged.cancel()
    disk.release()
    handle.upload_completion.result(LONG_S)


def test_it_is_a_context(tmp_path, keeper, disk):
    disk.hold()
    with keeper.async_save(state(), tmp_path / "a") as handle:
        assert not handle.done()
        threading.Timer(0.1, disk.release).start()
    assert handle.done()
    with (
        pytest.raises(ValueError, match="of the body"),
        keeper.async_save(state(), tmp_path / "b") as handle,
    ):
        raise ValueError("of the body")
    assert shardkeep.verify(tmp_path / "b").ok
    disk.fail(errno.EIO, "bad disk")
    with pytest.raises(StorageError, match="bad disk"), keeper.async_save(state(), tmp_path / "c"):
        pass
    with (
        pytest.raises(ValueError, match="of the body"),
        keeper.async_save(state(), tmp_path / "d"),
    ):
        raise ValueError("of the body")
    disk.heal()
    disk.hold()
    with keeper.async_save(state(), tmp_path / "e") as handle:
        handle.cancel()
        disk.release()
    assert handle.cancelled()


def test_it_can_be_awaited(tmp_path, keeper, disk):
    async def work():
        disk.hold()
        handle = keeper.async_save(state(), tmp_path / "a")
        ticks = 0
        waiting = asyncio.ensure_future(wait(handle))
        while not waiting.done():
            ticks += 1
            await asyncio.sleep(0.01)
            if ticks == 5:
                disk.release()
        assert ticks >= 5
        result = await waiting
        assert (await handle).digest == result.digest
        disk.fail(errno.EIO, "bad disk")
        with pytest.raises(StorageError, match="bad disk"):
            await keeper.async_save(state(), tmp_path / "b")
        disk.heal()
        disk.hold()
        handle = keeper.async_save(state(), tmp_path / "c")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(wait(handle)), 0.05)
        disk.release()
        await handle  # a shielded wait that was given up has cancelled nothing
        return result

    async def wait(handle):
        return await handle

    assert asyncio.run(work()).nbytes == 8000
    assert shardkeep.verify(tmp_path / "c").ok


# --- cancelling


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_cancelled_save_leaves_nothing(tmp_path, keeper, disk, when, caplog):
    many = {f"t{n}": np.full(1000, n) for n in range(20)}
    writer = NativeWriter(tmp_path / "a", limits=Limits(payload=4000))
    disk.hold()
    handle = keeper.async_save(many, storage_writer=writer)
    if when == "during":
        assert disk.reached.wait(LONG_S)
    assert handle.cancel()
    assert handle.cancel()
    disk.release()
    for ask in (handle.result, handle.exception):
        with pytest.raises(concurrent.futures.CancelledError):
            ask(LONG_S)
    assert handle.cancelled()
    assert handle.done()
    check_absent(tmp_path / "a")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    keeper.async_save(many, tmp_path / "a").result(LONG_S)
    assert shardkeep.verify(tmp_path / "a").ok


def test_a_save_that_commits_is_not_cancelled_any_more(tmp_path, keeper, monkeypatch):
    committing, go = threading.Event(), threading.Event()
    finish = NativeWriter.finish

    def slow(self, *args):
        committing.set()
        assert go.wait(LONG_S)
        return finish(self, *args)

    monkeypatch.setattr(NativeWriter, "finish", slow)
    handle = keeper.async_save(state(), tmp_path)
    assert committing.wait(LONG_S)
    assert handle.cancel()  # asked for, too late
    go.set()
    assert handle.result(LONG_S).nbytes == 8000
    assert not handle.cancelled()
    assert not handle.cancel()
    assert shardkeep.verify(tmp_path).ok


def test_a_cancelled_save_keeps_what_it_would_have_replaced(tmp_path, keeper, disk):
    keeper.save(state(1), tmp_path)
    before = files(tmp_path)
    disk.hold()
    handle = keeper.async_save(state(2), tmp_path, overwrite=True)
    handle.cancel()
    disk.release()
    keeper.async_save(state(3), tmp_path / "next").result(LONG_S)
    assert handle.cancelled()
    assert [name for name in files(tmp_path) if not name.startswith("next")] == before
    assert shardkeep.open(tmp_path)["w"][0] == 1


def test_the_next_save_waits_for_the_end_of_a_cancelled_one(tmp_path, keeper, disk):
    disk.hold()
    first = keeper.async_save(state(1), tmp_path / "a")
    first.cancel()
    threading.Timer(0.1, disk.release).start()
    second = keeper.async_save(state(2), tmp_path / "a")
    assert first.cancelled()
    second.result(LONG_S)
    assert shardkeep.open(tmp_path / "a")["step"] == 2


# --- overlaps


def test_waiting_for_the_one_before(tmp_path, keeper, disk):
    disk.hold()
    first = keeper.async_save(state(1), tmp_path / "a")
    threading.Timer(0.1, disk.release).start()
    second = keeper.async_save(state(2), tmp_path / "b")
    assert first.done()
    second.result(LONG_S)


def test_skipping_while_one_is_running(tmp_path, keeper, disk):
    disk.hold()
    first = keeper.async_save(state(1), tmp_path / "a", on_overlap="skip")
    assert not first.skipped
    second = keeper.async_save(state(2), tmp_path / "b", on_overlap="skip")
    assert (second.skipped, second.cancelled(), second.checkpoint_id) == (
        True,
        True,
        str(tmp_path / "b"),
    )
    with second:
        pass
    disk.release()
    first.result(LONG_S)
    assert not (tmp_path / "b").exists()
    third = keeper.async_save(state(3), tmp_path / "b", on_overlap="skip")
    assert not third.skipped
    third.result(LONG_S)


def test_refusing_while_one_is_running(tmp_path, keeper, disk):
    disk.hold()
    first = keeper.async_save(state(1), tmp_path / "a", on_overlap="error")
    with pytest.raises(PlanError, match=f"{tmp_path / 'a'} is still running"):
        keeper.async_save(state(2), tmp_path / "b", on_overlap="error")
    disk.release()
    first.result(LONG_S)
    keeper.async_save(state(2), tmp_path / "b", on_overlap="error").result(LONG_S)


def test_ranks_must_agree_on_what_to_do(tmp_path):
    def work(ranks):
        with shardkeep.Checkpointer(process_group=ranks) as keeper:
            how = "skip" if ranks.rank else "error"
            keeper.async_save(state(), tmp_path, on_overlap=how)

    for error in ThreadRanks(2).outcomes(work):
        assert isinstance(error, PlanError)
        assert "different on_overlap" in str(error)


# --- failures


def errors_of(caplog):
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failure_is_told_where_somebody_asks(tmp_path, keeper, disk, caplog, number):
    disk.fail(number, "disk says no")
    handle = keeper.async_save(state(), tmp_path)
    with pytest.raises(StorageError, match="disk says no") as caught:
        handle.result(LONG_S)
    assert caught.value.errno == number
    assert isinstance(caught.value.__cause__, OSError)
    assert handle.exception() is caught.value
    (record,) = errors_of(caplog)
    assert str(tmp_path) in record.getMessage()
    assert "disk says no" in caplog.text
    check_absent(tmp_path)
    disk.heal()
    keeper.async_save(state(), tmp_path).result(LONG_S)  # was seen, so it is not raised again


def test_a_directory_that_goes_away(tmp_path, keeper, disk):
    disk.hold()
    handle = keeper.async_save(state(), tmp_path / "a")
    assert disk.reached.wait(LONG_S)
    shutil.rmtree(tmp_path / "a")
    disk.release()
    with pytest.raises(StorageError):
        handle.result(LONG_S)
    assert not (tmp_path / "a" / "checkpoint.json").exists()


def fail_unseen(keeper, disk, path):
    disk.fail(errno.EIO, "disk says no")
    handle = keeper.async_save(state(), path / "failed")
    while not handle.done():
        time.sleep(0.005)
    disk.heal()
    return handle


@pytest.mark.parametrize("how", ["async_save", "save"])
def test_a_failure_that_nobody_saw_is_raised_by_the_next_save_once(tmp_path, keeper, disk, how):
    fail_unseen(keeper, disk, tmp_path)
    with pytest.raises(StorageError, match="disk says no") as caught:
        getattr(keeper, how)(state(), tmp_path / "b")
    assert any("has not been begun" in note for note in caught.value.__notes__)
    assert not (tmp_path / "b").exists()
    getattr(keeper, how)(state(), tmp_path / "b")


def test_a_look_at_the_error_is_enough(tmp_path, keeper, disk):
    fail_unseen(keeper, disk, tmp_path).exception()
    keeper.save(state(), tmp_path / "b")
    with pytest.raises(StorageError):
        fail_unseen(keeper, disk, tmp_path).result()
    keeper.save(state(), tmp_path / "b", overwrite=True)
    handle = fail_unseen(keeper, disk, tmp_path)
    handle.add_done_callback(lambda done: done.exception())
    keeper.save(state(), tmp_path / "b", overwrite=True)
    handle = fail_unseen(keeper, disk, tmp_path)
    assert handle.done()  # is no look
    assert handle.running() is handle.cancelled() is False
    with pytest.raises(StorageError):
        keeper.save(state(), tmp_path / "b", overwrite=True)


def test_closing_tells_of_a_failure(tmp_path, disk):
    keeper = shardkeep.Checkpointer()
    fail_unseen(keeper, disk, tmp_path)
    with pytest.raises(StorageError, match="disk says no"):
        keeper.close()
    keeper.close()
    with pytest.raises(StorageError, match="disk says no"), shardkeep.Checkpointer() as keeper:
        fail_unseen(keeper, disk, tmp_path)
    with pytest.raises(ValueError, match="of the body"), shardkeep.Checkpointer() as keeper:
        raise ValueError(f"of the body: {fail_unseen(keeper, disk, tmp_path)}")


def test_closing_waits(tmp_path, disk):
    disk.hold()
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save(state(), tmp_path)
        threading.Timer(0.1, disk.release).start()
    assert handle.done()
    assert shardkeep.verify(tmp_path).ok


def test_no_thread_for_the_save(tmp_path, keeper, monkeypatch):
    """The lease must not stay, nor the error come back."""
    start = threading.Thread.start

    def refuse(self):
        if self.name == "shardkeep-save":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            keeper.async_save(state(), tmp_path)
    assert files(tmp_path) == []
    keeper.async_save(state(), tmp_path).result(LONG_S)


def test_no_thread_but_that_of_the_save(tmp_path, keeper, monkeypatch):
    """As when the program has ended, on newer Pythons: all is written by the one there is."""
    monkeypatch.setattr("shardkeep.formats.native.writer.usable_cores", lambda ranks=1: 8)
    monkeypatch.setattr("shardkeep.background.usable_cores", lambda ranks=1: 8)
    start, refused = threading.Thread.start, []

    def refuse(self):
        if self.name.startswith(("shardkeep-save", "shardkeep-lease", "rank")):
            return start(self)
        refused.append(self.name)
        raise RuntimeError("can't create new thread at interpreter shutdown")

    many = {f"t{n}": np.full(3 << 20, n, np.int32) for n in range(4)}
    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer = NativeWriter(tmp_path, limits=Limits(payload=20 << 20))
    keeper.async_save(many, storage_writer=writer).result(60)
    kinds = {name.rsplit("-", 1)[0] for name in refused}
    assert {"shardkeep-io", "shardkeep-write"} <= kinds
    monkeypatch.undo()
    assert shardkeep.verify(tmp_path).ok


# --- storage of somebody else


class Plain(StorageWriter):
    """Keeps a checkpoint in a dict, through nothing but the contract."""

    def __init__(self, kept, write_slowly=lambda: None):
        self.kept = kept
        self.checkpoint_id = "memory"
        self._pause = write_slowly

    def reset(self, checkpoint_id=None):
        self._mine = {}

    def set_up_storage_writer(self, place, announcement=b""):
        return b"go"

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans, metadata):
        return plans

    def write_data(self, plan, planner):
        results = []
        for item in plan.items:
            self._pause()
            data = planner.resolve_data(item)
            key = (item.index.fqn, item.index.offset)
            if not isinstance(data, bytes):
                chunk = item.data.chunk
                count = int(np.prod(chunk.sizes, dtype=np.int64))
                size = lookup(item.data.properties.dtype).itemsize
                out = np.empty(count * size, np.uint8)
                data.read_into(0, count, out)
                data = out.tobytes()
            self._mine[key] = data
            results.append(shardkeep.WriteResult(item.index, len(data)))
        return results

    def finish(self, metadata, results):
        self.kept.update(self._mine)
        return metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return False


@pytest.mark.parametrize("call", [shardkeep.save, shardkeep.async_save])
def test_a_storage_is_told_once_that_a_save_ends_before_it_began(monkeypatch, call):
    told = []
    monkeypatch.setattr(Plain, "abort", lambda self, **how: told.append(how))
    with pytest.raises(UnsupportedValueError, match="object"):
        call({"w": object()}, storage_writer=Plain({}))
    assert told == [{"committing": False}]


def by_name(kept):
    return {name: data for (name, _), data in kept.items()}


def test_a_storage_of_somebody_else(keeper):
    go = threading.Event()
    kept = {}
    arrays = {"a": np.arange(12.0).reshape(3, 4), "b": np.arange(5, dtype=np.int16)}
    expected = {name: array.tobytes() for name, array in arrays.items()}
    writer = Plain(kept, lambda: go.wait(LONG_S))
    handle = keeper.async_save({**arrays, "step": 5}, storage_writer=writer)
    for array in arrays.values():
        array[:] = 0
    assert handle.staged.done()
    assert not handle.done()
    assert kept == {}
    go.set()
    handle.result(LONG_S)
    found = by_name(kept)
    assert found.pop("step")
    assert found == expected
    go.clear()
    writer = Plain(kept, lambda: go.wait(LONG_S))
    cancelled = keeper.async_save({"c": np.ones(3)}, storage_writer=writer)
    assert cancelled.cancel()
    go.set()
    with pytest.raises(concurrent.futures.CancelledError):
        cancelled.result(LONG_S)
    assert "c" not in by_name(kept)


def test_a_planner_of_somebody_else(tmp_path, keeper):
    class Doubling(DefaultSavePlanner):
        """Gives elements in a way of its own."""

        def resolve_data(self, write_item):
            self.asked = True
            return super().resolve_data(write_item)

    planner = Doubling()
    array = np.arange(100.0)
    handle = keeper.async_save({"a": array, "v": 1}, tmp_path, planner=planner, snapshot="lazy")
    array[:] = 0
    handle.result(LONG_S)
    assert planner.asked
    assert shardkeep.open(tmp_path)["a"][-1] == 99
    target = {"a": np.zeros(100), "v": 0}
    shardkeep.load(target, storage_reader=NativeReader(tmp_path))
    assert target["a"][5] == 5

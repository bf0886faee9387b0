"""The files of a rank: several of them, synced behind each other, and never half."""

import errno
import gc
import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

import shardkeep
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.errors import StorageError
from shardkeep.formats.native.header import (
    Entry,
    chunk_entries,
    header_room,
    read_header,
    write_header,
)
from shardkeep.formats.native.layout import Limits
from shardkeep.formats.native.names import entry_keys
from shardkeep.formats.native.writer import NativeWriter
from shardkeep.metadata import TensorProperties
from shardkeep.stores.local import LocalStore, WriteFile
from shardkeep.testing.operations import Enter, SyncDirectory, SyncFile, Write
from shardkeep.testing.recording import OperationLog


def state():
    return {f"t{i}": np.full(1000 + i, i, np.float32) for i in range(12)} | {"step": 3}


def writer(path, **options):
    return NativeWriter(path, limits=Limits(payload=9000), memory_budget=8 << 20, **options)


def held():
    """Threads and open files."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    return threading.active_count(), files


def test_many_files(tmp_path):
    used = writer(tmp_path / "c")
    shardkeep.save(state(), tmp_path / "c", storage_writer=used)
    report = shardkeep.verify(tmp_path / "c")
    assert report.ok, report.problems
    assert used.stats["written_files"] == 6
    found = sum(p.stat().st_size for p in (tmp_path / "c/data").iterdir() if "-r0" in p.name)
    assert used.stats["written_bytes"] == found
    assert used.stats["requests"] >= 6
    assert all(used.stats[name] > 0 for name in ("copy_s", "digest_s", "pwrite_s", "sync_s"))
    with shardkeep.open(tmp_path / "c") as checkpoint:
        assert checkpoint["t7"][:].tolist() == [7] * 1007


def test_every_file_is_synced_before_the_directory(tmp_path):
    log = OperationLog(tmp_path)
    shardkeep.save(
        state(), tmp_path / "c", storage_writer=writer(tmp_path / "c", open_store=log.store)
    )
    made = [
        op.inode
        for op in log.operations
        if isinstance(op, Enter) and op.made == "file" and "-r0" in op.name
    ]
    assert len(made) == 6
    for inode in made:
        mine = [
            (at, type(op))
            for at, op in enumerate(log.operations)
            if isinstance(op, (Write, SyncFile)) and op.inode == inode
        ]
        assert mine[-1][1] is SyncFile
        assert all(kind is Write for _, kind in mine[:-1])
    last_sync = max(
        at for at, op in enumerate(log.operations) if isinstance(op, SyncFile) and op.inode in made
    )
    assert any(isinstance(op, SyncDirectory) for op in log.operations[last_sync:])


@pytest.mark.parametrize("step", ["sync", "close", "write_at", "allocate"])
@pytest.mark.parametrize("number", range(1, 7))
def test_an_error_in_any_file_is_an_error_of_the_save(tmp_path, monkeypatch, step, number):
    """Also where it happens behind the back of the caller, while the next file is written."""
    real, lock, calls = getattr(WriteFile, step), threading.Lock(), []

    def fail(self, *args):
        with lock:
            if "-r0" in self.path.name:
                calls.append(self.path.name)
            mine = len(calls)
        if mine == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, *args)

    before = held()
    with monkeypatch.context() as patch:
        patch.setattr(WriteFile, step, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            shardkeep.save(state(), tmp_path / "c", storage_writer=writer(tmp_path / "c"))
    assert list((tmp_path / "c/data").iterdir()) == []
    if step != "close":  # a file whose close failed is closed, but the test kept it from that
        assert held() == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_that_is_alone_is_durable_before_the_save_goes_on(tmp_path, monkeypatch, fails):
    """It is synced behind the back of the caller, who waits for it in the end."""
    done, sync, link = [], WriteFile.sync, LocalStore.link

    def sync_late(self):
        if "-r0" in self.path.name:
            time.sleep(0.2)
            if fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done.append("synced")
        sync(self)

    def note(self, *args):
        done.append("committed")
        link(self, *args)

    monkeypatch.setattr(WriteFile, "sync", sync_late)
    monkeypatch.setattr(LocalStore, "link", note)
    with pytest.raises(StorageError, match="output error") if fails else nullcontext():
        shardkeep.save({"w": np.ones(9)}, tmp_path / "c")
    assert done == ([] if fails else ["synced", "committed"])


def test_a_planner_with_its_own_data_is_asked_for_it(tmp_path):
    class Doubling(DefaultSavePlanner):
        def resolve_data(self, write_item):
            found = super().resolve_data(write_item)
            if isinstance(found, bytes):
                return found
            return type(found)(found.array.view(np.float32) * np.float32(2))

    shardkeep.save(state(), tmp_path / "c", planner=Doubling())
    with shardkeep.open(tmp_path / "c") as checkpoint:
        assert checkpoint["t7"][:].tolist() == [14] * 1007
        assert checkpoint["step"] == 3


def test_text_of_entries_is_that_of_a_json_encoder():
    kinds = [TensorProperties("float32"), TensorProperties("complex128"), TensorProperties("int4")]
    keys = ["a", 'with "quotes"\\', "ünï\u2028cödé\x01", "x@0,1"]
    sizes, kind = [(), (3, 4), (5,), (5,)], [0, 1, 2, 0]
    begin, end = [0, 4, 196, 201], [4, 196, 201, 221]
    texts = chunk_entries(keys, kinds, kind, sizes, begin, end)
    codes = [("F32", ()), ("F64", (3, 4, 2)), ("U8", (5,)), ("F32", (5,))]
    plain = {
        key: Entry(code, shape, 4096 + a, 4096 + b)
        for key, (code, shape), a, b in zip(keys, codes, begin, end, strict=True)
    }
    more = {"last": Entry("U8", (7,), 4096 + 221, 4096 + 228)}
    header = write_header(more, {"k": "v"}, 4096, texts)
    assert header == write_header({**plain, **more}, {"k": "v"}, 4096)
    assert read_header(header, "", 10_000) == ({**plain, **more}, {"k": "v"})
    table = json.loads(header[8:])
    assert list(table) == ["__metadata__", *keys, "last"]
    assert (
        write_header({}, {}, 4096).rstrip() == (4088).to_bytes(8, "little") + b'{"__metadata__":{}}'
    )


def test_keys_of_entries_are_told_apart():
    """A name may look like a part of another; parts of nothing all begin at the same place."""
    taken = [("w@0", None), ("w", (0,)), ("w", (0,)), ("w@0~2", None), ("__metadata__", None)]
    assert entry_keys(taken) == ["w@0", "w@0~2", "w@0~3", "w@0~2~2", "~__metadata__"]


def test_a_header_may_fill_its_room_to_the_last_byte():
    room = header_room(4088)
    assert (room, header_room(4089)) == (4096, 8192)
    empty = len(write_header({}, {"a": ""}, room).rstrip()) - 8
    text = {"a": "x" * (room - 8 - empty)}
    full = write_header({}, text, room)
    assert (len(full), full[-1:]) == (room, b"}")
    assert read_header(full, "a file", room) == ({}, text)
    with pytest.raises(AssertionError, match="a header of 4089 bytes was planned to fit 4088"):
        write_header({}, {"a": text["a"] + "x"}, room)


def test_nothing_is_left_open_after_a_save(tmp_path):
    shardkeep.save(state(), tmp_path / "warm")
    before = held()
    for number in range(5):
        shardkeep.save(
            state(), tmp_path / str(number), storage_writer=writer(tmp_path / str(number))
        )
    assert held() == before


def test_the_store_of_a_save_is_only_asked_once_for_each_file(tmp_path):
    made = []

    class Counting(LocalStore):
        def create(self, name):
            made.append(name)
            return super().create(name)

    shardkeep.save(
        state(), tmp_path / "c", storage_writer=writer(tmp_path / "c", open_store=Counting)
    )
    assert len(made) == len(set(made)) == 6 + 2


@pytest.mark.parametrize(("nbytes", "asked"), [(1000, 0), (1 << 20, 1)])
def test_only_large_files_ask_for_direct_io(tmp_path, monkeypatch, nbytes, asked):
    calls = []
    monkeypatch.setattr(WriteFile, "begin_direct", lambda self: calls.append(self.path) or False)
    shardkeep.save({"x": np.ones(nbytes, np.uint8)}, tmp_path / "c")
    assert len(calls) == asked
    assert shardkeep.verify(tmp_path / "c").ok


def test_a_full_disk_at_one_file_ends_the_others(tmp_path, monkeypatch):
    """Files are written side by side; the error is that of the one that failed, and soon there."""
    monkeypatch.setattr("shardkeep.formats.native.writer.usable_cores", lambda ranks=1: 4)
    written = []
    real = WriteFile.write_at

    def write_at(self, data, offset):
        if self.path.name.endswith("-r00000-2.safetensors"):
            raise OSError(errno.ENOSPC, "no space left")
        written.append(self.path.name)
        real(self, data, offset)

    large = {f"t{i}": np.full(3 << 20, i, np.float32) for i in range(8)}
    before = held()
    limits = Limits(payload=13 << 20)
    used = NativeWriter(tmp_path / "c", limits=limits, memory_budget=32 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(WriteFile, "write_at", write_at)
        with pytest.raises(StorageError, match="no space left") as caught:
            shardkeep.save(large, tmp_path / "c", storage_writer=used)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert held() == before
    assert len(set(written)) < 8
    assert not list((tmp_path / "c").rglob("*-r00000-*"))
    shardkeep.save(large, tmp_path / "c", storage_writer=NativeWriter(limits=limits))
    assert shardkeep.verify(tmp_path / "c").ok


def test_a_rank_with_much_to_write_has_several_files():
    assert Limits().payload_of(900 << 20) == 1 << 30
    assert Limits().payload_of(16 << 30) == 2 << 30
    assert Limits().payload_of(1 << 40) == 16 << 30


def test_an_interrupt_ends_all_files_soon(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkeep.formats.native.writer.usable_cores", lambda ranks=1: 4)
    # Whoever runs the tests in the background may have had it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main, late, raised = threading.main_thread(), [], threading.Event()
    real = WriteFile.write_at

    def write_at(self, data, offset):
        if raised.is_set():
            late.append(time.monotonic())
        elif offset > 4 << 20:
            signal.pthread_kill(main.ident, signal.SIGINT)
        time.sleep(0.05)
        real(self, data, offset)

    monkeypatch.setattr(WriteFile, "write_at", write_at)
    large = {f"t{i}": np.full(10 << 20, i, np.float32) for i in range(8)}
    used = NativeWriter(tmp_path / "c", limits=Limits(payload=41 << 20), memory_budget=32 << 20)
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            shardkeep.save(large, tmp_path / "c", storage_writer=used)
    finally:
        signal.signal(signal.SIGINT, before)
    raised.set()
    assert time.monotonic() - begun < 8
    time.sleep(0.3)
    assert not late
    assert not list((tmp_path / "c").rglob("*-r00000-*"))

"""The commit where the file system is less than one would like: no links, late, or failing."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import shardkeep
from shardkeep import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    NativeWriter,
    StorageError,
    ThreadRanks,
)
from shardkeep.formats.native import claiming, commit
from shardkeep.formats.native.claiming import see_lease, take_lease
from shardkeep.formats.native.commit import Lease, keep_fresh, wait_visible
from shardkeep.formats.native.names import lease_name, new_save_id
from shardkeep.stores.local import LocalStore, WriteFile


def state(salt: int = 0) -> dict:
    return {"w": np.arange(10) + salt}


def save(path, store, salt: int = 0, **options) -> None:
    writer = NativeWriter(open_store=store)
    shardkeep.save(state(salt), path, storage_writer=writer, no_dist=True, **options)


def holds(path) -> int:
    """The salt of what lies there, whole."""
    assert shardkeep.verify(path).ok
    with shardkeep.open(path) as ckpt:
        return int(ckpt["w"][0])


def names(path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name != "data")


class NoLinks(LocalStore):
    """A file system that has none."""

    code = errno.EPERM

    def link(self, old: str, new: str) -> None:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_without_links_a_create_looks_and_renames(tmp_path, code):
    store = type("Store", (NoLinks,), {"code": code})
    save(tmp_path / "a", store)
    assert holds(tmp_path / "a") == 0
    assert names(tmp_path / "a") == ["checkpoint.json"]


def test_without_links_what_was_committed_meanwhile_stays(tmp_path):
    """Another save commits after this one has looked, before it renames."""
    path = tmp_path / "a"

    class Meanwhile(NoLinks):
        def link(self, old: str, new: str) -> None:
            save(path, LocalStore, 7)
            super().link(old, new)

    with pytest.raises(CheckpointExistsError, match="by another save meanwhile"):
        save(path, Meanwhile)
    assert holds(path) == 7
    shardkeep.gc(path, stale_s=0)
    assert holds(path) == 7
    assert names(path) == ["checkpoint.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_fails_leaves_what_there_was(tmp_path, overwrite):
    path = tmp_path / "a"
    if overwrite:
        save(path, LocalStore, 3)

    class Failing(LocalStore):
        def link(self, old: str, new: str) -> None:
            raise OSError(errno.EIO, "broken")

        def rename(self, old: str, new: str) -> None:
            raise OSError(errno.EIO, "broken")

    with pytest.raises(StorageError, match=r"committing .*broken") as caught:
        save(path, Failing, overwrite=overwrite)
    assert caught.value.errno == errno.EIO
    if overwrite:
        assert holds(path) == 3
    else:
        with pytest.raises(CheckpointNotFoundError):
            shardkeep.open(path)


def test_a_commit_that_fails_leaves_no_file_of_any_rank(tmp_path):
    """The others cannot know that it failed for sure, and leave theirs to the coordinator."""
    path, seen = tmp_path / "a", []

    class Failing(LocalStore):
        def link(self, old: str, new: str) -> None:
            seen.extend(os.listdir(path / "data"))
            raise OSError(errno.EIO, "broken")

    def work(coordinator):
        mine = {f"w{coordinator.rank}": np.arange(10)}
        writer = NativeWriter(open_store=Failing)
        with pytest.raises(StorageError, match=r"committing .*broken"):
            shardkeep.save(mine, path, storage_writer=writer, process_group=coordinator)

    ThreadRanks(3).run(work)
    assert {f"r{rank:05}" for rank in range(3)} <= {name.split("-")[1] for name in seen}
    assert os.listdir(path / "data") == []
    assert names(path) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_only_where_there_are_no_links_a_create_renames(tmp_path, code):
    """A rename would replace what another save has committed meanwhile."""
    with pytest.raises(StorageError, match="committing") as caught:
        save(tmp_path / "a", type("Store", (NoLinks,), {"code": code}))
    assert caught.value.errno == code
    assert not (tmp_path / "a" / "checkpoint.json").exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.EEXIST, errno.ENOENT])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_failed_after_it_succeeded_is_one(tmp_path, overwrite, code):
    """A network file system repeats a request that was done already."""
    path = tmp_path / "a"
    if overwrite:
        save(path, LocalStore, 3)

    class Repeated(LocalStore):
        def link(self, old: str, new: str) -> None:
            super().link(old, new)
            raise OSError(code, os.strerror(code))

        def rename(self, old: str, new: str) -> None:
            super().rename(old, new)
            raise OSError(code, os.strerror(code))

    save(path, Repeated, 5, overwrite=overwrite)
    assert holds(path) == 5
    assert names(path) == ["checkpoint.json"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("reads", [1, 2, 3])
def test_a_commit_that_a_server_does_late(tmp_path, overwrite, reads):
    """It was said to have failed, and is done after the record was looked at so many times."""
    path = tmp_path / "a"
    if overwrite:
        save(path, LocalStore, 3)

    waiting, looks = [], []

    class Late(LocalStore):
        def link(self, old: str, new: str) -> None:
            waiting.append((super().link, old, new))
            raise OSError(errno.ETIMEDOUT, "no answer")

        def rename(self, old: str, new: str) -> None:
            waiting.append((super().rename, old, new))
            raise OSError(errno.ETIMEDOUT, "no answer")

        def read(self, name: str, limit: int) -> bytes:
            try:
                return super().read(name, limit)
            finally:
                looks.extend(waiting[:1])
                if len(looks) == reads:
                    do()

    def do() -> None:
        while waiting:
            call, *names = waiting.pop()
            with contextlib.suppress(OSError):
                call(*names)

    with pytest.raises(StorageError, match="no answer"):
        save(path, Late, 5, overwrite=overwrite)
    do()  # now at the latest
    try:
        found = holds(path)
    except CheckpointNotFoundError:
        found = None
    assert found in (5, 3 if overwrite else None)


def test_a_lease_that_does_not_go_keeps_its_files(tmp_path):
    """It might still become the record."""

    class Stuck(LocalStore):
        def rename(self, old: str, new: str) -> None:
            raise OSError(errno.ETIMEDOUT, "no answer")

        def unlink(self, name: str) -> None:
            if not name.startswith("data/"):
                raise OSError(errno.EBUSY, "busy")
            super().unlink(name)

    path = tmp_path / "a"
    save(path, LocalStore, 3)
    with pytest.raises(StorageError, match="no answer"):
        save(path, Stuck, 5, overwrite=True)
    (late,) = (name for name in names(path) if name != "checkpoint.json")
    os.rename(path / late, path / "checkpoint.json")
    assert holds(path) == 5


def test_a_lease_whose_name_is_not_durable_is_none(tmp_path):
    class Failing(LocalStore):
        def sync_directory(self, name: str = "") -> None:
            raise OSError(errno.EIO, "broken")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError) as caught:
        Lease(Failing(tmp_path), new_save_id())
    assert len(os.listdir("/proc/self/fd")) == before, caught  # which holds what was not closed
    assert names(tmp_path) == []


def test_a_lease_that_cannot_be_kept_is_none(tmp_path, monkeypatch):
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError):
        Lease(LocalStore(tmp_path), new_save_id())
    assert names(tmp_path) == []


def test_a_lease_is_touched_also_after_a_failure():
    touched = []

    class File:
        def touch(self) -> None:
            touched.append(1)
            if len(touched) == 1:
                raise OSError(errno.EIO, "broken")
            stop.set()

    stop = threading.Event()
    keep_fresh(File(), stop, 0.001)
    assert len(touched) == 2


@pytest.mark.parametrize("committed", [False, True])
def test_a_lease_whose_file_is_closed_is_touched_no_more(tmp_path, committed):
    """The number of its descriptor may be another file's by then."""
    begun, go_on, done = threading.Event(), threading.Event(), []

    class Touched(WriteFile):
        def touch(self) -> None:
            begun.set()
            assert go_on.wait(10)
            done.append("touched")

        def close(self) -> None:
            done.append("closed")
            super().close()

    class Store(LocalStore):
        def create(self, name: str) -> WriteFile:
            return Touched(super().create(name).detach(), self.root / name)

    lease = Lease(Store(tmp_path), new_save_id(), touch_s=0.001)
    assert begun.wait(10)
    threading.Timer(0.2, go_on.set).start()
    if committed:
        lease.commit(b"record", overwrite=False, same=lambda found: False)
        assert done[-2:] == ["touched", "closed"]
        lease.release()
    lease.release()
    assert done[-2:] == ["touched", "closed"]
    assert names(tmp_path) == (["checkpoint.json"] if committed else [])


def test_a_save_that_was_given_up_for_dead_says_so(tmp_path):
    path = tmp_path / "a"

    class Collected(LocalStore):
        def link(self, old: str, new: str) -> None:
            shardkeep.gc(path, stale_s=0)
            super().link(old, new)

    with pytest.raises(StorageError, match="given up for dead and collected"):
        save(path, Collected)
    assert names(path) == []


def test_a_lease_stays_fresh_while_the_program_ends(tmp_path):
    """Saves that are under way then are finished, which may take long."""
    program = """
import atexit, os, sys, time
from shardkeep.formats.native.commit import Lease
from shardkeep.formats.native.names import new_save_id
from shardkeep.stores.local import LocalStore, WriteFile

def end():
    os.utime(path, (0, 0))
    time.sleep(0.3)
    os.write(1, b"fresh" if os.stat(path).st_mtime else b"old")

atexit.register(end)
lease = Lease(LocalStore(sys.argv[1]), new_save_id(), touch_s=0.01)
path = os.path.join(sys.argv[1], lease.name)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert done.stdout == b"fresh"


# --- a directory that others clean, and a lease that others must see


class Cleaned(LocalStore):
    """Somebody takes the directory for empty, so many times, before the lease is in it."""

    left = 0

    def create(self, name: str) -> WriteFile:
        if self.left:
            self.left -= 1
            shutil.rmtree(self.root)
        return super().create(name)


def test_a_directory_that_is_cleaned_away_is_made_again(tmp_path):
    store = Cleaned(tmp_path / "a")
    store.left = claiming.LEASE_TRIES
    take_lease(store, new_save_id()).release()
    assert (store.root / "data").is_dir()


def test_a_directory_that_always_goes_is_given_up(tmp_path):
    store = Cleaned(tmp_path / "a")
    store.left = claiming.LEASE_TRIES + 1
    with pytest.raises(StorageError) as caught:
        take_lease(store, new_save_id())
    assert (caught.value.errno, store.left) == (errno.ENOENT, 0)


def test_only_what_was_cleaned_away_is_tried_again(tmp_path):
    class Full(LocalStore):
        def create(self, name: str) -> WriteFile:
            tries.append(name)
            raise OSError(errno.ENOSPC, "full")

    tries: list[str] = []
    with pytest.raises(StorageError, match="full"):
        take_lease(Full(tmp_path), new_save_id())
    assert len(tries) == 1


def test_a_lease_that_a_rank_sees_late_is_waited_for(tmp_path):
    thread = threading.Timer(0.2, (tmp_path / "lease").touch)
    thread.start()
    see_lease(LocalStore(tmp_path), "lease", "first", 1)
    assert (tmp_path / "lease").exists()
    thread.join()


def test_a_lease_that_a_rank_never_sees_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(claiming, "LEASE_SEEN_S", 0.1)
    with pytest.raises(StorageError, match=r"does not see the directory .* host first made"):
        see_lease(LocalStore(tmp_path), "lease", "first", 1)


# --- files that will not go at once


class Busy(LocalStore):
    """Its files are open elsewhere, for a while."""

    left = 2

    def unlink(self, name: str) -> None:
        if Busy.left:
            Busy.left -= 1
            raise OSError(errno.EBUSY, "busy")
        super().unlink(name)


@pytest.mark.parametrize(("patience_s", "left"), [(30.0, []), (0.0, ["a", "b"])])
def test_files_that_will_not_go_at_once_are_tried_again(tmp_path, monkeypatch, patience_s, left):
    monkeypatch.setattr(Busy, "left", 2)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"")
    assert commit.unlink_all(Busy(tmp_path), ["a", "b", "gone"], patience_s) == left
    assert names(tmp_path) == left


# --- files that are seen late


@pytest.fixture
def lease(tmp_path):
    lease = Lease(LocalStore(tmp_path), new_save_id())
    yield lease
    lease.release()


def test_files_that_appear_late_are_waited_for(tmp_path, lease):
    def appear() -> None:
        (tmp_path / "b").write_bytes(b"ab")
        time.sleep(0.05)
        (tmp_path / "a").write_bytes(b"abc")
        (tmp_path / "b").write_bytes(b"abc")

    thread = threading.Thread(target=appear)
    thread.start()
    wait_visible(LocalStore(tmp_path), {"a": 3, "b": 3}, lease, timeout_s=30)
    thread.join()


@pytest.mark.parametrize(
    ("content", "what"), [(None, "not visible"), (b"ab", "2 bytes, expected 3")]
)
def test_files_that_never_appear_are_named(tmp_path, lease, content, what):
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(StorageError, match=f"such as a: {what}"):
        wait_visible(LocalStore(tmp_path), {"a": 3}, lease, timeout_s=0.05)


def test_who_lost_the_lease_does_not_wait(tmp_path, lease):
    (tmp_path / lease.name).unlink()
    begun = time.monotonic()
    with pytest.raises(StorageError, match="its lease is gone"):
        wait_visible(LocalStore(tmp_path), {"a": 3}, lease, timeout_s=60)
    assert time.monotonic() - begun < 10


def test_a_storage_that_does_not_answer_has_not_lost_the_lease(tmp_path, lease, monkeypatch):
    def fail(self: LocalStore, name: str) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(LocalStore, "stat", fail)
    assert lease.is_held()


# --- collection


def leftover(path, save_id: str) -> str:
    name = f"data/{save_id}-r00000-0.safetensors"
    (path / name).write_bytes(b"x")
    return name


def test_a_lease_that_will_not_go_protects_its_files(tmp_path):
    path, save_id = tmp_path / "a", new_save_id()
    save(path, LocalStore)
    name = leftover(path, save_id)
    (path / lease_name(save_id)).write_bytes(b"")

    class Stubborn(LocalStore):
        def unlink(self, name: str) -> None:
            if "tmp" in name and save_id in name:
                raise OSError(errno.EACCES, "no")
            super().unlink(name)

    result = commit.collect_garbage(Stubborn(path), stale_s=0)
    assert result.live == (save_id,)
    assert (path / name).exists()
    assert shardkeep.gc(path, stale_s=0).removed == (lease_name(save_id), name)
    assert holds(path) == 0


def test_files_without_a_record_that_are_young_may_be_a_copy(tmp_path):
    path, save_id = tmp_path / "a", new_save_id()
    save(path, LocalStore)
    (path / "checkpoint.json").rename(tmp_path / "record")
    name = leftover(path, save_id)
    result = shardkeep.gc(path)
    assert result.removed == ()
    assert save_id in result.live
    (tmp_path / "record").rename(path / "checkpoint.json")
    assert shardkeep.gc(path).removed == (name,)
    assert holds(path) == 0


def test_a_damaged_record_ends_a_collection(tmp_path):
    path = tmp_path / "a"
    save(path, LocalStore)
    name = leftover(path, new_save_id())
    record = path / "checkpoint.json"
    record.write_bytes(record.read_bytes().replace(b"files", b"flies"))
    with pytest.raises(shardkeep.CorruptionError):
        shardkeep.gc(path, stale_s=0)
    assert (path / name).exists()


def test_what_a_save_that_died_left_is_told_from_nothing(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"it holds no checkpoint\.json"):
        shardkeep.open(tmp_path)
    (tmp_path / lease_name(new_save_id())).write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"1 save\(s\) began there"):
        shardkeep.open(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="there is no such directory"):
        shardkeep.open(tmp_path / "none")


def test_the_record_is_durable_before_what_it_does_not_name_goes(tmp_path):
    """A save was killed after its commit: what it replaced is needed while that may be undone."""
    path, done = tmp_path / "a", []
    save(path, LocalStore)
    name = leftover(path, new_save_id())

    class Store(LocalStore):
        def sync_directory(self, name: str = "") -> None:
            done.append(f"sync {name}")
            super().sync_directory(name)

        def unlink(self, name: str) -> None:
            done.append(f"unlink {name}")
            super().unlink(name)

    commit.collect_garbage(Store(path), stale_s=0)
    assert [step for step in done if "gc-" not in step] == ["sync ", f"unlink {name}"]


def test_what_a_killed_collection_left_goes_when_it_is_old(tmp_path):
    path = tmp_path / "a"
    save(path, LocalStore)
    probe = path / "gc-0123456789abcdef.tmp"
    probe.write_bytes(b"xy")
    assert shardkeep.gc(path).removed == ()
    os.utime(probe, (0, 0))
    result = shardkeep.gc(path)
    assert (result.removed, result.nbytes, result.live) == ((probe.name,), 2, ())
    assert names(path) == ["checkpoint.json"]


def test_a_directory_with_nothing_of_ours_is_not_touched(tmp_path):
    before = tmp_path.stat().st_mtime_ns
    assert shardkeep.gc(tmp_path) == commit.GcResult((), 0, ())
    assert tmp_path.stat().st_mtime_ns == before


def test_a_dry_run_removes_nothing(tmp_path):
    path = tmp_path / "a"
    save(path, LocalStore)
    name = leftover(path, new_save_id())
    result = shardkeep.gc(path, stale_s=0, dry_run=True)
    assert (result.removed, result.nbytes) == ((name,), 1)
    assert (path / name).exists()

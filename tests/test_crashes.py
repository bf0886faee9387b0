"""Promise P2: whatever is killed or unplugged, whenever, the old checkpoint or the new one loads.

A save is recorded operation by operation; then every prefix of it is cut off in every way a file
system may lose what was not synced, and what is left must load.
"""

import contextlib
import os
import shutil
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from generations import ABSENT, FROZEN, assert_clean, generation_at, state
from machine import Violation

import shardkeep
from shardkeep.errors import CheckpointError, StorageError
from shardkeep.formats.native import writer as native_writer
from shardkeep.formats.native.commit import collect_garbage, read_record
from shardkeep.formats.native.names import RECORD, data_file, lease_name, new_save_id
from shardkeep.stores.local import LocalStore
from shardkeep.testing.disk import crash_points
from shardkeep.testing.operations import (
    Enter,
    Mark,
    Move,
    Remove,
    State,
    SyncDirectory,
    SyncFile,
    Write,
    materialize,
)
from shardkeep.testing.recording import OperationLog, RecordingStore


class UnsyncedStore(LocalStore):
    """For looking at what a crash left: nothing here has to survive another one."""

    def _sync_directory(self, path):
        pass

    def create(self, name):
        file = super().create(name)
        file.sync = lambda: None
        return file


def writer(place, open_store, overwrite):
    return shardkeep.NativeWriter(
        place, overwrite=overwrite, block=4096, memory_budget=8 << 20, open_store=open_store
    )


def save(place, generation, *, open_store=UnsyncedStore, overwrite=True, **options):
    given = writer(place, open_store, overwrite)
    return shardkeep.save(
        state(generation), place, storage_writer=given, overwrite=overwrite, **options
    )


class Saves:
    """Saves to one place under a directory, recorded, with what each promised and when."""

    def __init__(self, base, place="ckpt", first=ABSENT, log=None):
        Path(base).mkdir(exist_ok=True)
        self.log = log or OperationLog(base)
        self.base = Path(base)
        self.place = place
        self.first = first
        self.start = len(self.log.operations)
        self.tally = Counter()
        self.outcomes = {}

    @classmethod
    def over(cls, base, generation=1, **options):
        """In a place where a generation is committed, long since durable."""
        save(Path(base) / options.get("place", "ckpt"), generation)
        return cls(base, first=generation, **options)

    @property
    def path(self):
        return self.base / self.place

    def save(self, generation, *, overwrite=True, **options):
        self.log.mark(f"begin {generation}")
        save(self.path, generation, open_store=self.log.store, overwrite=overwrite, **options)
        self.log.mark(f"return {generation}")

    def gc(self):
        return collect_garbage(self.log.store(self.path), stale_s=0)

    def killed_at(self, position, base):
        """The same, after the process died there and the machine went on."""
        killed = Saves(base, self.place, self.first, self.log.resumed(position, base))
        killed.tally, killed.outcomes = self.tally, self.outcomes
        return killed

    def allowed(self, operations):
        """Generations that may be there: begun, and not older than one that has returned."""
        begun, returned = {self.first: -1}, {self.first: -1}
        for at, operation in enumerate(operations):
            if isinstance(operation, Mark):
                what, number = operation.label.split()
                table = begun if what == "begin" else returned
                table.setdefault(int(number), at)
        never = len(operations)
        return {
            one
            for one in begun
            if not any(begun[other] > returned.get(one, never) for other in returned)
        }

    def check(self, scratch, *, operations=None, samples=3):
        """Crash after every operation in every way, and look at what is left."""
        operations = self.log.operations if operations is None else operations
        outcomes = self.outcomes
        points = crash_points(self.log.initial, operations, start=self.start, samples=samples)
        for point in points:
            key = point.state.digest()
            self.tally["points"] += 1
            try:
                if key not in outcomes:
                    self.tally["states"] += 1
                    outcomes[key] = self.examine(point.state, scratch, self.tally["states"])
                allowed = self.allowed(operations[: point.position])
                assert outcomes[key] in allowed, f"found {outcomes[key]}, promised {allowed}"
            except (AssertionError, CheckpointError, OSError) as error:
                done = "\n  ".join(map(repr, operations[: point.position]))
                raise Violation(f"{error!r}\n{point.variant} after:\n  {done}") from error
        return self.tally

    def examine(self, found, scratch, number):
        """Which generation a crash left; and gc must keep it, and the next save must work."""
        base = Path(scratch) / "found"
        materialize(found, base)
        try:
            place = base / self.place
            generation = generation_at(place)
            if place.is_dir():
                collect_garbage(UnsyncedStore(place), stale_s=0)
                assert_clean(place)
                after = generation_at(place, thorough=False)
                assert after == generation, "gc changed what loads"
            if number % 4 == 0:
                save(place, 99)
                assert generation_at(place, thorough=False) == 99
                assert_clean(place)
            return generation
        finally:
            shutil.rmtree(base)


@pytest.fixture
def scratch(tmp_path):
    """Where crashed directories are looked at: in memory where there is such a place."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path / "scratch"
        return
    place = memory / f"shardkeep-{os.getpid()}-{tmp_path.name}"
    place.mkdir()
    yield place
    shutil.rmtree(place)


@pytest.fixture
def known_ids(monkeypatch):
    """The next save gets a known id, so that equal states of many runs are looked at once."""

    def use(number):
        ids = iter([f"{number:032x}"])
        monkeypatch.setattr(native_writer, "new_save_id", lambda: next(ids, None) or new_save_id())

    return use


# --- one save after another


def test_create(tmp_path, scratch):
    saves = Saves(tmp_path)
    saves.save(1, overwrite=False)
    tally = saves.check(scratch)
    assert tally["points"] > 200
    assert tally["states"] > 20


def test_create_in_missing_parents(tmp_path, scratch):
    saves = Saves(tmp_path, "run/of/today/ckpt")
    saves.save(1, overwrite=False)
    tally = saves.check(scratch)
    assert tally["points"] > 200
    assert tally["states"] > 20


def test_create_by_overwriting_nothing(tmp_path, scratch):
    saves = Saves(tmp_path)
    saves.save(1, overwrite=True)
    tally = saves.check(scratch)
    assert tally["points"] > 200


def test_overwrite(tmp_path, scratch):
    saves = Saves.over(tmp_path)
    saves.save(2)
    tally = saves.check(scratch, samples=10)
    assert tally["points"] > 250
    assert tally["states"] > 30


def test_overwrite_twice(tmp_path, scratch):
    saves = Saves.over(tmp_path)
    saves.save(2)
    saves.save(3)
    tally = saves.check(scratch)
    assert tally["points"] > 500
    assert tally["states"] > 60


def test_create_with_files_of_another(tmp_path, scratch):
    base = tmp_path / "base"
    save(base, FROZEN)
    saves = Saves(tmp_path)
    saves.save(FROZEN + 1, overwrite=False, base=base)
    assert any(row.kept for row in read_record(LocalStore(saves.path)).files)
    shutil.rmtree(base)
    assert generation_at(saves.path) == FROZEN + 1
    tally = saves.check(scratch)
    assert tally["points"] > 150
    assert tally["states"] > 20


def test_overwrite_with_files_of_what_is_replaced(tmp_path, scratch):
    saves = Saves.over(tmp_path, FROZEN)
    saves.save(FROZEN + 1, base=saves.path)
    saves.save(FROZEN + 2, base=saves.path)
    assert any(row.kept for row in read_record(LocalStore(saves.path)).files)
    assert_clean(saves.path)
    tally = saves.check(scratch)
    assert tally["points"] > 300
    assert tally["states"] > 40


def test_create_where_one_is(tmp_path, scratch):
    saves = Saves.over(tmp_path)
    with pytest.raises(shardkeep.CheckpointExistsError):
        save(saves.path, 2, open_store=saves.log.store, overwrite=False)
    saves.check(scratch)
    assert generation_at(saves.path) == 1


# --- several ranks


def sharded(generation, rank):
    """A rank's half of `state`."""
    whole, half = state(generation), slice(1500 * rank, 1500 * (rank + 1))
    big = shardkeep.ShardedArray.from_local(whole["big"][half], (1500 * rank,), (3000,))
    return {**whole, "big": big}


def save_by_ranks(saves, generation, planner=lambda rank: None):
    def work(coordinator):
        saves.log.mark(f"begin {generation}")
        shardkeep.save(
            sharded(generation, coordinator.rank),
            saves.path,
            storage_writer=writer(saves.path, saves.log.store, overwrite=True),
            overwrite=True,
            planner=planner(coordinator.rank),
            process_group=coordinator,
        )
        saves.log.mark(f"return {generation}")

    return shardkeep.ThreadRanks(2).outcomes(work)


def test_overwrite_by_two_ranks(tmp_path, scratch):
    points = 0
    for number in range(2):  # how many there are depends on how the ranks interleave
        folder = tmp_path / str(number)
        folder.mkdir()
        saves = Saves.over(folder)
        assert save_by_ranks(saves, 2) == [None, None]
        tally = saves.check(scratch)
        assert len(read_record(LocalStore(saves.path)).files) == 2
        assert tally["states"] > 40
        points += tally["points"]
    assert points > 500


def test_two_saves_at_once(tmp_path, scratch):
    saves = Saves.over(tmp_path)
    threads = [threading.Thread(target=saves.save, args=(number,)) for number in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert generation_at(saves.path) in (2, 3)
    tally = saves.check(scratch)
    assert tally["points"] > 400


# --- saves that fail


class Failing(shardkeep.DefaultSavePlanner):
    """Breaks off in the middle of the data."""

    def __init__(self, after=1):
        super().__init__()
        self.left = after

    def resolve_data(self, write_item):
        if self.left == 0:
            raise RuntimeError("the source is gone")
        self.left -= 1
        return super().resolve_data(write_item)


@pytest.mark.parametrize("first", [ABSENT, 1])
@pytest.mark.parametrize("after", [0, 2, 3])
def test_failed_save(tmp_path, scratch, first, after):
    saves = Saves.over(tmp_path) if first else Saves(tmp_path)
    with pytest.raises(RuntimeError, match="the source is gone"):
        save(saves.path, 2, open_store=saves.log.store, planner=Failing(after))
    assert_clean(saves.path)
    tally = saves.check(scratch)
    assert tally["points"] > 10
    assert generation_at(saves.path) == first


def test_failed_save_of_two_ranks(tmp_path, scratch):
    saves = Saves.over(tmp_path)
    outcomes = save_by_ranks(saves, 2, lambda rank: Failing() if rank == 1 else None)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert_clean(saves.path)
    tally = saves.check(scratch)
    assert tally["points"] > 100
    assert generation_at(saves.path) == 1


class Interrupting(LocalStore):
    """Ctrl-C at a chosen call of one operation, before or after it takes effect."""

    def __init__(self, root, operation, name, before):
        super().__init__(root)
        real = getattr(self, operation)

        def interrupted(*names):
            if not any(name in given for given in names):
                return real(*names)
            if not before:
                with contextlib.suppress(FileNotFoundError):
                    real(*names)
            raise KeyboardInterrupt

        setattr(self, operation, interrupted)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("create", "index"),
        ("create", "r00000"),
        ("rename", RECORD),
        ("unlink", "index"),
        ("unlink", ".tmp"),
    ],
)
def test_interrupt(tmp_path, operation, name, before):
    """A second Ctrl-C while cleaning up after the first is in here too."""
    place = tmp_path / "ckpt"
    save(place, 1)
    with pytest.raises(KeyboardInterrupt):
        save(place, 2, open_store=lambda root: Interrupting(root, operation, name, before))
    committed = operation == "unlink" or (operation == "rename" and not before)
    assert generation_at(place) == (2 if committed else 1)
    if operation == "create":
        assert_clean(place)
    collect_garbage(LocalStore(place), stale_s=0)
    assert_clean(place)
    assert generation_at(place) == (2 if committed else 1)


class Replaying(LocalStore):
    """A network file system that does what it is asked, asks itself again, and reports that."""

    def link(self, old, new):
        super().link(old, new)
        super().link(old, new)

    def rename(self, old, new):
        super().rename(old, new)
        super().rename(old, new)


@pytest.mark.parametrize("overwrite", [False, True])
def test_replayed_commit(tmp_path, overwrite):
    save(tmp_path, 1, open_store=Replaying, overwrite=overwrite)
    assert generation_at(tmp_path) == 1
    assert_clean(tmp_path)


class Unsynced(LocalStore):
    """The record becomes visible, but the directory cannot be made durable."""

    committed = False

    def rename(self, old, new):
        super().rename(old, new)
        self.committed = True

    def _sync_directory(self, path):
        if self.committed:
            raise OSError(5, "Input/output error")
        super()._sync_directory(path)


def test_failed_sync_of_commit_deletes_nothing(tmp_path):
    """Either may be found after a crash, so the files of both must stay."""
    save(tmp_path, 1)
    old = read_record(LocalStore(tmp_path))
    with pytest.raises(StorageError, match="Input/output error"):
        save(tmp_path, 2, open_store=Unsynced)
    assert generation_at(tmp_path) == 2
    for row in (old.index, *old.files):
        assert (tmp_path / row.name).stat().st_size == row.size


class DeadAfterCommit(RecordingStore):
    """Its process is killed right after the record became visible."""

    dead = False

    def rename(self, old, new):
        super().rename(old, new)
        self.dead = True

    def unlink(self, name):
        if self.dead:
            raise OSError(5, "dead")
        super().unlink(name)

    def _sync_directory(self, path):
        if self.dead:
            raise OSError(5, "dead")
        super()._sync_directory(path)


def test_abort_after_being_replaced(tmp_path, scratch):
    """Committed, then replaced by a record that may not last: nothing may be missing then."""
    saves = Saves.over(tmp_path)

    class Raced(shardkeep.NativeWriter):
        def settle(self):
            saves.log.mark("begin 3")
            with pytest.raises(StorageError, match="dead"):
                save(saves.path, 3, open_store=lambda root: DeadAfterCommit(root, saves.log))
            raise KeyboardInterrupt

    saves.log.mark("begin 2")
    raced = Raced(saves.path, overwrite=True, block=4096, open_store=saves.log.store)
    with pytest.raises(KeyboardInterrupt):
        shardkeep.save(state(2), saves.path, storage_writer=raced)
    assert generation_at(saves.path) == 3
    tally = saves.check(scratch)
    assert tally["points"] > 300


# --- gc


def test_gc_of_killed_overwrites(tmp_path, scratch):
    """The process is killed after any operation; gc runs, and then the machine stops too."""
    saves = Saves.over(tmp_path / "whole")
    saves.save(2)
    for position in range(len(saves.log.operations) + 1):
        killed = saves.killed_at(position, tmp_path / f"killed-{position}")
        killed.gc()
        assert_clean(killed.path)
        killed.check(scratch)
    assert saves.tally["points"] > 1500
    assert saves.tally["states"] > 120


def test_gc_of_leftovers(tmp_path, scratch):
    saves = Saves.over(tmp_path)
    killed = new_save_id()
    (saves.path / lease_name(killed)).write_bytes(b"")
    for number in range(3):
        (saves.path / data_file(killed, 0, number)).write_bytes(bytes(100))
    (saves.path / data_file(new_save_id(), 0, 0)).write_bytes(bytes(100))
    (saves.path / "gc-0123456789abcdef.tmp").write_bytes(b"")
    saves = Saves(tmp_path, first=1)
    result = saves.gc()
    assert len(result.removed) == 6
    assert result.nbytes == 400
    assert_clean(saves.path)
    tally = saves.check(scratch)
    assert tally["points"] > 100


def test_gc_of_nothing(tmp_path, scratch):
    saves = Saves.over(tmp_path)
    assert saves.gc().removed == ()
    assert saves.gc().live == ()
    tally = saves.check(scratch)
    assert tally["points"] > 5


def test_gc_leaves_running_saves_alone(tmp_path):
    save(tmp_path, 1)

    class Collecting(LocalStore):
        def rename(self, old, new):
            assert collect_garbage(LocalStore(tmp_path)).removed == ()
            super().rename(old, new)

    save(tmp_path, 2, open_store=Collecting)
    assert generation_at(tmp_path) == 2


def test_save_that_was_collected_fails(tmp_path):
    save(tmp_path, 1)

    class Collected(LocalStore):
        def rename(self, old, new):
            collect_garbage(LocalStore(tmp_path), stale_s=0)
            super().rename(old, new)

    with pytest.raises(StorageError, match="collected"):
        save(tmp_path, 2, open_store=Collected)
    assert generation_at(tmp_path) == 1
    assert_clean(tmp_path)


def test_gc_beside_a_save_that_begins(tmp_path):
    """Its lease is made after gc looked in one directory, its data before gc looks in the other."""
    save(tmp_path, 1)
    begun = new_save_id()

    class Beside(LocalStore):
        looks = 0

        def list(self, name=""):
            found = super().list(name)
            if self.looks == 0:
                for new in (lease_name(begun), data_file(begun, 0, 0)):
                    (self.root / new).write_bytes(b"")
            self.looks += 1
            return found

    result = collect_garbage(Beside(tmp_path))
    assert result.removed == ()
    assert (tmp_path / data_file(begun, 0, 0)).exists()


def test_gc_spares_the_files_of_a_lease_that_will_not_go(tmp_path):
    save(tmp_path, 1)
    running = new_save_id()
    for name in (lease_name(running), data_file(running, 0, 0)):
        (tmp_path / name).write_bytes(b"")

    class Stubborn(LocalStore):
        def unlink(self, name):
            if name == lease_name(running):
                raise PermissionError(13, "Permission denied")
            super().unlink(name)

    result = collect_garbage(Stubborn(tmp_path), stale_s=0)
    assert result.removed == ()
    assert result.live == (running,)
    assert (tmp_path / data_file(running, 0, 0)).exists()


# --- killed, and tried again


def test_retry_of_killed_creates(tmp_path, scratch, known_ids):
    """The process is killed after any operation; the next one saves; then the machine stops."""
    known_ids(1)
    saves = Saves(tmp_path / "whole", "run/ckpt")
    saves.save(1, overwrite=False)
    for position in range(len(saves.log.operations) + 1):
        killed = saves.killed_at(position, tmp_path / f"killed-{position}")
        known_ids(2)
        killed.save(2)
        killed.check(scratch, samples=1)
    assert saves.tally["points"] > 5000
    assert saves.tally["states"] > 200


# --- the checker itself


def first(operations, kind, **fields):
    """Position of the first operation like this."""
    return next(
        at
        for at, operation in enumerate(operations)
        if isinstance(operation, kind)
        and all(getattr(operation, key) == value for key, value in fields.items())
    )


def without(operations, kind):
    return [operation for operation in operations if not isinstance(operation, kind)]


def record_first(operations):
    """The record becomes visible before the data is durable."""
    publish = operations[first(operations, Move, new=RECORD)]
    rest = [operation for operation in operations if operation is not publish]
    at = first(rest, SyncFile)
    return [*rest[:at], publish, *rest[at:]]


def record_unsynced(operations):
    """The record's contents are not durable when its name appears."""
    record = operations[first(operations, Move, new=RECORD)].inode
    return [op for op in operations if op != SyncFile(record)]


def removed_early(operations):
    """The replaced files go before the new record is sure to stay."""
    publish = first(operations, Move, new=RECORD)
    sync = first(operations[publish:], SyncDirectory) + publish
    removal = first(operations, Remove)
    early = operations[removal]
    rest = [operation for operation in operations if operation is not early]
    return [*rest[:sync], early, *rest[sync:]]


def returned_early(operations):
    """`save` returns before the new record is sure to stay."""
    publish = first(operations, Move, new=RECORD)
    at = first(operations[publish:], SyncDirectory) + publish
    return [*operations[:at], *operations[at + 1 :]]


def data_names_unsynced(operations):
    data = operations[first(operations, Enter, made="file") + 2].directory
    return [op for op in operations if op != SyncDirectory(data)]


@pytest.mark.parametrize(
    "broken",
    [
        record_first,
        record_unsynced,
        removed_early,
        returned_early,
        data_names_unsynced,
        pytest.param(partial(without, kind=SyncFile), id="without_SyncFile"),
        pytest.param(partial(without, kind=SyncDirectory), id="without_SyncDirectory"),
        pytest.param(partial(without, kind=Write), id="without_Write"),
    ],
)
def test_checker_finds_a_broken_order(tmp_path, scratch, broken):
    saves = Saves.over(tmp_path)
    saves.save(2)
    with pytest.raises(Violation):
        saves.check(scratch, operations=broken(saves.log.operations))


def test_checker_finds_unsynced_parents(tmp_path, scratch):
    saves = Saves(tmp_path, "run/ckpt")
    saves.save(1, overwrite=False)
    broken = [op for op in saves.log.operations if op != SyncDirectory(0)]
    with pytest.raises(Violation, match="found 0, promised"):
        saves.check(scratch, operations=broken)


def test_recorded_operations_give_the_real_directory(tmp_path):
    saves = Saves(tmp_path, "run/ckpt")
    saves.save(1, overwrite=False)
    saves.save(2)
    assert saves.log.state() == State.of(tmp_path)

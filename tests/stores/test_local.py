"""The local store: every small operation does exactly what the commit relies on."""

import contextlib
import errno
import mmap
import os
import stat
import subprocess
import sys
import textwrap
import threading

import pytest

from shardkeep.errors import StorageError
from shardkeep.stores import direct, local, page_cache, reading
from shardkeep.stores.local import LocalStore, fallocate, storage_errors
from shardkeep.stores.page_cache import is_cached

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX")


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def write(store, name, data):
    file = store.create(name)
    file.write_at(memoryview(data), 0)
    file.sync()
    file.close()


# --- creating and writing


def test_create_is_exclusive(store):
    write(store, "a", b"first")
    with pytest.raises(FileExistsError):
        store.create("a")
    assert store.read("a", 100) == b"first"


def test_create_lets_one_of_many_win(store):
    outcomes = []
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        try:
            store.create("a").close()
            outcomes.append("made")
        except FileExistsError:
            outcomes.append("exists")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["exists"] * 7 + ["made"]


@posix
@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_create_does_not_write_through_a_link(store, target):
    write(store, "there", b"kept")
    os.symlink(target, store.root / "link")
    with pytest.raises(FileExistsError):
        store.create("link")
    assert store.list() == ["link", "there"]
    assert store.read("there", 100) == b"kept"


@posix
def test_permissions_follow_the_umask(store):
    old = os.umask(0o027)
    try:
        store.create("a").close()
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(store.root / "a").st_mode) == 0o640


def test_create_in_a_missing_directory(store):
    with pytest.raises(FileNotFoundError):
        store.create("data/a")


def test_short_writes_are_continued(store, monkeypatch):
    real, calls = os.pwrite, []

    def one_byte(fd, data, offset):
        calls.append(offset)
        return real(fd, data[:1], offset)

    file = store.create("a")
    monkeypatch.setattr(os, "pwrite", one_byte)
    file.write_at(memoryview(b"hello world"), 3)
    file.close()
    assert calls == list(range(3, 14))
    assert store.read("a", 100) == b"\0\0\0hello world"


def test_writes_at_places_from_many_threads(store):
    file = store.create("a")
    parts = [bytes([n]) * 1000 for n in range(50)]
    threads = [
        threading.Thread(target=file.write_at, args=(memoryview(part), 1000 * n))
        for n, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert store.read("a", 100_000) == b"".join(parts)


def test_an_error_in_the_middle_of_a_write_is_raised(store, monkeypatch):
    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = store.create("a")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        file.write_at(memoryview(b"hello"), 0)
    file.close()


@pytest.mark.parametrize("memory", [False, True])
def test_allocate(store, monkeypatch, memory):
    monkeypatch.setattr("shardkeep.stores.local.in_memory", lambda fd: memory)
    file = store.create("a")
    file.allocate(0)
    file.allocate(10_000)
    file.close()
    if sys.platform == "linux":
        assert store.stat("a").size == 10_000


@posix
@pytest.mark.parametrize(
    ("code", "fatal"),
    [(errno.ENOSPC, True), (errno.EIO, True), (errno.EOPNOTSUPP, False), (errno.EINVAL, False)],
)
def test_allocate_tells_a_full_disk_from_a_lack_of_support(store, monkeypatch, code, fatal):
    def fail(fd, size):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("shardkeep.stores.local.in_memory", lambda fd: False)
    monkeypatch.setattr("shardkeep.stores.local.fallocate", fail)
    file = store.create("a")
    if fatal:
        with pytest.raises(OSError, match=os.strerror(code)):
            file.allocate(100)
    else:
        file.allocate(100)
    file.close()


def test_close_twice_closes_once(store):
    file = store.create("a")
    number = file.fd
    file.close()
    other = os.open(store.root, os.O_RDONLY) if os.name != "nt" else None
    file.close()
    if other is not None:
        assert other == number  # the freed number, which the second close must not touch
        os.close(other)


def test_touch_moves_the_time_on(store):
    file = store.create("a")
    os.utime(store.root / "a", (1000, 1000))
    assert store.stat("a").modified == 1000
    file.touch()
    assert store.stat("a").modified > 1000
    file.close()


# --- reading


@posix
def test_open_does_not_follow_links(store):
    write(store, "a", b"secret")
    os.symlink("a", store.root / "link")
    with pytest.raises(OSError, match="symbolic link") as caught:
        store.open("link")
    assert caught.value.errno == errno.ELOOP
    assert not isinstance(caught.value, FileNotFoundError)
    assert stat.S_ISLNK(os.lstat(store.root / "link").st_mode)
    assert store.stat("link").size == len("a")


@posix
def test_a_pipe_is_refused_at_once(store):
    """A plain open of a pipe without a writer would wait for ever."""
    os.mkfifo(store.root / "pipe")
    open_before = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    with pytest.raises(OSError, match="not a regular file"):
        store.open("pipe")
    if open_before:
        assert len(os.listdir("/dev/fd")) == open_before


@posix
def test_a_directory_is_refused(store):
    store.make_directory("a")
    with pytest.raises(OSError, match="not a regular file"):
        store.open("a")
    with pytest.raises(OSError, match="not a regular file"):
        store.read("a", 100)


def test_a_missing_file(store):
    for operation in (store.open, store.stat, store.unlink):
        with pytest.raises(FileNotFoundError):
            operation("a")


def test_short_reads_are_continued(store, monkeypatch):
    write(store, "a", b"hello world")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, out, at: real(fd, [out[0][:1]], at))
    assert store.read("a", 100) == b"hello world"
    file = store.open("a")
    out = bytearray(5)
    assert file.read_into(memoryview(out), 6) == 5
    assert out == b"world"
    file.close()


def test_reading_stops_at_the_end(store):
    write(store, "a", b"hello")
    file = store.open("a")
    assert file.size == 5
    out = bytearray(b"........")
    assert file.read_into(memoryview(out), 3) == 2
    assert out == b"lo......"
    assert file.read_into(memoryview(out), 100) == 0
    file.close()
    file.close()


def test_read_limit(store):
    write(store, "a", bytes(100))
    assert store.read("a", 100) == bytes(100)
    with pytest.raises(StorageError, match="100 bytes, expected at most 99"):
        store.read("a", 99)


def test_a_file_that_shrinks_while_read(store, monkeypatch):
    write(store, "a", bytes(100))
    real = os.preadv

    def cut(fd, out, at):
        os.truncate(store.root / "a", 40)
        return real(fd, out, at)

    monkeypatch.setattr(os, "preadv", cut)
    assert store.read("a", 100) == bytes(40)


# --- names


def test_link_takes_no_name_that_is_taken(store):
    write(store, "a", b"a")
    write(store, "b", b"b")
    with pytest.raises(FileExistsError):
        store.link("a", "b")
    store.link("a", "c")
    store.unlink("a")
    assert store.read("b", 9) == b"b"
    assert store.read("c", 9) == b"a"


def test_rename_replaces(store):
    write(store, "a", b"a")
    write(store, "b", b"b")
    store.rename("a", "b")
    assert store.list() == ["b"]
    assert store.read("b", 9) == b"a"
    with pytest.raises(FileNotFoundError):
        store.rename("a", "b")


@posix
def test_unlink_removes_the_link_and_not_its_target(store):
    write(store, "a", b"a")
    os.symlink("a", store.root / "link")
    store.unlink("link")
    assert store.list() == ["a"]


def test_list(store):
    assert store.list() == []
    assert store.list("missing") == []
    store.make_directory("data")
    for name in ("b", "a", "data/c"):
        write(store, name, b"")
    assert store.list() == ["a", "b", "data"]
    assert store.list("data") == ["c"]
    assert LocalStore(store.root / "nowhere").list() == []


# --- directories


class Watching(LocalStore):
    """Notes what is made and synced, by its path under the root's parent."""

    def __init__(self, root, base):
        super().__init__(root)
        self.base = base
        self.done = []

    def _note(self, what, path):
        inside = path.is_relative_to(self.base)
        self.done.append((what, path.relative_to(self.base).as_posix() if inside else "outside"))

    def _mkdir(self, path):
        super()._mkdir(path)
        self._note("make", path)

    def _sync_directory(self, path):
        super()._sync_directory(path)
        self._note("sync", path)


def test_make_directory_syncs_every_parent_that_gains_one(tmp_path):
    store = Watching(tmp_path / "a" / "b", tmp_path)
    store.make_directory("")
    assert store.done[1:] == [("make", "a"), ("sync", "."), ("make", "a/b"), ("sync", "a")]
    assert store.done[0] == ("sync", "outside")


def test_make_directory_that_is_there(tmp_path):
    """Its maker may have been killed before it synced the parent, so that is done once more."""
    store = Watching(tmp_path / "a", tmp_path)
    (tmp_path / "a").mkdir()
    store.make_directory("")
    assert store.done == [("sync", ".")]


def test_make_directory_below_one_that_somebody_has_just_made(tmp_path):
    store = Watching(tmp_path / "a" / "b", tmp_path)
    (tmp_path / "a").mkdir()
    store.make_directory("")
    assert store.done == [("sync", "."), ("make", "a/b"), ("sync", "a")]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL])
def test_make_directory_under_a_parent_that_is_not_ours(tmp_path, code):
    class Guarded(LocalStore):
        def _sync_directory(self, path):
            if path == tmp_path.parent:
                raise OSError(code, os.strerror(code))
            super()._sync_directory(path)

    Guarded(tmp_path).make_directory("data")
    Guarded(tmp_path).make_directory("")
    assert (tmp_path / "data").is_dir()


def test_a_failed_sync_of_a_parent_is_an_error(tmp_path):
    class Broken(LocalStore):
        def _sync_directory(self, path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("data", ""):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            Broken(tmp_path).make_directory(name)


def test_make_directory_loses_a_race(tmp_path):
    """Somebody makes it between the look and the making: synced all the same."""

    class Raced(Watching):
        def _mkdir(self, path):
            path.mkdir()
            super()._mkdir(path)

    store = Raced(tmp_path / "a" / "b", tmp_path)
    store.make_directory("data")
    assert (tmp_path / "a" / "b" / "data").is_dir()
    assert store.done[1:] == [("sync", "."), ("sync", "a"), ("sync", "a/b")]


def test_make_directory_by_many_at_once(tmp_path):
    barrier = threading.Barrier(8)
    failed = []

    def work():
        barrier.wait()
        try:
            LocalStore(tmp_path / "a" / "b" / "c").make_directory("data")
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (tmp_path / "a" / "b" / "c" / "data").is_dir()


@posix
def test_a_file_in_the_way_of_a_directory(store):
    write(store, "a", b"")
    with pytest.raises(NotADirectoryError):
        store.make_directory("a/b/c")


# --- errors


def test_storage_errors_keep_what_the_system_said():
    with pytest.raises(StorageError, match=r"reading x: .*\(errno 116\)") as caught:  # noqa: SIM117
        with storage_errors("reading x"):
            raise OSError(116, "Stale file handle")
    assert caught.value.errno == 116
    assert caught.value.transient == (errno.ESTALE == 116)
    assert isinstance(caught.value.__cause__, OSError)
    assert isinstance(caught.value, OSError)


def test_storage_errors_leave_ours_alone():
    mine = StorageError("already said")
    with pytest.raises(StorageError) as caught:  # noqa: SIM117
        with storage_errors("reading x"):
            raise mine
    assert caught.value is mine


@pytest.mark.skipif(os.name == "nt", reason="needs descriptors of POSIX")
def test_no_file_of_ours_gets_the_number_of_a_closed_stream(tmp_path):
    code = """
        import os, sys
        for number in (0, 1, 2):
            os.close(number)
        from shardkeep.stores.local import LocalStore
        file = LocalStore(sys.argv[1]).create("x")
        os._exit(file.fd)
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], env=env, timeout=60
    )
    assert done.returncode > 2


# --- what a kernel may lack, or refuse


def test_a_path_of_bytes_is_refused():
    with pytest.raises(TypeError, match="pass text"):
        LocalStore(b"x")


@posix
def test_a_kernel_that_counts_no_pages_is_asked_for_one(store, monkeypatch):
    """If in doubt, what is asked for is in the page cache: that is always right."""
    write(store, "a", bytes(4 * mmap.PAGESIZE))
    monkeypatch.setattr(page_cache, "_cachestat", lambda: None)
    with contextlib.closing(store.open("a")) as file:
        assert is_cached(file.fd, 0, 4 * mmap.PAGESIZE)
        assert is_cached(file.fd, 0, 10)
        monkeypatch.setattr(os, "preadv", fails(errno.EAGAIN))
        assert not is_cached(file.fd, 0, 4 * mmap.PAGESIZE)
        assert is_cached(file.fd, 0, 10)
        monkeypatch.setattr(os, "preadv", fails(errno.EOPNOTSUPP))
        assert is_cached(file.fd, 0, 4 * mmap.PAGESIZE)


def fails(code):
    def call(*_):
        raise OSError(code, os.strerror(code))

    return call


@posix
def test_systems_that_lack_a_call(store, tmp_path, monkeypatch):
    write(store, "a", b"abc")
    monkeypatch.setattr(direct, "_call", lambda name: None)
    with contextlib.closing(store.open("a")) as file:
        assert direct.direct_alignment(file.fd) == 0
        assert not direct.in_memory(file.fd)
        direct.start_writeback(file.fd, 0, 3)
    with pytest.raises(OSError, match="cannot change places") as caught:
        direct.exchange_names(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == errno.EINVAL


@posix
def test_names_change_places_or_nothing_does(store, tmp_path):
    write(store, "a", b"1")
    write(store, "b", b"2")
    direct.exchange_names(tmp_path / "a", tmp_path / "b")
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"2", b"1")
    with pytest.raises(FileNotFoundError):
        direct.exchange_names(tmp_path / "a", tmp_path / "gone")
    assert (tmp_path / "a").read_bytes() == b"2"


@posix
def test_space_that_a_file_cannot_have(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r".+") as caught:
            fallocate(fd, 4096)
    finally:
        os.close(fd)
    assert caught.value.errno in (errno.EBADF, errno.EISDIR, errno.ENODEV)


@posix
def test_direct_writes_that_cannot_be_turned_off_are_an_error(store, monkeypatch):
    file = store.create("a")
    try:
        file.direct = True
        monkeypatch.setattr(local, "set_direct", lambda fd, on: False)
        with pytest.raises(OSError, match="nor can it be turned off"):
            file._end_direct()
        monkeypatch.setattr(local, "set_direct", lambda fd, on: True)
        file._end_direct()
        assert not file.direct
    finally:
        file.close()


@posix
@pytest.mark.parametrize(
    ("code", "becomes"),
    [(errno.EINVAL, "the rest"), (errno.EFAULT, "the rest"), (errno.EIO, "an error")],
)
def test_direct_reads_that_are_refused(store, monkeypatch, code, becomes):
    """Through the page cache from there on; an error of the disk is none of these."""
    data = os.urandom(8192)
    write(store, "a", data)
    with contextlib.closing(store.open("a")) as file:
        file._direct, file._alignment = file.fd, 4096
        plain, calls = reading._read_some, []

        def read(fd, out, offset):
            calls.append(offset)
            if len(calls) == 2:
                raise OSError(code, os.strerror(code))
            return plain(fd, out[:4096], offset)

        monkeypatch.setattr(reading, "_read_some", read)
        out = bytearray(8192)
        if becomes == "an error":
            with pytest.raises(OSError, match="Input/output"):
                file.read_direct(memoryview(out), 0, 8192)
            return
        assert file.read_direct(memoryview(out), 0, 8192) == (8192, 4096)
        assert out == data
        assert (file._direct >= 0) is (code == errno.EFAULT)


@posix
def test_direct_reads_that_stop_within_a_block_go_on_otherwise(store, monkeypatch):
    data = os.urandom(8192)
    write(store, "a", data)
    with contextlib.closing(store.open("a")) as file:
        file._direct, file._alignment = file.fd, 4096
        plain = reading._read_some
        monkeypatch.setattr(
            reading, "_read_some", lambda fd, out, offset: plain(fd, out[:1000], offset)
        )
        out = bytearray(8192)
        assert file.read_direct(memoryview(out), 0, 8192) == (8192, 1000)
        assert out == data


@posix
def test_threads_that_ask_first_get_the_same_answer(store, monkeypatch):
    """While one finds out whether a file can be read directly, the others wait for what it finds:
    they would read cold bytes through the page cache, at a fraction of the disk's rate."""
    write(store, "a", os.urandom(8192))
    asked, found = threading.Event(), threading.Event()

    def align(fd):
        asked.set()
        assert found.wait(10)
        return 4096

    monkeypatch.setattr(reading, "direct_alignment", align)
    monkeypatch.setattr(reading, "O_DIRECT", 0)
    monkeypatch.setattr(reading, "is_cached", lambda fd, offset, nbytes: False)
    answers = []
    with contextlib.closing(store.open("a")) as file:
        threads = [
            threading.Thread(target=lambda: answers.append(file.is_cold(0, 8192))) for _ in range(4)
        ]
        threads[0].start()
        assert asked.wait(10)
        for thread in threads[1:]:
            thread.start()
        threads[1].join(0.1)
        found.set()
        for thread in threads:
            thread.join()
        assert answers == [True] * 4


@posix
@pytest.mark.parametrize("while_what", ["is_cold", "read_into", "read_direct"])
def test_a_file_that_is_closed_meanwhile_says_so(store, monkeypatch, while_what):
    """Whatever a thread was just about to do with it, by whichever descriptor."""
    write(store, "a", os.urandom(8192))
    file = store.open("a")
    file._direct, file._alignment = file.fd, 4096

    def closing_before(plain):
        def work(*args):
            file.close()
            return plain(*args)

        return work

    if while_what == "is_cold":
        monkeypatch.setattr(reading, "is_cached", closing_before(is_cached))
        assert not file.is_cold(0, 8192)  # what then reads it says why it cannot
    else:
        monkeypatch.setattr(reading, "_read_some", closing_before(reading._read_some))
    size = (8192,) if while_what == "read_direct" else ()
    read = file.read_direct if size else file.read_into
    with pytest.raises(StorageError, match="was closed"):
        read(memoryview(bytearray(8192)), 0, *size)


@posix
def test_who_cannot_be_asked_what_is_cached_has_it_all(monkeypatch):
    monkeypatch.setattr(page_cache, "_count", lambda *args: -1)
    low, high = os.pipe()
    try:
        assert is_cached(low, 0, 8192)  # no file, and so no advice
    finally:
        os.close(low)
        os.close(high)

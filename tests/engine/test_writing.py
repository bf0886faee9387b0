"""Written files, byte for byte against a writer of a few lines, with faults put in everywhere."""

from __future__ import annotations

import errno
import os
import random
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.arrays import HostSource
from shardkeep.engine import digests, filling, writing
from shardkeep.engine.budget import MINIMUM_BUDGET, BufferPool
from shardkeep.engine.digests import PAGE_DIGESTS, ContentDigests, DigestLayout, algorithm
from shardkeep.engine.filling import Chunks
from shardkeep.engine.writing import Payload, WriteStats, write_file
from shardkeep.planner import NO_IMAGE, Image
from shardkeep.stores import direct, local
from shardkeep.stores.local import LocalStore

XXH3 = algorithm("xxh3-128")
ALIGNMENT = 4096

linux = pytest.mark.skipif(sys.platform != "linux", reason="direct I/O")


def reference(head, arrays, values, block, piece):
    """The whole file, and its root, from everything in memory at once."""
    digest = xxhash.xxh3_128_digest
    data, content = head, b""
    for array in arrays:
        raw = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
        pieces = [digest(raw[at : at + piece]) for at in range(0, len(raw), piece)]
        content += len(data).to_bytes(8, "little") + digest(b"".join(pieces))
        data += raw
    data += content + values
    level1 = b"".join(digest(data[at : at + block]) for at in range(0, len(data), block))
    page = PAGE_DIGESTS * 16
    level2 = b"".join(digest(level1[at : at + page]) for at in range(0, len(level1), page))
    end = len(data) + len(level1) + len(level2)
    tail = level2 + bytes(-end % 4096)
    return data + level1 + tail, digest(tail)


class Taken:
    """A snapshot of arrays, in memory that is settled after it was asked for so many units."""

    def __init__(self, head, arrays, settled_after):
        raw = b"".join(
            np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
            for array in arrays
        )
        self.begin, self.bytes = len(head), np.frombuffer(raw, np.uint8)
        self.left, self.found = settled_after, 0

    def find(self, low, high):
        if low < self.begin or high > self.begin + len(self.bytes):
            return None
        self.left -= 1
        self.found += 1
        return self.bytes[low - self.begin : high - self.begin]

    def image(self):
        return Image(self.find, lambda: self.left < 0)


def written(file, head, arrays, values, block, pool, stats=None, writers=0, image=NO_IMAGE):
    """The same through the engine."""
    nbytes = np.array([array.nbytes for array in arrays], np.int64)
    start = len(head) + np.cumsum(nbytes) - nbytes
    content = ContentDigests(XXH3, nbytes)
    late_start = len(head) + int(nbytes.sum())

    def late():
        keys = start.astype("<u8").view(np.uint8).reshape(-1, 8)
        return np.hstack([keys, content.results()]).tobytes() + values

    chunks = Chunks(
        start,
        nbytes,
        np.array([array.itemsize for array in arrays], np.int64),
        lambda low, high: [HostSource(array) for array in arrays[low:high]],
        image,
    )
    layout = DigestLayout(late_start + 24 * len(arrays) + len(values), block, 16)
    file.allocate(layout.file_size)
    file.begin_direct()
    return write_file(
        file,
        Payload(head, chunks, late_start, late),
        layout,
        pool=pool,
        algorithm=XXH3,
        threads=pool.threads,
        writers=writers,
        content=content,
        stats=stats,
    )


def small_pool(unit, threads, block):
    pool = BufferPool(MINIMUM_BUDGET, threads, block)
    pool.unit, pool.threads = max(block, unit // block * block), threads
    return pool


class Kernel:
    """Stands before `os.pwrite`: strict about direct I/O, and faulty as told."""

    def __init__(self, patch, *, direct, shorts=0.0, interrupts=0.0, refuse_at=None, fail=None):
        self.real, self.chance, self.lock = os.pwrite, random.Random(0), threading.Lock()
        self.direct = {}
        self.shorts, self.interrupts = shorts, interrupts
        self.refuse_at, self.fail = refuse_at, fail or {}
        self.calls = self.refused = 0
        patch.setattr(os, "pwrite", self.pwrite)
        patch.setattr(local, "direct_alignment", lambda fd: ALIGNMENT if direct else 0)
        patch.setattr(local, "set_direct", self.set_direct)

    def set_direct(self, fd, on):
        self.direct[fd] = on
        return True

    def pwrite(self, fd, data, offset):
        with self.lock:
            self.calls += 1
            number, luck, cut = self.calls, self.chance.random(), self.chance.random()
        if number in self.fail:
            raise OSError(self.fail[number], os.strerror(self.fail[number]))
        if self.direct.get(fd):
            address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
            if number == self.refuse_at or (offset | len(data) | address) % ALIGNMENT:
                self.refused += 1
                raise OSError(errno.EINVAL, "Invalid argument")
        if luck < self.interrupts:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        if luck < self.interrupts + self.shorts:
            data = data[: max(1, int(len(data) * cut))]
        return self.real(fd, data, offset)


DTYPES = ["u1", "<u2", "<u4", "<u8", ">u4", "<c16"]


@st.composite
def states(draw):
    """Arrays of many sizes, contiguous or not, in any byte order."""
    chance = np.random.default_rng(draw(st.integers(0, 1000)))
    arrays = []
    for _ in range(draw(st.integers(0, 12))):
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        rows, columns = draw(st.integers(1, 90)), draw(st.integers(1, 90))
        raw = chance.integers(0, 256, rows * columns * dtype.itemsize, np.uint8)
        array = raw.view(dtype).reshape(rows, columns)
        how = draw(st.sampled_from(["plain", "transposed", "stepped", "backwards", "scalar"]))
        if how == "transposed":
            array = array.T
        elif how == "stepped":
            array = array[:, ::2]
        elif how == "backwards":
            array = array[::-1]
        elif how == "scalar":
            array = array[0, 0, ...]
        arrays.append(array)
    # As the format has them: every chunk starts on a multiple of its item size.
    arrays.sort(key=lambda a: -(a.nbytes & -a.nbytes))
    return (
        chance.bytes(4096 * draw(st.integers(1, 3))),
        arrays,
        chance.bytes(draw(st.integers(0, 9000))),
    )


@settings(max_examples=150, deadline=None)
@given(
    state=states(),
    block=st.sampled_from([4096, 8192, 1 << 15]),
    unit=st.integers(4096, 1 << 16),
    threads=st.sampled_from([1, 2, 4]),
    writers=st.sampled_from([0, 1, 3]),
    direct=st.booleans(),
    refuse_at=st.one_of(st.none(), st.integers(1, 12)),
    shorts=st.sampled_from([0.0, 0.0, 0.3]),
    interrupts=st.sampled_from([0.0, 0.3]),
    piece=st.sampled_from([1000, 1 << 14, 1 << 20]),
    small=st.sampled_from([64, 4096, 1 << 15]),
)
def test_files_are_those_of_the_reference(
    state, block, unit, threads, writers, direct, refuse_at, shorts, interrupts, piece, small
):
    head, arrays, values = state
    expected, root = reference(head, arrays, values, block, piece)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        kernel = Kernel(
            patch, direct=direct, shorts=shorts, interrupts=interrupts, refuse_at=refuse_at
        )
        patch.setattr(digests, "CONTENT_PIECE", piece)
        patch.setattr(filling, "SMALL", small)
        patch.setattr(writing, "SMALL", small)  # also decides whether threads are used
        file = LocalStore(folder).create("x")
        stats = WriteStats()
        pool = small_pool(unit, threads, block)
        found = written(file, head, arrays, values, block, pool, stats, writers)
        ended_direct = file.direct
        file.close()
        assert (Path(folder) / "x").read_bytes() == expected
    assert found == root
    assert stats.written_bytes == len(expected)
    assert stats.direct_files == ended_direct
    if direct and not shorts and not kernel.refused:
        assert ended_direct, "nothing was refused, so nothing had to leave direct I/O"
    if kernel.refused:
        assert not ended_direct


@settings(max_examples=100, deadline=None)
@given(
    state=states(),
    block=st.sampled_from([4096, 8192]),
    unit=st.integers(4096, 1 << 14),
    threads=st.sampled_from([1, 2, 4]),
    writers=st.sampled_from([0, 1, 3]),
    settled_after=st.one_of(st.integers(0, 20), st.just(1 << 20)),
    piece=st.sampled_from([1000, 1 << 14]),
)
def test_what_is_written_while_a_snapshot_is_taken_is_digested_all_the_same(
    state, block, unit, threads, writers, settled_after, piece
):
    head, arrays, values = state
    expected, root = reference(head, arrays, values, block, piece)
    taken = Taken(head, arrays, settled_after)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "CONTENT_PIECE", piece)
        patch.setattr(writing, "SMALL", 64)
        file = LocalStore(folder).create("x")
        pool = small_pool(unit, threads, block)
        found = written(
            file, head, arrays, values, block, pool, writers=writers, image=taken.image()
        )
        file.close()
        assert (Path(folder) / "x").read_bytes() == expected
    assert found == root
    if len(taken.bytes) > 2 * max(unit, block) + block:
        assert taken.found


def test_an_image_whose_memory_is_used_again_is_digested_before_that(tmp_path):
    """As windows are, that a conversion reads ahead: nothing of them may be put off."""
    head, arrays, block = b"h" * 4096, [np.arange(50_000, dtype=np.uint32)], 4096
    taken = Taken(head, arrays, 0)
    scratch = np.empty(1 << 16, np.uint8)

    def find(low, high):
        found = taken.find(low, high)
        if found is None:
            return None
        scratch[: len(found)] = found
        return scratch[: len(found)]

    file = LocalStore(tmp_path).create("x")
    pool = small_pool(1 << 14, 1, block)
    found = written(file, head, arrays, b"v", block, pool, image=Image(find))
    file.close()
    assert taken.found > 2
    assert ((tmp_path / "x").read_bytes(), found) == reference(head, arrays, b"v", block, 1 << 20)


def test_a_file_that_ends_with_its_chunks_has_every_digest(tmp_path):
    # Nothing comes after the chunks, so that the last unit too is found in the snapshot.
    arrays, size = [np.arange(16484, dtype=np.uint32)], 16484 * 4
    taken = Taken(b"", arrays, 1 << 20)
    chunks = Chunks(
        np.zeros(1, np.int64),
        np.array([size]),
        np.array([4]),
        lambda low, high: pytest.fail("it is in memory"),
        taken.image(),
    )
    layout = DigestLayout(size, 4096, 16)
    file = LocalStore(tmp_path).create("x")
    file.allocate(layout.file_size)
    payload = Payload(b"", chunks, size)
    pool = small_pool(1 << 13, 2, 4096)
    root = write_file(file, payload, layout, pool=pool, algorithm=XXH3, threads=2, writers=1)
    file.close()
    raw, digest = arrays[0].tobytes(), xxhash.xxh3_128_digest
    level1 = b"".join(digest(raw[at : at + 4096]) for at in range(0, len(raw), 4096))
    written_now = (tmp_path / "x").read_bytes()
    assert written_now[: len(raw) + len(level1)] == raw + level1
    assert root == digest(written_now[len(raw) + len(level1) :])


def open_files():
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


@pytest.mark.parametrize(("threads", "writers"), [(1, 0), (4, 0), (1, 1), (4, 3)])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ENOSYS])
def test_an_error_of_any_write_is_raised(tmp_path, monkeypatch, threads, writers, direct, code):
    head, arrays = bytes(4096), [np.arange(50_000, dtype=np.uint32)]
    pool = small_pool(1 << 14, threads, 4096)
    before = threading.active_count(), open_files()
    with pytest.MonkeyPatch.context() as patch:
        kernel = Kernel(patch, direct=direct)
        file = LocalStore(tmp_path).create("whole")
        written(file, head, arrays, b"values", 4096, pool, writers=writers)
        file.close()
    assert kernel.calls > 10
    for at in range(1, kernel.calls + 1):
        with pytest.MonkeyPatch.context() as patch:
            Kernel(patch, direct=direct, fail={at: code})
            file = LocalStore(tmp_path).create(f"x{at}")
            with pytest.raises(OSError, match=os.strerror(code)):
                written(file, head, arrays, b"values", 4096, pool, writers=writers)
            file.close()
            assert len(pool._free) == pool._made, "a buffer was lost"
    assert (threading.active_count(), open_files()) == before


def test_a_buffered_write_that_is_refused_is_an_error(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        Kernel(patch, direct=False, fail={1: errno.EINVAL})
        file = LocalStore(tmp_path).create("x")
        with pytest.raises(OSError, match="Invalid argument"):
            written(file, bytes(4096), [], b"", 4096, small_pool(4096, 1, 4096))
        file.close()


def test_a_write_of_nothing_is_an_error(tmp_path, monkeypatch):
    """And not a loop without end."""
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    file = LocalStore(tmp_path).create("x")
    with pytest.raises(OSError, match="wrote nothing"):
        file.write_at(memoryview(b"abc"), 0)
    file.close()


@pytest.mark.parametrize("writers", [0, 2])
def test_an_error_while_filling_is_raised(tmp_path, writers):
    class Broken:
        def read_into(self, start, stop, out):
            raise RuntimeError("the device is gone")

    chunks = Chunks(
        np.array([4096]), np.array([1 << 20]), np.array([4]), lambda low, high: [Broken()]
    )
    file = LocalStore(tmp_path).create("x")
    with pytest.raises(RuntimeError, match="the device is gone"):
        write_file(
            file,
            Payload(bytes(4096), chunks, 4096 + (1 << 20)),
            DigestLayout(4096 + (1 << 20), 4096, 16),
            pool=small_pool(1 << 16, 4, 4096),
            algorithm=XXH3,
            writers=writers,
        )
    file.close()


def test_a_chunk_longer_than_its_source_is_not_filled_with_something_else(tmp_path):
    arrays = [np.arange(100, dtype=np.uint32)]
    chunks = Chunks(
        np.array([4096]), np.array([404]), np.array([4]), lambda low, high: map(HostSource, arrays)
    )
    file = LocalStore(tmp_path).create("x")
    with pytest.raises(ValueError, match="broadcast"):
        write_file(
            file,
            Payload(bytes(4096), chunks, 4500),
            DigestLayout(4500, 4096, 16),
            pool=small_pool(1 << 16, 1, 4096),
            algorithm=XXH3,
        )
    file.close()


def test_many_small_chunks_of_all_kinds(tmp_path):
    """Batches of plain memory, broken by what cannot be copied so."""
    chance = np.random.default_rng(0)
    arrays = []
    for number in range(3000):
        array = chance.integers(0, 1 << 30, (8, 4)).astype([np.uint32, np.uint64][number % 2])
        arrays.append([array, array.T, array.astype(array.dtype.newbyteorder(">"))][number % 3])
    arrays.sort(key=lambda a: -a.nbytes)
    head = bytes(4096)
    expected, root = reference(head, arrays, b"v", 1 << 17, 1 << 20)
    file = LocalStore(tmp_path).create("x")
    assert (
        written(file, head, arrays, b"v", 1 << 17, BufferPool(MINIMUM_BUDGET, 2, 1 << 17)) == root
    )
    file.close()
    assert (tmp_path / "x").read_bytes() == expected


# --- with a real disk


@linux
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 1 << 20, (5 << 20) + 12345])
def test_direct_io_on_a_real_disk(disk, threads, size):
    head, arrays = bytes(8192), [np.random.default_rng(0).integers(0, 256, size, np.uint8)]
    arrays = [a for a in arrays if a.size]
    expected, root = reference(head, arrays, b"values", 1 << 17, 1 << 20)
    name = f"x{threads}-{size}"
    file = LocalStore(disk).create(name)
    pool = BufferPool(64 << 20, threads, 1 << 17, 1 << 20)
    assert written(file, head, arrays, b"values", 1 << 17, pool) == root
    assert file.direct
    file.sync()
    file.close()
    assert (disk / name).read_bytes() == expected


@linux
def test_a_real_disk_goes_on_buffered_where_direct_io_is_refused(disk):
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    page = BufferPool(MINIMUM_BUDGET, 1, 4096)
    with page.buffer() as buffer:
        half = len(buffer) // 2
        buffer[:] = np.resize(data, len(buffer))
        file = LocalStore(disk).create("mixed")
        assert file.begin_direct()
        file.write_at(buffer[:half].data, 0)
        assert file.direct
        file._alignment = 1  # so that the kernel is the one to refuse
        file.write_at(buffer[half : half + 1001].data, half)
        assert not file.direct
        file.write_at(buffer[half + 1001 :].data, half + 1001)
        file.sync()
        file.close()
        assert (disk / "mixed").read_bytes() == buffer.tobytes()


@linux
def test_no_direct_io_where_there_is_no_disk(monkeypatch, tmp_path):
    file = LocalStore(tmp_path).create("x")
    monkeypatch.setattr(direct, "_file_system", lambda fd: 0x01021994)  # tmpfs
    assert direct.direct_alignment(file.fd) == 0
    monkeypatch.setattr(direct, "_file_system", lambda fd: 0xEF53)
    monkeypatch.setattr(direct, "_call", lambda name: None)  # a kernel that cannot be asked
    assert direct.direct_alignment(file.fd) >= 4096
    monkeypatch.setattr(direct, "_file_system", lambda fd: 0x1234)
    assert direct.direct_alignment(file.fd) == 0
    monkeypatch.setattr(direct, "O_DIRECT", 0)  # not Linux
    assert direct.direct_alignment(file.fd) == 0
    assert not direct.set_direct(file.fd, True)
    assert direct.set_direct(file.fd, False)
    file.close()
    assert not direct.set_direct(10_000, True)

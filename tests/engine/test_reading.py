"""Any regions of any chunks read bit-equal, however the file is read, or an error is raised."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.arrays import HostPlaces, HostSink
from shardkeep.columns import Boxes
from shardkeep.dtypes import lookup
from shardkeep.engine import reading as engine
from shardkeep.engine.budget import MINIMUM_BUDGET, BufferPool
from shardkeep.engine.digests import DigestLayout, algorithm
from shardkeep.engine.pages import page_aligned
from shardkeep.engine.reading import READ_STATS, Reading
from shardkeep.engine.regions import Regions, cut_sparse, spans_of
from shardkeep.engine.verified import VerifiedFile
from shardkeep.errors import CorruptionError
from shardkeep.memory import address_of, bytes_at
from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.stores import reading as store
from shardkeep.stores.local import LocalStore

BLOCK = 4096
KINDS = [lookup(name) for name in ("uint8", "float16", "float32", "float64", "complex128")]
XXH = algorithm("xxh3-128")
ORDERS = ("C", "F", "big", "pages")
"""How the elements of sinks lie; the last begin on a page, so that direct reads go there."""
REFUSALS = (-errno.EINVAL, -errno.EOPNOTSUPP)
"""What only direct I/O answers: the same bytes are then read through the page cache."""

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="stands in for Linux")


def read_regions(files, regions, sinks, stats=None, **options):
    reading = Reading(files, regions, sinks, **options)
    reading.run()
    if stats is not None:
        stats |= reading.stats


def write(path, payload):
    layout = DigestLayout(len(payload), BLOCK, XXH.size)
    blocks = [payload[at : at + BLOCK] for at in range(0, len(payload), BLOCK)]
    tail, root = layout.seal(b"".join(map(XXH.digest, blocks)), XXH)
    path.write_bytes(payload + tail)
    return layout, root


@st.composite
def cases(draw):
    """Chunks of some shapes end to end, and regions of them with where they go."""
    seed = draw(st.integers(0, 2**32 - 1))
    chunks, regions = [], []
    at = draw(st.sampled_from([0, 16, 4096, 6000 // 16 * 16]))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.integers(0, len(KINDS) - 1))
        most = draw(st.sampled_from([4, 24, 90]))
        shape = tuple(draw(st.lists(st.integers(1, most), min_size=0, max_size=3)))
        at = -(-at // 16) * 16
        chunks.append((at, shape, kind))
        at += int(np.prod(shape, dtype=np.int64)) * KINDS[kind].itemsize
    for _ in range(draw(st.integers(1, 6))):
        number = draw(st.integers(0, len(chunks) - 1))
        low, size, dest, room = [], [], [], []
        whole = draw(st.booleans())
        for n in chunks[number][1]:
            a = 0 if whole else draw(st.integers(0, n - 1))
            s = n if whole else draw(st.integers(1, n - a))
            before, after = (0, 0) if whole else draw(st.tuples(*[st.integers(0, 2)] * 2))
            low.append(a)
            size.append(s)
            dest.append(before)
            room.append(before + s + after)
        regions.append((number, low, size, dest, room, draw(st.sampled_from(ORDERS))))
    return seed, chunks, regions, at


def columns(chunks, regions):
    def flat(k):
        return np.array([x for region in regions for x in region[k]], np.int64)

    ndim = [len(region[1]) for region in regions]
    start = np.concatenate([[0], np.cumsum(ndim)]).astype(np.int64)
    sizes = np.array([x for region in regions for x in chunks[region[0]][1]], np.int64)
    return Regions(
        np.zeros(len(regions), np.int64),
        np.array([chunks[region[0]][0] for region in regions], np.int64),
        Boxes(start, flat(1), sizes),
        flat(2),
        flat(3),
        flat(4),
        np.arange(len(regions)),
        KINDS,
        np.array([chunks[region[0]][2] for region in regions]),
    )


def sink_of(region, kind):
    if region[5] == "pages":
        nbytes = int(np.prod(region[4], dtype=np.int64)) * kind.itemsize
        memory = page_aligned(max(nbytes, 1))[:nbytes]
        return HostSink(memory.view(kind.bits()).reshape(region[4]), kind)
    order = "F" if region[5] == "F" else "C"
    bits = kind.bits().newbyteorder(">" if region[5] == "big" else "=")
    return HostSink(np.zeros(region[4], bits, order=order), kind)


def places_of(sinks, known):
    """Where those sinks lie that are row-major memory, of the numbers that are known."""
    address = [
        address_of(sink.array.reshape(-1).view(np.uint8))
        if known[number % len(known)]
        and sink.array.size
        and sink.array.flags.c_contiguous
        and sink.array.dtype.isnative
        else 0
        for number, sink in enumerate(sinks)
    ]
    dtypes = [sink.dtype for sink in sinks]
    return HostPlaces(np.array(address, np.uint64), np.arange(len(sinks)), dtypes)


def expected(payload, chunks, region):
    at, shape, kind = chunks[region[0]]
    count = int(np.prod(shape, dtype=np.int64))
    chunk = np.frombuffer(payload, KINDS[kind].bits(), count, at).reshape(shape)
    out = np.zeros(region[4], KINDS[kind].bits())
    part = tuple(slice(a, a + s) for a, s in zip(region[1], region[2], strict=True))
    place = tuple(slice(a, a + s) for a, s in zip(region[3], region[2], strict=True))
    out[place] = chunk[part]
    return out


class Unit(BufferPool):
    """A pool whose buffers are as small as a test wants them."""

    def __init__(self, blocks, threads):
        super().__init__(MINIMUM_BUDGET, threads, BLOCK)
        self.unit = blocks * BLOCK


@contextlib.contextmanager
def opened(path, layout, root, check=True):
    file = VerifiedFile(
        LocalStore(path.parent).open(path.name), path.name, layout, root, XXH, check
    )
    try:
        yield lambda _: contextlib.nullcontext(file)
    finally:
        file.close()


class Disk:
    """Stands in for the system: short reads, interruptions and refusals, on the nth call."""

    def __init__(self, answers, cold, direct=()):
        self.answers = list(answers)
        self.direct = list(direct)
        self.cold = cold
        self.lock = threading.Lock()
        self.real = os.preadv

    def read(self, fd, out, offset):
        with self.lock:
            is_direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
            answers = self.direct if self.direct and is_direct else self.answers
            answer = answers.pop(0) if answers else None
        if answer in REFUSALS and not is_direct:
            answer = None
        if isinstance(answer, int) and answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        if isinstance(answer, int) and 0 < answer < len(out):
            out = out[:answer]
        return self.real(fd, [out], offset)

    @contextlib.contextmanager
    def installed(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "_read_some", self.read)
            patch.setattr(store, "is_cached", lambda *_: not self.cold)
            yield


HARMLESS = st.sampled_from([None, 1, 16, 512, 4096, 5000, -errno.EINTR, *REFUSALS])


@pytest.fixture(scope="module", params=["disk", "memory"])
def place(request):
    """A folder with direct I/O, where there is one, and one without."""
    root = {"disk": "/var/tmp", "memory": "/dev/shm"}[request.param]
    if not os.path.isdir(root):
        pytest.skip(f"no {root}")
    with tempfile.TemporaryDirectory(dir=root) as name:
        yield Path(name)


@given(
    case=cases(),
    blocks=st.sampled_from([1, 2, 3, 64]),
    threads=st.integers(1, 3),
    piece=st.sampled_from([BLOCK, 3 * BLOCK]),
    cold=st.booleans(),
    check=st.booleans(),
    known=st.lists(st.booleans(), min_size=1, max_size=3),
    answers=st.lists(HARMLESS, max_size=30),
)
@settings(max_examples=60)
def test_any_regions_read_bit_equal(
    place, case, blocks, threads, piece, cold, check, known, answers
):
    seed, chunks, regions, end = case
    payload = np.random.default_rng(seed).bytes(end + seed % 5000)
    path = place / "file"
    layout, root = write(path, payload)
    sinks = [sink_of(region, KINDS[chunks[region[0]][2]]) for region in regions]
    stats = {}
    with (
        pytest.MonkeyPatch.context() as patch,
        Disk(answers, cold).installed(),
        opened(path, layout, root, check) as files,
    ):
        patch.setattr(engine, "PIECE", piece)
        read_regions(
            files,
            columns(chunks, regions),
            sinks.__getitem__,
            block=BLOCK,
            pool=lambda *_: Unit(blocks, 2 * threads),
            threads=threads,
            places=places_of(sinks, known),
            stats=stats,
        )
    for region, sink in zip(regions, sinks, strict=True):
        want = expected(payload, chunks, region)
        assert sink.array.astype(want.dtype).tobytes() == want.tobytes()
    assert set(stats) == set(READ_STATS)
    assert 0 < stats["bytes_read"] <= -(-len(payload) // BLOCK) * BLOCK * len(regions)


@given(case=cases(), blocks=st.sampled_from([1, 3, 64]), cold=st.booleans(), data=st.data())
@settings(max_examples=60)
def test_damage_in_what_is_read_is_an_error(place, case, blocks, cold, data):
    seed, chunks, regions, end = case
    payload = np.random.default_rng(seed).bytes(end + 1)
    path = place / "file"
    layout, root = write(path, payload)
    spans = spans_of(cut_sparse(columns(chunks, regions), BLOCK))
    row = data.draw(st.integers(0, len(spans.low) - 1))
    bit = data.draw(st.integers(int(spans.low[row]) * 8, int(spans.high[row]) * 8 - 1))
    bad = bytearray(path.read_bytes())
    bad[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bad)
    sinks = [sink_of(region, KINDS[chunks[region[0]][2]]) for region in regions]
    with (
        Disk([], cold).installed(),
        opened(path, layout, root) as files,
        pytest.raises(CorruptionError, match="differs from its digest"),
    ):
        read_regions(
            files,
            columns(chunks, regions),
            sinks.__getitem__,
            block=BLOCK,
            pool=lambda *_: Unit(blocks, 4),
            threads=2,
        )


def simple(path, nbytes=40 * BLOCK, order="C"):
    payload = np.random.default_rng(0).bytes(nbytes)
    layout, root = write(path, payload)
    chunks = [(0, (nbytes,), 0)]
    region = (0, [0], [nbytes], [0], [nbytes], order)
    return payload, layout, root, columns(chunks, [region]), sink_of(region, KINDS[0])


def run(path, disk, blocks=8, order="C", memory=None):
    payload, layout, root, regions, sink = simple(path, order=order)
    if memory is not None:
        sink = HostSink(memory, sink.dtype)
    stats = {}
    with disk.installed(), opened(path, layout, root) as files:
        read_regions(
            files,
            regions,
            lambda _: sink,
            block=BLOCK,
            pool=lambda *_: Unit(blocks, 2),
            threads=1,
            stats=stats,
        )
    assert sink.array.tobytes() == payload
    return stats


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("units", [0, 1, 4])
def test_a_direct_read_that_is_refused_goes_through_the_page_cache(place, code, units):
    disk = Disk([], cold=True, direct=[*[None] * units, code])
    stats = run(place / "file", disk)
    assert stats["bytes_direct"] < stats["bytes_read"] == 40 * BLOCK
    # Refused once is refused for good; other threads may have been reading.
    assert stats["bytes_direct"] <= (units + 1) * 8 * BLOCK


def test_a_short_direct_read_is_completed(place):
    run(place / "file", Disk([4096, 100, None, 512], cold=True))


@pytest.mark.parametrize("cold", [True, False])
def test_an_error_of_the_disk_is_raised(place, cold):
    with pytest.raises(OSError, match="Input/output") as caught:
        run(place / "file", Disk([None, None, -errno.EIO], cold))
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("cold", [True, False])
def test_a_file_cut_while_it_is_open(place, cold):
    path = place / "file"
    _, layout, root, regions, sink = simple(path)
    with Disk([], cold).installed(), opened(path, layout, root) as files:
        os.truncate(path, 5 * BLOCK)
        with pytest.raises(CorruptionError, match="has 20480 bytes now"):
            read_regions(
                files, regions, lambda _: sink, block=BLOCK, pool=lambda *_: Unit(8, 1), threads=1
            )


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors")
def test_nothing_is_left_open(place, cold):
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    run(place / "file", Disk([], cold))
    with pytest.raises(OSError, match="Input/output"):
        run(place / "file", Disk([None, -errno.EIO], cold))
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_run_of_host_memory_is_read_without_a_buffer(place):
    stats = run(place / "file", Disk([], cold=False))
    assert stats["bytes_straight"] == 40 * BLOCK
    assert stats["bytes_direct"] == 0


def test_memory_that_begins_on_a_page_is_read_to_around_the_page_cache(place):
    stats = run(place / "file", Disk([], cold=True), order="pages")
    if place.is_relative_to("/var/tmp"):
        assert stats["bytes_straight"] == stats["bytes_direct"] == 40 * BLOCK
    refused = Disk([], cold=True, direct=[None, -errno.EINVAL])
    run(place / "file", refused, order="pages")


_MEMFD_SECRET = 447
"""The number of the system call, the same on every machine."""


@pytest.fixture
def secret():
    """Memory that the program may write to, and no device: as that of devices themselves."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(_MEMFD_SECRET, os.O_CLOEXEC)
    if fd < 0:
        pytest.skip("the kernel has no such memory")
    try:
        os.ftruncate(fd, 40 * BLOCK)
        try:
            made = mmap.mmap(fd, 40 * BLOCK)
        except OSError:
            pytest.skip("no memory may be locked")
    finally:
        os.close(fd)
    with contextlib.suppress(BufferError):
        yield np.frombuffer(made, np.uint8)


@pytest.mark.parametrize("cold", [True, False])
def test_memory_that_no_disk_may_write_to(place, secret, cold):
    stats = run(place / "file", Disk([], cold), memory=secret)
    assert stats["bytes_direct"] == 0
    stats = run(place / "file", Disk([], cold))
    assert stats["bytes_direct"] == (40 * BLOCK if cold and place.parts[1] == "var" else 0)


@pytest.mark.parametrize("code", sorted(store._NOT_THERE))
def test_memory_that_is_refused_says_nothing_of_the_file(place, code):
    """The rest of it goes elsewhere, and around the page cache still."""
    disk = Disk([], cold=True, direct=[None, -code])
    stats = run(place / "file", disk, order="pages")
    if place.is_relative_to("/var/tmp"):
        assert stats["bytes_direct"] == 32 * BLOCK


def test_memory_that_nobody_may_write_to_is_an_error(place):
    memory = mmap.mmap(-1, 40 * BLOCK, prot=mmap.PROT_READ)
    array = bytes_at(address_of(np.frombuffer(memory, np.uint8)), len(memory))
    for cold in (True, False):
        with pytest.raises(OSError, match="Bad address"):
            run(place / "file", Disk([], cold), memory=array)


def test_rows_far_apart_are_not_read_together(place):
    path = place / "file"
    width, rows = 8 * BLOCK, 20
    payload = np.random.default_rng(1).bytes(width * rows)
    layout, root = write(path, payload)
    chunks = [(0, (rows, width), 0)]
    region = (0, [3, 100], [10, 50], [0, 0], [10, 50], "C")
    sink, stats = sink_of(region, KINDS[0]), {}
    with opened(path, layout, root) as files:
        read_regions(
            files,
            columns(chunks, [region]),
            lambda _: sink,
            block=BLOCK,
            pool=lambda *_: Unit(64, 2),
            threads=1,
            stats=stats,
        )
    assert sink.array.tobytes() == expected(payload, chunks, region).tobytes()
    assert stats["bytes_read"] == 10 * BLOCK


def test_a_region_that_reaches_out_of_its_sink_is_never_copied(tmp_path):
    """Copies by address have nobody else who would see it."""
    path = tmp_path / "file"
    layout, root = write(path, bytes(2 * BLOCK))
    kind = lookup("uint8")
    one = Boxes.of([ChunkStorageMetadata((0,), (BLOCK,))])
    sink = HostSink(np.zeros(BLOCK, np.uint8), kind)
    column = np.zeros(1, np.int64)
    regions = Regions(
        column, column, one, one.sizes, np.array([8]), np.array([BLOCK]), column, [kind], column
    )
    with (
        opened(path, layout, root) as files,
        pytest.raises(AssertionError, match="out of its sink"),
    ):
        read_regions(
            files,
            regions,
            lambda _: sink,
            block=BLOCK,
            pool=lambda *_: Unit(8, 1),
            threads=1,
            places=places_of([sink], [True]),
        )

"""Digest trees and content digests, however buffers cut them."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.engine import contents, digests
from shardkeep.engine.contents import digest_memory
from shardkeep.engine.digests import PAGE_DIGESTS, ContentDigests, DigestLayout, algorithm
from shardkeep.engine.parallel import run_in_order
from shardkeep.errors import FormatError


@given(st.integers(0, 3 * 10**9), st.sampled_from([4096, 1 << 17, 1 << 20]))
def test_layout(payload, block):
    layout = DigestLayout(payload, block, 16)
    assert layout.blocks == (payload + block - 1) // block
    assert layout.file_size % 4096 == 0
    assert layout.file_size >= payload + 16 * (layout.blocks + layout.pages)
    assert layout.file_size - payload - 16 * (layout.blocks + layout.pages) < 4096
    ranges = [layout.page_range(page) for page in range(layout.pages)]
    assert sum(length for _, length in ranges) == layout.level1
    assert all(offset == payload + 16 * PAGE_DIGESTS * n for n, (offset, _) in enumerate(ranges))


def test_seal():
    layout = DigestLayout(10_000 * 4096, 4096, 16)
    level1 = random.Random(0).randbytes(layout.level1)
    entry, root = layout.seal(level1, algorithm("xxh3-128"))
    assert len(entry) == layout.file_size - layout.payload
    assert entry[: len(level1)] == level1
    page = PAGE_DIGESTS * 16
    for n in range(3):
        at = len(level1) + 16 * n
        assert entry[at : at + 16] == xxhash.xxh3_128_digest(level1[n * page : (n + 1) * page])
    assert root == xxhash.xxh3_128_digest(entry[len(level1) :])


def test_unknown_algorithms():
    with pytest.raises(FormatError, match="md5"):
        algorithm("md5")


def expected_content(whole, piece):
    digest = xxhash.xxh3_128_digest
    return digest(b"".join(digest(whole[at : at + piece]) for at in range(0, len(whole), piece)))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    piece=st.sampled_from([16, 64, 100]),
)
def test_content_does_not_depend_on_how_it_is_cut(data, lengths, piece):
    """Chunks lie end to end; buffers cut them anywhere and come in any order, on any thread."""
    ends = np.cumsum(lengths)
    whole = np.random.default_rng(ends[-1]).integers(0, 256, ends[-1], np.uint8)
    bounds = list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=8)))
    buffers = [(a, b) for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if a < b]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "CONTENT_PIECE", piece)
        content = ContentDigests(algorithm("xxh3-128"), lengths)

        def add(buffer):
            low, high = buffer
            rows = [row for row, (a, b) in enumerate(bounds) if a < high and b > low]
            parts = [(max(bounds[row][0], low), min(bounds[row][1], high)) for row in rows]
            starts = [a - bounds[row][0] for row, (a, _) in zip(rows, parts, strict=True)]
            content.add_run(rows[0], starts, [whole[a:b].data for a, b in parts])

        run_in_order(data.draw(st.permutations(buffers)), add, data.draw(st.sampled_from([1, 3])))
        found = content.results()
    for row, (a, b) in enumerate(bounds):
        assert found[row].tobytes() == expected_content(whole[a:b].tobytes(), piece)
    assert not content._shared
    assert not content._chunks


def test_content_that_is_not_whole_is_never_given_out():
    content = ContentDigests(algorithm("xxh3-128"), [10, 3 << 20])
    content.add_run(0, [0], [memoryview(bytes(10))])
    content.add_run(1, [1 << 20], [memoryview(bytes(2 << 20))])
    with pytest.raises(AssertionError, match="1 chunks"):
        content.results()


def test_a_piece_that_many_threads_share(monkeypatch):
    """Whoever has the next bytes goes on, whoever is early leaves a copy; nobody finishes twice."""
    monkeypatch.setattr(digests, "CONTENT_PIECE", 1 << 16)
    whole = np.random.default_rng(0).integers(0, 256, 3 << 16, np.uint8)
    expected = expected_content(whole.tobytes(), 1 << 16)
    chance = random.Random(0)
    for _ in range(50):
        content = ContentDigests(algorithm("xxh3-128"), [len(whole)])
        parts = [(at, min(at + 5000, len(whole))) for at in range(0, len(whole), 5000)]
        chance.shuffle(parts)
        run_in_order(
            parts,
            lambda p, content=content: content.add_run(0, [p[0]], [whole[p[0] : p[1]].data]),
            4,
        )
        assert content.results()[0].tobytes() == expected


def test_memory_is_digested_in_parts_of_any_size(monkeypatch):
    """Large chunks by several threads, small ones together."""
    whole = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    nbytes = np.array([300, 10, 10, 700 - 20], np.int64)
    address = whole.ctypes.data + np.array([0, 300, 310, 320], np.uint64)
    monkeypatch.setattr(digests, "CONTENT_PIECE", 64)
    monkeypatch.setattr(contents, "PART", 128)
    found = digest_memory(address, nbytes, algorithm=algorithm("xxh3-128"), threads=2)
    low = 0
    for row, length in zip(found, nbytes.tolist(), strict=True):
        chunk = whole[low : low + length].tobytes()
        assert row.tobytes() == expected_content(chunk, 64)
        low += length


def test_no_garbage_is_left_of_looking_at_memory():
    """The collector would look at all that the program has, in the middle of a save."""
    count = 2000
    whole = np.zeros(count * (count + 1) // 2, np.uint8)
    nbytes = np.arange(1, count + 1)
    address = whole.ctypes.data + (np.cumsum(nbytes) - nbytes).astype(np.uint64)
    gc.collect()
    gc.disable()
    try:
        digest_memory(address, nbytes, algorithm=algorithm("xxh3-128"), threads=2)
        assert gc.collect() < count // 10
    finally:
        gc.enable()

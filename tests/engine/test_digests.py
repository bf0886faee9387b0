"""Digest trees and content digests, however buffers cut them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.engine import digests
from shardkeep.engine.digests import PAGE_DIGESTS, ContentDigests, DigestLayout, algorithm
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


@settings(max_examples=150, deadline=None)
@given(data=st.data(), length=st.integers(1, 500), piece=st.sampled_from([16, 64, 100]))
def test_content_does_not_depend_on_how_it_is_cut(data, length, piece):
    whole = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    parts = [whole[at : at + piece] for at in range(0, length, piece)]
    digest = xxhash.xxh3_128_digest
    expected = digest(b"".join(digest(part) for part in parts))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=8)))
    spans = list(zip([0, *cuts], [*cuts, length], strict=True))
    old = digests.CONTENT_PIECE
    digests.CONTENT_PIECE = piece
    try:
        content = ContentDigests(algorithm("xxh3-128"), [length])
        for low, high in data.draw(st.permutations(spans)):
            if low < high:
                content.add(0, low, whole[low:high])
        assert content.result(0) == expected
    finally:
        digests.CONTENT_PIECE = old

"""Filling memory with chunks: those whose address is known, and those between them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep import memory
from shardkeep.arrays import HostSource
from shardkeep.engine.filling import FEW_GAPS, Chunks, Filler
from shardkeep.memory import LazyAddresses, address_of


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.booleans()), max_size=40),
    st.integers(1, 64),
)
def test_known_and_unknown_chunks_come_to_their_places(chunks, unit):
    """Whatever lies between, wherever a unit ends, and whichever address is known."""
    rng = np.random.default_rng(0)
    data = [rng.integers(1, 256, length, np.uint8) for length, _, _ in chunks]
    nbytes = np.array([length for length, _, _ in chunks], np.int64)
    gaps = np.array([gap for _, gap, _ in chunks], np.int64)
    start = np.cumsum(nbytes + gaps) - nbytes
    address = np.array(
        [address_of(one) if known else 0 for one, (_, _, known) in zip(data, chunks, strict=True)],
        np.uint64,
    )
    asked = []

    def sources(low, high):
        asked.extend(range(low, high))
        return [HostSource(one) for one in data[low:high]]

    filler = Filler(
        Chunks(
            start,
            nbytes,
            np.ones(len(data), np.int64),
            sources,
            addresses=lambda low, high: address[low:high],
        )
    )
    end = int(start[-1] + nbytes[-1]) if chunks else 0
    found, wanted = np.zeros(end, np.uint8), np.zeros(end, np.uint8)
    for at, one in zip(start.tolist(), data, strict=True):
        wanted[at : at + len(one)] = one
    for low in range(0, end, unit):
        filler.fill(low, min(low + unit, end), found[low : low + unit])
    assert found.tobytes() == wanted.tobytes()
    unknown = set(np.flatnonzero(address == 0).tolist())
    assert unknown <= set(asked)
    if len(unknown) <= FEW_GAPS:
        assert unknown == set(asked)


def test_addresses_are_found_as_they_are_needed(monkeypatch):
    """A few at first, then more at a time; each once, whoever asks."""
    monkeypatch.setattr(memory, "FIRST", 4)
    monkeypatch.setattr(memory, "MOST", 16)
    asked = []

    def find(low, high):
        asked.append((low, high))
        return np.arange(low, high, dtype=np.uint64) + 1000

    found = LazyAddresses(50, find)
    assert asked == []
    assert found(0, 2).tolist() == [1000, 1001]
    assert asked == [(0, 4)]
    assert found(3, 5).tolist() == [1003, 1004]
    assert asked == [(0, 4), (4, 12)]
    threads = [threading.Thread(target=found, args=(at, at + 10)) for at in range(0, 41, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [(0, 4), (4, 12), (12, 28), (28, 44), (44, 50)]
    assert found(0, 50).tolist() == list(range(1000, 1050))


def test_addresses_that_cannot_be_found_are_asked_for_again():
    """One thread's error is that of every other which needs them."""
    tries = []

    def find(low, high):
        tries.append(low)
        if len(tries) == 1:
            raise ValueError("not now")
        return np.ones(high - low, np.uint64)

    found = LazyAddresses(3, find)
    with pytest.raises(ValueError, match="not now"):
        found(0, 1)
    assert found(0, 3).all()

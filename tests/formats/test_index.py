"""Chunk rows of an index, read for some tensors at a time: few requests, and all that was asked."""

import numpy as np
import pytest

import shardkeep
from shardkeep import NativeReader, ShardedArray
from shardkeep.formats.native import index as module
from shardkeep.formats.native.index import Index


def cut(rows: int, columns: int) -> ShardedArray:
    """A tensor of so many chunks, one for each row."""
    data = np.arange(rows * columns).reshape(rows, columns)
    shards = [(data[row : row + 1], (row, 0)) for row in range(rows)]
    return ShardedArray.from_shards(shards, data.shape, dtype="int64")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "a"
    counts = np.random.default_rng(0).integers(0, 6, 40).tolist()
    state = {f"w{n:02}": cut(count, n % 3 + 1) for n, count in enumerate(counts)}
    state["x0"], state["x1"] = np.float32(1), np.arange(3)
    state["x2"] = state["x1"]  # an alias has none
    shardkeep.save(state, path, no_dist=True)
    return path


def runs(rows: list[int], first: list[int], block: int, most: int) -> list[tuple[int, int]]:
    """Which tensors are read together, as it is meant."""
    found: list[list[int]] = []
    begin = 0
    for row in rows:
        if not found or first[row] - first[found[-1][-1] + 1] > block:
            begin = first[row]
            found.append([row])
        elif (first[row] - begin) // most != (first[found[-1][-1]] - begin) // most:
            found.append([row])
        else:
            found[-1].append(row)
    return [(run[0], run[-1] + 1) for run in found]


@pytest.mark.parametrize("few", [0, 64])
def test_chunks_of_any_tensors(saved, monkeypatch, few):
    read, real = [], Index._rows

    def rows_of(self, low, high):
        read.append((low, high))
        return real(self, low, high)

    monkeypatch.setattr(Index, "_rows", rows_of)
    monkeypatch.setattr(module, "FEW", few)
    reader = NativeReader(saved)
    reader.read_metadata()
    tensors, first = len(reader.index.tensors), reader.index.first_chunk.tolist()
    each = [reader.index.chunks_of(row) for row in range(tensors)]
    assert [len(chunks) for chunks in each] == np.diff(first).tolist()
    rng = np.random.default_rng(1)
    for _ in range(100):
        block, most = int(rng.integers(0, 9)), int(rng.integers(1, 30))
        monkeypatch.setattr(module, "BLOCK_ROWS", block)
        monkeypatch.setattr(module, "RUN_ROWS", most)
        rows = np.flatnonzero(rng.random(tensors) < rng.random())
        reader.index._held.clear()
        read.clear()
        found, begin = reader.index.chunks_among(rows)
        assert read == runs(rows.tolist(), first, block, most)
        parts = [each[row] for row in rows.tolist()]
        assert np.diff(begin).tolist() == [len(part) for part in parts]
        for name in ("tensor", "file", "start"):
            together = [number for part in parts for number in getattr(part, name).tolist()]
            assert getattr(found, name).tolist() == together, name
        for name in ("offsets", "sizes"):
            together = [n for part in parts for n in getattr(part.boxes, name).tolist()]
            assert getattr(found.boxes, name).tolist() == together, name
        read.clear()
        again, _ = reader.index.chunks_among(rows)
        assert again.start.tolist() == found.start.tolist()
        assert bool(read) == (few == 0 and len(rows) > 0)  # few are kept
    reader.close()

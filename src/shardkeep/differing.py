# SPDX-License-Identifier: Apache-2.0
"""What differs between two checkpoints, of whatever formats: names, shapes, types, elements.

Elements are compared as bits. Where both checkpoints have digests of the same chunks, what is equal
is known without reading it; the rest is read in pieces, within a memory budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardkeep import values
from shardkeep.arrays import HostSink
from shardkeep.boxes import flat_range_boxes, whole
from shardkeep.checkpoint import Checkpoint
from shardkeep.comparing import Found, Tolerance, compare
from shardkeep.dtypes import DType
from shardkeep.engine.budget import checked_budget, io_threads
from shardkeep.engine.parallel import run_in_order
from shardkeep.errors import CheckpointError
from shardkeep.formats.native.reader import NativeReader
from shardkeep.inspecting import open as open_checkpoint
from shardkeep.metadata import ChunkStorageMetadata
from shardkeep.progress import Counter, Progress, tracked
from shardkeep.storage import CheckpointId

__all__ = ["DiffReport", "Difference", "diff"]

SMALLEST = 1 << 20
"""Bytes that are read together, at least."""
BATCHES = 6
"""Parts of the budget: two sides of a piece, and what comparing makes of it, twice over."""


@dataclass(frozen=True)
class Difference:
    """One name that is not the same in both."""

    name: str
    """Which."""
    kind: str
    """`"only in a"`, `"only in b"`, `"kind"`, `"shape"`, `"dtype"` or `"values"`."""
    a: str = ""
    """What it is in the first."""
    b: str = ""
    """What it is in the second."""
    elements: int = 0
    """How many a tensor has; 0 where they were not compared."""
    changed: int = 0
    """How many of them differ."""
    max_abs: float | None = None
    """The largest difference of two elements, where that is a number."""

    @property
    def fraction(self) -> float:
        """Part of the elements that differ."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class DiffReport:
    """What differs."""

    a: str
    """Where the first checkpoint is."""
    b: str
    """Where the second is."""
    differences: Sequence[Difference]
    """In the order of the first; then what only the second has."""
    names: int
    """How many names there are in either."""
    nbytes: int
    """Bytes of tensors that both have, each counted once."""
    known_bytes: int
    """Those of them that are equal by their digests, and were not read."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def diff(
    a: CheckpointId,
    b: CheckpointId,
    *,
    keys: Sequence[str] = (),
    rtol: float = 0.0,
    atol: float = 0.0,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> DiffReport:
    """Compare two checkpoints; `keys` are globs that narrow what is compared.

    With `rtol` or `atol`, elements within `atol + rtol * abs(b)` of each other are equal, and so
    are NaNs; without, only equal bits are.
    """
    from shardkeep.surgery.patterns import matching

    budget = checked_budget(memory_budget)
    part = max(8 << 20, budget // 4)
    with (
        open_checkpoint(a, memory_budget=part) as first,
        open_checkpoint(b, memory_budget=part) as second,
        tracked(progress, "comparing") as counter,
    ):
        names = list(dict.fromkeys([*first, *second]))
        for glob in keys:
            if not matching(names, glob):
                raise ValueError(f"no name in {a} or {b} matches {glob!r}")
        if keys:
            wanted = {name for glob in keys for name in matching(names, glob)}
            names = [name for name in names if name in wanted]
        tolerance = Tolerance(rtol, atol)
        return _Comparison(first, second, names, tolerance, budget, counter).report()


@dataclass
class _Pair:
    """A tensor that both have."""

    name: str
    dtypes: tuple[DType, DType]
    shape: tuple[int, ...]
    nbytes: int
    boxes: list[ChunkStorageMetadata]
    """What of it must be read."""
    found: Found = field(default_factory=Found)


@dataclass(frozen=True)
class _Piece:
    pair: _Pair
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Comparison:
    """One comparison."""

    def __init__(
        self,
        a: Checkpoint,
        b: Checkpoint,
        names: Sequence[str],
        tolerance: Tolerance,
        budget: int,
        counter: Counter,
    ) -> None:
        self.a, self.b, self.names = a, b, names
        self.tolerance = tolerance
        self.threads = io_threads()
        self.batch = max(SMALLEST, budget // 2 // (BATCHES * self.threads))
        self.counter = counter
        self.digests = _comparable_digests(a, b)
        self.plain = [_encoded(side, names) for side in (a, b)]
        """The plain values of each side, as they are encoded."""

    def report(self) -> DiffReport:
        """Compare everything."""
        out: dict[str, Difference] = {}
        pairs = []
        for name in self.names:
            found = self._kinds(name)
            if isinstance(found, _Pair):
                pairs.append(found)
            elif found is not None:
                out[name] = found
        total = sum(pair.nbytes for pair in pairs)
        for pair in pairs:
            self._narrow(pair)
        left = sum(_volume(box) * pair.dtypes[0].itemsize for pair in pairs for box in pair.boxes)
        self.counter.expect(left)
        run_in_order(self._batches(pairs), self._compare, self.threads)
        for pair in pairs:
            difference = _difference(pair)
            if difference is not None:
                out[pair.name] = difference
        ordered = [out[name] for name in self.names if name in out]
        return DiffReport(self.a.path, self.b.path, ordered, len(self.names), total, total - left)

    def _kinds(self, name: str) -> Difference | _Pair | None:
        """What is known without reading elements; a pair where those must be looked at."""
        tables = self.a._state.tensors, self.b._state.tensors
        rows = [table.row_of.get(name) for table in tables]
        # A name that is a leaf of one side may be that of a container in the other.
        there = [
            row is not None or name in plain for row, plain in zip(rows, self.plain, strict=True)
        ]
        texts = [self._describe(at, name) if has else "" for at, has in enumerate(there)]
        if not all(there):
            kind = "only in a" if there[0] else "only in b"
            return Difference(name, kind, texts[0], texts[1])
        if (rows[0] is None) != (rows[1] is None):
            return Difference(name, "kind", texts[0], texts[1])
        if rows[0] is None or rows[1] is None:
            return self._values(name)
        shapes = tables[0].shape(rows[0]), tables[1].shape(rows[1])
        if shapes[0] != shapes[1]:
            return Difference(name, "shape", texts[0], texts[1])
        dtypes = tables[0].dtype(rows[0]), tables[1].dtype(rows[1])
        count = int(np.prod(shapes[0], dtype=np.int64))
        boxes = [whole(shapes[0])] if count else []
        return _Pair(name, dtypes, shapes[0], count * dtypes[0].itemsize, boxes)

    def _describe(self, at: int, name: str) -> str:
        tensors = (self.a, self.b)[at]._state.tensors
        row = tensors.row_of.get(name)
        if row is None:
            return _text(_decoded(self.plain[at][name]))
        shape = "x".join(map(str, tensors.shape(row))) or "scalar"
        return f"{shape} {tensors.dtype(row).name}"

    def _values(self, name: str) -> Difference | None:
        data = [side[name] for side in self.plain]
        if data[0] == data[1]:
            return None
        plain = [_decoded(one) for one in data]
        if self.tolerance.close_numbers(*plain):
            return None
        return Difference(name, "values", _text(plain[0]), _text(plain[1]))

    def _narrow(self, pair: _Pair) -> None:
        """Leave out the chunks that have equal digests."""
        if not self.digests or pair.dtypes[0] is not pair.dtypes[1] or not pair.boxes:
            return
        sides = []
        for side in (self.a, self.b):
            reader: Any = side._reader
            tensors = side._state.tensors
            chunks = reader.index.chunks_of(tensors.stored_row(tensors.row_of[pair.name]))
            sides.append((reader, chunks))
        (_, mine), (_, yours) = sides
        if len(mine) != len(yours) or not (
            np.array_equal(mine.boxes.offsets, yours.boxes.offsets)
            and np.array_equal(mine.boxes.sizes, yours.boxes.sizes)
        ):
            return
        here, there = (
            np.asarray(reader.contents_at(chunks.file, chunks.start)) for reader, chunks in sides
        )
        differs = (here != there).reshape(len(mine), -1).any(axis=1)
        pair.boxes = [mine.boxes[row] for row in np.flatnonzero(differs).tolist()]

    def _batches(self, pairs: Sequence[_Pair]) -> Iterator[list[_Piece]]:
        """Pieces that are read together: small tensors many at a time, large ones cut."""
        batch: list[_Piece] = []
        room = self.batch
        for pair in pairs:
            item = max(dtype.itemsize for dtype in pair.dtypes)
            for box in pair.boxes:
                at, count = 0, _volume(box)
                while at < count:
                    if room < item:
                        yield batch
                        batch, room = [], self.batch
                    stop = min(count, at + room // item)
                    for inner, sizes in flat_range_boxes(box.sizes, at, stop):
                        offsets = tuple(x + y for x, y in zip(box.offsets, inner, strict=True))
                        batch.append(_Piece(pair, offsets, sizes))
                    room -= (stop - at) * item
                    at = stop
        if batch:
            yield batch

    def _compare(self, batch: list[_Piece]) -> None:
        sides = []
        for at, side in enumerate((self.a, self.b)):
            arrays = [np.empty(p.sizes, p.pair.dtypes[at].bits()) for p in batch]
            side._read(
                [
                    (
                        p.pair.name,
                        ChunkStorageMetadata(p.offsets, p.sizes),
                        HostSink(array, p.pair.dtypes[at]),
                    )
                    for p, array in zip(batch, arrays, strict=True)
                ]
            )
            sides.append(arrays)
        for piece, x, y in zip(batch, *sides, strict=True):
            piece.pair.found.add(compare(x, y, piece.pair.dtypes, self.tolerance))
            self.counter(x.nbytes)


def _volume(box: ChunkStorageMetadata) -> int:
    return int(np.prod(box.sizes, dtype=np.int64))


def _comparable_digests(a: Checkpoint, b: Checkpoint) -> bool:
    one, other = a._reader, b._reader
    return (
        isinstance(one, NativeReader)
        and isinstance(other, NativeReader)
        and one.record.digests == other.record.digests
    )


def _difference(pair: _Pair) -> Difference | None:
    found, (one, other) = pair.found, pair.dtypes
    if one is other and not found.changed:
        return None
    count = int(np.prod(pair.shape, dtype=np.int64))
    shape = "x".join(map(str, pair.shape)) or "scalar"
    kind = "values" if one is other else "dtype"
    texts = (f"{shape} {one.name}", f"{shape} {other.name}")
    return Difference(pair.name, kind, *texts, count, found.changed, found.max_abs)


def _encoded(side: Checkpoint, names: Sequence[str]) -> dict[str, bytes]:
    """The plain values among these names, read in one go."""
    known = side._state.values_table.row_of
    wanted = [name for name in names if name in known]
    found: dict[str, bytes] = {}
    side._reader.read_values(wanted, lambda at, data: found.__setitem__(wanted[at], data))
    return found


def _decoded(data: bytes) -> object:
    """A value for people; a pickle is never opened."""
    try:
        return values.decode(data, foreign="plain")
    except CheckpointError:
        return f"<{len(data)} bytes that need pickle>"


def _text(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."

# SPDX-License-Identifier: Apache-2.0
"""What is converted: the source after surgery, still without its elements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardkeep import values
from shardkeep.arrays import Bytes, HostSink
from shardkeep.checkpoint import Checkpoint
from shardkeep.converting.straight import stored_runs
from shardkeep.dtypes import lookup
from shardkeep.engine.budget import Spares
from shardkeep.engine.byte_runs import ByteRuns
from shardkeep.engine.regions import Flags
from shardkeep.foreign.filling import Wish
from shardkeep.foreign.layout import Elements, Outline, OutTensor
from shardkeep.structure import Structure
from shardkeep.surgery.operation import Operated, Surgery
from shardkeep.surgery.reading import operated_on
from shardkeep.surgery.view import View, Wanted
from shardkeep.tables import NO_ALIAS

__all__ = ["READERS", "Contents", "Row", "contents_of"]

READERS = 4
"""Reads of the source at the same time, each on one thread and with the source's budget: what one
waits for, another can digest meanwhile."""


@dataclass(frozen=True)
class Row:
    """What becomes what."""

    name: str
    """In the result."""
    old: tuple[str, ...]
    """The stored names it is made of."""
    kind: str
    """`"tensor"` or `"value"`."""
    dtype: str = ""
    """Of its elements."""
    old_dtype: str = ""
    """Of the stored elements."""
    shape: tuple[int, ...] = ()
    """Its extent."""
    nbytes: int = 0
    """Of all elements; 0 for a tie, whose elements are stored under another name."""
    tie: str = ""
    """That name."""


class Contents:
    """A state to be written: names, nesting and tensors, and how to read their elements."""

    def __init__(self, checkpoint: Checkpoint, operated: Operated, structure: Structure) -> None:
        """Made by `contents_of`."""
        self.checkpoint = checkpoint
        self.structure = structure
        """The nesting; its names are the new ones."""
        self.composed = operated.tensors
        """Every tensor by its new name, in any order."""
        self.stored_values = operated.values
        """New to stored names of plain values."""
        self.tensors = [n for n in structure.names if n in operated.tensors]
        """Names of tensors, in the order of the state."""
        self.values = [n for n in structure.names if n not in operated.tensors]
        """Names of plain values, in the order of the state."""
        reader: Any = checkpoint._reader
        reader.spares, reader.alone = Spares(READERS), True
        self.view = View(operated.tensors, checkpoint._state, reader.read_tensors)
        self._turns = threading.Semaphore(READERS)

    @cached_property
    def ties(self) -> dict[str, str]:
        """Tensors that have the very elements of an earlier one, and that one."""
        stored = self.checkpoint._state.tensors
        row_of, alias_of = stored.row_of, stored.alias_of.tolist()
        holder = [row if alias == NO_ALIAS else alias for row, alias in enumerate(alias_of)]
        first: dict[object, str] = {}
        out: dict[str, str] = {}
        for name in self.tensors:
            tensor = self.composed[name]
            key = (
                tensor.dtype,
                tensor.shape,
                tuple(
                    (holder[row_of[p.source]], p.begin, p.dims, p.offsets) for p in tensor.pieces
                ),
            )
            if tensor.pieces and first.setdefault(key, name) != name:
                out[name] = first[key]
        return out

    @property
    def nbytes(self) -> int:
        """Of all tensors, ties counted once."""
        return sum(self.composed[n].nbytes for n in self.tensors if n not in self.ties)

    def rows(self) -> list[Row]:
        """What becomes what, in the order of the result."""
        stored = self.checkpoint._state.tensors
        row_of, kind, kinds = stored.row_of, stored.kind.tolist(), stored.kinds
        out = []
        for name in self.structure.names:
            if name not in self.composed:
                out.append(Row(name, (self.stored_values[name],), "value"))
                continue
            tensor, tie = self.composed[name], self.ties.get(name, "")
            types = {kinds[kind[row_of[old]]].dtype for old in tensor.sources}
            out.append(
                Row(
                    name,
                    tensor.sources,
                    "tensor",
                    tensor.dtype,
                    types.pop() if types else tensor.dtype,
                    tensor.shape,
                    0 if tie else tensor.nbytes,
                    tie,
                )
            )
        return out

    def encoded_values(self) -> dict[str, bytes]:
        """Every plain value as it is stored."""
        names = [self.stored_values[name] for name in self.values]
        found: dict[int, bytes] = {}
        self.checkpoint._reader.read_values(names, found.__setitem__)
        return {name: found[at] for at, name in enumerate(self.values)}

    def outline(self, allow_pickle: bool) -> Outline:
        """The same for a format that lays its files out."""
        plain = {
            name: values.decode(data, allow_pickle=allow_pickle)
            for name, data in self.encoded_values().items()
        }
        tensors = {
            name: OutTensor(name, t.dtype, t.shape, t.requires_grad)
            for name, t in ((name, self.composed[name]) for name in self.tensors)
        }
        tensors |= {name: tensors[first] for name, first in self.ties.items()}
        names = self.structure.names

        def leaf(number: int) -> object:
            name = names[number]
            return tensors[name] if name in tensors else plain[name]

        state = self.structure.build(leaf)
        return Outline(state, tensors, plain, dict(self.checkpoint.user_metadata))

    def runs(self, segments: Sequence[Elements]) -> tuple[ByteRuns, Flags]:
        """Where the bytes of segments are stored, for those that are stored as they are wanted."""
        return stored_runs(segments, self.composed, self.checkpoint._state)

    def read_runs(self, runs: ByteRuns, name: Callable[[int], str], out: Bytes) -> None:
        """Bring those, checked where the source has digests."""
        reader: Any = self.checkpoint._reader
        with self._turns:
            reader.read_runs(runs, name, out)

    def read(self, wishes: Sequence[Wish]) -> None:
        """Bring elements, cast where the stored ones are of another type."""
        wanted = [
            Wanted(w.tensor.name, w.offsets, w.sizes, HostSink(w.place, lookup(w.tensor.dtype)))
            for w in wishes
        ]
        with self._turns:
            self.view.read(wanted)


def contents_of(checkpoint: Checkpoint, surgery: Surgery) -> Contents:
    """Operate on what is stored; everything that is wrong is one `PlanError`."""
    return Contents(checkpoint, *operated_on(checkpoint._state, checkpoint.structure, surgery))

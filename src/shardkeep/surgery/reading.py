# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is loaded as surgery leaves it: a reader over any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardkeep.columns import Boxes
from shardkeep.metadata import ChunkStorageMetadata, Metadata, TensorProperties
from shardkeep.planner import LoadPlan, LoadPlanner, ReadItems
from shardkeep.storage import CheckpointId, ColumnReader, StorageReader
from shardkeep.structure import TENSOR, VALUE, Structure
from shardkeep.surgery.operation import Operated, Surgery
from shardkeep.surgery.pieces import Composed
from shardkeep.surgery.placing import placed
from shardkeep.surgery.view import View, Wanted
from shardkeep.tables import ChunkTable, StateColumns, TensorTable, ValueTable

__all__ = ["OperatedReader", "operated_on", "stored_tensors"]


def stored_tensors(tensors: TensorTable) -> dict[str, Composed]:
    """Every stored tensor as it is."""
    return {
        name: Composed.stored(
            name,
            tensors.dtype(row).name,
            tensors.shape(row),
            tensors.properties(row).requires_grad,
        )
        for row, name in enumerate(tensors.names)
    }


def operated_on(
    state: StateColumns, structure: Structure, surgery: Surgery
) -> tuple[Operated, Structure]:
    """What surgery leaves of what is stored; everything that is wrong is one `PlanError`."""
    operated = surgery.operate(stored_tensors(state.tensors), state.values_table.names)
    operated.check()  # names that clash have no place
    if surgery.is_nothing:
        return operated, structure
    kinds = {**dict.fromkeys(operated.tensors, TENSOR), **dict.fromkeys(operated.values, VALUE)}
    made, faults = placed(structure, kinds)
    operated.faults += faults
    operated.check()
    return operated, made


class OperatedReader(ColumnReader):
    """Reads what another reader has, as surgery leaves it."""

    def __init__(self, reader: StorageReader, surgery: Surgery) -> None:
        """`reader` must be one of ours: others do not read boxes by name."""
        if not hasattr(reader, "read_tensors") or not hasattr(reader, "read_values"):
            raise TypeError(f"{type(reader).__qualname__} cannot be loaded with surgery")
        if not isinstance(surgery, Surgery):
            raise TypeError(
                f"surgery is a {type(surgery).__qualname__}; pass shardkeep.Surgery(...)"
            )
        self._reader: Any = reader
        self._surgery = surgery
        self._operated = Operated({}, {})
        self._stored: StateColumns | None = None

    @property
    def stats(self) -> Mapping[str, float]:  # type: ignore[override]
        """Of the reader."""
        found: Mapping[str, float] = self._reader.stats
        return found

    @property
    def ranks_on_host(self) -> int:
        """Of the reader."""
        return int(self._reader.ranks_on_host)

    @ranks_on_host.setter
    def ranks_on_host(self, count: int) -> None:
        self._reader.ranks_on_host = count

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another load."""
        self._reader.reset(checkpoint_id)

    def read_metadata(self, announcement: bytes = b"") -> Metadata:
        """What there is after surgery: every piece is a chunk."""
        metadata: Metadata = self._reader.read_metadata(announcement)
        stored, structure = metadata.state_dict_metadata, metadata.planner_data
        assert isinstance(stored, StateColumns)
        assert structure is not None
        self._stored = stored
        self._operated, made = operated_on(stored, structure, self._surgery)
        return replace(
            metadata, state_dict_metadata=_columns(self._operated, made), planner_data=made
        )

    def announcement(self) -> bytes:
        """Of the reader."""
        word: bytes = self._reader.announcement()
        return word

    def read_values(self, names: Sequence[str], deliver: Callable[[int, bytes], None]) -> None:
        """By the names they are stored under."""
        self._reader.read_values([self._operated.values[name] for name in names], deliver)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> int:
        """Wanted boxes, piece by piece of what is stored."""
        items = ReadItems.of(plan)
        assert self._stored is not None
        sinks = planner.sinks(items)
        view = View(self._operated.tensors, self._stored, self._reader.read_tensors)
        numbers = np.unique(items.wanted).tolist()
        boxes = [(number, items.wanted_boxes[number]) for number in numbers]
        view.read(
            [
                Wanted(items.wanted_names[number], box.offsets, box.sizes, sinks(number))
                for number, box in boxes
            ]
        )
        planner.commit(items, sinks)
        return items.nbytes

    def same_content(self, first: str, second: str) -> bool:
        """Only where two tensors are stored ones as they are, or made of the same pieces."""
        one, other = (self._operated.tensors[name] for name in (first, second))
        if one == other:
            return True
        assert self._stored is not None
        names = [tensor.sources for tensor in (one, other)]
        if one.dtype != other.dtype or any(len(found) != 1 for found in names):
            return False
        tensors = self._stored.tensors
        for tensor, (name,) in zip((one, other), names, strict=True):
            row = tensors.row_of[name]
            if tensor != Composed.stored(
                name, tensors.dtype(row).name, tensors.shape(row), tensor.requires_grad
            ):
                return False
        return bool(self._reader.same_content(names[0][0], names[1][0]))

    def close(self) -> None:
        """Let go of files."""
        self._reader.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """It is only made by hand."""
        return False


def _columns(operated: Operated, structure: Structure) -> StateColumns:
    tensors = operated.tensors
    names = [name for name in structure.names if name in tensors]
    made = [tensors[name] for name in names]
    table = TensorTable.of(
        names,
        [TensorProperties(one.dtype, requires_grad=one.requires_grad) for one in made],
        [one.shape for one in made],
    )
    ordered = [sorted(one.pieces, key=lambda piece: piece.offsets) for one in made]
    row = np.repeat(np.arange(len(made)), [len(pieces) for pieces in ordered])
    boxes = [ChunkStorageMetadata(p.offsets, p.sizes) for pieces in ordered for p in pieces]
    none = np.zeros(len(boxes), np.int64)
    chunks = ChunkTable(row.astype(np.int64), Boxes.of(boxes), none, none, none, none)
    values = [name for name in structure.names if name not in tensors]
    zeros = np.zeros(len(values), np.int64)
    begin = np.searchsorted(row, np.arange(len(made) + 1))
    return StateColumns(
        table,
        ValueTable(values, zeros, np.arange(len(values)), zeros),
        lambda at: chunks.part(int(begin[at]), int(begin[at + 1])),
        chunks,
    )

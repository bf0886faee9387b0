# SPDX-License-Identifier: Apache-2.0
"""The default save planner: what a nested state means in boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash

from shardkeep import tree, values
from shardkeep.arrays import LocalArray, Source, adapter_of
from shardkeep.columns import Boxes, Column, order_by
from shardkeep.errors import PlanError, UnsupportedValueError
from shardkeep.global_plan import join_plans
from shardkeep.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from shardkeep.planner import (
    BytesWriteData,
    LocalColumns,
    Place,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItems,
)
from shardkeep.structure import VALUE
from shardkeep.tables import NO_ALIAS, ChunkTable, StateColumns, TensorTable

__all__ = ["CheckReplicas", "DefaultSavePlanner"]

CheckReplicas: TypeAlias = Literal["sample", "full", "off"]

MAX_DIMS = 32
FULL_DIGEST_BYTES = 1 << 20
SAMPLE_BYTES = 64 << 10
_UNIT = 1 << 20


class DefaultSavePlanner(SavePlanner):
    """Takes any nested state apart; joins the plans of all ranks as columns."""

    def __init__(
        self, *, check_replicas: CheckReplicas = "sample", allow_pickle: bool = False
    ) -> None:
        """`check_replicas` says how plain tensors under one name on several ranks are compared."""
        if check_replicas not in ("sample", "full", "off"):
            raise ValueError(f"check_replicas is {check_replicas!r}; use 'sample', 'full' or 'off'")
        self.check_replicas = check_replicas
        self.allow_pickle = allow_pickle
        self._pickled = False
        self.renamed: list[dict[int, str]] = []
        """On the coordinator after the global plan: names that changed, by rank and leaf."""
        self._place = Place()
        self._sources: list[tuple[ChunkStorageMetadata, Source]] = []
        self._values: list[bytes] = []

    def set_up_planner(
        self, state_dict: object, storage_meta: StorageMeta | None = None, place: Place = Place()
    ) -> None:
        """Take this rank's state apart, on the caller's thread."""
        self._place = place
        self._flat = tree.flatten(state_dict, rank=place.rank, world_size=place.world_size)
        self._sources, self._values = [], []
        self._pickled = False

    @property
    def features(self) -> frozenset[str]:
        """`"pickle"` where a value of this rank had to be pickled."""
        return frozenset({"pickle"} if self._pickled else ())

    def create_local_plan(self) -> SavePlan:
        """Name every box and value this rank holds."""
        structure = self._flat.structure
        names = structure.names
        arrays: list[LocalArray] = []
        tensor_leaf, value_leaf, ties, alias_of = [], [], dict[Any, int](), []
        for number, leaf in enumerate(self._flat.leaves):
            if leaf.kind == VALUE:
                encoded = values.encode_value(
                    leaf.value, where=names[number], allow_pickle=self.allow_pickle
                )
                self._pickled |= encoded.pickled
                self._values.append(encoded.data)
                value_leaf.append(number)
                continue
            adapter = adapter_of(leaf.value)
            assert adapter is not None
            array = adapter.held(leaf.value, names[number])
            _check_shape(array.shape, array.dtype.itemsize, names[number])
            tie = (array.tie, array.shape, tuple(p.box for p in array.pieces))
            first = len(arrays) if array.tie is None else ties.setdefault(tie, len(arrays))
            alias_of.append(NO_ALIAS if first == len(arrays) else first)
            arrays.append(array)
            tensor_leaf.append(number)
        items = self._columns(names, arrays, tensor_leaf, value_leaf, alias_of)
        return SavePlan(items, structure)

    def _columns(
        self,
        names: Sequence[str],
        arrays: Sequence[LocalArray],
        tensor_leaf: list[int],
        value_leaf: list[int],
        alias_of: list[int],
    ) -> WriteItems:
        tensor, replicas, digests = [], [], []
        compare = self._place.world_size > 1 and self.check_replicas != "off"
        for row, array in enumerate(arrays):
            self._check_declared(array, names[tensor_leaf[row]])
            declared = _replica_number(array.replicas)
            for piece in array.pieces:
                nbytes = math.prod(piece.box.sizes) * array.dtype.itemsize
                if nbytes == 0:
                    continue
                self._sources.append((piece.box, piece.source))
                tensor.append(row)
                replicas.append(declared)
                if compare and not declared:
                    digests.append(self._digest(piece.source, nbytes, array.dtype.itemsize))
                else:
                    digests.append(bytes(16))
        count = len(tensor)
        table = ChunkTable(
            np.array(tensor, np.int64),
            Boxes.of([box for box, _ in self._sources]),
            np.full(count, self._place.rank),
            np.arange(count),
        )
        local = LocalColumns(
            np.array(tensor_leaf, np.int64),
            np.array(value_leaf, np.int64),
            np.array(replicas, np.int64),
            _digest_column(digests),
            _digest_column([xxhash.xxh3_128_digest(data) for data in self._values]),
        )
        tensors = TensorTable.of(
            [names[leaf] for leaf in tensor_leaf],
            [array.properties for array in arrays],
            [array.shape for array in arrays],
            alias_of,
        )
        value_names = [names[leaf] for leaf in value_leaf]
        return WriteItems(tensors, table, value_names, range(len(value_names)), local)

    def _check_declared(self, array: LocalArray, name: str) -> None:
        """A rank that declares replicas by number must be one of them."""
        ranks = array.replicas
        if ranks and array.pieces and all(type(rank) is int for rank in ranks):
            place = self._place
            if place.rank not in ranks or not all(0 <= r < place.world_size for r in ranks):  # type: ignore[operator]
                raise PlanError(
                    f"{name}: rank {place.rank} of {place.world_size} declares its pieces to be "
                    f"held by ranks {ranks}; it must be one of them"
                )

    def _digest(self, source: Source, nbytes: int, itemsize: int) -> bytes:
        """All bytes of a small tensor; of a large one all, or its two ends and its middle."""
        if nbytes <= FULL_DIGEST_BYTES or self.check_replicas == "full":
            spans = [(at, min(at + _UNIT, nbytes)) for at in range(0, nbytes, _UNIT)]
        else:
            middle = nbytes // 2 // SAMPLE_BYTES * SAMPLE_BYTES
            last = (nbytes - SAMPLE_BYTES) // itemsize * itemsize
            spans = [(at, at + SAMPLE_BYTES) for at in (0, middle)] + [(last, nbytes)]
        state = xxhash.xxh3_128()
        for low, high in spans:
            buffer = np.empty(high - low, np.uint8)
            source.read_into(low // itemsize, high // itemsize, buffer)
            state.update(buffer.data)
        return state.digest()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Join all plans; see `shardkeep.global_plan`."""
        joined = join_plans(all_plans)
        world = len(all_plans)
        chunks = joined.chunks.take(order_by(joined.chunks.rank, world))
        edges = np.searchsorted(chunks.rank, np.arange(world + 1))
        slots = np.lexsort((joined.values.slot, joined.values.rank))
        value_edges = np.searchsorted(joined.values.rank[slots], np.arange(world + 1))
        plans = []
        for rank in range(world):
            mine = slots[value_edges[rank] : value_edges[rank + 1]]
            items = WriteItems(
                joined.tensors,
                chunks.part(int(edges[rank]), int(edges[rank + 1])),
                [joined.values.names[row] for row in mine.tolist()],
                joined.value_source[mine].tolist(),
            )
            plans.append(SavePlan(items, all_plans[rank].planner_data))
        self.renamed = joined.renamed
        first_chunk = np.searchsorted(joined.chunks.tensor, np.arange(len(joined.tensors) + 1))

        def chunks_of(row: int) -> ChunkTable:
            return joined.chunks.part(int(first_chunk[row]), int(first_chunk[row + 1]))

        state = StateColumns(joined.tensors, joined.values, chunks_of, joined.chunks)
        return plans, Metadata(state, joined.structure)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing is left to do."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Source | bytes:
        """The hint of the item is the number of the piece or value on this rank."""
        number = write_item.index.index
        assert number is not None
        if isinstance(write_item.data, BytesWriteData):
            return self._values[number]
        return self.source_of(number, write_item.data.chunk)

    def source_of(self, number: int, box: ChunkStorageMetadata) -> Source:
        """A piece, or the part of it that lies in `box`."""
        held, source = self._sources[number]
        if held == box:
            return source
        offsets = tuple(a - b for a, b in zip(box.offsets, held.offsets, strict=True))
        return source.part(offsets, box.sizes)


def _check_shape(shape: tuple[int, ...], itemsize: int, name: str) -> None:
    if len(shape) > MAX_DIMS:
        raise UnsupportedValueError(f"{name}: {len(shape)} dimensions; at most {MAX_DIMS}")
    if math.prod(max(n, 1) for n in shape) * itemsize >= 2**63:
        raise UnsupportedValueError(f"{name}: shape {shape} is more than 2**63 bytes")


def _replica_number(replicas: tuple[Any, ...]) -> int:
    if not replicas:
        return 0
    return xxhash.xxh3_64_intdigest(repr(replicas).encode()) >> 2 | 1


def _digest_column(digests: Sequence[bytes]) -> Column:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)

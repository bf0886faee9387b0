# SPDX-License-Identifier: Apache-2.0
"""The default planners: what a nested state means in boxes, on save and on load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash

from shardkeep import tree, values
from shardkeep.arrays import ArrayAdapter, LocalArray, LocalTarget, Sink, Source, adapter_of
from shardkeep.boxes import overlap
from shardkeep.columns import Boxes, Column, Ints, order_by
from shardkeep.dtypes import Cast, can_cast
from shardkeep.errors import MismatchError, UnsupportedValueError
from shardkeep.global_plan import join_plans
from shardkeep.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from shardkeep.planner import (
    BytesWriteData,
    LoadPlan,
    LoadPlanner,
    LocalColumns,
    Place,
    ReadItem,
    ReadItems,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItems,
)
from shardkeep.structure import VALUE, Structure, dotted, key_identity
from shardkeep.tables import NO_ALIAS, ChunkTable, StateColumns, TensorTable

__all__ = [
    "CheckReplicas",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "mismatch_error",
    "plan_reads",
]

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


class DefaultLoadPlanner(LoadPlanner):
    """Matches a target with what is stored, by name, and finds which bytes go where."""

    def __init__(
        self,
        *,
        strict: bool = True,
        keys: Sequence[str] | None = None,
        optional: Sequence[str] = (),
        cast: Cast = False,
        allow_pickle: bool = False,
        device: object = None,
    ) -> None:
        """See `shardkeep.load` for what each means."""
        if cast not in (False, True, "widen"):
            raise ValueError(f"cast is {cast!r}; use False, 'widen' or True")
        self.strict = strict
        self.keys = [keys] if isinstance(keys, str) else keys
        self.optional = [optional] if isinstance(optional, str) else optional
        self.cast = cast
        self.allow_pickle = allow_pickle
        self.device = device
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.skipped: tuple[str, ...] = ()
        """On the coordinator after the global plan: names that were not filled or not asked for."""

    def set_up_planner(
        self, state_dict: object, metadata: Metadata, place: Place = Place()
    ) -> None:
        """Take the target apart; abstract arrays are allocated once everything fits."""
        self._state = state_dict
        self._metadata = metadata
        self._place = place
        self._flat = tree.flatten(state_dict, rank=place.rank, world_size=place.world_size)
        stored = metadata.state_dict_metadata
        if not isinstance(stored, StateColumns):
            raise TypeError("the default load planner needs metadata over columns")
        self._stored = stored
        self.results: list[object] = [leaf.value for leaf in self._flat.leaves]

    def _asked(self, name: str) -> bool:
        return self.keys is None or any(fnmatchcase(name, key) for key in self.keys)

    def create_local_plan(self) -> LoadPlan:
        """What this rank wants; what does not fit is noted, and refused by the global plan."""
        names = self._stored_names()
        mismatched = self._per_rank_faults()
        self._targets: list[tuple[str, LocalTarget, int]] = []
        value_names, value_dest, wanted = [], [], []
        tensors, others = self._stored.tensors, self._stored.values_table
        for number, (leaf, name) in enumerate(zip(self._flat.leaves, names, strict=True)):
            if not self._asked(name):
                continue
            wanted.append(name)
            row = tensors.row_of.get(name)
            if leaf.kind == VALUE:
                if row is not None:
                    mismatched[name] = (
                        f"an array is stored, the target is a {type(leaf.value).__name__}"
                    )
                elif name in others.row_of:
                    value_names.append(name)
                    value_dest.append(number)
                continue
            if row is None:
                if name in others.row_of:
                    mismatched[name] = "a plain value is stored, the target is an array"
                continue
            adapter = adapter_of(leaf.value)
            assert adapter is not None
            fault = self._fault(adapter, leaf.value, name, row)
            if fault:
                mismatched[name] = fault
            else:
                target = adapter.target(leaf.value, name, self.device)
                self._targets.append((name, target, number))
                self.results[number] = target.result
        items = self._read_items(value_names, value_dest)
        return LoadPlan(
            items,
            wanted=frozenset(wanted),
            containers=frozenset(_top_containers(self._flat.structure)),
            mismatched=mismatched,
        )

    def _stored_names(self) -> list[str]:
        """The stored name of each target leaf: by name, where names are as unique as paths.

        Where a clash bracketed names, on either side, the typed path decides first: `a.8` may be
        another leaf here than there. What no path matches goes by name, if that is still free.
        """
        own, here = self._flat.structure.names, self._flat.structure
        there = self._metadata.planner_data
        if there is None or not (_has_brackets(here) or _has_brackets(there)):
            return own
        by_path = {
            tuple(map(key_identity, path)): name
            for path, name in zip(there.paths, there.names, strict=True)
        }
        found = [by_path.get(tuple(map(key_identity, path))) for path in here.paths]
        claimed = set(found)
        return [
            exact if exact is not None else name if name not in claimed else _unmatched(path)
            for exact, name, path in zip(found, own, here.paths, strict=True)
        ]

    def _per_rank_faults(self) -> dict[str, str]:
        structure = self._metadata.planner_data
        if structure is None:
            return {}
        saved = dict(_per_rank_worlds(structure.root, ()))
        return {
            dotted(path): (
                f"saved per rank by {saved[path]} ranks, loading on {world}; leave it out with "
                "keys=..., or load it with shardkeep.open"
            )
            for path, world in _per_rank_worlds(self._flat.structure.root, ())
            if path in saved and saved[path] != world and self._asked(dotted(path))
        }

    def _fault(self, adapter: ArrayAdapter, value: object, name: str, row: int) -> str:
        """Why the target does not fit the stored tensor, or nothing."""
        tensors = self._stored.tensors
        shape, dtype = adapter.signature(value, name)
        stored_shape, stored_dtype = tensors.shape(row), tensors.dtype(row)
        faults = []
        if stored_shape != shape:
            faults.append(f"stored shape {stored_shape}, target shape {shape}")
        if not can_cast(stored_dtype, dtype, self.cast):
            faults.append(f"stored dtype {stored_dtype.name}, target dtype {dtype.name}")
        return "; ".join(faults)

    def _read_items(self, value_names: Sequence[str], value_dest: Sequence[int]) -> ReadItems:
        """Overlap every wanted box with the chunks of its tensor."""
        wanted = []
        self._sinks: list[Sink] = []
        for name, target, _ in self._targets:
            for piece in target.pieces:
                if 0 not in piece.box.sizes:
                    wanted.append((name, piece.box))
                    self._sinks.append(piece.sink)
        return plan_reads(self._stored, wanted, value_names, value_dest)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Strictness over the union of all ranks: one error that lists everything."""
        wanted = frozenset().union(*(plan.wanted for plan in global_plan))
        containers = frozenset().union(*(plan.containers for plan in global_plan))
        mismatched: dict[str, str] = {}
        for plan in global_plan:
            mismatched |= plan.mismatched
        stored = self._stored
        tops = containers | {top for top, inner in map(_split_top, wanted) if inner}
        absent = sorted(
            n
            for n in wanted
            if n not in stored.tensors.row_of
            and n not in stored.values_table.row_of
            and n not in mismatched
        )
        per_rank = tuple(f"{name}." for name in mismatched)
        missing = [
            n
            for n in absent
            if not any(fnmatchcase(n, glob) for glob in self.optional)
            and not (per_rank and n.startswith(per_rank))
        ]
        unexpected: list[str] = []
        skipped: list[str] = []
        for names, is_tensor in ((stored.tensors.names, True), (stored.values_table.names, False)):
            for name in names:
                if name in wanted or (per_rank and name.startswith(per_rank)):
                    continue
                top, inner = _split_top(name)
                asked = self._asked(name) and (top in tops if inner else is_tensor)
                (unexpected if asked and self.keys is None else skipped).append(name)
        self.missing, self.unexpected, self.skipped = (
            tuple(absent),
            tuple(unexpected),
            tuple(skipped),
        )
        if mismatched or (self.strict and (missing or unexpected)):
            raise mismatch_error(
                missing if self.strict else (), unexpected if self.strict else (), mismatched
            )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing is left to do."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: bytes) -> None:
        """Decode a value; named tuples and Enums take their class from the target."""
        number = read_item.dest_index.index
        assert number is not None
        leaf = self._flat.leaves[number]
        decoded = values.like(leaf.value, values.decode(value, allow_pickle=self.allow_pickle))
        if leaf.fixed and not values.same(leaf.value, decoded):
            name = read_item.dest_index.fqn
            raise mismatch_error((), (), {name: f"stored {decoded!r}, target {leaf.value!r}"})
        self.results[number] = decoded

    def resolve_tensor(self, read_item: ReadItem) -> Sink:
        """The sink of a wanted box."""
        number = read_item.dest_index.index
        assert number is not None
        return self._sinks[number]

    def commit_tensor(self, read_item: ReadItem, tensor: Sink) -> None:
        """Sinks need no commit."""

    def targets(self) -> list[tuple[str, LocalTarget]]:
        """Every array that will be filled."""
        return [(name, target) for name, target, _ in self._targets]

    def fill(self) -> Any:
        """Put what was read into the target; returns the filled tree."""
        return tree.fill(self._state, self._flat, self.results)


def plan_reads(
    stored: StateColumns,
    wanted: Sequence[tuple[str, ChunkStorageMetadata]],
    value_names: Sequence[str] = (),
    value_dest: Sequence[int] = (),
) -> ReadItems:
    """Which regions of which chunks make up the wanted boxes; none of them may be empty."""
    tensors = stored.tensors
    rows = [tensors.stored_row(tensors.row_of[name]) for name, _ in wanted]
    stored.prefetch(rows)
    tables, chunk_rows, counts, lows, sizes = [], [], [], [], []
    for row, (_, box) in zip(rows, wanted, strict=True):
        chunks = stored.chunks_of(row)
        found, low, size = _overlaps(chunks, box)
        tables.append(chunks.take(found) if len(found) != len(chunks) else chunks)
        chunk_rows.append(found)
        counts.append(len(found))
        lows.append(low.ravel())
        sizes.append(size.ravel())
    none = [np.zeros(0, np.int64)]
    return ReadItems(
        tensors,
        _join_tables(tables),
        np.concatenate(chunk_rows or none),
        np.repeat(np.arange(len(wanted)), counts),
        [name for name, _ in wanted],
        [box for _, box in wanted],
        np.concatenate(lows or none),
        np.concatenate(sizes or none),
        value_names,
        value_dest,
    )


def mismatch_error(
    missing: Sequence[str], unexpected: Sequence[str], mismatched: Mapping[str, str]
) -> MismatchError:
    """One error that names everything which does not fit."""
    lines = ["the target does not fit the checkpoint; nothing was read"]
    if mismatched:
        lines.append(f"  {len(mismatched)} mismatched:")
        lines += [f"    {name}: {how}" for name, how in sorted(mismatched.items())]
    for what, names in (("missing from the checkpoint", missing), ("unexpected in it", unexpected)):
        if names:
            lines.append(f"  {len(names)} {what}:")
            lines += [f"    {name}" for name in names]
    lines.append(
        "Load into a matching target, narrow the request with keys=..., allow names to be absent "
        "with optional=..., or pass strict=False."
    )
    return MismatchError(
        "\n".join(lines), missing=missing, unexpected=unexpected, mismatched=mismatched
    )


def _unmatched(path: tuple[Any, ...]) -> str:
    """A name for a leaf whose own name is stored for another path: `a["8"]` beside `a.8`."""
    return f"{dotted(path[:-1])}[{path[-1]!r}]"


def _has_brackets(structure: Structure) -> bool:
    return any(
        name != dotted(path) for name, path in zip(structure.names, structure.paths, strict=True)
    )


def _split_top(name: str) -> tuple[str, bool]:
    """The first component of a name, and whether there are more."""
    ends = [at for at in (name.find("."), name.find("[", 1)) if at >= 0]
    return (name[: min(ends)], True) if ends else (name, False)


def _top_containers(structure: Structure) -> list[str]:
    root = structure.root
    if type(root) is int or root[1] is None:
        return []
    pairs = zip(root[1], root[2], strict=True)
    return [_split_top(str(key))[0] for key, child in pairs if type(child) is not int]


def _per_rank_worlds(node: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], int]]:
    if type(node) is int:
        return []
    kind, keys, children, extra = node
    if kind == "per_rank":
        return [(path, extra)]
    inner = range(len(children)) if keys is None else keys
    return [
        found
        for key, child in zip(inner, children, strict=True)
        for found in _per_rank_worlds(child, (*path, key))
    ]


def _overlaps(chunks: ChunkTable, box: ChunkStorageMetadata) -> tuple[Ints, Ints, Ints]:
    """Rows of the chunks that share elements with the box, and the regions they share."""
    ndim = len(box.offsets)
    if len(chunks) == 1:
        shared = overlap(chunks.boxes[0], box)
        if shared is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        return (
            np.zeros(1, np.int64),
            np.array(shared.offsets, np.int64),
            np.array(shared.sizes, np.int64),
        )
    offsets = chunks.boxes.offsets.reshape(-1, ndim)
    sizes = chunks.boxes.sizes.reshape(-1, ndim)
    rows = np.arange(len(chunks))
    for dim in range(ndim):
        # One dimension mostly leaves few chunks for the next.
        begin = offsets[rows, dim] if dim else offsets[:, 0]
        end = begin + (sizes[rows, dim] if dim else sizes[:, 0])
        low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        rows = rows[np.maximum(begin, low) < np.minimum(end, high)]
    box_low = np.array(box.offsets, np.int64)
    lows = np.maximum(offsets[rows], box_low)
    highs = np.minimum(offsets[rows] + sizes[rows], box_low + np.array(box.sizes, np.int64))
    return rows, lows, highs - lows


def _join_tables(tables: Sequence[ChunkTable]) -> ChunkTable:
    empty = np.zeros(0, np.int64)
    if not tables:
        return ChunkTable(
            empty, Boxes(np.zeros(1, np.int64), empty, empty), empty, empty, empty, empty
        )
    first = tables[0]
    return replace(
        first,
        tensor=np.concatenate([t.tensor for t in tables]),
        boxes=Boxes.join([t.boxes for t in tables]),
        rank=np.concatenate([t.rank for t in tables]),
        source=np.concatenate([t.source for t in tables]),
        file=None if first.file is None else np.concatenate([t.file for t in tables]),
        start=None if first.start is None else np.concatenate([t.start for t in tables]),
    )

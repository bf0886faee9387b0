# SPDX-License-Identifier: Apache-2.0
"""Plans as messages between ranks.

What many ranks send alike (the nesting, names, shapes) is one part of a local plan and decoded
once; what is a rank's own (its boxes) is a few arrays. A final plan names pieces the rank knows
already, so it holds no names unless the union of all ranks changed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.columns import Boxes, Column, Ints, Strings, narrow, pack, starts, unpack
from shardkeep.errors import PlanError
from shardkeep.metadata import TensorProperties
from shardkeep.planner import LoadPlan, LocalColumns, SavePlan, WriteItems
from shardkeep.structure import Structure
from shardkeep.tables import ChunkTable, TensorTable

__all__ = [
    "PlanDecoder",
    "decode_final_plan",
    "decode_kinds",
    "encode_final_plan",
    "encode_kinds",
    "encode_load_plan",
    "encode_local_plan",
]


def encode_kinds(kinds: Sequence[TensorProperties]) -> bytes:
    """Tensor properties as JSON, short and readable."""
    return msgspec.json.encode([vars(kind) for kind in kinds])


def decode_kinds(data: bytes) -> tuple[TensorProperties, ...]:
    """What `encode_kinds` made; unknown members are ignored."""
    known = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
    rows = msgspec.json.decode(data, type=list[dict[str, Any]])
    return tuple(TensorProperties(**{k: row[k] for k in known if k in row}) for row in rows)


def encode_local_plan(plan: SavePlan) -> bytes:
    """A rank's local plan, for the coordinator, who gets one from every rank: so keep it small."""
    items = WriteItems.of(plan.items)
    tensors, chunks, local = items.tensors, items.chunks, items.local
    shared: dict[str, Any] = {
        "kinds": encode_kinds(tensors.kinds),
        "kind": tensors.kind,
        "ndim": narrow(np.diff(tensors.shape_start)),
        "shapes": narrow(tensors.shapes),
        "alias_of": narrow(tensors.alias_of),
    }
    if local is not None:
        shared["tensor_leaf"] = narrow(local.tensor_leaf)
        shared["value_leaf"] = narrow(local.value_leaf)
    if plan.planner_data is not None and local is not None:
        shared["structure"] = plan.planner_data.encode()
    else:
        names, others = Strings.of(tensors.names), Strings.of(items.value_names)
        shared |= {"names": names.blob, "name_start": names.start}
        shared |= {"value_names": others.blob, "value_start": others.start}
    own: dict[str, Any] = {
        "shared": pack(shared),
        "tensor": narrow(chunks.tensor),
        "offsets": narrow(chunks.boxes.offsets),
        "sizes": narrow(chunks.boxes.sizes),
        "source": narrow(chunks.source),
        "value_source": narrow(np.array(items.value_source, np.int64)),
    }
    # Most chunks have no replica, and few sets of holders occur.
    if local is not None and local.replicas.any():
        sets, which = np.unique(local.replicas, return_inverse=True)
        own |= {"replica_sets": sets, "replicas": narrow(which)}
    return pack(own)


@dataclass(frozen=True, eq=False)
class _Shared:
    tensors: TensorTable
    structure: Structure | None
    value_names: Sequence[str]
    ndim: Ints
    """Dimensions of each tensor."""
    tensor_leaf: Ints
    value_leaf: Ints


@dataclass(frozen=True, slots=True)
class PlanDecoder:
    """Decodes local plans; parts that ranks send alike become one object."""

    seen: dict[bytes, _Shared] = field(default_factory=dict)
    """Encoded shared part to what it means."""

    def decode(self, message: bytes) -> SavePlan:
        """One rank's plan."""
        own = unpack(message)
        shared = self.seen.get(own["shared"])
        if shared is None:
            shared = self.seen[own["shared"]] = _decode_shared(own["shared"])
        tensor = _wide(own["tensor"])
        boxes = Boxes(starts(shared.ndim[tensor]), _wide(own["offsets"]), _wide(own["sizes"]))
        zeros = np.zeros(len(tensor), np.int64)
        local = None
        if shared.structure is not None:
            replicas = own["replica_sets"][own["replicas"]] if "replicas" in own else zeros
            local = LocalColumns(shared.tensor_leaf, shared.value_leaf, replicas)
        table = ChunkTable(tensor, boxes, zeros, _wide(own["source"]))
        items = WriteItems(
            shared.tensors, table, shared.value_names, own["value_source"].tolist(), local
        )
        return SavePlan(items, shared.structure)


def _wide(column: Column) -> Ints:
    return column.astype(np.int64, copy=False)


def _decode_shared(data: bytes) -> _Shared:
    part = unpack(data)
    ndim, none = _wide(part["ndim"]), np.zeros(0, np.int8)
    tensor_leaf = _wide(part.get("tensor_leaf", none))
    value_leaf = _wide(part.get("value_leaf", none))
    structure = Structure.decode(part["structure"]) if "structure" in part else None
    value_names: Sequence[str]
    if structure is not None:
        every = structure.names
        names = [every[leaf] for leaf in tensor_leaf.tolist()]
        value_names = [every[leaf] for leaf in value_leaf.tolist()]
    else:
        names = Strings(part["names"], part["name_start"]).tolist()
        value_names = Strings(part["value_names"], part["value_start"]).tolist()
    tensors = TensorTable(
        names,
        decode_kinds(part["kinds"]),
        part["kind"],
        starts(ndim),
        _wide(part["shapes"]),
        _wide(part["alias_of"]),
    )
    return _Shared(tensors, structure, value_names, ndim, tensor_leaf, value_leaf)


def encode_final_plan(plan: SavePlan, renamed: dict[int, str], shared: bytes = b"") -> bytes:
    """A rank's part of the global plan; `renamed` maps its leaves to names that changed.

    `shared` is what it must compare with other ranks (`Shared.messages`).
    """
    items = WriteItems.of(plan.items)
    return pack(
        {
            "offsets": narrow(items.chunks.boxes.offsets),
            "sizes": narrow(items.chunks.boxes.sizes),
            "source": narrow(items.chunks.source),
            "value_source": narrow(np.array(items.value_source, np.int64)),
            "storage": plan.storage_data,
            "renamed": msgspec.msgpack.encode(renamed),
            "shared": shared,
        }
    )


def decode_final_plan(message: bytes, local_plan: SavePlan) -> tuple[SavePlan, bytes]:
    """What `encode_final_plan` was given, with the names and shapes of this rank's own plan."""
    part = unpack(message)
    mine = WriteItems.of(local_plan.items)
    tensors, values = mine.tensors, list(mine.value_names)
    renamed = msgspec.msgpack.decode(part["renamed"], type=dict[int, str])
    if renamed and mine.local is not None:
        names = list(tensors.names)
        for row, leaf in enumerate(mine.local.tensor_leaf.tolist()):
            names[row] = renamed.get(leaf, names[row])
        for row, leaf in enumerate(mine.local.value_leaf.tolist()):
            values[row] = renamed.get(leaf, values[row])
        tensors = TensorTable(
            names,
            tensors.kinds,
            tensors.kind,
            tensors.shape_start,
            tensors.shapes,
            tensors.alias_of,
        )
    source = _wide(part["source"])
    tensor = mine.chunks.tensor[_rows_of(source, mine.chunks.source, "piece")]
    ndim = np.diff(tensors.shape_start)[tensor]
    boxes = Boxes(starts(ndim), _wide(part["offsets"]), _wide(part["sizes"]))
    value_source = part["value_source"].tolist()
    listed = np.array(mine.value_source, np.int64)
    value_rows = _rows_of(_wide(part["value_source"]), listed, "value")
    items = WriteItems(
        tensors,
        ChunkTable(tensor, boxes, np.zeros(len(tensor), np.int64), source),
        [values[row] for row in value_rows.tolist()],
        value_source,
    )
    return SavePlan(items, local_plan.planner_data, part["storage"]), part["shared"]


def _rows_of(numbers: Ints, listed: Ints, what: str) -> npt.NDArray[np.intp]:
    """Where each of these numbers is in a list of them, which is mostly in order."""
    order = np.argsort(listed, kind="stable")
    known = listed[order]
    at = np.searchsorted(known, numbers)
    strange = np.append(known, -1)[at] != numbers
    if strange.any():
        raise PlanError(
            f"the global plan gives a rank its {what} of index {numbers[strange][0]}, which is "
            "not in the rank's own plan"
        )
    return order[at]


class _LoadSummary(msgspec.Struct):
    wanted: list[str]
    containers: list[str]
    mismatched: dict[str, str]
    whole: list[tuple[int, int]]
    kept: dict[str, tuple[int, int]]


def encode_load_plan(plan: LoadPlan) -> bytes:
    """What the coordinator must know of a load plan: the names, and what does not fit."""
    summary = _LoadSummary(
        sorted(plan.wanted),
        sorted(plan.containers),
        dict(plan.mismatched),
        sorted(plan.whole),
        dict(plan.kept),
    )
    return msgspec.msgpack.encode(summary)


def decode_load_plan(message: bytes) -> LoadPlan:
    """The summary of a rank's load plan."""
    summary = msgspec.msgpack.decode(message, type=_LoadSummary)
    return LoadPlan(
        (),
        wanted=frozenset(summary.wanted),
        containers=frozenset(summary.containers),
        mismatched=summary.mismatched,
        whole=frozenset(summary.whole),
        kept=summary.kept,
    )

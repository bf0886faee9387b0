# SPDX-License-Identifier: Apache-2.0
"""Plans of torch's planners as ours: what a rank writes, and where its elements come from."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint import planner as dcp

from shardkeep.adapters.torch_tensors import ADAPTER
from shardkeep.arrays import Source, Staging
from shardkeep.columns import Boxes, Ints, Strings, pack, unpack
from shardkeep.errors import PlanError, UnsupportedValueError
from shardkeep.formats.native.layout import FilePlan, Layout, decode_rank_layout
from shardkeep.metadata import Metadata, StorageMeta
from shardkeep.planner import Place, SavePlan, SavePlanner, WriteItem, WriteItems
from shardkeep.tables import ChunkTable, TensorTable, ValueTable
from shardkeep.torch.mapping import boxes_of, chunk_order, properties_from_torch
from shardkeep.torch.objects import decode_stream, encode_object

__all__ = ["Elements", "check_items", "describe_items", "join_layouts", "write_items"]

_BYTES = dcp.WriteItemType.BYTE_IO


def check_items(items: Sequence[dcp.WriteItem]) -> None:
    """Raise for tensors that cannot be stored, before any byte moves."""
    for item in items:
        if item.tensor_data is not None:
            properties_from_torch(item.tensor_data.properties, item.index.fqn)


def write_items(items: Sequence[dcp.WriteItem], rank: int) -> WriteItems:
    """Columns of a rank's items, each sorted by name; a source is the place in `items`."""
    at = [row for row, item in enumerate(items) if item.type != _BYTES]
    data: list[Any] = [items[row].tensor_data for row in at]
    names = [items[row].index.fqn for row in at]
    first = dict(reversed(list(zip(names, data, strict=True))))
    distinct = sorted(first)
    tensors = TensorTable.of(
        distinct,
        [properties_from_torch(first[name].properties, name) for name in distinct],
        [tuple(first[name].size) for name in distinct],
    )
    rows = tensors.row_of
    tensor = np.fromiter((rows[name] for name in names), np.int64, len(names))
    boxes = boxes_of([one.chunk for one in data])
    order = chunk_order(tensors, tensor, boxes)
    order = order[boxes.volumes()[order] > 0]  # nothing is stored of an empty box
    chunks = ChunkTable(
        tensor[order],
        boxes.take(order),
        np.full(len(order), rank),
        np.array(at, np.int64)[order],
    )
    values = sorted((item.index.fqn, row) for row, item in enumerate(items) if item.type == _BYTES)
    return WriteItems(tensors, chunks, [name for name, _ in values], [row for _, row in values])


class Elements(SavePlanner):
    """Our planner's side of a torch planner, for the items it gave."""

    def __init__(self, items: Sequence[dcp.WriteItem], planner: dcp.SavePlanner) -> None:
        """Nothing is asked of the planner yet, but where its tensors are."""
        self._items = items
        self._planner = planner
        self._lock = threading.Lock()
        self.staging = self._settle()

    def _settle(self) -> Staging | None:
        """Wait for devices that compute what is to be saved."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        planner: Any = self._planner
        tensors = (item for item in self._items if item.type != _BYTES)
        if hasattr(planner, "lookup_object"):  # the tensor itself, before a planner changes it
            return ADAPTER.settle(planner.lookup_object(item.index) for item in tensors)
        return ADAPTER.settle(map(planner.resolve_data, tensors))

    def resolve_data(self, write_item: WriteItem) -> Source | bytes:
        """The elements of a box, or an encoded object."""
        number = write_item.index.index
        assert number is not None
        item = self._items[number]
        if item.type == _BYTES:
            return encode_object(self._object(item), item.index.fqn)
        return self._source(item)

    def sources(self, items: WriteItems, rows: Ints) -> Sequence[Source]:
        """The elements of some chunks."""
        return [self._source(self._items[at]) for at in items.chunks.source[rows].tolist()]

    def _object(self, item: dcp.WriteItem) -> object:
        """What the planner would pickle, before it does."""
        planner: Any = self._planner
        if _keeps(planner, "resolve_data") and _keeps(planner, "transform_object"):
            return planner.lookup_object(item.index)
        stream = planner.resolve_data(item)
        if not isinstance(stream, io.BytesIO):
            raise UnsupportedValueError(
                f"{item.index.fqn}: the planner gives a {type(stream).__qualname__} where torch "
                "asks for io.BytesIO"
            )
        return decode_stream(stream, item.index.fqn)

    def _source(self, item: dcp.WriteItem) -> Source:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None
        with self._lock:  # a planner need not know of threads
            found = self._planner.resolve_data(item)
        if not isinstance(found, torch.Tensor):
            raise PlanError(f"{name}: planned as a tensor, is a {type(found).__qualname__}")
        tensor = plain_tensor(found)
        if tensor.dtype != data.properties.dtype or tensor.shape != torch.Size(data.chunk.sizes):
            raise PlanError(
                f"{name}: planned as shape {tuple(data.chunk.sizes)} {data.properties.dtype}, is "
                f"shape {tuple(tensor.shape)} {tensor.dtype}. A planner that changes tensors must "
                "say so in its plan"
            )
        return ADAPTER.sources(tensor, name)[0]

    # What the storage never asks for: torch's driver has planned.

    def set_up_planner(
        self, state_dict: object, storage_meta: StorageMeta | None = None, place: Place = Place()
    ) -> None:
        """Done by torch's driver."""
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        """Done by torch's driver."""
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Done by torch's driver."""
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Done by torch's driver."""
        raise NotImplementedError


def _keeps(planner: object, method: str) -> bool:
    """Whether a planner does this as torch's default one does."""
    default = getattr(default_planner.DefaultSavePlanner, method)
    return getattr(type(planner), method, None) is default


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the class of one that only adds to it; others are refused later."""
    wait = getattr(tensor, "wait", None)
    if type(tensor).__name__ == "AsyncCollectiveTensor" and callable(wait):
        tensor = wait()
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor and not hasattr(tensor, "__tensor_flatten__"):
        return tensor.as_subclass(torch.Tensor)
    return tensor


# --- what a rank tells the coordinator of where it wrote


def describe_items(items: WriteItems, layout: bytes, save_id: str) -> bytes:
    """A rank's chunks and values, and where they lie, for `join_layouts`."""
    names, values = Strings.of(items.tensors.names), Strings.of(items.value_names)
    boxes = items.chunks.boxes
    return pack(
        {
            "save_id": save_id.encode(),
            "layout": layout,
            "names": names.blob,
            "name_start": names.start,
            "values": values.blob,
            "value_start": values.start,
            "tensor": items.chunks.tensor,
            "start": boxes.start,
            "offsets": boxes.offsets,
            "sizes": boxes.sizes,
        }
    )


def join_layouts(
    told: Sequence[bytes], tensors: TensorTable, value_names: Sequence[str], save_id: str
) -> Layout:
    """The layout of the whole checkpoint, of what all ranks have told."""
    files: list[FilePlan] = []
    tables: list[ChunkTable] = []
    places: dict[str, tuple[int, int]] = {}
    for part in map(unpack, told):
        if part["save_id"].decode() != save_id:
            raise PlanError("another save has begun with this writer; use a writer for each")
        plans, disk_order, start = decode_rank_layout(part["layout"])
        file = np.zeros(len(disk_order), np.int64)
        for number, plan in enumerate(plans, len(files)):
            file[disk_order[plan.first : plan.first + plan.count]] = number
            if plan.holds_values:
                names = Strings(bytes(part["values"]), part["value_start"]).tolist()
                places |= {name: (number, slot) for slot, name in enumerate(names)}
        names = Strings(bytes(part["names"]), part["name_start"]).tolist()
        rows = np.array([tensors.row_of[name] for name in names], np.int64)
        rank = np.full(len(file), plans[0].rank if plans else 0)
        boxes = Boxes(part["start"], part["offsets"], part["sizes"])
        tensor = rows[part["tensor"]]
        tables.append(ChunkTable(tensor, boxes, rank, np.zeros_like(rank), file, start))
        files += plans
    chunks = ChunkTable.join(tables)
    chunks = chunks.take(chunk_order(tensors, chunks.tensor, chunks.boxes))
    lost = [name for name in value_names if name not in places]
    if lost:
        raise PlanError(f"no rank has written {', '.join(lost[:8])}")
    at = np.array([places[name] for name in value_names], np.int64).reshape(-1, 2)
    rank = np.array([files[number].rank for number in at[:, 0].tolist()], np.int64)
    values = ValueTable(value_names, rank, at[:, 1], at[:, 0])
    return Layout(chunks, values, tuple(files), ())

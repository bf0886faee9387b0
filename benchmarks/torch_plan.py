"""The same planning with torch's own functions, phase by phase; needs no process group."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.phases import Phases
from benchmarks.simulated import Model, Shards, Tensor


def local_plan(shards: Shards, rank: int, mappings: dict[str, Any]) -> SavePlan:
    """What `create_default_local_save_plan` makes of DTensors cut alike."""
    tensors = shards.model.tensors
    items = []
    held, boxes = shards.held(rank)
    for at, row in enumerate(held.tolist()):
        tensor, box = tensors[row], boxes[at]
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes),
            TensorProperties(dtype=getattr(torch, tensor.dtype)),
            torch.Size(tensor.shape),
        )
        index = MetadataIndex(tensor.name, offsets)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    for name in mappings.keys() - {tensor.name for tensor in tensors}:
        index = MetadataIndex(name)
        items.append(WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0)))
    return SavePlan(items, planner_data=mappings)


def flat_mappings(model: Model) -> dict[str, tuple[str, ...]]:
    """Name to path, as torch's flattening gives it."""
    out = {}

    def walk(node: object, path: tuple[str, ...]) -> None:
        if isinstance(node, dict):
            for key, child in node.items():
                walk(child, (*path, key))
        else:
            out[".".join(path)] = path

    walk(model.tree, ())
    return out


def write_results(plans: list[SavePlan]) -> list[list[WriteResult]]:
    """What each rank's `write_data` reports: where each item lies."""
    return [
        [
            WriteResult(item.index, 4096, _StorageInfo(f"__{rank}_0.distcp", 4096 * at, 4096))
            for at, item in enumerate(plan.items)
        ]
        for rank, plan in enumerate(plans)
    ]


def run(directory: Path, ranks: int, tensors: int, load_ranks: int) -> Phases:
    """One save and one load, planned."""
    model = Model(tensors)
    shards = Shards(model, ranks)
    mappings = flat_mappings(model)
    phases = Phases()

    messages = []
    for rank in range(ranks):
        plan = local_plan(shards, rank, mappings)
        phases.chunks += len(plan.items)
        with phases.phase("encode local plans"):
            messages.append(pickle.dumps(plan))
    phases.note("encode local plans", nbytes=sum(map(len, messages)))
    with phases.phase("decode local plans"):
        plans = [pickle.loads(message) for message in messages]
    del messages
    with phases.phase("global plan"):
        plans, metadata = DefaultSavePlanner().create_global_plan(plans)
    results = write_results(plans)
    with phases.phase("locations"):
        told = [pickle.dumps(part) for part in results]
        placed = {}
        for part in told:
            placed.update({result.index: result.storage_data for result in pickle.loads(part)})
        metadata.storage_data = placed
    phases.note("locations", nbytes=sum(map(len, told)))
    with phases.phase("encode final plans"):
        final = [pickle.dumps(plan) for plan in plans]
    phases.note("encode final plans", nbytes=sum(map(len, final)))
    del plans, final, results, told
    path = directory / ".metadata"
    with phases.phase("write index"), open(path, "wb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())
    phases.note("write index", nbytes=path.stat().st_size)
    stored = len(metadata.storage_data)
    del metadata
    with phases.phase("read index"), open(path, "rb") as file:
        read: Metadata = pickle.load(file)
    assert len(read.storage_data) == stored
    wanted = _wanted(Shards(model, load_ranks), load_ranks // 2)
    with phases.phase("plan one rank's load"):
        items: list[Any] = []
        for name, box in wanted:
            stored_as: Any = read.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, stored_as, [box])
    assert len(items) >= len(wanted)
    return phases


def _wanted(shards: Shards, rank: int) -> list[tuple[str, ChunkStorageMetadata]]:
    tensors: list[Tensor] = shards.model.tensors
    held, boxes = shards.held(rank)
    return [
        (
            tensors[row].name,
            ChunkStorageMetadata(torch.Size(boxes[at].offsets), torch.Size(boxes[at].sizes)),
        )
        for at, row in enumerate(held.tolist())
    ]

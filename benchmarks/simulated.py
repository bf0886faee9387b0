"""A model of llama-405B's shape, cut over simulated ranks: local plans without any tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardkeep.columns import Boxes, Ints, starts
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.engine.digests import DigestLayout, algorithm
from shardkeep.formats.native.names import RECORD
from shardkeep.formats.native.record import FileRow, Record, encode_record
from shardkeep.formats.native.writer import NativeWriter
from shardkeep.metadata import Metadata, TensorProperties
from shardkeep.planner import LocalColumns, Place, SavePlan, WriteItems
from shardkeep.structure import TENSOR, VALUE, Structure
from shardkeep.tables import ChunkTable, StateColumns, TensorTable

HIDDEN, INNER, KV, VOCABULARY = 16384, 53248, 1024, 128256

LAYER = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (KV, HIDDEN),
    "self_attn.v_proj.weight": (KV, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
OUTER = {
    "embed_tokens.weight": (VOCABULARY, HIDDEN),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    "norm.weight": (HIDDEN,),
}
REPLICATED_EVERY = 8
"""The first norm of every n-th layer is held whole by every rank, and declared so."""
HOLDERS = 12345
"""Any number but 0 stands for a declared set of holders."""


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: str
    replicated: bool


def parameters() -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Names, shapes and whether replicated; as many layers as are asked for."""
    for name, shape in OUTER.items():
        yield f"model.{name}", shape, False
    layer = 0
    while True:
        for name, shape in LAYER.items():
            replicated = name.startswith("input") and layer % REPLICATED_EVERY == 0
            yield f"model.layers.{layer}.{name}", shape, replicated
        layer += 1


class Model:
    """`count` tensors: parameters and both Adam moments of each; and a few plain values."""

    def __init__(self, count: int) -> None:
        self.tree: dict[str, Any] = {}
        """The nested state: a `Tensor` or a plain value at each leaf."""
        made = 0
        moments: dict[str, dict[str, Tensor]] = {}
        for name, shape, replicated in parameters():
            if made >= count:
                break
            self._put(name.split("."), Tensor(name, shape, "bfloat16", replicated))
            made += 1
            moments[name] = {}
            for moment in ("exp_avg", "exp_avg_sq")[: count - made]:
                full = f"optimizer.state.{name}.{moment}"
                moments[name][moment] = Tensor(full, shape, "float32", replicated)
                made += 1
        groups = {"lr": 8e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}
        self.tree["optimizer"] = {"state": moments, "param_groups": groups}
        self.tree["step"] = 12000

    def _put(self, path: list[str], tensor: Tensor) -> None:
        node = self.tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = tensor

    @cached_property
    def leaves(self) -> list[Any]:
        def walk(node: Any) -> Iterator[Any]:
            if isinstance(node, dict):
                for child in node.values():
                    yield from walk(child)
            else:
                yield node

        return list(walk(self.tree))

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def structure(self) -> Structure:
        """A new one at each call, as each rank makes its own."""

        def node(value: Any) -> Any:
            if isinstance(value, dict):
                return ["dict", list(value), [node(child) for child in value.values()], None]
            return TENSOR if isinstance(value, Tensor) else VALUE

        return Structure(node(self.tree))


@dataclass(frozen=True)
class Shards:
    """Every tensor cut along its first dimension over `ranks`, as `torch.chunk` cuts."""

    model: Model
    ranks: int

    @cached_property
    def table(self) -> TensorTable:
        tensors = self.model.tensors
        return TensorTable.of(
            [t.name for t in tensors],
            [TensorProperties(t.dtype) for t in tensors],
            [t.shape for t in tensors],
        )

    @cached_property
    def _replicated(self) -> Any:
        return np.array([t.replicated for t in self.model.tensors], np.bool_)

    def held(self, rank: int) -> tuple[Ints, Boxes]:
        """The tensors a rank holds a box of, and the boxes."""
        table = self.table
        rows = table.shapes[table.shape_start[:-1]]
        per_rank = -(-rows // self.ranks)
        low = np.where(self._replicated, 0, np.minimum(rank * per_rank, rows))
        size = np.where(self._replicated, rows, np.minimum(low + per_rank, rows) - low)
        tensor = np.flatnonzero(size > 0)
        shapes = Boxes(table.shape_start, np.zeros_like(table.shapes), table.shapes).take(tensor)
        offsets, sizes = shapes.offsets, shapes.sizes
        offsets[shapes.start[:-1]] = low[tensor]
        sizes[shapes.start[:-1]] = size[tensor]
        return tensor, Boxes(shapes.start, offsets, sizes)

    def wanted(self, rank: int) -> list[tuple[str, Any]]:
        """Names and boxes, for a load."""
        names = self.table.names
        held, boxes = self.held(rank)
        return [(names[row], boxes[at]) for at, row in enumerate(held.tolist())]

    def local_plan(self, rank: int) -> SavePlan:
        """What `DefaultSavePlanner.create_local_plan` makes of such a rank's state."""
        leaves = self.model.leaves
        is_tensor = np.array([isinstance(leaf, Tensor) for leaf in leaves])
        tensor_leaf, value_leaf = np.flatnonzero(is_tensor), np.flatnonzero(~is_tensor)
        tensor, boxes = self.held(rank)
        count = len(tensor)
        local = LocalColumns(
            tensor_leaf,
            value_leaf,
            np.where(self._replicated[tensor], HOLDERS, 0),
        )
        structure = self.model.structure()
        names = [structure.names[leaf] for leaf in value_leaf.tolist()]
        chunks = ChunkTable(tensor, boxes, np.full(count, rank), np.arange(count))
        items = WriteItems(self.table, chunks, names, range(len(names)), local)
        return SavePlan(items, structure)


def write_index(
    directory: str | os.PathLike[str], writer: NativeWriter, metadata: Metadata
) -> tuple[FileRow, bytes]:
    """Write the index of a checkpoint as its commit does; its row, and the record to it.

    The writer has the global plan. The record names data files that nobody wrote: such a
    checkpoint can be opened and planned upon.
    """
    state, structure = metadata.state_dict_metadata, metadata.planner_data
    assert isinstance(state, StateColumns)
    assert structure is not None
    assert writer._layout is not None
    index = writer._write_index(state, structure)
    files = []
    for plan in writer._layout.files:
        payload = plan.values + (1 if plan.holds_values else 0)
        size = DigestLayout(payload, writer.block, algorithm("xxh3-128").size).file_size
        values = plan.values if plan.holds_values else None
        files.append(
            FileRow(plan.name(writer.save_id), size, payload, "00" * 16, values, plan.count)
        )
    record = encode_record(Record(writer.save_id, index, tuple(files), block=writer.block))
    with open(os.path.join(directory, RECORD), "wb") as file:
        file.write(record)
    return index, record


def plan_checkpoint(
    directory: str | os.PathLike[str], plans: list[SavePlan]
) -> tuple[NativeWriter, Metadata]:
    """The coordinator's part of a save up to the point where ranks write data."""
    writer = NativeWriter(directory)
    writer.set_up_storage_writer(Place(0, len(plans)))
    final, metadata = DefaultSavePlanner().create_global_plan(plans)
    writer.prepare_global_plan(final, metadata)
    return writer, metadata


def even_cut(names: int, chunks: int) -> list[SavePlan]:
    """One rank that holds `names` tensors of `chunks` boxes each: many chunks, cheaply."""
    table = TensorTable.of(
        [f"layer.{n}.weight" for n in range(names)],
        [TensorProperties("float32")] * names,
        [(chunks, 4)] * names,
    )
    tensor = np.repeat(np.arange(names), chunks)
    offsets = np.zeros((len(tensor), 2), np.int64)
    offsets[:, 0] = np.tile(np.arange(chunks), names)
    sizes = np.tile(np.array([1, 4], np.int64), len(tensor))
    boxes = Boxes(starts(np.full(len(tensor), 2)), offsets.ravel(), sizes)
    rows = ChunkTable(tensor, boxes, np.zeros_like(tensor), np.arange(len(tensor)))
    return [SavePlan(WriteItems(table, rows))]

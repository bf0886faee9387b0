"""llama-405B as it was trained: tensor, pipeline and data parallel; local plans without any tensor.

Ranks are numbered (stage, data, tensor), tensor innermost. A rank holds the layers of its pipeline
stage. Tensor parallel cuts a matrix along its rows or its columns and leaves norms whole; FSDP over
the data ranks then cuts the rows of what is left, as `torch.chunk` cuts. Norms are therefore held
by all tensor ranks of a data rank, and declared so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.simulated import LAYER, OUTER
from shardkeep.columns import Boxes, Ints
from shardkeep.holding import replica_number
from shardkeep.metadata import TensorProperties
from shardkeep.planner import LocalColumns, SavePlan, WriteItems
from shardkeep.structure import TENSOR, VALUE, Structure
from shardkeep.tables import ChunkTable, TensorTable

LAYERS, TENSOR_RANKS, STAGES = 126, 8, 16

ROWS, COLUMNS, WHOLE = 0, 1, 2
"""How tensor parallel cuts a parameter."""


def _cut(name: str) -> int:
    if "norm" in name:
        return WHOLE
    return COLUMNS if "o_proj" in name or "down_proj" in name else ROWS


def stage_of_layer() -> list[int]:
    """8 layers a stage, but 7 on the first and the last, which have the embeddings."""
    per_stage = [7, *[8] * (STAGES - 2), 7]
    assert sum(per_stage) == LAYERS
    return np.repeat(np.arange(STAGES), per_stage).tolist()


class Stage:
    """What all ranks of one pipeline stage have alike: names, shapes, how each is cut."""

    def __init__(self, number: int) -> None:
        parameters = dict(self._parameters(number))
        model: dict[str, Any] = {}
        for name in parameters:
            *path, last = name.split(".")
            node = model
            for key in path:
                node = node.setdefault(key, {})
            node[last] = TENSOR
        moments = {name: {"exp_avg": TENSOR, "exp_avg_sq": TENSOR} for name in parameters}
        groups = {"lr": VALUE, "betas": VALUE, "weight_decay": VALUE}
        tree = {
            "model": model,
            "optimizer": {"state": moments, "param_groups": groups},
            "step": VALUE,
        }
        self.structure = Structure(_node(tree))
        kinds = np.array(self.structure.kinds)
        self.tensor_leaf = np.flatnonzero(kinds == TENSOR)
        self.value_leaf = np.flatnonzero(kinds == VALUE)
        paths, names = self.structure.paths, self.structure.names
        rows = self.tensor_leaf.tolist()
        whose = [p[2] if p[0] == "optimizer" else ".".join(p[1:]) for p in (paths[r] for r in rows)]
        self.table = TensorTable.of(
            [names[row] for row in rows],
            [TensorProperties("bfloat16" if paths[r][0] == "model" else "float32") for r in rows],
            [parameters[name] for name in whose],
        )
        self.value_names = [names[leaf] for leaf in self.value_leaf.tolist()]
        self.cut = np.array([_cut(name) for name in whose])

    @staticmethod
    def _parameters(number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        if number == 0:
            yield "embed_tokens.weight", OUTER["embed_tokens.weight"]
        for layer, stage in enumerate(stage_of_layer()):
            if stage == number:
                for name, shape in LAYER.items():
                    yield f"layers.{layer}.{name}", shape
        if number == STAGES - 1:
            for name in ("norm.weight", "lm_head.weight"):
                yield name, OUTER[name]


def _node(value: Any) -> Any:
    if isinstance(value, dict):
        return ["dict", list(value), [_node(child) for child in value.values()], None]
    return value


@dataclass(frozen=True)
class Pipeline:
    """All ranks; a rank's plan is made when asked for."""

    ranks: int

    @property
    def data_ranks(self) -> int:
        count, left = divmod(self.ranks, TENSOR_RANKS * STAGES)
        if left or not count:
            raise ValueError(f"{self.ranks} ranks are not {TENSOR_RANKS} x {STAGES} x any number")
        return count

    @cached_property
    def stages(self) -> list[Stage]:
        return [Stage(number) for number in range(STAGES)]

    @property
    def tensor_count(self) -> int:
        return sum(len(stage.table) for stage in self.stages)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Stage, data rank, tensor rank."""
        rest, tensor = divmod(rank, TENSOR_RANKS)
        stage, data = divmod(rest, self.data_ranks)
        return stage, data, tensor

    def held(self, rank: int) -> tuple[Ints, Boxes]:
        """The tensors of its stage a rank holds a box of, and the boxes."""
        at, data, tensor = self.place(rank)
        stage = self.stages[at]
        table = stage.table
        first = table.shape_start[:-1]
        offsets, sizes = np.zeros_like(table.shapes), table.shapes.copy()
        # Tensor parallel: every extent that it cuts divides by 8.
        cut = np.flatnonzero(stage.cut != WHOLE)
        where = first[cut] + stage.cut[cut]
        sizes[where] //= TENSOR_RANKS
        offsets[where] = tensor * sizes[where]
        # FSDP: rows of the rest.
        rows = sizes[first]
        per_rank = -(-rows // self.data_ranks)
        low = np.minimum(data * per_rank, rows)
        sizes[first] = np.minimum(low + per_rank, rows) - low
        offsets[first] += low
        some = np.flatnonzero(sizes[first] > 0)
        return some, Boxes(table.shape_start, offsets, sizes).take(some)

    def wanted(self, rank: int) -> list[tuple[str, Any]]:
        names = self.stages[self.place(rank)[0]].table.names
        held, boxes = self.held(rank)
        return [(names[row], boxes[at]) for at, row in enumerate(held.tolist())]

    def local_plan(self, rank: int) -> SavePlan:
        """What `DefaultSavePlanner.create_local_plan` makes of such a rank's state."""
        at, _, _ = self.place(rank)
        stage = self.stages[at]
        tensor, boxes = self.held(rank)
        count = len(tensor)
        first = rank - rank % TENSOR_RANKS
        alone = replica_number((f"mesh {at}", rank))
        together = replica_number((f"mesh {at}", *range(first, first + TENSOR_RANKS)))
        local = LocalColumns(
            stage.tensor_leaf,
            stage.value_leaf,
            np.where(stage.cut[tensor] == WHOLE, together, alone),
        )
        chunks = ChunkTable(tensor, boxes, np.full(count, rank), np.arange(count))
        values = range(len(stage.value_names))
        items = WriteItems(stage.table, chunks, stage.value_names, values, local)
        return SavePlan(items, stage.structure)

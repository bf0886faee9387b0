"""States cut over ranks, whose every element tells where it belongs.

A rank makes its own part without any other's, and can check after a load that each element is the
one its place asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.states import training_state

Cut = Literal["rows", "columns", "replicated"]
MIB = 1 << 20
COLUMNS = 2048
"""Of every large tensor; in float32 a row has 8 KiB."""


@dataclass(frozen=True)
class Scenario:
    """Saved by some ranks, loaded by others."""

    name: str
    ranks: int
    cut: Cut
    load_ranks: int
    load_cut: Cut
    shapes: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Of all tensors, each element once: what is wanted by the ranks together."""
        return sum(map(prod, self.shapes)) * 4


def training_shapes(nbytes: int) -> tuple[tuple[int, int], ...]:
    """Of the tensors that `benchmarks io` saves, as float32: thousands, from one element on."""
    shapes = [leaf.shape for leaf in training_state(nbytes)]
    scale = nbytes / sum(prod(shape) * 4 for shape in shapes)
    return tuple(
        (max(1, int(shape[0] * scale)) if len(shape) == 2 else prod(shape[:1]), prod(shape[1:]))
        for shape in shapes
    )


def large_shapes(nbytes: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """So that each rank has chunks of 8 MiB and a little: nothing lies on a round number."""
    rows = ranks * (8 * MIB // (4 * COLUMNS)) + 5 * ranks
    return ((rows, COLUMNS),) * max(1, nbytes // (rows * COLUMNS * 4))


def many_small(nbytes: int) -> Scenario:
    """More tensors than bytes count for."""
    shape = (max(8, nbytes // 3400 // 4 // 64), 64)
    return Scenario("4 to 6, 3400 small", 4, "rows", 6, "rows", (shape,) * 3400)


def scenarios(nbytes: int) -> list[Scenario]:
    """Of about `nbytes` each."""

    def large(name: str, ranks: int, cut: Cut, load_ranks: int, load_cut: Cut) -> Scenario:
        return Scenario(name, ranks, cut, load_ranks, load_cut, large_shapes(nbytes, ranks))

    return [
        large("8 to 3, rows", 8, "rows", 3, "rows"),
        large("4 to 6, rows", 4, "rows", 6, "rows"),
        large("4 to 4, rows to columns", 4, "rows", 4, "columns"),
        large("4 to 4, replicated", 4, "replicated", 4, "replicated"),
        many_small(nbytes),
    ]


def box(shape: tuple[int, int], cut: Cut, rank: int, ranks: int) -> tuple[slice, slice]:
    """What a rank holds, as `torch.chunk` cuts."""
    whole = [slice(0, size) for size in shape]
    if cut != "replicated":
        dim = 0 if cut == "rows" else 1
        each = -(-shape[dim] // ranks)
        low = min(rank * each, shape[dim])
        whole[dim] = slice(low, min(low + each, shape[dim]))
    return whole[0], whole[1]


def elements(number: int, shape: tuple[int, int], where: tuple[slice, slice]) -> Any:
    """What tensor `number` holds in a box: float32, finite, not zero."""
    rows = np.arange(where[0].start, where[0].stop, dtype=np.uint32)[:, None]
    columns = np.arange(where[1].start, where[1].stop, dtype=np.uint32)[None, :]
    bits = (rows * np.uint32(shape[1]) + columns + np.uint32(number)) * np.uint32(2654435761)
    return ((bits & np.uint32(0x83FFFFFF)) | np.uint32(0x38000000)).view(np.float32)


def sharded(scenario: Scenario, cut: Cut, rank: int, ranks: int, fill: bool) -> dict[str, Any]:
    """The nested state of one rank: DTensors on a mesh of one dimension."""
    mesh = init_device_mesh("cpu", (ranks,))
    placement = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}[cut]
    out: dict[str, Any] = {}
    for number, shape in enumerate(scenario.shapes):
        where = box(shape, cut, rank, ranks)
        if fill:
            local = torch.from_numpy(elements(number, shape, where))
        else:
            local = torch.full([part.stop - part.start for part in where], -1.0)
        tensor = DTensor.from_local(
            local,
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )
        out.setdefault(f"layer{number // 16}", {})[f"weight{number % 16}"] = tensor
    return {"model": out}


def check(state: dict[str, Any], scenario: Scenario, cut: Cut, rank: int, ranks: int) -> None:
    """Every element of a rank is the one that belongs there."""
    tensors = [tensor for layer in state["model"].values() for tensor in layer.values()]
    for number, tensor in enumerate(tensors):
        shape = scenario.shapes[number]
        local = tensor.to_local().numpy()
        expected = elements(number, shape, box(shape, cut, rank, ranks))
        if not np.array_equal(local.view(np.uint32), expected.view(np.uint32)):
            raise AssertionError(f"rank {rank}: tensor {number} was not loaded as it was saved")
        tensor.to_local().fill_(-1.0)

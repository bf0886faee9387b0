"""DTensors in many layouts, for tests with real or simulated ranks.

Every function runs on one rank of an initialised process group (or of a fake one) and needs no
communication. `build` makes this rank's DTensors, `check` compares loaded ones bit by bit. What a
rank must hold is found by cutting a real tensor with torch's own functions, in an order that each
case states, and not by the code under test.

    state = dtensor_cases.state(world_size)              # every rank, before the save
    target = dtensor_cases.state(other_world, empty=True)  # every rank, before the load
    dtensor_cases.check(target, other_world)             # every rank, after the load
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# Whole tensors by name: the same whatever the number of ranks.
SHAPES = {
    "even": (8, 12),
    "uneven": (7, 5),
    "short": (1, 3),  # more ranks than rows: some hold nothing
    "columns": (6, 10),
    "both": (9, 7),
    "replicated": (5, 4),
    "mixed": (10, 6),
    "holes": (12, 2),
    "holes_uneven": (11, 3),
    "fsdp_tp": (16, 4),
    "fsdp_tp_uneven": (7, 3),
    "scalar": (),
    "none": (0, 4),
    "half": (33,),
}
DTYPES = {"half": torch.bfloat16, "columns": torch.int32, "both": torch.complex64}


@dataclass(frozen=True)
class Case:
    """How one tensor is spread over the ranks."""

    name: str
    mesh_shape: tuple[int, ...]
    placements: tuple[object, ...]
    order: tuple[int, ...] | None = None
    """Mesh dimensions in the order in which plain chunks are taken; None: as placements say."""
    parameter: bool = False
    whole: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = SHAPES[self.name]
        count = math.prod(shape)
        seed = torch.Generator().manual_seed(sum(map(ord, self.name)))
        numbers = torch.randint(-(2**15), 2**15, (count,), generator=seed)
        object.__setattr__(
            self, "whole", numbers.to(DTYPES.get(self.name, torch.float32)).reshape(shape)
        )

    def local(self, coordinate: tuple[int, ...]) -> torch.Tensor:
        """What the rank at this place of the mesh holds, cut by torch."""
        return cut(self.whole, self.mesh_shape, coordinate, self.placements, self.order)


def cut(whole, mesh_shape, coordinate, placements, order=None) -> torch.Tensor:
    """Cut by torch's own functions, one mesh dimension after the other."""
    part = whole
    for axis in range(len(mesh_shape)) if order is None else order:
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        if order is not None:
            placement = Shard(placement.dim)
        parts, _ = placement._split_tensor(
            part, mesh_shape[axis], with_padding=False, contiguous=True
        )
        part = parts[coordinate[axis]]
    return part.clone()


def cases(world: int) -> list[Case]:
    """Each tensor in one layout for this many ranks; other numbers give other layouts."""
    line = (world,)
    outer = 2 if world % 2 == 0 else 1
    plane = (outer, world // outer)
    inner = plane[1]
    strided = _StridedShard(0, split_factor=inner) if inner > 1 else Shard(0)
    return [
        Case("even", line, (Shard(0),)),
        Case("uneven", line, (Shard(0),), parameter=True),
        Case("short", line, (Shard(0),)),
        Case("columns", line, (Shard(1),)),
        Case("both", plane, (Shard(1), Shard(0))),
        Case("replicated", line, (Replicate(),)),
        Case("mixed", plane, (Replicate(), Shard(0)), parameter=True),
        Case("holes", line, (_StridedShard(0, split_factor=3),)),
        Case("holes_uneven", plane, (_StridedShard(0, split_factor=5), Shard(1))),
        Case("fsdp_tp", plane, (strided, Shard(0)), order=(1, 0)),
        Case("fsdp_tp_uneven", plane, (strided, Shard(0)), order=(1, 0)),
        Case("scalar", line, (Replicate(),)),
        Case("none", line, (Shard(0),)),
        Case("half", plane, (Shard(0), Shard(0))),
    ]


def build(case: Case, *, empty: bool = False, meta: bool = False) -> DTensor:
    """This rank's DTensor: filled, or zeros to load into, or on the meta device."""
    mesh = init_device_mesh("cpu", case.mesh_shape)
    local = case.local(tuple(mesh.get_coordinate()))
    if meta:
        local = local.to("meta")
    elif empty:
        local = torch.zeros_like(local)
    whole = case.whole
    made = DTensor.from_local(
        local, mesh, case.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return torch.nn.Parameter(made) if case.parameter else made


def state(world: int, *, empty: bool = False, meta: bool = False) -> dict[str, DTensor]:
    """All cases for this many ranks, under their names."""
    return {case.name: build(case, empty=empty, meta=meta) for case in cases(world)}


def check(loaded: dict[str, DTensor], world: int) -> None:
    """Assert that every local tensor is, bit by bit, what torch would have put there."""
    for case in cases(world):
        tensor = loaded[case.name]
        expected = case.local(tuple(tensor.device_mesh.get_coordinate()))
        assert tuple(tensor.placements) == case.placements, case.name
        assert tensor.shape == case.whole.shape, case.name
        found = tensor._local_tensor.detach()
        assert found.device.type == "cpu", case.name
        assert found.dtype == expected.dtype, case.name
        assert torch.equal(found, expected), f"{case.name}: {found} != {expected}"


def build_fsdp_tp(
    rows: int, columns: int, mesh_shape: tuple[int, int], *, empty: bool = False
) -> torch.nn.Parameter:
    """A weight cut by tensor parallelism, then by `fully_shard`, as FSDP2 users get it."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    whole = torch.arange(float(rows * columns)).reshape(rows, columns)
    if empty:
        whole = torch.zeros_like(whole)
    tp = mesh["tp"]
    local = torch.chunk(whole, mesh_shape[1], dim=0)
    at = tp.get_local_rank()
    local = local[at] if at < len(local) else whole[:0]
    linear = torch.nn.Linear(columns, rows, bias=False, device="meta")
    spread = DTensor.from_local(
        local.clone(), tp, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    linear.weight = torch.nn.Parameter(spread)
    fully_shard(linear, mesh=mesh["dp"])
    return linear.weight

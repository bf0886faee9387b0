"""DTensors, ShardedTensors and pending tensors: what each rank holds, and loads into.

The ranks are simulated: a fake process group lets one process build the tensors of any rank.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import dtensor_cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard as ShardOfTensor,
)
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardkeep
from shardkeep import MismatchError, PlanError, ThreadRanks, UnsupportedValueError
from shardkeep.arrays import adapter_of
from shardkeep.dtypes import lookup


@contextlib.contextmanager
def as_rank(rank, world):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    # Meshes of different ranks are equal, so torch would hand out those of the rank before.
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(world, build):
    """What `build` gives on each rank. DTensors need their group only to be made."""
    states = []
    for rank in range(world):
        with as_rank(rank, world):
            states.append(build())
    return states


def save(states, path, **options):
    return ThreadRanks(len(states)).run(
        lambda ranks: shardkeep.save(states[ranks.rank], path, process_group=ranks, **options)
    )


def load(states, path, **options):
    return ThreadRanks(len(states)).run(
        lambda ranks: shardkeep.load(states[ranks.rank], path, process_group=ranks, **options)
    )


def held(tensor):
    """Its form, and each box of it with its elements."""
    adapter = adapter_of(tensor)
    form = adapter.form(tensor, "x")
    return form, list(zip(form.boxes, adapter.sources(tensor, "x"), strict=True))


def content(source, sizes, name):
    count = int(np.prod(sizes))
    out = np.empty(count * lookup(name).itemsize, np.uint8)
    source.read_into(0, count, out)
    return out.tobytes()


def on_mesh(local, mesh, placements, shape=None):
    stride = None if shape is None else torch.empty(shape, device="meta").stride()
    size = None if shape is None else torch.Size(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


# --- save and load ------------------------------------------------------------------------------

WORLDS = [1, 2, 3, 4, 6]


@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_is_saved_bit_by_bit(tmp_path, world):
    save(on_ranks(world, lambda: dtensor_cases.state(world)), tmp_path)
    stored = shardkeep.open(tmp_path)
    found = stored.state_dict(as_="torch")
    for case in dtensor_cases.cases(world):
        assert torch.equal(found[case.name], case.whole), case.name
    assert not stored.verify().problems


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("meta", [False, True], ids=["in place", "meta"])
def test_every_layout_loads_what_another_wrote(tmp_path, world, meta):
    other = 4 if world != 4 else 3
    save(on_ranks(other, lambda: dtensor_cases.state(other)), tmp_path)
    targets = on_ranks(world, lambda: dtensor_cases.state(world, empty=True, meta=meta))
    before = [
        {name: t._local_tensor.data_ptr() for name, t in target.items()} for target in targets
    ]
    originals = [dict(target) for target in targets]
    load(targets, tmp_path)
    for target, addresses, original in zip(targets, before, originals, strict=True):
        dtensor_cases.check(target, world)
        for name, tensor in target.items():
            if not meta:
                assert tensor is original[name]
                assert tensor._local_tensor.data_ptr() == addresses[name]
            assert isinstance(tensor, torch.nn.Parameter) == isinstance(
                original[name], torch.nn.Parameter
            )
            assert tensor.requires_grad == original[name].requires_grad
            assert tensor._spec == original[name]._spec


def test_three_dimensional_meshes(tmp_path):
    whole = torch.arange(11.0 * 6).reshape(11, 6)
    layouts = {
        "a": (Replicate(), Shard(0), Shard(1)),
        "b": (Shard(0), Shard(0), Shard(0)),
        "c": (Shard(1), _StridedShard(0, split_factor=3), Replicate()),
    }

    def build(empty=False):
        mesh = init_device_mesh("cpu", (2, 2, 2))
        out = {}
        for name, placements in layouts.items():
            local = dtensor_cases.cut(whole, (2, 2, 2), mesh.get_coordinate(), placements)
            local = torch.zeros_like(local) if empty else local
            out[name] = on_mesh(local, mesh, placements, whole.shape)
        return out

    states = on_ranks(8, build)
    save(states, tmp_path)
    for name in layouts:
        assert torch.equal(shardkeep.open(tmp_path)[name].torch(), whole)
    targets = on_ranks(8, lambda: build(empty=True))
    load(targets, tmp_path)
    for target, state in zip(targets, states, strict=True):
        for name in layouts:
            assert torch.equal(target[name]._local_tensor, state[name]._local_tensor)


@pytest.mark.parametrize(
    ("rows", "mesh_shape"), [(16, (2, 2)), (7, (3, 2)), (9, (4, 2)), (3, (2, 4)), (50, (4, 3))]
)
def test_fully_shard_over_tensor_parallel(tmp_path, rows, mesh_shape):
    """Uneven ones too: there torch's own chunk list names rows that the rank does not hold."""
    world = mesh_shape[0] * mesh_shape[1]
    states = on_ranks(world, lambda: {"w": dtensor_cases.build_fsdp_tp(rows, 3, mesh_shape)})
    assert any("Strided" in type(p).__name__ for p in states[0]["w"].placements)
    save(states, tmp_path)
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    assert torch.equal(shardkeep.open(tmp_path)["w"].torch(), whole)
    targets = on_ranks(
        world, lambda: {"w": dtensor_cases.build_fsdp_tp(rows, 3, mesh_shape, empty=True)}
    )
    load(targets, tmp_path)
    for target, state in zip(targets, states, strict=True):
        assert torch.equal(target["w"]._local_tensor, state["w"]._local_tensor)


def test_plain_and_distributed_tensors_load_each_other(tmp_path):
    whole = torch.arange(21.0).reshape(7, 3)
    shardkeep.save({"x": whole}, tmp_path / "plain", no_dist=True)

    def build():
        mesh = init_device_mesh("cpu", (2,))
        return {"x": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)], src_data_rank=None)}

    states = on_ranks(2, build)
    load(states, tmp_path / "plain")
    save(states, tmp_path / "spread")
    target = {"x": torch.zeros(7, 3)}
    shardkeep.load(target, tmp_path / "spread", no_dist=True)
    assert torch.equal(target["x"], whole)


# --- torch is the judge -------------------------------------------------------------------------

TWICE = _StridedShard(0, split_factor=2)
GATHERED = [
    ((3, 2), (7, 2), (TWICE, Shard(0))),
    ((4, 2), (9,), (TWICE, Shard(0))),
    ((2, 3), (13, 2), (Shard(0), Shard(0))),
    (
        (2, 2, 2),
        (11,),
        (TWICE, TWICE, Shard(0)),
    ),
    ((2, 2, 2), (10, 3), (_StridedShard(0, split_factor=4), Shard(0), Shard(0))),
    ((2, 3), (7, 5), (_StridedShard(1, split_factor=3), Shard(1))),
    ((2, 2), (6, 4), (Replicate(), Shard(1))),
]


@pytest.mark.parametrize(("mesh_shape", "shape", "placements"), GATHERED, ids=str)
def test_boxes_are_what_torch_redistributes_to(mesh_shape, shape, placements):
    """All ranks in one process, with working collectives: torch spreads, and gathers again."""
    from torch.distributed._local_tensor import LocalTensorMode

    world = int(np.prod(mesh_shape))
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    with as_rank(0, world), LocalTensorMode(world):
        mesh = init_device_mesh("cpu", mesh_shape)
        spread = distribute_tensor(whole, mesh, [Replicate()] * len(mesh_shape))
        spread = spread.redistribute(mesh, placements)
        locals_ = {rank: t.clone() for rank, t in spread._local_tensor._local_tensors.items()}
        for gathered in spread.full_tensor()._local_tensors.values():
            assert torch.equal(gathered, whole)
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", mesh_shape)
            local = on_mesh(locals_[rank], mesh, placements, shape)
            for held_box, source in held(local)[1]:
                box = tuple(
                    slice(o, o + s) for o, s in zip(held_box.offsets, held_box.sizes, strict=True)
                )
                expected = whole[box].contiguous().numpy().tobytes()
                assert content(source, held_box.sizes, "int64") == expected


def test_shards_made_in_an_unusual_order(tmp_path):
    """Not visible in `placements`: only the private spec tells."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    whole = torch.arange(7.0)

    def build():
        mesh = init_device_mesh("cpu", (2, 2))
        placements = (Shard(0), Shard(0))
        local = dtensor_cases.cut(whole, (2, 2), mesh.get_coordinate(), placements, (1, 0))
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        spec = DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=order)
        return {"x": DTensor(local, spec, requires_grad=False)}

    save(on_ranks(4, build), tmp_path)
    assert torch.equal(shardkeep.open(tmp_path)["x"].torch(), whole)


# --- replicas, ties, properties -----------------------------------------------------------------


def test_replicas_are_declared_and_written_once(tmp_path):
    def build():
        mesh = init_device_mesh("cpu", (2, 2))
        return {"x": on_mesh(torch.ones(2, 3), mesh, [Replicate(), Shard(0)])}

    states = on_ranks(4, build)
    found = [held(state["x"])[0].replicas for state in states]
    assert [ranks for _, *ranks in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert found[0] == found[2] != found[1] == found[3]
    assert save(states, tmp_path)[0].nbytes == 4 * 3 * 4


def test_one_name_on_two_meshes_is_refused_with_ranks(tmp_path):
    """Two pipeline stages, each with its own mesh, that call different tensors by one name."""

    def build():
        mesh = DeviceMesh("cpu", [0, 1] if dist.get_rank() < 2 else [2, 3])
        return {"w": on_mesh(torch.full((2, 3), float(dist.get_rank())), mesh, [Shard(0)])}

    with pytest.raises(PlanError, match="w offsets") as caught:
        save(on_ranks(4, build), tmp_path)
    assert "ranks 0, 2" in str(caught.value)
    assert "ranks 1, 3" in str(caught.value)


def test_one_name_on_two_meshes_may_be_one_tensor(tmp_path):
    """What FSDP has cut and tensor parallelism has not: each of its ranks has a mesh."""

    def build():
        mesh = DeviceMesh("cpu", [0, 2] if dist.get_rank() % 2 == 0 else [1, 3])
        return {"w": on_mesh(torch.full((2, 3), float(dist.get_rank() // 2)), mesh, [Shard(0)])}

    assert save(on_ranks(4, build), tmp_path)[0].nbytes == 4 * 3 * 4
    with shardkeep.open(tmp_path) as saved:
        assert saved["w"][:, 0].tolist() == [0, 0, 1, 1]


def test_one_name_on_two_meshes_is_compared_in_full(tmp_path):
    """Large tables of two stages that differ in a row that no sample sees; also in later saves."""

    def build(row):
        table = torch.zeros(1 << 12, 128)
        table[row] = 1
        mesh = DeviceMesh("cpu", [dist.get_rank()])
        return {"w": on_mesh(table, mesh, [Shard(0)])}

    same = on_ranks(2, lambda: build(700))
    save(same, tmp_path / "same")
    differs = on_ranks(2, lambda: build(700 + dist.get_rank()))
    with pytest.raises(PlanError, match=r"w offsets .* on ranks 0, 1"):
        save(differs, tmp_path / "new")
    save(differs, tmp_path / "off", check_replicas="off")

    def work(ranks):
        state = same[ranks.rank]
        shardkeep.save(state, tmp_path / "first", process_group=ranks)
        state["w"]._local_tensor[900 + ranks.rank] = 1
        with pytest.raises(PlanError, match=r"w offsets .* on ranks 0, 1"):
            shardkeep.save(state, tmp_path / "again", process_group=ranks)

    ThreadRanks(2).run(work)


def test_a_plain_tensor_beside_a_distributed_one_is_compared(tmp_path):
    def build(value):
        if dist.get_rank() == 0:
            return {"w": torch.ones(3)}
        return {"w": on_mesh(torch.full((3,), value), DeviceMesh("cpu", [0, 1]), [Replicate()])}

    save(on_ranks(2, lambda: build(1.0)), tmp_path / "same")
    with pytest.raises(PlanError, match="ranks 0, 1"):
        save(on_ranks(2, lambda: build(2.0)), tmp_path / "other")


def test_ranks_outside_the_mesh_hold_nothing(tmp_path):
    def build(empty=False):
        mesh = DeviceMesh("cpu", [1, 2])
        if dist.get_rank() == 0:
            local = torch.zeros(0)
        else:
            local = torch.arange(3.0) + 3 * (dist.get_rank() - 1)
        return {"x": on_mesh(torch.zeros_like(local) if empty else local, mesh, [Shard(0)], (6,))}

    save(on_ranks(3, build), tmp_path)
    assert shardkeep.open(tmp_path)["x"].torch().tolist() == [0, 1, 2, 3, 4, 5]
    targets = on_ranks(3, lambda: build(empty=True))
    load(targets, tmp_path)
    assert [t["x"]._local_tensor.tolist() for t in targets] == [[], [0, 1, 2], [3, 4, 5]]


def test_ties_hold_where_some_ranks_hold_nothing(tmp_path):
    def build():
        mesh = init_device_mesh("cpu", (4,))
        mine = torch.ones(1 if dist.get_rank() < 3 else 0, 5)
        tensor = on_mesh(mine, mesh, [Shard(0)], (3, 5))
        return {"a": tensor, "b": tensor.detach(), "c": on_mesh(mine + 1, mesh, [Shard(0)], (3, 5))}

    result = save(on_ranks(4, build), tmp_path)[0]
    assert result.nbytes == 2 * 3 * 5 * 4
    out = shardkeep.open(tmp_path).state_dict(as_="torch")
    assert out["a"] is out["b"]
    assert out["c"] is not out["a"]


def test_tied_targets_with_different_contents_are_refused(tmp_path):
    shardkeep.save({"a": torch.ones(4), "b": torch.zeros(4)}, tmp_path, no_dist=True)

    def build():
        mesh = init_device_mesh("cpu", (2,))
        tensor = on_mesh(torch.zeros(2), mesh, [_StridedShard(0, split_factor=2)], (4,))
        return {"a": tensor, "b": tensor.detach()}

    with pytest.raises(MismatchError, match="shares memory"):
        load(on_ranks(2, build), tmp_path)


LAYOUTS = {
    "rows": (Shard(0), (2, 3), (4, 3)),
    "columns": (Shard(1), (4, 3), (4, 6)),
    "replicas": (Replicate(), (4, 3), (4, 3)),
    "several boxes": (_StridedShard(0, split_factor=2), (4, 3), (8, 3)),
}


def alike(count, apart, layout="rows"):
    """DTensors of one layout on two ranks, whose elements lie `apart` from tensor to tensor."""
    mesh = init_device_mesh("cpu", (2,))
    placement, here, whole = LAYOUTS[layout]
    first = 0 if layout == "replicas" else 50 * mesh.get_rank()
    local = torch.arange(float(np.prod(here))).reshape(here) + first
    return {f"w{n}": on_mesh(local + n * apart, mesh, [placement], whole) for n in range(count)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_of_many_alike_gets_its_own(tmp_path, layout):
    states = on_ranks(2, lambda: alike(4, 100, layout))
    save(states, tmp_path)
    targets = on_ranks(2, lambda: alike(4, 0, layout))
    load(targets, tmp_path)
    for state, target in zip(states, targets, strict=True):
        for name, tensor in state.items():
            assert torch.equal(target[name]._local_tensor, tensor._local_tensor)


@pytest.mark.parametrize("at", [0, 3])
def test_one_of_many_alike_cannot_be_filled(tmp_path, at):
    save(on_ranks(2, lambda: alike(4, 100)), tmp_path)
    targets = on_ranks(2, lambda: alike(4, 0))
    targets[1][f"w{at}"]._local_tensor.untyped_storage().resize_(8)
    with pytest.raises(UnsupportedValueError, match=f"w{at}: the tensor needs 24 bytes"):
        load(targets, tmp_path)
    targets = on_ranks(2, lambda: alike(4, 0))
    lazy = targets[1][f"w{at}"]
    lazy._local_tensor = torch._neg_view(lazy._local_tensor)
    with pytest.raises(UnsupportedValueError, match=f"w{at}: the target is a lazy"):
        load(targets, tmp_path)


def test_results_on_their_way_are_waited_for_one_by_one(tmp_path):
    """Local tensors that look alike, each behind a collective of its own."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    save(on_ranks(2, lambda: alike(4, 100)), tmp_path)
    targets, pending = on_ranks(2, lambda: alike(4, 0)), []
    for target in targets:
        for tensor in target.values():
            tensor._local_tensor = AsyncCollectiveTensor(tensor._local_tensor)
            pending.append(tensor._local_tensor)
    load(targets, tmp_path)
    assert all(local.completed for local in pending)
    assert targets[1]["w3"]._local_tensor.elem.tolist() == [[350, 351, 352], [353, 354, 355]]


def test_properties():
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        weight = torch.nn.Parameter(on_mesh(torch.ones(3, 2).bfloat16(), mesh, [Shard(1)]))
        found, _ = held(weight)
        assert found.shape == (3, 4)
        assert found.dtype is lookup("bfloat16")
        assert found.properties.requires_grad
        assert not held(weight.detach())[0].properties.requires_grad
        assert adapter_of(weight).parts(weight) is None


def test_strided_memory_and_devices(tmp_path):
    """A local tensor may be any view; an abstract one keeps the order of its dimensions."""

    def build(meta=False):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.arange(12.0).reshape(3, 4).t() + 100 * dist.get_rank()
        local = local.to("meta") if meta else local
        return {"x": on_mesh(local, mesh, [_StridedShard(0, split_factor=2)], (8, 3))}

    states = on_ranks(2, build)
    save(states, tmp_path)
    targets = on_ranks(2, lambda: build(meta=True))
    results = load(targets, tmp_path, device="cpu")
    for state, target, result in zip(states, targets, results, strict=True):
        found = result.state_dict["x"]
        assert found is target["x"]
        assert torch.equal(found._local_tensor, state["x"]._local_tensor)
        assert found._local_tensor.stride() == (1, 4)


def test_lazy_conjugates_are_resolved(tmp_path):
    base = torch.complex(torch.arange(6.0), torch.ones(6)).reshape(3, 2)

    def build():
        mesh = init_device_mesh("cpu", (2,))
        return {"x": on_mesh(base.conj(), mesh, [_StridedShard(0, split_factor=3)], (6, 2))}

    save(on_ranks(2, build), tmp_path)
    found = shardkeep.open(tmp_path)["x"].torch()
    assert torch.equal(found[::2], base.conj())
    assert torch.equal(found[1::2], base.conj())


def test_a_pending_local_tensor_is_awaited():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        inner = torch.arange(4.0)
        pending = AsyncCollectiveTensor(inner)
        tensor = on_mesh(torch.zeros(4), mesh, [Shard(0)])
        tensor._local_tensor = pending
        ((_, source),) = held(tensor)[1]
        assert content(source, (4,), "float32") == inner.numpy().tobytes()
        assert pending.completed


def test_a_pending_tensor_is_awaited(tmp_path):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    shardkeep.save({"x": AsyncCollectiveTensor(torch.arange(3.0))}, tmp_path)
    assert sorted(shardkeep.open(tmp_path)) == ["x"]
    inner = torch.zeros(3)
    target = AsyncCollectiveTensor(inner)
    state = {"x": target}
    shardkeep.load(state, tmp_path)
    assert state["x"] is target
    assert inner.tolist() == [0, 1, 2]


# --- what is refused ----------------------------------------------------------------------------


def test_partial_is_refused_by_path(tmp_path):
    def build():
        return {"deep": {"x": on_mesh(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])}}

    with pytest.raises(UnsupportedValueError, match=r"deep\.x.*not yet reduced"):
        save(on_ranks(2, build), tmp_path)
    shardkeep.save({"deep": {"x": torch.ones(3)}}, tmp_path, no_dist=True)
    with pytest.raises(UnsupportedValueError, match=r"deep\.x.*not yet reduced"):
        load(on_ranks(2, build), tmp_path)


def test_shards_of_unusual_sizes_are_refused(tmp_path):
    """Torch would file them under the wrong rows."""

    def build():
        mesh = init_device_mesh("cpu", (2,))
        return {"x": on_mesh(torch.ones(1 + 4 * dist.get_rank()), mesh, [Shard(0)], (6,))}

    with pytest.raises(UnsupportedValueError, match="shape"):
        save(on_ranks(2, build), tmp_path)


def test_uneven_strided_shards_made_by_hand_are_refused(tmp_path):
    """`distribute_tensor` without communication cuts them so that torch cannot gather them."""

    def build():
        mesh = init_device_mesh("cpu", (3, 2))
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        return {"x": distribute_tensor(torch.arange(7.0), mesh, placements, src_data_rank=None)}

    with pytest.raises(UnsupportedValueError, match=r"\(2, 0\)"):
        save(on_ranks(6, build), tmp_path)


class Scaled(torch.Tensor):
    """Numbers, and a factor for each column of them."""

    shardkeep_alike = ("numbers",)

    @staticmethod
    def __new__(cls, numbers, factors):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)

    def __init__(self, numbers, factors):
        self.numbers, self.factors = numbers, factors

    def __tensor_flatten__(self):
        return ["numbers", "factors"], {"shape": tuple(self.shape)}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def scaled(world, empty=False, dim=0):
    """On a rank: its part of 4 times 4 numbers, and factors of its own."""
    rank = dist.get_rank()
    numbers = torch.arange(16.0).reshape(4, 4).chunk(world, dim)[rank].clone()
    factors = torch.arange(2.0) + 10 * rank
    if empty:
        numbers, factors = torch.zeros_like(numbers), torch.zeros_like(factors)
    tensor = on_mesh(torch.zeros_like(numbers), init_device_mesh("cpu", (world,)), [Shard(dim)])
    tensor._local_tensor = Scaled(numbers, factors)
    return {"x": tensor}


def test_local_tensors_that_are_made_of_others(tmp_path):
    """What is declared to have their elements is spread as they are; all else is the rank's own."""
    save(on_ranks(2, lambda: scaled(2)), tmp_path)
    with shardkeep.open(tmp_path) as saved:
        assert saved["x.numbers"][...].tolist() == torch.arange(16.0).reshape(4, 4).tolist()
        assert saved["x.factors"][...].tolist() == [[0, 1], [10, 11]]
    targets = on_ranks(2, lambda: scaled(2, empty=True))
    load(targets, tmp_path)
    for target, expected in zip(targets, on_ranks(2, lambda: scaled(2)), strict=True):
        found, whole = target["x"]._local_tensor, expected["x"]._local_tensor
        assert torch.equal(found.numbers, whole.numbers)
        assert torch.equal(found.factors, whole.factors)


@pytest.mark.parametrize("other", [{"world": 4}, {"world": 2, "dim": 1}])
def test_what_is_a_ranks_own_fits_only_the_same_layout(tmp_path, other):
    save(on_ranks(2, lambda: scaled(2)), tmp_path)
    with pytest.raises(MismatchError, match=r"x\.(factors|__layout__)"):
        load(on_ranks(other["world"], lambda: scaled(**other, empty=True)), tmp_path)


class Turned(Scaled):
    """Keeps its numbers transposed, which nothing but itself knows; square, they look the same."""

    shardkeep_alike = ()

    @staticmethod
    def __new__(cls, numbers, factors):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.T.shape, dtype=numbers.dtype)

    def __tensor_flatten__(self):
        return ["numbers", "factors"], None


def turned(mesh_shape, placements, size=4, empty=False):
    """On a rank: its block of `size` times `size` numbers."""
    mesh = init_device_mesh("cpu", mesh_shape)
    block = torch.arange(1.0, size * size + 1).reshape(size, size)
    for extent, at, placement in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
        if placement.is_shard():
            block = block.tensor_split(extent, placement.dim)[at]
    shape = (size, size)
    tensor = on_mesh(torch.zeros(block.shape), mesh, placements, shape)
    inner = block.T.contiguous()
    tensor._local_tensor = Turned(torch.zeros_like(inner) if empty else inner, torch.ones(2))
    return {"x": tensor}


BLOCKS = ((2, 2), [Shard(0), Shard(1)])


def test_a_shape_does_not_tell_where_elements_belong(tmp_path):
    save(on_ranks(4, lambda: turned(*BLOCKS)), tmp_path)
    targets = on_ranks(4, lambda: turned(*BLOCKS, empty=True))
    load(targets, tmp_path)
    for target, expected in zip(targets, on_ranks(4, lambda: turned(*BLOCKS)), strict=True):
        found, whole = target["x"]._local_tensor, expected["x"]._local_tensor
        assert torch.equal(found.numbers, whole.numbers)
    whole = {"x": Turned(torch.zeros(4, 4), torch.zeros(2))}
    for others in ([whole], on_ranks(2, lambda: turned((2,), [Shard(0)], empty=True))):
        with pytest.raises(MismatchError, match=r"x\.(numbers|__layout__)"):
            load(others, tmp_path)


def test_what_is_not_cut_is_whole_whatever_it_is_made_of(tmp_path):
    save(on_ranks(2, lambda: turned((2,), [Replicate()])), tmp_path)
    whole = {"x": Turned(torch.zeros(4, 4), torch.zeros(2))}
    load([whole], tmp_path)
    assert torch.equal(whole["x"].numbers, torch.arange(1.0, 17).reshape(4, 4).T)


def test_unequal_parts_of_what_nobody_knows_are_refused(tmp_path):
    with pytest.raises(UnsupportedValueError, match=r"unequal parts.*shardkeep_alike"):
        save(on_ranks(2, lambda: turned((2,), [Shard(0)], size=5)), tmp_path)


class Opaque(torch.Tensor):
    """A subclass that does not say what it is made of."""


def test_opaque_and_abstract_local_tensors_are_refused(tmp_path):
    def opaque():
        mesh = init_device_mesh("cpu", (2,))
        tensor = on_mesh(torch.ones(2), mesh, [Shard(0)])
        tensor._local_tensor = torch.ones(2).as_subclass(Opaque)
        return {"x": tensor}

    with pytest.raises(UnsupportedValueError, match="Opaque"):
        save(on_ranks(2, opaque), tmp_path)

    def abstract():
        return {
            "x": on_mesh(torch.ones(2, device="meta"), init_device_mesh("cpu", (2,)), [Shard(0)])
        }

    with pytest.raises(UnsupportedValueError, match="meta"):
        save(on_ranks(2, abstract), tmp_path)


def test_a_mismatch_leaves_targets_alone(tmp_path):
    save(on_ranks(2, lambda: dtensor_cases.state(2)), tmp_path)

    def build():
        mesh = init_device_mesh("cpu", (2,))
        return {
            "even": on_mesh(torch.full((4, 12), 7.0), mesh, [Shard(0)]),
            "uneven": on_mesh(torch.full((4, 12), 7.0), mesh, [Shard(0)]),
        }

    targets = on_ranks(2, build)
    with pytest.raises(MismatchError, match=r"uneven: stored shape \(7, 5\), target"):
        load(targets, tmp_path, strict=False)
    assert all((t == 7).all() for target in targets for t in (target["even"]._local_tensor,))


# --- ShardedTensor ------------------------------------------------------------------------------


def sharded_tensor(whole, shards, *, empty=False):
    """`shards` are (offsets, sizes, rank); this rank's are cut out of `whole`."""
    rank = dist.get_rank()
    listed = [
        ShardMetadata(list(offsets), list(sizes), f"rank:{owner}/cpu")
        for offsets, sizes, owner in shards
    ]
    local = []
    for shard, (offsets, sizes, owner) in zip(listed, shards, strict=True):
        if owner == rank:
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            part = torch.zeros(sizes) if empty else whole[box].clone()
            local.append(ShardOfTensor(part, shard))
    metadata = ShardedTensorMetadata(listed, whole.shape, TensorProperties(dtype=whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_sharded_tensors(tmp_path):
    whole = torch.arange(35.0).reshape(5, 7)
    first = [((0, 0), (5, 2), 0), ((0, 2), (3, 5), 1), ((3, 2), (2, 5), 0)]
    second = [((0, 0), (1, 7), 2), ((1, 0), (4, 7), 0)]  # rank 1 holds nothing
    save(on_ranks(2, lambda: {"x": sharded_tensor(whole, first)}), tmp_path)
    assert torch.equal(shardkeep.open(tmp_path)["x"].torch(), whole)
    targets = on_ranks(3, lambda: {"x": sharded_tensor(whole, second, empty=True)})
    originals = [target["x"] for target in targets]
    load(targets, tmp_path)
    for target, original in zip(targets, originals, strict=True):
        assert target["x"] is original
    assert torch.equal(targets[2]["x"].local_shards()[0].tensor, whole[:1])
    assert torch.equal(targets[0]["x"].local_shards()[0].tensor, whole[1:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_sharded_tensors_are_saved_lazily(tmp_path):
    whole = torch.arange(24.0).reshape(6, 4)
    shards = [((0, 0), (6, 4), 0)]
    (state,) = on_ranks(1, lambda: {"x": sharded_tensor(whole, shards)})
    owned = state["x"].local_shards()[0].tensor
    optimizer = torch.optim.SGD([torch.nn.Parameter(owned, requires_grad=False)])
    with shardkeep.Checkpointer(no_dist=True) as keeper:
        keeper.async_save(state, tmp_path, snapshot="lazy").result(60)
    assert (shardkeep.open(tmp_path)["x"][...] == whole.numpy()).all()
    assert optimizer.param_groups


# --- imports ------------------------------------------------------------------------------------


def test_plain_tensors_do_not_load_the_distributed_adapter(tmp_path):
    code = f"""
import sys, torch, shardkeep
shardkeep.save({{"a": torch.ones(3)}}, {str(tmp_path)!r})
assert "shardkeep.adapters.torch_dtensors" not in sys.modules
assert "torch.distributed.tensor" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)

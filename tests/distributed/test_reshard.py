"""Saved by real processes, loaded by any other number of them: every sharding, bit by bit.

And what must not be merged: state that is each rank's own, or of another part of the model, under a
name that other ranks use too.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardkeep
from shardkeep import MismatchError, PerRank, PlanError, ShardedArray
from shardkeep.testing.processes import PRELOAD, RankServer

SIZES = [1, 2, 3, 4]
ROWS = 11
"""Divided by none of the sizes."""


@pytest.fixture(scope="module")
def processes():
    """A server that has imported what the first DTensor of each process would, for seconds."""
    pytest.importorskip("torch")
    with RankServer((*PRELOAD, "torch._dynamo", "torch.distributed.fsdp")) as server:
        yield server


# --- the state: DTensors of `dtensor_cases`, plain tensors, ShardedArrays, values, PerRank


def whole(columns=6):
    """Numbers with all kinds of bits: not a number, and a negative zero."""
    made = np.random.default_rng(columns).standard_normal((ROWS, columns))
    made[0, 0], made[-1, -1] = np.nan, -0.0
    return made


def plain(empty):
    import torch

    made = {
        "half": torch.from_numpy(whole().astype(np.float32)).to(torch.bfloat16),
        "transposed": torch.from_numpy(whole()).t(),
        "count": torch.tensor(12345678901),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.zeros(0, 3),
        "array": np.arange(-5, 5, dtype=np.int16),
    }
    if not empty:
        return made
    return {
        name: np.zeros_like(value) if name == "array" else torch.zeros_like(value)
        for name, value in made.items()
    }


def rows(rank, world):
    """Which rows a rank holds; the last may hold fewer."""
    each = -(-ROWS // world)
    return min(rank * each, ROWS), min((rank + 1) * each, ROWS)


def sharded(rank, world, empty):
    def part(value):
        return np.zeros_like(value) if empty else value.copy()

    low, high = rows(rank, world)
    dealt = [(part(whole()[row : row + 1]), (row, 0)) for row in range(rank, ROWS, world)]
    spec = shardkeep.MeshShardingSpec((world,), (shardkeep.Replicate(),))
    return {
        "rows": ShardedArray.from_local(part(whole()[low:high]), (low, 0), (ROWS, 6)),
        "dealt": ShardedArray.from_shards(dealt, (ROWS, 6)),
        "everywhere": ShardedArray.from_mesh(part(whole(3)), spec, (rank,), (ROWS, 3)),
    }


def own(rank, empty):
    """Of other shapes on other ranks."""
    made = {"seed": bytes([rank]), "sum": np.full(rank + 2, rank + 0.5)}
    return PerRank({"seed": b"", "sum": np.zeros(rank + 2)} if empty else made)


def state(rank, world, *, empty=False):
    import dtensor_cases

    return {
        "dtensors": dtensor_cases.state(world, empty=empty),
        "plain": plain(empty),
        "sharded": sharded(rank, world, empty),
        "own": own(rank, empty),
        "step": -1 if empty else 7,
        "betas": (0.0, {3: ""}) if empty else (0.9, {3: "x"}),
    }


def bits(value):
    """What is compared: shape, dtype and bytes."""
    import torch

    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return value.shape, value.dtype, bytes(flat.view(torch.uint8).numpy())
    return value.shape, value.dtype, value.tobytes()


def check(got, rank, world, *, same_size):
    import dtensor_cases

    dtensor_cases.check(got["dtensors"], world)
    for name, value in plain(empty=False).items():
        assert bits(got["plain"][name]) == bits(value), name
    for name, array in sharded(rank, world, empty=False).items():
        found = got["sharded"][name].local_shards
        assert [bits(shard.array) for shard in found] == [
            bits(shard.array) for shard in array.local_shards
        ], name
    assert got["step"] == 7
    assert got["betas"] == (0.9, {3: "x"})
    if same_size:
        expected = own(rank, empty=False).value
        assert got["own"].value["seed"] == expected["seed"]
        assert bits(got["own"].value["sum"]) == bits(expected["sum"])


# --- any number to any number


def save_one(rank, where, world):
    result = shardkeep.save(state(rank, world), where)
    return result.digest, result.save_id


def check_stored(rank, where):
    """What lies in the files, read as whole arrays by one process with no group."""
    import dtensor_cases

    with shardkeep.open(where) as ckpt:
        for case in dtensor_cases.cases(1):
            stored = ckpt[f"dtensors.{case.name}"].torch()
            assert bits(stored) == bits(case.whole), case.name
        for name, columns in (("rows", 6), ("dealt", 6), ("everywhere", 3)):
            assert bits(ckpt[f"sharded.{name}"][...]) == bits(whole(columns)), name


@pytest.fixture(scope="module")
def saved(processes, tmp_path_factory):
    """Where the state is that so many processes have saved; each saves once."""
    done = {}

    def get(world):
        if world not in done:
            where = str(tmp_path_factory.mktemp("saved") / str(world))
            results = processes.run(world, save_one, where, world)
            assert len(set(results)) == 1
            done[world] = where
        return done[world]

    return get


def load_one(rank, where, world, same_size):
    target = state(rank, world, empty=True)
    if not same_size:
        del target["own"]
    result = shardkeep.load(target, where)
    assert not result.missing
    check(target, rank, world, same_size=same_size)


@pytest.mark.parametrize("before", SIZES)
def test_what_is_stored_is_the_whole(processes, saved, before):
    assert shardkeep.verify(saved(before)).ok
    processes.run(1, check_stored, saved(before), init=False)


@pytest.mark.parametrize("after", SIZES)
@pytest.mark.parametrize("before", SIZES)
def test_from_any_number_to_any(processes, saved, before, after):
    processes.run(after, load_one, saved(before), after, before == after)


def load_on_meta(rank, where, world):
    """DTensors of which only the shape is known are allocated by the load."""
    import dtensor_cases

    target = {"dtensors": dtensor_cases.state(world, meta=True)}
    result = shardkeep.load(target, where)
    dtensor_cases.check(result.state_dict["dtensors"], world)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4)])
def test_targets_on_the_meta_device(processes, saved, before, after):
    processes.run(after, load_on_meta, saved(before), after)


def load_own(rank, where):
    return caught(lambda: shardkeep.load({"own": own(rank, empty=True)}, where))


def test_what_is_per_rank_stays_with_its_number_of_ranks(processes, saved):
    texts = set()
    for error in processes.run(2, load_own, saved(3)):
        assert isinstance(error, MismatchError)
        assert list(error.mismatched) == ["own"]
        texts.add(str(error))
    assert len(texts) == 1


# --- FSDP2 over tensor parallelism, as torch itself makes it


def save_fsdp(rank, where):
    import dtensor_cases

    made = {
        "even": dtensor_cases.build_fsdp_tp(16, 4, (2, 2)),
        "uneven": dtensor_cases.build_fsdp_tp(7, 3, (2, 2)),
    }
    shardkeep.save(made, where)


def load_fsdp(rank, where, mesh_shape):
    import dtensor_cases

    made, targets = (
        {
            "even": dtensor_cases.build_fsdp_tp(16, 4, mesh_shape, empty=empty),
            "uneven": dtensor_cases.build_fsdp_tp(7, 3, mesh_shape, empty=empty),
        }
        for empty in (False, True)
    )
    shardkeep.load(targets, where)
    for name, expected in made.items():
        assert bits(targets[name]._local_tensor) == bits(expected._local_tensor), name


def test_fsdp_over_tensor_parallelism_from_four_to_two(processes, tmp_path):
    where = str(tmp_path / "c")
    processes.run(4, save_fsdp, where)
    with shardkeep.open(where) as ckpt:
        assert np.array_equal(ckpt["even"][...], np.arange(64.0).reshape(16, 4))
        assert np.array_equal(ckpt["uneven"][...], np.arange(21.0).reshape(7, 3))
    for mesh_shape in ((2, 1), (1, 2)):
        processes.run(2, load_fsdp, where, mesh_shape)


# --- one name, and different things under it


def caught(call):
    """The error of a call that must fail."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def refused(errors, tmp_path, *parts):
    """The same error on every rank, which says all this; nothing was written."""
    for error in errors:
        assert type(error) is PlanError
        assert str(error) == str(errors[0])
        assert error.failures == errors[0].failures != {}
    for part in parts:
        assert part in str(errors[0])
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.json"))
    return str(errors[0])


def batch_norm(rank):
    """As DDP leaves it: equal weights, and statistics of what each rank has seen."""
    import torch

    norm = torch.nn.BatchNorm1d(5)
    norm(torch.arange(20.0).reshape(4, 5) * (rank + 1))
    return norm.state_dict()


STATISTICS = ("running_mean", "running_var")


def split_norm(rank):
    made = batch_norm(rank)
    statistics = {name: made.pop(name) for name in STATISTICS}
    return {"bn": dict(made), "statistics": PerRank(statistics)}


def save_norms(rank, root):
    import torch

    error = caught(lambda: shardkeep.save({"bn": dict(batch_norm(rank))}, f"{root}/refused"))
    shardkeep.save(split_norm(rank), f"{root}/own")
    target = split_norm(7)
    shardkeep.load(target, f"{root}/own")
    expected = split_norm(rank)
    for name in STATISTICS:
        assert torch.equal(target["statistics"].value[name], expected["statistics"].value[name])
    assert all(torch.equal(target["bn"][name], value) for name, value in expected["bn"].items())
    return error


def test_statistics_of_batch_norm_under_ddp(processes, tmp_path):
    text = refused(
        processes.run(4, save_norms, str(tmp_path)),
        tmp_path / "refused",
        *("bn.running_mean", "bn.running_var", "ranks 0, 1, 2, 3", "PerRank"),
    )
    assert "bn.weight" not in text
    assert "bn.num_batches_tracked" not in text


def optimizer(tensor, step):
    return {"state": {0: {"exp_avg": tensor, "step": step}}, "param_groups": [{"params": [0]}]}


def by_stage(rank, how, empty):
    """Two pipeline stages of two ranks; each counts its parameters from 0."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    stage = rank // 2
    value = torch.full((4, 3), 0.0 if empty else stage + 1.0)
    if how == "plain":
        return value
    if how == "shapes":
        return value[: 4 - stage].clone()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    if how == "replicated":
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    local = value.chunk(2)[rank % 2].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def save_stages(rank, root, how):
    stage = rank // 2

    def local(tensor):
        return getattr(tensor, "_local_tensor", tensor)

    made = by_stage(rank, how, False)
    error = caught(lambda: shardkeep.save({"optim": optimizer(made, 5)}, f"{root}/refused"))
    # A name for each stage; what is plain may also be each rank's own.
    named = {"optim": {f"stage{stage}": optimizer(made, 5 + stage)}}
    target = {"optim": {f"stage{stage}": optimizer(by_stage(rank, how, True), 0)}}
    if how in ("plain", "shapes"):
        named["own"] = PerRank(optimizer(made, 5 + stage))
        target["own"] = PerRank(optimizer(by_stage(rank, how, True), 0))
    shardkeep.save(named, f"{root}/named")
    shardkeep.load(target, f"{root}/named", strict=False)
    found = [target["optim"][f"stage{stage}"]]
    if "own" in target:
        found.append(target["own"].value)
    for each in found:
        assert bits(local(each["state"][0]["exp_avg"])) == bits(local(made))
        assert each["state"][0]["step"] == 5 + stage
    return error


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("plain", ("differ between ranks", "ranks 0, 1, 2, 3", "PerRank")),
        ("shapes", ("(4, 3) float32 on rank 0", "(3, 3) float32 on rank 2", "PerRank")),
        ("replicated", ("differ between ranks", "ranks 0, 1, 2, 3", "different names")),
        ("sharded", ("differ between ranks", "ranks 0, 2", "ranks 1, 3")),
    ],
)
def test_optimizers_of_pipeline_stages_with_equal_numbers(processes, tmp_path, how, parts):
    refused(
        processes.run(4, save_stages, str(tmp_path), how),
        tmp_path / "refused",
        *("optim.state.0.exp_avg", *parts),
    )


def experts(rank, first=0):
    """Two experts on each rank, which numbers them from `first`."""
    import torch

    return {
        first + number: {"w": torch.full((3, 2), float(2 * rank + number))} for number in range(2)
    }


def save_experts(rank, root):
    error = caught(lambda: shardkeep.save({"experts": experts(rank)}, f"{root}/refused"))
    # Numbered over all ranks, or each rank's own.
    made = {"experts": experts(rank, 2 * rank), "own": PerRank(experts(rank))}
    shardkeep.save(made, f"{root}/named")
    target = {"experts": experts(9, 2 * rank), "own": PerRank(experts(9))}
    shardkeep.load(target, f"{root}/named", strict=False)
    for number in range(2):
        expected = bits(made["own"].value[number]["w"])
        assert bits(target["experts"][2 * rank + number]["w"]) == expected
        assert bits(target["own"].value[number]["w"]) == expected
    return error


def test_experts_with_equal_names(processes, tmp_path):
    refused(
        processes.run(4, save_experts, str(tmp_path)),
        tmp_path / "refused",
        *("experts.0.w", "experts.1.w", "ranks 0, 1, 2, 3", "PerRank"),
    )
    with shardkeep.open(tmp_path / "named") as ckpt:
        for number in range(8):
            assert (ckpt[f"experts.{number}.w"][...] == number).all()

"""AppState on several ranks: what the matrix of layouts does not have."""

from __future__ import annotations

import pytest

import shardkeep

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import training  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402

from shardkeep.torch import AppState, guard  # noqa: E402


class WithStatistics(nn.Sequential):
    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(model, optimizer, rank):
    numbers = torch.Generator().manual_seed(rank)
    loss = model(torch.randn(6, 3, generator=numbers)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def statistics(rank, path):
    """Each rank has seen other data; DDP goes on with what the first has seen."""
    model = nn.parallel.DistributedDataParallel(WithStatistics())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, rank)
    seen = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(seen, model.module[1].running_mean)
    assert not torch.equal(*seen)
    with pytest.raises(shardkeep.PlanError, match=r"AppState takes what the first rank has"):
        shardkeep.save({"model": model.module.state_dict()}, path / "raw")
    shardkeep.save(AppState(model, optimizer), path / "a")
    expected = step(model, optimizer, rank)

    again = nn.parallel.DistributedDataParallel(WithStatistics(7))
    into = torch.optim.SGD(again.parameters(), lr=0.1)
    shardkeep.load(AppState(again, into), path / "a")
    assert torch.equal(again.module[1].running_mean, seen[0])
    assert step(again, into, rank) == expected
    # Not under DDP, but data parallel all the same; and with an average, which differs as well.
    with pytest.raises(shardkeep.PlanError, match="buffers_from"):
        shardkeep.save(AppState(model.module), path / "b")
    average = AveragedModel(model.module)
    app = AppState(model.module, ema=average, buffers_from=dist.group.WORLD)
    shardkeep.save(app, path / "b")
    shardkeep.load(app, path / "b")
    shardkeep.save(AppState(model, ema=AveragedModel(model.module)), path / "c")
    # Alone, a rank saves what it has.
    shardkeep.save(AppState(model), path / f"own-{rank}", no_dist=True)
    with shardkeep.open(path / f"own-{rank}") as saved:
        assert "model.1.running_mean" in saved


def test_statistics_under_ddp(processes, tmp_path):
    processes.run(2, statistics, tmp_path)


def statistics_of_each(rank, path):
    """Buffers whose names no other rank saves are saved by the rank that has them."""
    torch.manual_seed(rank)
    model = WithStatistics(rank)
    model(torch.randn(6, 3) + rank)
    own = model[1].running_mean.clone()

    def stage(module):
        return AppState(module, rename=lambda n: f"{rank}.{n}", buffers_from=dist.group.WORLD)

    wrapped = nn.parallel.DistributedDataParallel(model)
    model[1].running_mean.copy_(own)  # DDP has made them equal
    for number, made in enumerate((stage, lambda module: shardkeep.PerRank(AppState(module)))):
        shardkeep.save({"x": made(wrapped)}, path / str(number))
        shardkeep.save({"x": made(wrapped)}, path / f"{number}-again")
        for saved in (f"{number}", f"{number}-again"):
            into = nn.parallel.DistributedDataParallel(WithStatistics(7))
            shardkeep.load({"x": made(into)}, path / saved)
            assert torch.equal(into.module[1].running_mean, own)
    # Two ranks follow one that saves nothing of the kind: nobody says which of them counts.
    if rank == 0:
        app = AppState(nn.Linear(2, 2), rename=lambda n: f"first.{n}")
    else:
        app = AppState(nn.BatchNorm1d(4), buffers_from=dist.group.WORLD)
        app._modules.modules[0][1].running_mean.fill_(rank)
    with pytest.raises(shardkeep.PlanError, match=r"running_mean offsets .* on ranks 1, 2"):
        shardkeep.save(app, path / "nobody")


def test_statistics_that_no_other_rank_saves(processes, tmp_path):
    processes.run(3, statistics_of_each, tmp_path)


def new_optimizer(rank, layout, path):
    """Saved before the first step: the first step after the load is a first step."""
    job = training.Job(layout)
    shardkeep.save(job.app(), path)
    assert not job.optimizer.state
    expected = [job.step() for _ in range(2)]
    again = training.Job(layout, seed=5)
    again.step()
    shardkeep.load(again.app(), path)
    assert not any(again.optimizer.state.values())
    assert [again.step() for _ in range(2)] == expected


def only_the_model(rank, layout, path):
    """What is not asked for stays: the optimizer's state."""
    job = training.Job(layout)
    job.step()
    shardkeep.save(job.app(), path)
    again = training.Job(layout, seed=5)
    again.step()
    kept = {id(p): training.bits(s["exp_avg"]) for p, s in local_states(again.optimizer)}
    shardkeep.load(again.app(), path, keys=["model.*"])
    assert {id(p): training.bits(s["exp_avg"]) for p, s in local_states(again.optimizer)} == kept
    assert kept


def local_states(optimizer):
    for parameter, kept in optimizer.state.items():
        if kept:
            yield parameter, {k: getattr(v, "_local_tensor", v) for k, v in kept.items()}


@pytest.mark.parametrize("layout", [training.fsdp1, training.fsdp2])
def test_only_the_model_of_a_checkpoint(processes, tmp_path, layout):
    processes.run(2, only_the_model, layout, tmp_path / "a")


@pytest.mark.parametrize("layout", [training.fsdp1, training.fsdp2, training.pp])
def test_saved_before_the_first_step(processes, tmp_path, layout):
    processes.run(2, new_optimizer, layout, tmp_path / "a")


def abstract(rank, path):
    """Made on the meta device, sharded there, an optimizer over it, then loaded."""
    job = training.Job(training.fsdp2)
    job.step()
    shardkeep.save(job.app(), path)
    expected = job.step()
    again = training.Job(training.fsdp2, abstract=True)
    assert all(parameter.is_meta for parameter in again.model.parameters())
    shardkeep.load(again.app(), path)
    assert not any(parameter.is_meta for parameter in again.model.parameters())
    training.check(again.app().state_dict(), path)
    assert again.step() == expected


def test_abstract_model(processes, tmp_path):
    processes.run(2, abstract, tmp_path / "a")


def background(rank, path):
    job = training.Job(training.fsdp2)
    job.step()
    before = {
        name: training.bits(getattr(value, "_local_tensor", value))
        for name, value in training.leaves(job.app().state_dict())
    }
    handle = shardkeep.async_save(job.app(), path, snapshot="lazy")
    guard(job.optimizer, handle)
    job.step()
    handle.result(60)
    again = training.Job(training.fsdp2, seed=5)
    shardkeep.load(again.app(), path)
    for name, value in training.leaves(again.app().state_dict()):
        assert training.bits(getattr(value, "_local_tensor", value)) == before[name], name


def test_background_saves(processes, tmp_path):
    processes.run(2, background, tmp_path / "a")


def by_place(rank, path, world):
    """Stages that number their layers from 0: names come from `rename`."""
    torch.manual_seed(rank)
    each = 4 // world
    stage = nn.Sequential(*(nn.Linear(2, 2) for _ in range(each)))
    optimizer = torch.optim.AdamW(stage.parameters())

    def rename(name):
        layer, rest = name.split(".", 1)
        return f"layers.{rank * each + int(layer)}.{rest}"

    app = AppState(stage, optimizer, rename=rename)
    if world == 2:
        for parameter in stage.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
        with pytest.raises(shardkeep.PlanError, match="different names"):
            shardkeep.save(AppState(stage, optimizer), path / "refused")
        shardkeep.save(app, path / "a")
    else:
        shardkeep.load(app, path / "a")
    training.check(app.state_dict(), path / "a")


def test_stages_that_count_from_zero(processes, tmp_path):
    processes.run(2, by_place, tmp_path, 2)
    processes.run(1, by_place, tmp_path, 1)


def averaged(model):
    """As programs keep it that shard with FSDP2, whose modules cannot be copied."""
    return {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}


def unused(rank, path):
    """What has no gradient on any rank has no state; its neighbours have."""
    job = training.Job(training.fsdp2)
    job.model.blocks["1"].down.bias.requires_grad_(False)
    job.step()
    average = averaged(job.model)
    shardkeep.save(AppState(job.model, job.optimizer, ema=average), path)
    again = training.Job(training.fsdp2, seed=5)
    again.step()
    other = averaged(again.model)
    app = AppState(again.model, again.optimizer, ema=other)
    shardkeep.load(app, path)
    training.check(app.state_dict(), path)
    assert again.model.blocks["1"].down.bias not in again.optimizer.state


def test_unused_parameters_and_an_average(processes, tmp_path):
    processes.run(2, unused, tmp_path / "a")


def one_rank_refuses(rank, path):
    """An error while one rank takes the state back is the same error on all of them."""
    job = training.Job(training.fsdp2)
    job.step()
    shardkeep.save(job.app(), path)
    again = training.Job(training.fsdp2, seed=5)
    if rank == 1:
        group = again.optimizer.param_groups.pop()
        again.optimizer.param_groups[0]["params"] += group["params"]
    with pytest.raises(shardkeep.MismatchError, match=r"one group of the optimizer.*rank 1"):
        shardkeep.load(again.app(), path)


def test_groups_that_do_not_fit_on_one_rank(processes, tmp_path):
    processes.run(2, one_rank_refuses, tmp_path / "a")

"""Optimizer states of torchao: wrapper subclasses, in DTensors where FSDP2 shards."""

from __future__ import annotations

import pytest

import shardkeep
from shardkeep.testing.processes import PRELOAD, RankServer

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from shardkeep.torch import AppState  # noqa: E402

# Importing torchao takes seconds.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processes():
    modules = ("torch._dynamo", "torch.distributed.fsdp", "shardkeep.torch", "torchao.optim")
    with RankServer((*PRELOAD, *modules)) as server:
        yield server


class Job:
    """Two layers: one is quantised on up to 4 ranks, one is too small for it."""

    def __init__(self, kind, seed=0, dtype=torch.float32, tensor_parallel=False):
        import torchao.optim
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 8)).to(dtype)
        self.parts, self.part = 1, 0
        if tensor_parallel:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            parallelize_module(self.model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
        elif dist.is_initialized() and dist.get_world_size() > 1:
            self.parts, self.part = dist.get_world_size(), dist.get_rank()
            fully_shard(self.model)
        self.optimizer = getattr(torchao.optim, kind)(self.model.parameters(), lr=1e-2)
        self.steps = 0

    def step(self):
        numbers = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        rows = torch.randn(8, 128, generator=numbers).chunk(self.parts)[self.part]
        weight = next(self.model.parameters())
        loss = self.model(rows.to(weight.dtype)).square().mean()
        loss.backward()
        with torch.compiler.set_stance("force_eager"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().float().clone()
        if self.parts > 1:
            dist.all_reduce(total)
        return total.item() / self.parts


def inner(value):
    """All plain tensors that a state is made of."""
    value = getattr(value, "_local_tensor", value)
    if hasattr(value, "__tensor_flatten__"):
        return [part for name in value.__tensor_flatten__()[0] for part in inner(getattr(value, name))]
    return [value.detach()]


def held(job):
    found = [inner(parameter) for parameter in job.model.parameters()]
    for kept in job.optimizer.state.values():
        found += [inner(kept[key]) for key in sorted(kept)]
    return [part for parts in found for part in parts]


def save(rank, path, kind, options):
    job = Job(kind, **options)
    job.step()
    shardkeep.save(AppState(job.model, job.optimizer, extra={"steps": job.steps}), path)
    return job.step()


def load(rank, path, kind, options, expected, exact):
    job = Job(kind, seed=5, **options)
    app = AppState(job.model, job.optimizer, extra={"steps": 0})
    shardkeep.load(app, path)
    job.steps = app.extra["steps"]
    loss = job.step()
    if exact:
        assert loss == expected
    return loss


def values(rank, path, kind, options):
    """Whole states by name, as this many ranks see them after a load."""
    job = Job(kind, seed=5, **options)
    shardkeep.load(AppState(job.model, job.optimizer, extra={"steps": 0}), path)
    shardkeep.save(AppState(job.model, job.optimizer, extra={"steps": 1}), f"{path}-again-{dist.get_world_size()}")


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_any_number_of_ranks_to_any_other(processes, tmp_path, kind):
    for source in (4, 1):
        path = tmp_path / f"from-{source}"
        expected = processes.run(source, save, path, kind, {})[0]
        with shardkeep.open(path) as saved:
            names = sorted(saved.keys())
            stored = {name: bytes(saved[name].numpy().reshape(-1).view("u1")) for name in names
                      if hasattr(saved[name], "numpy")}
        assert f"optimizer.state.0.weight.exp_avg.scale" in names
        for target in (4, 2, 1):
            losses = processes.run(target, load, path, kind, {}, expected, source == target)
            assert losses[0] == pytest.approx(expected, abs=1e-5)
            # Bit by bit: what is saved again is what was loaded.
            processes.run(target, values, path, kind, {})
            with shardkeep.open(f"{path}-again-{target}") as again:
                assert sorted(again.keys()) == names
                for name, content in stored.items():
                    assert bytes(again[name].numpy().reshape(-1).view("u1")) == content, name


def test_bfloat16(processes, tmp_path):
    options = {"dtype": torch.bfloat16}
    expected = processes.run(2, save, tmp_path / "a", "AdamW8bit", options)[0]
    processes.run(2, load, tmp_path / "a", "AdamW8bit", options, expected, True)
    processes.run(1, load, tmp_path / "a", "AdamW8bit", options, expected, False)


def test_cut_rows_fit_only_the_same_layout(processes, tmp_path):
    """Blocks go over whole rows: cut otherwise, they are the rank's own."""
    options = {"tensor_parallel": True}
    expected = processes.run(2, save, tmp_path / "a", "AdamW8bit", options)[0]
    processes.run(2, load, tmp_path / "a", "AdamW8bit", options, expected, True)
    with pytest.raises(Exception, match="exp_avg"):
        processes.run(1, load, tmp_path / "a", "AdamW8bit", {}, expected, False)


def test_ranks_that_do_not_quantise_are_refused(processes, tmp_path):
    """Cut into 8, the layer is too small to be quantised: another state altogether."""
    processes.run(4, save, tmp_path / "a", "AdamW8bit", {})
    with pytest.raises(Exception, match="exp_avg"):
        processes.run(8, load, tmp_path / "a", "AdamW8bit", {}, 0.0, False)

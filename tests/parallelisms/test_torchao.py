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


def save_again(rank, path, kind, to):
    job = Job(kind, seed=5)
    app = AppState(job.model, job.optimizer, extra={"steps": 0})
    shardkeep.load(app, path)
    shardkeep.save(app, to)


def contents(path):
    """Every tensor, by name."""
    with shardkeep.open(path) as saved:
        views = {name: saved[name] for name in saved.keys()}  # noqa: SIM118
        tensors = {name: view.torch() for name, view in views.items() if hasattr(view, "torch")}
        return {
            name: (tensor.dtype, tensor.shape, bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
            for name, tensor in tensors.items()
        }


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_any_number_of_ranks_to_any_other(processes, tmp_path, kind):
    for source in (4, 1):
        path = tmp_path / f"from-{source}"
        expected = processes.run(source, save, path, kind, {})[0]
        stored = contents(path)
        assert "optimizer.state.0.weight.exp_avg.scale" in stored
        for target in (4, 2, 1):
            losses = processes.run(target, load, path, kind, {}, expected, source == target)
            assert losses[0] == pytest.approx(expected, abs=1e-5)
            # Bit by bit: what is saved again is what was loaded.
            processes.run(target, save_again, path, kind, tmp_path / f"{source}-{target}")
            assert contents(tmp_path / f"{source}-{target}") == stored


def random_state(job):
    """A state as after some steps: of bfloat16 in DTensors, torchao takes them only compiled."""
    for parameter in job.model.parameters():
        kept = {"step": torch.tensor(3.0)}
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            made = kept[key] = job.optimizer._new_buffer(parameter, signed)
            local = getattr(made, "_local_tensor", made)
            for part in ("codes", "scale"):
                inner = getattr(local, part, None)
                if inner is not None:
                    inner.copy_(torch.randint(0, 200, inner.shape))
        job.optimizer.state[parameter] = kept


def save_half(rank, path, source):
    job = Job("AdamW8bit", dtype=torch.bfloat16)
    if source is None:
        random_state(job)
    else:
        shardkeep.load(AppState(job.model, job.optimizer), source)
    shardkeep.save(AppState(job.model, job.optimizer), path)


def test_bfloat16(processes, tmp_path):
    processes.run(2, save_half, tmp_path / "a", None)
    for world in (2, 1, 4):
        processes.run(world, save_half, tmp_path / f"{world}", tmp_path / "a")
        assert contents(tmp_path / f"{world}") == contents(tmp_path / "a")


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

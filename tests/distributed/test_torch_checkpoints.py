"""Real processes: what torch saved on some ranks is loaded on others, sharded otherwise."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardkeep

FULL = torch.arange(70.0).reshape(10, 7)


def state_of(values, placements):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {
        f"w{at}": distribute_tensor(values + at, mesh, [placement])
        for at, placement in enumerate(placements)
    }
    return {"model": model, "plain": values + 9, "step": 3}


def save(rank, path, use_collectives):
    state = state_of(FULL, [Shard(0), Shard(1), Replicate()])
    dcp.save(state, checkpoint_id=path, use_collectives=use_collectives)


def load(rank, path):
    state = state_of(torch.zeros_like(FULL), [Shard(1), Shard(0), Shard(0)]) | {"step": 0}
    shardkeep.load(state, path)
    for at in range(3):
        assert torch.equal(state["model"][f"w{at}"].full_tensor(), FULL + at)
    assert torch.equal(state["plain"], FULL + 9)
    assert state["step"] == 3


@pytest.mark.parametrize("use_collectives", [True, False])
def test_saved_by_torch_and_loaded_by_us_with_another_sharding(training, tmp_path, use_collectives):
    training.run(2, save, str(tmp_path / "step"), use_collectives)
    assert (tmp_path / "step" / ".metadata").exists() == use_collectives
    training.run(3, load, str(tmp_path / "step"))

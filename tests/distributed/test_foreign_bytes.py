"""Real processes: other systems' files, sharded otherwise on load, are read once by all ranks."""

import os
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardkeep

WORLD = 4
SHAPES = {f"layers.{i}.w": (512, 500) for i in range(10)} | {
    f"layers.{i}.norm": (512,) for i in range(40)
}
DISTINCT = sum(4 * int(np.prod(shape)) for shape in SHAPES.values())
CUTS = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}


def whole(name):
    rng = np.random.default_rng(list(SHAPES).index(name))
    return torch.from_numpy(rng.standard_normal(SHAPES[name]).astype(np.float32))


def held(cut, empty):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = {}
    for name, shape in SHAPES.items():
        placement = Shard(0) if cut == "columns" and len(shape) == 1 else CUTS[cut]
        tensor = torch.zeros(shape) if empty else whole(name)
        made[name] = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    return made


def save(rank, path, system, cut):
    state = held(cut, empty=False)
    if system == "torch DCP":
        dcp.save(state, checkpoint_id=path)
    else:
        shardkeep.save(state, path, storage_writer=shardkeep.HuggingFaceWriter())


def load(rank, path, cut):
    state = held(cut, empty=True)
    result = shardkeep.load(state, path)
    for name, wanted in held(cut, empty=False).items():
        assert torch.equal(state[name].to_local(), wanted.to_local()), name
    return result.stats["bytes_read"]


@pytest.mark.parametrize("system", ["torch DCP", "Hugging Face"])
@pytest.mark.parametrize("wanted", ["columns", "copies"])
def test_all_ranks_together_read_little_more_than_there_is(training, tmp_path, system, wanted):
    path = str(tmp_path / "step")
    training.run(WORLD, save, path, system, "rows")
    read = training.run(WORLD, load, path, wanted)
    assert sum(read) <= 1.1 * DISTINCT
    assert max(read) <= 0.5 * DISTINCT  # all take part


@pytest.mark.parametrize("system", ["torch DCP", "Hugging Face"])
def test_so_do_fewer_ranks(training, tmp_path, system):
    path = str(tmp_path / "step")
    training.run(WORLD, save, path, system, "columns")
    assert sum(training.run(3, load, path, "rows")) <= 1.1 * DISTINCT


def load_here(rank, folder):
    os.chdir(f"{folder}/{rank}")
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    shardkeep.load(state, "step")
    for name, tensor in state.items():
        assert torch.equal(tensor, whole(name)), name


def test_each_host_has_a_copy(processes, tmp_path):
    """At one path, which leads to another disk on each."""
    state = {name: whole(name) for name in SHAPES}
    dcp.save(state, checkpoint_id=tmp_path / "0" / "step", no_dist=True)
    shutil.copytree(tmp_path / "0", tmp_path / "1", copy_function=shutil.copyfile)
    for path in (tmp_path / "1" / "step").iterdir():
        os.utime(path, (1e9, 1e9))
    processes.run(2, load_here, str(tmp_path))

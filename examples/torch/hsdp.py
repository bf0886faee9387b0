# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""HSDP: FSDP2 over a part of the ranks, and copies of that: pieces and declared replicas.

torchrun --nproc-per-node 4 examples/torch/hsdp.py run
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training_loop import Model, ordinary_step, run

from shardkeep.torch import AppState


def main() -> None:
    dist.init_process_group("gloo")
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    model = Model()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    app = AppState(model, optimizer, extra={"step": 0})
    run(app, ordinary_step(model, optimizer, part=dist.get_rank(), parts=dist.get_world_size()))


if __name__ == "__main__":
    main()

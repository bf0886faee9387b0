# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""FSDP2 and tensor parallelism: matrices are cut twice, mostly along the same dimension.

torchrun --nproc-per-node 4 examples/torch/fsdp2_tensor_parallel.py run
"""

import torch
import torch.distributed as dist
from tensor_parallel import cut
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training_loop import Model, ordinary_step, run

from shardkeep.torch import AppState


def main() -> None:
    dist.init_process_group("gloo")
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))
    model = Model()
    cut(model, mesh["tp"])
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    app = AppState(model, optimizer, extra={"step": 0})
    run(app, ordinary_step(model, optimizer, part=mesh["fsdp"].get_local_rank(), parts=2))


if __name__ == "__main__":
    main()

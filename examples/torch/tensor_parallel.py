# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""Tensor parallelism: matrices are cut by rows or columns, and all ranks see the whole batch.

torchrun --nproc-per-node 2 examples/torch/tensor_parallel.py run
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from training_loop import Model, ordinary_step, run

from shardkeep.torch import AppState


def cut(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def main() -> None:
    dist.init_process_group("gloo")
    model = Model()
    cut(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    app = AppState(model, optimizer, extra={"step": 0})
    run(app, ordinary_step(model, optimizer))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""FSDP2: every parameter is a DTensor, cut over the ranks.

torchrun --nproc-per-node 4 examples/torch/fsdp2.py run
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from training_loop import Model, ordinary_step, run

from shardkeep.torch import AppState


def main() -> None:
    dist.init_process_group("gloo")
    model = Model()
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    app = AppState(model, optimizer, extra={"step": 0})
    run(app, ordinary_step(model, optimizer, part=dist.get_rank(), parts=dist.get_world_size()))


if __name__ == "__main__":
    main()

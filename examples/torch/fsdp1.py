# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""FullyShardedDataParallel, the first FSDP: parameters lie in flat ones, cut over the ranks.

torchrun --nproc-per-node 2 examples/torch/fsdp1.py run
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from training_loop import Model, ordinary_step, run

from shardkeep.torch import AppState


def main() -> None:
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    model = Model()
    for name, block in list(model.blocks.items()):
        model.blocks[name] = FullyShardedDataParallel(block, device_id=device)
    sharded = FullyShardedDataParallel(model, device_id=device)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)

    app = AppState(sharded, optimizer, extra={"step": 0})
    run(app, ordinary_step(sharded, optimizer, part=dist.get_rank(), parts=dist.get_world_size()))


if __name__ == "__main__":
    main()

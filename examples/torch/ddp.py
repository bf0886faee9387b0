# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""DistributedDataParallel: every rank has the whole model, and a part of the batch.

torchrun --nproc-per-node 2 examples/torch/ddp.py run
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training_loop import Model, ordinary_step, run

from shardkeep.torch import AppState


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    app = AppState(model, optimizer, extra={"step": 0})
    run(app, ordinary_step(model, optimizer, part=dist.get_rank(), parts=dist.get_world_size()))


if __name__ == "__main__":
    main()

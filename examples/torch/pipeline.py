# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""A pipeline of two stages: each rank has some of the layers, under the names of the whole model.

torchrun --nproc-per-node 2 examples/torch/pipeline.py run
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from training_loop import Model, loss_of, run

from shardkeep.torch import AppState


def main() -> None:
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    model = Model()
    if first:
        del model.blocks["1"]
        model.head = None
    else:
        del model.blocks["0"]
        model.embed = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)

    def step(rows: Tensor) -> Tensor:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if first:
            schedule.step(rows)
        else:
            schedule.step(target=rows, losses=losses)
        optimizer.step()
        loss = torch.zeros(()) if first else torch.stack(losses).mean().detach()
        dist.broadcast(loss, 1)
        return loss

    run(AppState(model, optimizer, extra={"step": 0}), step)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""Expert parallelism: each rank has some of the experts, numbered over all ranks.

torchrun --nproc-per-node 4 examples/torch/experts.py run
torchrun --nproc-per-node 2 examples/torch/experts.py run --steps 8
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_loop import LENGTH, VOCABULARY, WIDTH, ordinary_step, run

from shardkeep.torch import AppState

EXPERTS = 4


class SumOverRanks(torch.autograd.Function):
    """Each rank adds what its experts say; all go on with the same."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class ToAllRanks(torch.autograd.Function):
    """The same on all ranks, whose experts all have a say in its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        each = EXPERTS // dist.get_world_size()
        # Named by its number among all experts, an expert is itself on any number of ranks.
        mine = range(dist.get_rank() * each, (dist.get_rank() + 1) * each)
        every = {str(number): nn.Linear(WIDTH, WIDTH) for number in range(EXPERTS)}
        self.experts = nn.ModuleDict({str(number): every[str(number)] for number in mine})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        to_expert = (torch.arange(LENGTH) % EXPERTS).view(1, -1, 1)
        here = ToAllRanks.apply(x)
        said = [one(here) * (to_expert == int(number)) for number, one in self.experts.items()]
        return self.head(x + SumOverRanks.apply(torch.stack(said).sum(0)))


def main() -> None:
    dist.init_process_group("gloo")
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    app = AppState(model, optimizer, extra={"step": 0})
    run(app, ordinary_step(model, optimizer))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""What all examples here share: a small model, its data, and a loop that can be killed anywhere.

Each example spreads the same model in another way, and goes on where the last one ended:

    torchrun --nproc-per-node 4 examples/torch/fsdp2.py run --steps 4
    torchrun --nproc-per-node 2 examples/torch/tensor_parallel.py run --steps 8
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardkeep
from shardkeep.torch import AppState

VOCABULARY, WIDTH, BATCH, LENGTH = 32, 16, 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Also a part of one: a stage of a pipeline has no embedding, or no head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same first weights on every rank
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({"0": Block(), "1": Block()})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(output: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), rows.flatten())


def ordinary_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, part: int = 0, parts: int = 1
) -> Callable[[Tensor], Tensor]:
    """A step on this rank's part of the batch."""

    def step(rows: Tensor) -> Tensor:
        mine = rows.chunk(parts)[part]
        loss = loss_of(model(mine), mine)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    return step


def last_checkpoint(folder: Path) -> Path | None:
    # The record is written last: a directory without one is a save that was cut short.
    records = folder.glob("step-*/checkpoint.json")
    return max((record.parent for record in records), default=None)


def run(app: AppState, train_step: Callable[[Tensor], Tensor]) -> None:
    """Go on from the last checkpoint, and save every other step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=4, help="the last step")
    options = parser.parse_args()

    last = last_checkpoint(options.folder)
    if last is not None:
        shardkeep.load(app, last)
    while app.extra["step"] < options.steps:
        # Batches depend on the step alone, so every layout sees the same.
        numbers = torch.Generator().manual_seed(app.extra["step"])
        loss = train_step(torch.randint(VOCABULARY, (BATCH, LENGTH), generator=numbers))
        app.extra["step"] += 1
        if dist.get_rank() == 0:
            print(f"step {app.extra['step']} loss {loss.item():.9g}", flush=True)
        if app.extra["step"] % 2 == 0:
            shardkeep.save(app, options.folder / f"step-{app.extra['step']:06}")
    dist.destroy_process_group()

# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""A whole training loop: it saves in the background, keeps a few steps, and stops when told to.

    python examples/train_managed.py run
    torchrun --nproc-per-node 4 examples/train_managed.py run

Kill it, or send it SIGTERM as a scheduler would, and start it again, on as many processes as you
like: it goes on where it was. `shardkeep ls run` shows what is there.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import shardkeep
from shardkeep import (
    CheckpointManager,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    OnPreemption,
)

LENGTH, WIDTH, BATCH = 8, 64, 32


class Job:
    """A model that learns to write its own source text, and all that its next step depends on."""

    def __init__(self, world: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(256, WIDTH),
            nn.Flatten(),
            nn.Linear(LENGTH * WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, 256),
        )
        if world > 1:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.batches = torch.Generator().manual_seed(0)
        self.step = 0
        self.text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8)

    def train_step(self) -> float:
        starts = torch.randint(len(self.text) - LENGTH, (BATCH,), generator=self.batches)
        rows = torch.stack([self.text[at : at + LENGTH + 1] for at in starts]).long()
        loss: Tensor = F.cross_entropy(self.model(rows[:, :-1]), rows[:, -1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "batches": self.batches.get_state(),
            "step": self.step,
        }

    def use(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.batches.set_state(state["batches"])
        self.step = state["step"]


def train(
    job: Job,
    folder: Path,
    steps: int,
    save_every: int,
    is_first: bool,
    fast: Path | None = None,
) -> None:
    with CheckpointManager(
        folder,
        save=EverySteps(save_every) | EverySeconds(600) | OnPreemption(),
        keep=KeepLast(2) | KeepBest(1, "loss") | KeepEvery(1000),
        fast=fast,
    ) as manager:
        state = job.state()
        restored = manager.restore(state)  # the newest whole step, the same on all ranks
        if restored is not None:
            job.use(state)
            if is_first:
                print(f"resumed step {restored.step}", flush=True)
        while job.step < steps:
            loss = job.train_step()
            if is_first:
                print(f"step {job.step} loss {loss:.9g}", flush=True)
            if manager.should_save(job.step):
                manager.async_save(job.step, job.state(), {"loss": loss})
            if manager.should_stop():  # also where only one rank was told
                if is_first:
                    print(f"stopped at step {job.step}", flush=True)
                break
    # Left: the last save is complete and copied, and what was to be removed is gone.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints go")
    parser.add_argument("--fast", type=Path, help="saved there first: /dev/shm/..., an NVMe")
    parser.add_argument("--steps", type=int, default=300, help="the last step")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    options = parser.parse_args()

    shardkeep.catch_preemption()  # SIGTERM is noted, and asked about after each step
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    is_first = world == 1 or dist.get_rank() == 0
    train(Job(world), options.folder, options.steps, options.save_every, is_first, options.fast)
    if world > 1:
        shardkeep.flush()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

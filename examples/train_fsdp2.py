# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""Trains a small transformer, and can be killed at any moment: start it again and it goes on.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py run
    torchrun --nproc-per-node 2 examples/train_fsdp2.py run --tensor-parallel

The first line shards everything over 4 processes with FSDP2. The second continues the same training
on 2, cut in another way. It learns to write its own source text, on CPUs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import shardkeep
from shardkeep.torch import AppState

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 256, 4, 2, 32, 16


# --- the model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        # With tensor parallelism each rank has some of the heads, hence the -1.
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(heads.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def shard_fully(model: Transformer) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def shard_tensors(model: Transformer) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel() for name in ("o", "down")}
        parallelize_module(block, mesh, plan)
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


# --- the job


class Job:
    """The model, its optimizer, and everything else that decides what the next step does."""

    def __init__(self, *, tensor_parallel: bool = False) -> None:
        torch.manual_seed(0)  # the same first weights on every rank ...
        self.model = Transformer()
        (shard_tensors if tensor_parallel else shard_fully)(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0
        # Every rank draws the whole batch and takes its part, so the batches do not depend on
        # how many ranks there are.
        self.batches = torch.Generator().manual_seed(0)
        self.parts = 1 if tensor_parallel else dist.get_world_size()
        self.part = dist.get_rank() % self.parts
        torch.manual_seed(1 + dist.get_rank())  # ... but dropout and the like differ

    def train_step(self, text: Tensor) -> float:
        """One step; the loss before it, over all ranks."""
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=self.batches)
        rows = torch.stack([text[at : at + LENGTH + 1] for at in starts])
        rows = rows.chunk(self.parts)[self.part]
        loss = F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def app(self) -> AppState:
        # By the names of the bare model; an optimizer that has no state yet can be loaded into.
        extra = {
            "step": self.step,
            "batches": self.batches.get_state(),
            "rng": shardkeep.torch.rng_state(),  # goes on; on other ranks, seeded anew
        }
        return AppState(self.model, self.optimizer, extra=extra)

    def save(self, checkpoint: Path) -> None:
        shardkeep.save(self.app(), checkpoint)

    def load(self, checkpoint: Path) -> None:
        app = self.app()
        shardkeep.load(app, checkpoint)
        self.step = app.extra["step"]
        self.batches.set_state(app.extra["batches"])


def last_checkpoint(folder: Path) -> Path | None:
    # The record is written last: a directory without one is a save that was cut short. Each rank
    # looks for itself; should two find different ones, the load is refused on all of them.
    records = folder.glob("step-*/checkpoint.json")
    return max((record.parent for record in records), default=None)


def main(job_type: type[Job] = Job) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=100, help="the last step")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--resume", type=Path, help="a checkpoint; the last one in the folder")
    parser.add_argument("--tensor-parallel", action="store_true", help="instead of FSDP2")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda text: None
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()

    job = job_type(tensor_parallel=options.tensor_parallel)
    resume = options.resume or last_checkpoint(options.folder)
    if resume is not None:
        job.load(resume)
        say(f"resumed {resume}")
    while job.step < options.steps:
        loss = job.train_step(text)
        say(f"step {job.step} loss {loss:.9g}")
        if job.step % options.save_every == 0:
            job.save(options.folder / f"step-{job.step:06}")

    shardkeep.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One small model, trained in every way that PyTorch spreads models over processes.

All layouts compute the same: every rank draws the whole batch, and takes its part where the batch
is split. A `Job` is made on every rank of an initialised group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

import shardkeep
from shardkeep.torch import AppState

VOCABULARY, WIDTH, EXPERTS, BATCH, LENGTH = 24, 8, 4, 12, 5


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the same on all of them."""

    @staticmethod
    def forward(context, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient


class _Same(torch.autograd.Function):
    """What is the same on all ranks, of which each uses a part: its gradients are added up."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Experts(nn.Module):
    """Each token goes to one expert, by its place; a rank may have only some of them."""

    def __init__(self, mine=range(EXPERTS)):
        super().__init__()
        self.each = nn.ModuleDict({str(e): nn.Linear(WIDTH, WIDTH) for e in range(EXPERTS)})
        for expert in set(range(EXPERTS)) - set(mine):
            del self.each[str(expert)]

    def forward(self, x):
        spread = len(self.each) < EXPERTS
        x = _Same.apply(x) if spread else x
        place = (torch.arange(x.shape[1]) % EXPERTS).view(1, -1, 1)
        parts = [expert(x) * (place == int(e)) for e, expert in self.each.items()]
        total = torch.stack(parts).sum(0)
        return _Sum.apply(total) if spread else total


class Block(nn.Module):
    def __init__(self, experts=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.experts = experts

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm(x) * self.scale)))
        return x if self.experts is None else x + self.experts(x)


class Model(nn.Module):
    def __init__(self, *, tied=False, experts=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({"0": Block(), "1": Block(experts)})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(output, rows):
    return F.cross_entropy(output.flatten(0, 1), rows.flatten())


# --- layouts


def one(model):
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    wrap = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for name, block in list(model.blocks.items()):
        model.blocks[name] = Fsdp(block, **wrap)
    return Fsdp(model, **wrap)


def fsdp2(model, mesh=None, **options):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def offloaded(model):
    from torch.distributed.fsdp import CPUOffloadPolicy

    return fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hsdp(model):
    half = dist.get_world_size() // 2
    return fsdp2(model, init_device_mesh("cpu", (2, half), mesh_dim_names=("replicas", "shards")))


def tp(model, mesh=None):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, ends)


def fsdp2_tp(model):
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("dp", "tp"))
    return fsdp2(tp(model, mesh["tp"]), mesh["dp"])


def pp(model):
    """The stage of this rank: the first half, or the second."""
    if dist.get_rank() == 0:
        del model.blocks["1"]
        model.head = None
    else:
        del model.blocks["0"]
        model.embed = None
    return model


def ep(model):
    """Experts of other ranks are left out; all else is on every rank."""
    each = EXPERTS // dist.get_world_size()
    mine = range(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    for expert in set(range(EXPERTS)) - set(mine):
        del model.blocks["1"].experts.each[str(expert)]
    return model


LAYOUTS = {
    "one": (1, one),
    "compiled": (1, compiled),
    "ddp2": (2, ddp),
    "fsdp1x2": (2, fsdp1),
    "fsdp1x4": (4, fsdp1),
    "fsdp2x2": (2, fsdp2),
    "fsdp2x3": (3, fsdp2),
    "fsdp2x4": (4, fsdp2),
    "offloaded": (2, offloaded),
    "hsdp": (4, hsdp),
    "tp2": (2, tp),
    "tp4": (4, tp),
    "fsdp2xtp": (4, fsdp2_tp),
    "pp2": (2, pp),
}
"""How many processes, and how they spread the model."""
EXPERT_LAYOUTS = {"one": (1, one), "ep2": (2, ep), "ep4": (4, ep)}
TIED_LAYOUTS = {"one": (1, one), "ddp2": (2, ddp), "fsdp2x2": (2, fsdp2)}


# --- a program


def groups_of(model):
    """Two groups; by name, because FSDP1 has flat shapes only."""
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[name.endswith("weight") and "norm" not in name].append(parameter)
    return [
        {"params": groups[True], "weight_decay": 0.1},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def adamw(model):
    return torch.optim.AdamW(groups_of(model), lr=1e-2)


class Job:
    """A model in a layout, its optimizer, its schedule."""

    def __init__(self, layout, *, seed=0, optimizer=adamw, model=Model, abstract=False, **options):
        torch.manual_seed(seed)
        self.layout = layout
        if abstract:
            with torch.device("meta"):
                made = model(**options)
        else:
            made = model(**options)
        self.stage = None
        self.model = layout(made)
        self.optimizer = optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.extra = {"step": 0}
        self.parts = dist.get_world_size() if dist.is_initialized() else 1
        self.part = dist.get_rank() if dist.is_initialized() else 0
        if layout in (tp, pp, ep):
            self.parts, self.part = 1, 0
        elif layout is fsdp2_tp:
            self.parts, self.part = 2, self.part // (self.parts // 2)
        if layout is pp:
            self.prepare_pipeline()

    def prepare_pipeline(self):
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        stage = PipelineStage(self.model, dist.get_rank(), 2, torch.device("cpu"))
        self.stage = ScheduleGPipe(stage, n_microbatches=1, loss_fn=loss_of)

    def app(self):
        return AppState(self.model, self.optimizer, self.scheduler, extra=self.extra)

    def step(self):
        """One step; the loss over the whole batch."""
        numbers = torch.Generator().manual_seed(self.extra["step"])
        rows = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=numbers)
        self.optimizer.zero_grad()
        if self.stage is not None:
            loss = self.step_pipeline(rows)
        else:
            mine = rows.chunk(self.parts)[self.part]
            loss = loss_of(self.model(mine), mine)
            loss.backward()
            loss = loss.detach()
            if self.parts > 1:
                loss = self.mean(loss, len(mine))
        self.optimizer.step()
        self.scheduler.step()
        self.extra["step"] += 1
        return loss.item()

    def mean(self, loss, count):
        if self.layout is fsdp2_tp:
            each = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
            dist.all_gather(each, loss)
            return torch.stack(each).mean()
        total = torch.stack([loss * count, torch.tensor(float(count))])
        dist.all_reduce(total)
        return total[0] / total[1]

    def step_pipeline(self, rows):
        loss = torch.zeros(())
        if dist.get_rank() == 0:
            self.stage.step(rows)
        else:
            losses = []
            self.stage.step(target=rows, losses=losses)
            loss = losses[0].detach().clone()
        dist.broadcast(loss, 1)
        return loss


# --- comparing


def bits(value):
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return tuple(value.shape), value.dtype, bytes(flat.numpy())
    return type(value), repr(value)


def leaves(state, path=()):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, str(key)))
        else:
            yield ".".join((*path, str(key))), value


def check(state, path, spare=()):
    """Whether what the ranks hold is, bit by bit, what is stored; and all of it is held."""
    names = set()
    with shardkeep.open(path) as saved:
        for name, value in leaves(state):
            names.add(name)
            stored = saved[name]
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if hasattr(value, "local_shards"):
                for shard in value.local_shards():
                    begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    at = tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))
                    assert bits(shard.tensor) == bits(stored.torch()[at]), name
            elif isinstance(value, torch.Tensor):
                assert bits(value) == bits(stored.torch()), name
            else:
                assert bits(value) == bits(stored), name
        everything = set(saved.keys())
    held = [names]
    if dist.is_initialized():
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, names)
    assert set().union(*held) == everything

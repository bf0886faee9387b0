"""Files for Hugging Face from many ranks, and back: ours beside torch's, on real gloo processes.

A model of bfloat16 tensors, held by four ranks in rows (as FSDP2 does) or in columns. Ours writes
the final files at once; torch's `HuggingFaceStorageWriter` writes a file for each rank and then
consolidates them. What torch wrote is then loaded by both, warm and cold. Rounds alternate who goes
first, and what was loaded is compared.
"""

from __future__ import annotations

import argparse
import shutil
import time
import warnings
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.caches import evict, make_durable, warm
from benchmarks.report import Report, above_zero, add_options, number, ratio
from benchmarks.rounds import in_turn, need_memory, scratch
from shardkeep.testing.processes import PRELOAD, RankServer

MODULES = (
    *PRELOAD,
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.hf_storage",
    "shardkeep.formats.huggingface",
    "safetensors.torch",
)
RANKS = 4
HIDDEN = 2048
SIDES = ("shardkeep", "torch DCP", "torch DCP, consolidating on 4 threads")


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Layers of a transformer, as many as fit."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (4 * HIDDEN, HIDDEN),
        "mlp.up_proj": (4 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 4 * HIDDEN),
    }
    each = 2 * sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in layer.values())
    count = max(1, nbytes // each)
    found: dict[str, tuple[int, ...]] = {}
    for at in range(count):
        for name, shape in layer.items():
            found[f"model.layers.{at}.{name}.weight"] = shape
    return found


def held(nbytes: int, cut: str, *, empty: bool) -> dict[str, Any]:
    """This rank's parts."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(mesh.get_rank())
    made = {}
    for name, shape in shapes(nbytes).items():
        dim = 1 if cut == "columns" and len(shape) > 1 else 0
        local = list(shape)
        local[dim] //= RANKS
        if empty:
            part = torch.zeros(local, dtype=torch.bfloat16)
        else:
            bits = torch.randint(-(1 << 14), 1 << 14, local, generator=generator, dtype=torch.int16)
            part = bits.view(torch.bfloat16)
        made[name] = DTensor.from_local(part, mesh, [Shard(dim)])
    return made


def save(side: str, state: dict[str, Any], path: Path) -> None:
    import torch.distributed as dist

    import shardkeep

    dcp: Any = import_module("torch.distributed.checkpoint")
    if side == "shardkeep":
        shardkeep.save(state, path, storage_writer=shardkeep.HuggingFaceWriter())
        return
    writer = dcp.HuggingFaceStorageWriter(
        str(path),
        save_distributed=True,
        enable_consolidation=True,
        thread_count_consolidation=4 if "threads" in side else 1,
        fqn_to_index_mapping=dict.fromkeys(state, 1),
    )
    dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        make_durable(path)
    dist.barrier()


def load(side: str, state: dict[str, Any], path: Path) -> None:
    import shardkeep

    dcp: Any = import_module("torch.distributed.checkpoint")
    if side == "shardkeep":
        shardkeep.load(state, path)
        return
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)))


def timed(work: Any, *args: Any) -> float:
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    work(*args)
    dist.barrier()
    return time.perf_counter() - begun


def rounds(rank: int, nbytes: int, cut: str, base: str, repeat: int) -> list[dict[str, float]]:
    """On one rank; the first round is not counted."""
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    state, target = held(nbytes, cut, empty=False), held(nbytes, cut, empty=True)
    seen: list[dict[str, float]] = []
    for at in range(repeat + 1):
        found: dict[str, float] = {}
        written: dict[str, Path] = {}
        for side in in_turn(SIDES, at):
            path = Path(base, side.replace(" ", "-").replace(",", ""))
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                make_durable(Path(base))
            dist.barrier()
            found[f"save, {side}"] = timed(save, side, state, path)
            if rank == 0 and "shardkeep" not in side:
                shutil.rmtree(path / "sharded")
            written[side] = path
        source = written["torch DCP"]
        for state_of_cache, prepare in (("warm", warm), ("cold", evict)):
            for side in ("shardkeep", "torch DCP")[:: 1 if at % 2 else -1]:
                if rank == 0:
                    prepare(source)
                for tensor in target.values():
                    tensor.to_local().zero_()
                found[f"{state_of_cache} load, {side}"] = timed(load, side, target, source)
                for name, tensor in target.items():
                    assert torch.equal(
                        tensor.to_local().view(torch.int16),
                        state[name].to_local().view(torch.int16),
                    ), f"{side}: {name}"
        if at == 0:
            load("shardkeep", target, written["shardkeep"])
        seen.append(found)
    return seen[1:]


def rows(cut: str, seen: list[dict[str, float]], nbytes: int) -> list[list[str]]:
    out = []
    for operation in ("save", "warm load", "cold load"):
        ours = f"{operation}, shardkeep"
        for key in seen[0]:
            if not key.startswith(f"{operation}, "):
                continue
            seconds = median(one[key] for one in seen)
            times = median(one[key] / one[ours] for one in seen)
            out.append(
                [
                    f"{cut}: {key}",
                    number(seconds, 3),
                    number(nbytes / seconds / 1e9),
                    ratio(times, 1.0),
                ]
            )
    return out


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks huggingface", description=__doc__)
    parser.add_argument("--size", type=above_zero, default=2.0, help="of the state, in GB")
    parser.add_argument("--cut", choices=("rows", "columns", "both"), default="both")
    add_options(parser, repeat=5)
    return parser


def main(argv: list[str] | None = None) -> None:
    chosen = arguments().parse_args(argv)
    nbytes = int(chosen.size * 1e9)
    need_memory(4 * nbytes)
    table, everything = [], {}
    with scratch(chosen.dir, 6 * nbytes) as base, RankServer(MODULES) as server:
        report = Report("huggingface", base, nbytes=nbytes, repeat=chosen.repeat, ranks=RANKS)
        for cut in ("rows", "columns") if chosen.cut == "both" else (chosen.cut,):
            work = (nbytes, cut, str(base), chosen.repeat)
            seen = server.run(RANKS, rounds, *work, timeout_s=3600.0)[0]
            everything[cut] = seen
            table += rows(cut, seen, nbytes)
        headings = ["of 4 ranks", "s", "GB/s", "takes, to ours"]
        report.table("Hugging Face, medians", headings, table)
        report.finish(everything, chosen.json)

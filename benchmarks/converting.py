"""Converting a checkpoint on one disk: how fast beside the disk itself, and in how much memory.

The state of `io`, saved once. Each round measures the raw rates, evicts the source from the page
cache, and converts it in a process of its own, which says how long that took and the most memory it
had; with `--cached` the source is brought into the page cache instead, where a library that writes
through it leaves what it saved. Every byte is read, checked, digested and written; a convert reads
and writes at the same time. It is compared with the slower of the two raw rates, and with what the
disk gives if it is read and written at the same time, which bounds it where the source is not
cached. The source is ours; `--source` has it converted to another format first, once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shardkeep
from benchmarks import raw
from benchmarks.accelerator import device_tensors
from benchmarks.caches import evict, sync_one, warm
from benchmarks.report import Report, above_zero, add_options, number
from benchmarks.rounds import need_memory, scratch
from benchmarks.states import nested, training_state

PROGRAM = """
import json, re, sys, time
from shardkeep import convert  # loaded before the clock runs
src, dst, to, budget, rules, cast = json.loads(sys.argv[1])
cpu, begun = time.process_time(), time.perf_counter()
options = {"values": "drop"} if to == "hf" else {}
done = convert(
    src, dst, to=to, memory_budget=budget, rules=rules, cast=cast, options=options
)
seconds = time.perf_counter() - begun
print(json.dumps({
    "seconds": seconds,
    "cpu": time.process_time() - cpu,
    "nbytes": done.nbytes,
    "rss": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024,
}))
"""
"""In a process of its own: the memory of this one held the state."""


def save_source(path: Path, nbytes: int) -> int:
    """Save a state of about so many bytes; gives how many."""
    leaves = training_state(nbytes)
    state = nested(leaves, device_tensors(leaves, torch.device("cpu"), seed=1))
    return shardkeep.save(state, path, no_dist=True).nbytes


def convert_once(source: Path, target: Path, chosen: argparse.Namespace) -> Any:
    """Convert what is or is not in the page cache; what was made is gone afterwards."""
    if chosen.cached:
        warm(source)
    else:
        evict(source)
    sync_one(source)
    budget = chosen.budget << 20
    asked = json.dumps([str(source), str(target), chosen.to, budget, [], chosen.cast])
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, asked], check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.stderr) from error
    finally:
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        sync_one(source)
    return json.loads(done.stdout)


def run(directory: Path, chosen: argparse.Namespace, source: Path) -> list[dict[str, float]]:
    nbytes = int(chosen.size * (1 << 30))
    ways = raw.choose(directory, nbytes)
    rounds: list[dict[str, float]] = []
    for _ in range(chosen.repeat + 1):
        rates = {**ways.disk(directory, nbytes), "both": ways.copying(directory, nbytes)}
        seen = convert_once(source, directory / "made", chosen)
        rounds.append({**seen, **rates})
    return rounds[1:]


def show(report: Report, rounds: list[dict[str, float]]) -> None:
    rows, ratios = [], []
    for seen in rounds:
        rate, slower = seen["nbytes"] / seen["seconds"], min(seen["read"], seen["write"])
        ratios.append(rate / slower)
        rows.append(
            [
                number(seen["seconds"]),
                number(rate / 1e9),
                number(seen["read"] / 1e9),
                number(seen["write"] / 1e9),
                number(seen["both"] / 1e9),
                f"{rate / slower:.2f}",
                f"{rate / seen['both']:.2f}",
                number(seen["cpu"] / seen["nbytes"] * 1e9),
                f"{seen['rss'] / (1 << 20):.0f}",
            ]
        )
    both = median(seen["nbytes"] / seen["seconds"] / seen["both"] for seen in rounds)
    rows.append(["median", "", "", "", "", f"{median(ratios):.2f}", f"{both:.2f}", "", ""])
    headings = ["s", "GB/s", "raw read", "raw write", "both", "to the slower", "to both"]
    headings += ["CPU s/GB", "RSS, MiB"]
    report.table("Converting", headings, rows)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks convert", description=__doc__)
    parser.add_argument("--size", type=above_zero, default=4.0, help="of the checkpoint, in GiB")
    parser.add_argument("--budget", type=int, default=256, help="memory budget, in MiB")
    parser.add_argument("--source", default="native", help="format of what is converted")
    parser.add_argument("--to", default="native", help="format of the result")
    parser.add_argument("--cast", action="append", default=[], help="such as f32=bf16")
    parser.add_argument("--cached", action="store_true", help="the source is in the page cache")
    add_options(parser, repeat=3)
    return parser


def main(argv: list[str] | None = None) -> None:
    chosen = arguments().parse_args(argv)
    nbytes = int(chosen.size * (1 << 30))
    need_memory(nbytes + (1 << 30))
    with scratch(chosen.dir, 3 * nbytes) as directory:
        settings: dict[str, Any] = {"nbytes": nbytes, "budget": chosen.budget, "to": chosen.to}
        settings |= {"source": chosen.source, "cached": chosen.cached}
        report = Report("convert", directory, repeat=chosen.repeat, **settings)
        source = directory / "source"
        saved = save_source(source, nbytes)
        if chosen.source != "native":
            native, source = source, directory / f"source of {chosen.source}"
            options = {"values": "drop"} if chosen.source == "hf" else {}
            shardkeep.convert(native, source, to=chosen.source, options=options)
            shutil.rmtree(native)
        what = f"{chosen.source} to {chosen.to}"
        report.say(f"{saved / 1e9:.2f} GB from {what}, budget {chosen.budget} MiB")
        rounds = run(directory, chosen, source)
        show(report, rounds)
        report.finish({"rounds": rounds}, chosen.json)

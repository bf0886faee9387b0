"""Saves of which most did not change: with an earlier checkpoint as their base, and whole.

The state of `io`, in one process. In each round a part of the tensors changes, others in each
round, and the state is saved twice: on the checkpoint of the round before, and whole. Who begins
alternates. At the end all checkpoints but the last are removed one after the other, the oldest
first, and those that are left are verified.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shardkeep
from benchmarks.accelerator import device_tensors
from benchmarks.report import Report, above_zero, add_options, number
from benchmarks.rounds import need_memory, scratch
from benchmarks.states import nested, training_state


class Run:
    """The state, and what was measured."""

    def __init__(self, nbytes: int, directory: Path, changing: float) -> None:
        leaves = training_state(nbytes)
        self.tensors = device_tensors(leaves, torch.device("cpu"), seed=1)
        self.state = nested(leaves, self.tensors)
        self.directory = directory
        self.changing = changing
        self.nbytes = sum(leaf.nbytes for leaf in leaves)
        self.steps: list[Path] = []
        self.rounds: list[dict[str, float]] = []

    def change(self, at: int) -> float:
        """Other tensors in each round, up to so many bytes; says which part of all that is."""
        generator = torch.Generator().manual_seed(at)
        done, most = 0, self.changing * self.nbytes
        for one in torch.randperm(len(self.tensors), generator=generator).tolist():
            tensor = self.tensors[one]
            if done + tensor.nbytes <= most:
                tensor.neg_()
                done += tensor.nbytes
        return done / self.nbytes

    def save(self, path: Path, base: Path | None) -> tuple[float, float]:
        """Seconds, and bytes written."""
        begun = time.perf_counter()
        result = shardkeep.save(self.state, path, base=base, no_dist=True)
        return time.perf_counter() - begun, result.stats["bytes"]

    def round(self, at: int) -> None:
        part = self.change(at)
        step, whole = self.directory / f"step-{at}", self.directory / "whole"
        seen: dict[str, float] = {"changed": part}
        for kind in ("base", "whole") if at % 2 else ("whole", "base"):
            path, base = (step, self.steps[-1]) if kind == "base" else (whole, None)
            seen[f"{kind}_s"], seen[f"{kind}_bytes"] = self.save(path, base)
        shutil.rmtree(whole)
        self.steps.append(step)
        self.rounds.append(seen)

    def run(self, repeat: int) -> None:
        first = self.directory / "step-0"
        self.save(first, None)
        self.steps.append(first)
        for at in range(1, repeat + 2):
            self.round(at)
        del self.rounds[0]

    def remove_all(self) -> int:
        """The oldest first; all others must stay whole. Says how often that was looked at."""
        looked = 0
        while len(self.steps) > 1:
            shutil.rmtree(self.steps.pop(0))
            for step in self.steps:
                report = shardkeep.verify(step)
                assert report.ok, report.problems
                looked += 1
        return looked


def show(report: Report, run: Run) -> None:
    rows = [
        [
            f"{100 * seen['changed']:.1f} %",
            number(seen["base_s"], 3),
            number(seen["whole_s"], 3),
            f"{seen['base_s'] / seen['whole_s']:.3f}",
            f"{100 * seen['base_bytes'] / seen['whole_bytes']:.1f} %",
        ]
        for seen in run.rounds
    ]
    ratios = [seen["base_s"] / seen["whole_s"] for seen in run.rounds]
    rows.append(["median", "", "", f"{median(ratios):.3f}", ""])
    headings = ["changed", "on a base, s", "whole, s", "to whole", "bytes, to whole"]
    report.table("Saves on the checkpoint before", headings, rows)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks incremental", description=__doc__)
    parser.add_argument("--size", type=above_zero, default=2.0, help="of the state, in GiB")
    parser.add_argument("--changing", type=float, default=0.05, help="part that changes each time")
    add_options(parser, repeat=10)
    return parser


def main(argv: list[str] | None = None) -> None:
    chosen = arguments().parse_args(argv)
    nbytes = int(chosen.size * (1 << 30))
    need_memory(2 * nbytes)
    with scratch(chosen.dir, 5 * nbytes) as directory:
        settings: dict[str, Any] = {"nbytes": nbytes, "changing": chosen.changing}
        report = Report("incremental", directory, repeat=chosen.repeat, **settings)
        run = Run(nbytes, directory, chosen.changing)
        run.run(chosen.repeat)
        show(report, run)
        report.say(f"{run.remove_all()} verifications after removals, all whole")
        report.finish({"rounds": run.rounds}, chosen.json)

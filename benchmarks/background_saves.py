"""Saves in the background: how long the program waits, and what goes on behind it.

All ways in turn in one process, another one first in each round. *Stall* is the time until the call
returns, *staged* until the state may change, *total* until the checkpoint is committed and durable.
Stalls are held against one plain copy of the state (`yardstick.py`), measured in the same rounds.
Before the rounds every way saves once or twice and every element is changed as soon as the way
allows it; what is loaded then must be the state as it was (`--unchecked` leaves that out).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from benchmarks.background_report import Found, picture, show
from benchmarks.background_sides import WAYS, State, Way, torch_group
from benchmarks.beside import Captures, Products, capture_until
from benchmarks.device_rates import synchronize
from benchmarks.report import Report, above_zero, add_options, at_least_one
from benchmarks.rounds import checkpoint, named, need_memory, scratch
from benchmarks.states import training_state
from benchmarks.worker import Measure, give_memory_back, measured, status
from benchmarks.yardstick import DeviceCopy, HostCopy, Yardstick
from shardkeep.background import MOST_COPYING
from shardkeep.engine.budget import usable_cores

OURS = ("shardkeep, thread", "shardkeep, process", "shardkeep, lazy")
"""Whose memory is watched over many saves, and during which graphs are captured."""

ENOUGH_S = 0.2
"""A save that is written sooner says nothing about what it costs others."""


def save(way: Way, path: Path) -> Measure:
    """One save, from the call to its end."""
    synchronize(way.state.device)
    with measured() as measure:
        at = time.perf_counter()
        begun = way.begin(path)
        stall = time.perf_counter() - at
        if begun.staged is not None:
            begun.staged.result()
        staged = time.perf_counter() - at
        result = begun.done.result()
    told = getattr(result, "stats", {})
    measure.stats = {**told, "stall": stall, "staged": stall if way.may_change else staged}
    return measure


class Run:
    """All ways over one state."""

    def __init__(self, state: State, ways: dict[str, Way], directory: Path) -> None:
        self.state, self.ways, self.directory = state, ways, directory
        self.found = Found(state.nbytes)
        self.copy: Yardstick
        if state.device.type == "cuda":
            self.copy = DeviceCopy(state.device, state.nbytes)
        else:
            self.copy = HostCopy(state.tensors, min(MOST_COPYING, usable_cores()))
        self.copy.seconds()

    def each(
        self,
        work: Callable[[str, Way], None],
        first: int = 0,
        only: tuple[str, ...] | None = None,
    ) -> None:
        """Every way once; one that fails is left out from then on."""
        names = [name for name in self.ways if only is None or name in only]
        turn = first % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            print(f"{work.__name__}: {name}", file=sys.stderr)
            way = self.ways[name]
            try:
                work(name, way)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # torch's CheckpointException is none of Exception
                if isinstance(error.__context__, KeyboardInterrupt | SystemExit):
                    raise error.__context__ from None  # of which the save's own error came
                print(f"{name}: failed and is left out: {error!r}", file=sys.stderr)
                self.found.results.failed[name] = f"{type(error).__name__}: {error}"
                self.ways.pop(name)

    def check(self, name: str, way: Way) -> None:
        """What is saved is the state as it was, although it changes at once."""
        way.open()
        try:
            for _ in range(2 if way.is_ours else 1):  # with new memory, and with kept memory
                with checkpoint(self.directory) as path:
                    begun = way.begin(path)
                    if not way.may_change and begun.staged is not None:
                        begun.staged.result()
                    self.state.negate()
                    try:
                        begun.done.result()
                        way.load(path)
                    finally:
                        self.state.negate()
                    self.state.check()
        finally:
            way.close()

    def measure(self, name: str, way: Way, steady: int) -> None:
        """First saves, with and without memory that is ready, and saves after that."""

        def once(operation: str) -> None:
            with checkpoint(self.directory) as path:
                measure = save(way, path)
            self.found.results.add(name, operation, measure)
            told = f"stall {measure.stats['stall']:.3f} s, total {measure.seconds:.2f} s"
            print(f"  {operation}: {told}", file=sys.stderr)

        way.open()
        try:
            once("first")
            if way.prewarms:
                way.close()
                way.open()
                with measured() as measure:
                    way.prewarm()
                self.found.results.add(name, "prewarm", measure)
                once("prewarmed")
            for _ in range(steady):
                once("steady")
        finally:
            way.close()

    def round(self, number: int, steady: int) -> None:
        self.found.copies.append(self.copy.seconds())

        def measure(name: str, way: Way) -> None:
            self.measure(name, way, steady)

        self.each(measure, number)
        self.found.copies.append(self.copy.seconds())

    def grow(self, count: int) -> None:
        """Resident memory after the first and after the last of many saves."""

        def growth(name: str, way: Way) -> None:
            gc.collect()  # memory of the way before
            way.open()
            try:
                seen = []
                for _ in range(count):
                    with checkpoint(self.directory) as path:
                        way.begin(path).done.result()
                    give_memory_back()
                    seen.append(status("VmRSS"))
                self.found.resident[name] = seen
            finally:
                way.close()

        self.each(growth, only=OURS)

    def compute(self, seconds: float) -> None:
        """Products alone, beside a save, and alone again."""
        products = Products(self.state.device)
        products.alone(min(seconds, 0.5))

        def beside(name: str, way: Way) -> None:
            way.open()
            try:
                with checkpoint(self.directory) as path:
                    way.begin(path).done.result()  # memory is there from now on
                before = products.alone(seconds)
                with checkpoint(self.directory) as path:
                    begun = way.begin(path)
                    during = products.run(begun.done.done)
                    begun.done.result()
                after = products.alone(seconds)
            finally:
                way.close()
            alone = median([before.per_s, after.per_s])
            self.found.beside.setdefault(name, []).append(
                {
                    "loss": 1 - during.per_s / alone if during.seconds >= ENOUGH_S else None,
                    "alone": [before.plain(), after.plain()],
                    "beside": during.plain(),
                }
            )

        self.each(beside, only=(*OURS, "torch", "torch, kept"))

    def capture(self) -> None:
        """Graphs captured during a first save, whose memory is being made, and the one after."""
        captures = Captures(self.state.device)

        def captured(name: str, way: Way) -> None:
            way.open()
            try:
                for which in ("first", "steady"):
                    with checkpoint(self.directory) as path:
                        begun = way.begin(path)
                        assert begun.staged is not None
                        seen = capture_until(captures.capture, begun.staged.done, begun.done.done)
                        begun.done.result()
                    self.found.captured[f"{name}: {which}"] = asdict(seen)
            finally:
                way.close()

        self.each(captured, only=OURS)


def present(wanted: str | None, device: torch.device) -> list[str]:
    """The ways that can run here; says which cannot."""
    out = []
    for name in named(wanted, list(WAYS), list(WAYS)):
        why = WAYS[name].missing(device)
        if why is None:
            out.append(name)
        else:
            print(f"{name}: left out, {why}", file=sys.stderr)
    return out


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks async", description=__doc__)
    parser.add_argument("--size", type=above_zero, help="of the state, in GiB: 2, on a device 16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--layers", type=at_least_one, default=24, help="fewer: fewer, larger tensors"
    )
    parser.add_argument("--sides", help=f"only these, separated by ';': {'; '.join(WAYS)}")
    parser.add_argument("--steady", type=int, default=3, help="saves of a round after the first")
    parser.add_argument("--growth", type=int, default=10, help="saves to see memory grow; 0: none")
    parser.add_argument("--loop", type=float, default=3.0, help="seconds of products; 0: none")
    parser.add_argument("--unchecked", action="store_true", help="nothing is loaded and compared")
    add_options(parser, repeat=3)
    return parser


def main(argv: list[str] | None = None) -> None:
    chosen = arguments().parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    device = torch.device(chosen.device)
    on_device = device.type == "cuda"
    if on_device and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --device cpu runs without one")
    size = chosen.size or (16.0 if on_device else 2.0)
    leaves = training_state(int(size * (1 << 30)), chosen.layers)
    total = sum(leaf.nbytes for leaf in leaves)
    need_memory((3 if on_device else 6) * total)
    names = present(chosen.sides, device)
    with ExitStack() as stack:
        directory = stack.enter_context(scratch(chosen.dir, int(1.3 * total)))
        if any(name.startswith("torch") for name in names):
            stack.enter_context(torch_group())
        place = torch.cuda.get_device_name() if on_device else "host memory"
        settings = {"nbytes": total, "tensors": len(leaves), "repeat": chosen.repeat}
        report = Report("async", directory, device=place, steady=chosen.steady, **settings)
        report.say(f"{place}: {total / 1e9:.2f} GB in {len(leaves)} tensors")
        state = State(leaves, device)
        ways = {name: WAYS[name](state) for name in names}
        for name, way in ways.items():
            report.say(f"{name}: {way.note}")
        run = Run(state, ways, directory)
        if not chosen.unchecked:
            run.each(run.check)
        for number in range(chosen.repeat):
            run.round(number, chosen.steady)
        if chosen.growth:
            run.grow(chosen.growth)
        for _ in range(chosen.repeat if chosen.loop else 0):
            run.compute(chosen.loop)
        if on_device:
            run.capture()
        show(report, run.found)
        if chosen.picture:
            picture(chosen.picture, run.found)
        report.finish(run.found.plain(), chosen.json)

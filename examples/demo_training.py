# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep[torch]"]
# ///
"""The main job from end to end: train, save, be killed while saving, go on, also on other ranks.

Run `./demo`, or `python examples/demo_training.py [--directory DIR]`. What is trained, saved and
loaded is in `examples/train_fsdp2.py`. This works in a temporary directory, which it removes, and
exits with 1 if anything is not as it says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo import MIB, NotAsPromised, expect, files_of, flip, say, short, written
from demo_processes import PATIENCE_S, Launcher, Losses, Report, Training

import shardkeep
from shardkeep import (
    Checkpoint,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    MetadataIndex,
    TensorView,
)

if TYPE_CHECKING:
    import numpy as np

SAVE_EVERY = 3
FIRST, SECOND = SAVE_EVERY, 2 * SAVE_EVERY
LAST = SECOND + 2
TOLERANCE = 1e-5
"""For the loss on other ranks, which add floats up in another order."""

EMBEDDING = "model.tokens.weight"
WEIGHT = "model.blocks.0.down.weight"
MOMENT = "optimizer.state.blocks.0.up.weight.exp_avg_sq"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", help="where to make the temporary directory")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="shardkeep-demo-", dir=options.directory) as folder,
            Launcher(Path(folder)) as launcher,
        ):
            Demo(Path(folder), launcher).run()
    except (NotAsPromised, CheckpointError, subprocess.TimeoutExpired) as error:
        print(f"\nNOT AS PROMISED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left behind", file=sys.stderr)
        return 130
    return 0


class Demo:
    """The steps, in order."""

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        self.folder = folder
        self.launcher = launcher
        self.run_folder = folder / "run"
        self.first = self.run_folder / step_name(FIRST)
        self.second = self.run_folder / step_name(SECOND)
        self.number = 0
        self.trainings = 0
        self.summary: list[tuple[str, str]] = []

    def run(self) -> None:
        began = time.perf_counter()
        say_title(f"Shardkeep {shardkeep.__version__}, torch {version('torch')}, gloo, CPU")
        self.train_and_kill()
        self.look_at_what_is_left()
        self.train_undisturbed()
        self.resume_on_four()
        self.resume_on_two()
        self.read_without_torch()
        self.flip_a_bit()
        say_title("Summary")
        for what, outcome in self.summary:
            say(f"{what:32} {outcome}")
        print(f"\nAll as promised, in {time.perf_counter() - began:.0f} s.")

    def step(self, title: str) -> None:
        self.number += 1
        say_title(f"{self.number}. {title}")

    def start(self, world_size: int, name: str, *options: object) -> Training:
        """Start a training whose checkpoints go into the folder `name`."""
        arguments = [self.folder / name, "--save-every", SAVE_EVERY, *options]
        words = " ".join(str(argument) for argument in arguments).replace(f"{self.folder}/", "")
        say(f"$ torchrun --nproc-per-node {world_size} examples/train_fsdp2.py {words}")
        self.trainings += 1
        logs = self.folder / f"logs of {self.trainings}, {name}"
        return self.launcher.start(world_size, logs, *arguments)

    # --- the steps

    def train_and_kill(self) -> None:
        self.step("Train a transformer on 4 processes (FSDP2, AdamW); kill them while they save")
        for attempt in range(10):
            training = self.start(4, "run")
            self.await_half_a_save(training)
            codes = training.kill()
            if not (self.second / "checkpoint.json").exists():
                break
            say("the save was faster than the kill; once more from the beginning")
            self.run_folder.rename(self.folder / f"too-late-{attempt}")
        else:
            raise NotAsPromised("every save was faster than the kill")
        say("(in truth forked from one process, so that torch is imported only once)")
        expect(codes == [-signal.SIGKILL] * 4, f"exit codes {codes} instead of SIGKILL")
        self.killed = training
        self.saved = training.reports("saving", FIRST)
        self.tensors = self.saved[0]["tensors"]
        show_losses({"loss": training.losses()})
        say(f"all 4 killed by SIGKILL in the middle of saving {self.second.name}")

    def await_half_a_save(self, training: Training) -> None:
        """Until the second save has data on disk, and is not yet committed."""
        deadline = time.monotonic() + PATIENCE_S
        while training.exit_codes(0) is None:
            if any(map(is_half_written, self.second.glob("data/*-r*"))):
                return
            expect(time.monotonic() < deadline, f"no second save in {PATIENCE_S} s")
            time.sleep(0.0005)
        training.wait()
        raise NotAsPromised("the training ended before it was killed")

    def look_at_what_is_left(self) -> None:
        self.step("What the kill left: one whole checkpoint, and half of one that nobody sees")
        report = shardkeep.verify(self.first)
        expect(report.ok, f"{self.first.name} is damaged: {report.problems}")
        with shardkeep.open(self.first) as opened:
            step = opened["extra.step"]
            expect(step == FIRST, f"{self.first.name} is of step {step}")
            expect(digests(opened) == self.tensors, f"{self.first.name} is not what was in memory")
            size = f"{len(self.tensors)} tensors, {opened.nbytes / MIB:.1f} MiB"
        say(f"{self.first.name} verifies: {size},")
        say("  bit-equal to what the 4 processes held in memory, gathered by torch")

        self.left = files_of(self.second)
        say(f"{self.second.name} holds {len(self.left)} files that belong to no checkpoint:")
        for name in self.left:
            say(f"  {file_text(self.second, name)}")
        started = [self.second / name for name in self.left if name.startswith("data/")]
        expect(any(map(written, started)), "nothing had been written when they were killed")
        try:
            shardkeep.open(self.second)
        except CheckpointNotFoundError as error:
            reason = str(error).partition(": ")[2].partition(";")[0]
            say(f"  opening it: {type(error).__name__}, {reason}")
        else:
            raise NotAsPromised(f"{self.second.name} opens, though it was never committed")
        self.conclude("killed in the middle of a save", "the one before is whole, this one absent")

    def train_undisturbed(self) -> None:
        self.step("For comparison: the same training, never killed")
        self.undisturbed = self.start(4, "undisturbed", "--steps", LAST).wait()
        expect(
            pick(self.undisturbed.losses(), 1, SECOND) == self.killed.losses(),
            "the training that was killed was another one from the start",
        )
        say(f"up to step {SECOND} every loss is bit-equal to the one that was killed")

    def resume_on_four(self) -> None:
        self.step("Start it again on 4 processes: it goes on as if it had not been killed")
        run = self.start(4, "run", "--steps", LAST).wait()
        expect(run.resumed() == self.first.name, f"it resumed {run.resumed()}")
        loaded = run.reports("loaded", FIRST)
        self.check_state(loaded)
        rngs = [report["rng"] for report in self.saved]
        expect(len(set(rngs)) == 4, "the random generators of the ranks do not differ")
        expect([report["rng"] for report in loaded] == rngs, "a rank has another's RNG")
        say(f"it found {self.first.name}; state and each rank's RNG are bit-equal to the saved")
        expected = pick(self.undisturbed.losses(), FIRST + 1, LAST)
        show_losses({"never killed": expected, "resumed": run.losses()})
        expect(run.losses() == expected, "the losses are not bit-equal")
        for here, there in zip(
            run.reports("saving", SECOND), self.undisturbed.reports("saving", SECOND), strict=True
        ):
            expect(here == there, f"the state at step {SECOND} is not bit-equal")
        say(f"every loss is bit-equal, and so are all weights and moments at step {SECOND}")
        self.sweep()
        self.conclude("resumed on 4 (FSDP2)", "loss and state bit-equal to a run never killed")

    def sweep(self) -> None:
        """The resumed training has saved where the killed one had left half a save."""
        careful = shardkeep.gc(self.second)
        expect(not careful.removed and len(careful.live) == 1, "gc touched a fresh lease")
        removed = shardkeep.gc(self.second, stale_s=0)
        expect(sorted(removed.removed) == self.left, "gc removed other files than those left")
        report = shardkeep.verify(self.second)
        expect(report.ok, f"{self.second.name} is damaged: {report.problems}")
        say(f"{self.second.name} was saved beside the half one. gc spares that while its lease is")
        say("  fresh; gc(stale_s=0), as its writer is known to be dead, removes")
        say(
            f"  {len(self.left)} files, {removed.nbytes / MIB:.1f} MiB; {self.second.name} verifies"
        )

    def resume_on_two(self) -> None:
        self.step("Go on from the same checkpoint on 2 processes, by tensor parallelism")
        options = ("--steps", LAST, "--tensor-parallel", "--resume", self.first)
        run = self.start(2, "two", *options).wait()
        loaded = run.reports("loaded", FIRST)
        was, now = self.saved[0]["shards"], loaded[0]["shards"]
        for name in (EMBEDDING, WEIGHT):
            say(f"{name}: {shard_text(was[name])} of 4, now {shard_text(now[name])} of 2")
        expect(was[WEIGHT][0] != now[WEIGHT][0], f"{WEIGHT} is cut in the same way")
        self.check_state(loaded)
        say(f"all {len(self.tensors)} tensors, gathered by torch, are bit-equal to the saved")
        expected = pick(self.undisturbed.losses(), FIRST + 1, LAST)
        show_losses({"never killed": expected, "resumed on 2": run.losses()})
        off = largest_difference(expected, run.losses())
        expect(off <= TOLERANCE, f"the losses differ by {off:.1e}, more than {TOLERANCE:.0e}")
        say(f"no loss differs by more than {off:.1e}")
        self.conclude("resumed on 2 (tensor parallel)", f"state bit-equal, loss within {off:.1e}")

    def check_state(self, loaded: list[Report]) -> None:
        for rank, report in enumerate(loaded):
            wrong = sorted(dict(report["tensors"].items() ^ self.tensors.items()))
            expect(not wrong, f"rank {rank} has another state than was saved: {wrong[:9]}")

    def read_without_torch(self) -> None:
        self.step("Read it where torch cannot be imported: numpy only")
        python = TorchlessPython(self.folder)
        for command in ("show 'model.blocks.0.*.weight'", "verify"):
            name, *options = shlex.split(command)
            shown = python.run("-m", "shardkeep.cli", name, self.first, *options)
            say(f"$ shardkeep {command.replace(name, f'{name} run/{self.first.name}', 1)}")
            for line in shown.replace(f"{self.folder}/", "").strip().splitlines():
                say(f"  {line}")
        told = json.loads(python.run("-c", READ_ROWS, self.first, WEIGHT))
        with shardkeep.open(self.first) as opened:
            rows, nbytes = opened[WEIGHT].numpy()[60:70], opened.nbytes
        expect(told["rows"] == rows.tobytes().hex(), "other rows came")
        say(f"{WEIGHT}[60:70] is bit-equal: {rows.nbytes / 1024:.0f} KiB, of two ranks' files")
        if told["nbytes"] is not None:
            say(f"  for which {told['nbytes'] / 1024:.0f} KiB of {nbytes / MIB:.1f} MiB were read")
            expect(told["nbytes"] < nbytes / 8, "reading ten rows read far too much")
        self.conclude("read without torch", "listed, verified, ten rows bit-equal")

    def flip_a_bit(self) -> None:
        self.step("Flip one bit of it")
        with shardkeep.open(self.first) as opened:
            place = opened.metadata.storage_data[MetadataIndex(MOMENT, (0, 0))]
        file, at = self.first / place.file, place.offset + place.nbytes // 2
        flip(file, at)
        problems = shardkeep.verify(self.first).problems
        expect(len(problems) == 1, f"verify found {len(problems)} problems, not 1")
        expect(MOMENT in problems[0].names, "verify blames another tensor")
        say(f"verify:     damage in {short(problems[0].file)}, which hits")
        say(f"            {', '.join(problems[0].names)}")
        with shardkeep.open(self.first) as opened:
            try:
                opened[MOMENT].numpy()
            except CorruptionError as error:
                expect(MOMENT in error.names, "reading blames another tensor")
                say(f"reading it: {type(error).__name__}; other tensors still read, checked")
            else:
                raise NotAsPromised("reading did not notice a flipped bit")
            found = digest(opened[WEIGHT].numpy())
            expect(found == self.tensors[WEIGHT], "an undamaged tensor differs")
        flip(file, at)
        expect(shardkeep.verify(self.first).ok, "flipping the bit back did not heal it")
        self.conclude("one flipped bit", "found by verify and by reading, with its tensor's name")

    def conclude(self, what: str, outcome: str) -> None:
        self.summary.append((what, outcome))


class TorchlessPython:
    """Runs Python in processes of its own, in which `import torch` fails."""

    def __init__(self, folder: Path) -> None:
        block = folder / "no-torch"
        block.mkdir()
        (block / "torch.py").write_text("raise ImportError('hidden by the demo')\n")
        path = [str(block), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        hidden = "try: import torch\nexcept ImportError as error: print(error)"
        expect("hidden by the demo" in self.run("-c", hidden), "torch can be imported after all")

    def run(self, *arguments: object) -> str:
        """What it printed."""
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        expect(done.returncode == 0, f"a process without torch failed: {done.stderr}")
        return done.stdout


READ_ROWS = """
import json, sys
import shardkeep
from demo import read_counter

def read():
    with shardkeep.open(sys.argv[1]) as checkpoint:
        return checkpoint[sys.argv[2]][60:70]

read()  # imports what it needs
before = read_counter()
rows = read()
nbytes = None if before is None else read_counter() - before
print(json.dumps({"rows": rows.tobytes().hex(), "nbytes": nbytes}))
"""


# --- small things


def say_title(text: str) -> None:
    print(f"\n{text}", flush=True)


def step_name(step: int) -> str:
    return f"step-{step:06}"


def is_half_written(path: Path) -> bool:
    """Whether there are bytes behind the first sixteenth of a data file; it is preallocated."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(path.stat().st_size // 16)
            return any(file.read(4096))
    except FileNotFoundError:
        return False


def file_text(checkpoint: Path, name: str) -> str:
    if not name.startswith("data/"):
        return "the lease of its save"
    path = checkpoint / name
    done, size = written(path) / MIB, path.stat().st_size / MIB
    return f"{short(name)}  {done:.1f} of {size:.1f} MiB written"


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Of every tensor that is not a rank's own."""
    views: Mapping[str, Any] = {name: checkpoint[name] for name in checkpoint}
    return {
        name: digest(view.numpy())
        for name, view in views.items()
        if isinstance(view, TensorView) and not name.startswith("extra.rng.")
    }


def pick(losses: Losses, first: int, last: int) -> Losses:
    expect(losses.keys() >= set(range(first, last + 1)), f"losses of steps {list(losses)} only")
    return {step: losses[step] for step in range(first, last + 1)}


def largest_difference(one: Losses, two: Losses) -> float:
    expect(one.keys() == two.keys(), f"losses of steps {list(one)} and of {list(two)}")
    return max(abs(one[step] - two[step]) for step in one)


def show_losses(columns: dict[str, Losses]) -> None:
    say("step" + "".join(f"{title:>16}" for title in columns))
    for step in next(iter(columns.values())):
        say(f"{step:4}" + "".join(f"{column[step]:16.9g}" for column in columns.values()))


def shard_text(shard: list[Any]) -> str:
    placement, shape = shard
    return f"{placement} {'x'.join(map(str, shape))}"


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep"]
# ///
"""What Shardkeep promises, shown on a small model's state: numpy only, under half a minute.

Run `./demo`, or `python examples/demo.py [--small] [--directory DIR]`. It works in a temporary
directory, which it removes, and exits with 1 if anything is not as it says.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import shardkeep
from shardkeep import CorruptionError, MetadataIndex, ShardedArray, ThreadRanks

State = dict[str, Any]
EMBEDDING = "model.embedding"
MIB = 1 << 20


class NotAsPromised(Exception):
    """Something differs from what the demo says; it must never happen."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a few MB instead of about 140")
    parser.add_argument("--directory", help="where to make the temporary directory")
    parser.add_argument("--overwrite", metavar="CHECKPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.overwrite:  # the process that step 3 starts, and kills
        shardkeep.save(make_state(2, options.small), options.overwrite, overwrite=True)
        return 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shardkeep-demo-", dir=options.directory) as folder:
        try:
            Demo(Path(folder), options.small).run()
        except NotAsPromised as error:
            print(f"\nNOT AS PROMISED: {error}", file=sys.stderr)
            return 1
    print(f"\nAll as promised, in {time.perf_counter() - began:.1f} s.")
    return 0


# --- the state


def make_state(step: int, small: bool) -> State:
    """Like a small language model's: bfloat16 weights, float32 Adam moments, plain values."""
    layers, hidden, vocabulary = (2, 128, 4096) if small else (4, 512, 8192)
    rng = np.random.default_rng(step)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}": (hidden, hidden) for name in ("wq", "wk", "wv", "wo")}
        shapes[f"layers.{layer}.up"] = (4 * hidden, hidden)
        shapes[f"layers.{layer}.down"] = (hidden, 4 * hidden)
        shapes[f"layers.{layer}.norm"] = (hidden,)

    def random(shape: tuple[int, ...]) -> np.ndarray:
        return rng.random(shape, dtype=np.float32) - np.float32(0.5)

    model = {name: random(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    model["head"] = model["embedding"]  # tied: one array under two names
    return {
        "model": model,
        "adam": {name: {"m": random(shape), "v": random(shape)} for name, shape in shapes.items()},
        "step": step,
        "schedule": {"lr": 3e-4, "betas": (0.9, 0.95)},
        "rng": rng.bit_generator.state,  # holds integers of 128 bits
    }


def blank(state: Any) -> Any:
    """A target of the same form with nothing in it."""
    if isinstance(state, Mapping):
        return {key: blank(value) for key, value in state.items()}
    return np.zeros_like(state) if isinstance(state, np.ndarray) else None


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, state


def bit_equal(a: Any, b: Any) -> bool:
    """The same names, types, shapes and bits."""

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, np.ndarray):
            alike = isinstance(y, np.ndarray) and (x.dtype, x.shape) == (y.dtype, y.shape)
            return alike and x.tobytes() == y.tobytes()
        return type(x) is type(y) and x == y

    left, right = dict(leaves(a)), dict(leaves(b))
    return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)


# --- the steps


class Demo:
    """The steps, in order; each leaves the checkpoint whole for the next."""

    def __init__(self, folder: Path, small: bool) -> None:
        self.small = small
        self.checkpoint = folder / "step-100"
        self.resharded = folder / "four-ranks"
        self.number = 0

    def run(self) -> None:
        self.make()
        self.save()
        self.kill_a_writer()
        self.overwrite()
        self.flip_a_bit()
        self.read_lazily()
        self.open_with_other_tools()
        self.reshard()

    def step(self, title: str) -> None:
        self.number += 1
        print(f"\n{self.number}. {title}")

    def make(self) -> None:
        self.step("A state to keep: bfloat16 weights, float32 Adam moments, step, RNG")
        self.state = make_state(1, self.small)
        arrays = [x for _, x in leaves(self.state) if isinstance(x, np.ndarray)]
        nbytes = sum(array.nbytes for array in {id(a): a for a in arrays}.values())
        say(f"{len(arrays)} tensors, {nbytes / MIB:.1f} MiB; model.head is tied to {EMBEDDING}")

    def save(self) -> None:
        self.step("Save it")
        began = time.perf_counter()
        saved = shardkeep.save(self.state, self.checkpoint)
        seconds = time.perf_counter() - began
        size = sum(path.stat().st_size for path in self.checkpoint.rglob("*") if path.is_file())
        say(f"{size / MIB:.1f} MiB on disk in {seconds:.2f} s: {size / 1e6 / seconds:.0f} MB/s,")
        say("hashed, fsynced and committed before save() returned")
        self.digest = saved.digest
        say(f"digest {self.digest}")
        listing(self.checkpoint)
        self.check_is(self.state, "what was saved")

    def kill_a_writer(self) -> None:
        self.step("Kill a process (SIGKILL) while it overwrites this checkpoint")
        before = set(files_of(self.checkpoint))
        for attempts_left in reversed(range(12)):
            code = self.overwrite_and_kill(before)
            left = [name for name in files_of(self.checkpoint) if name not in before]
            killed = code == -signal.SIGKILL and before <= set(files_of(self.checkpoint))
            if killed and (self.is_half_written(left) or not attempts_left):
                break
            # Too late: clean up, and strike once more.
            expect(attempts_left > 0, "the writer always finished before it could be killed")
            if killed:
                shardkeep.gc(self.checkpoint, stale_s=0)
            else:
                self.digest = shardkeep.save(self.state, self.checkpoint, overwrite=True).digest
                before = set(files_of(self.checkpoint))
        say(f"the writer ended with exit code {code}: killed by SIGKILL")
        say(f"it left {len(left)} uncommitted files behind:")
        for name in left:
            path = self.checkpoint / name
            size, done = path.stat().st_size / MIB, written(path) / MIB
            say(f"  {name}  {f'{done:.1f} of {size:.1f} MiB written' if size else '(its lease)'}")
        report = shardkeep.verify(self.checkpoint)
        expect(report.ok and report.digest == self.digest, "the old checkpoint is not whole")
        say(f"the old checkpoint verifies: {report.files} files, digest unchanged")
        self.check_is(self.state, "the old state")

        careful = shardkeep.gc(self.checkpoint)
        expect(not careful.removed and len(careful.live) == 1, "gc touched a fresh lease")
        say("gc leaves it alone: the lease is seconds old, so a save could still be running")
        removed = shardkeep.gc(self.checkpoint, stale_s=0)
        say("but we know that its writer is dead, so gc(stale_s=0) removes")
        say(f"  {len(removed.removed)} files, {removed.nbytes / MIB:.1f} MiB")
        expect(set(files_of(self.checkpoint)) == before, "gc did not restore the directory")
        self.check_is(self.state, "the old state, still")

    def overwrite_and_kill(self, before: set[str]) -> int:
        """Start a writer and kill it in the middle of its data file; returns its exit code."""
        command = [sys.executable, __file__, "--overwrite", str(self.checkpoint)]
        with subprocess.Popen(command + ["--small"] * self.small) as writer:
            deadline = time.monotonic() + 60
            while writer.poll() is None and not self.third_is_written(before):
                if time.monotonic() > deadline:
                    writer.kill()
                    raise NotAsPromised("the writer wrote nothing in a minute")
                time.sleep(0.0002)
            writer.kill()
            return writer.wait()

    def third_is_written(self, before: set[str]) -> bool:
        """Whether a new data file has bytes at a third of its length (files are preallocated)."""
        for path in (self.checkpoint / "data").iterdir():
            if f"data/{path.name}" not in before and "-r" in path.name:
                try:
                    with path.open("rb", buffering=0) as file:
                        file.seek(path.stat().st_size // 3)
                        return any(file.read(4096))
                except FileNotFoundError:  # committed, and already replaced
                    return False
        return False

    def is_half_written(self, left: list[str]) -> bool:
        """Whether the killed save's data file is there but not full."""
        data = [self.checkpoint / name for name in left if "-r" in name]
        if len(data) != 1 or any(name.endswith("-index.safetensors") for name in left):
            return False
        return 0 < written(data[0]) < data[0].stat().st_size

    def overwrite(self) -> None:
        self.step("Overwrite it, this time undisturbed")
        self.state = make_state(2, self.small)
        saved = shardkeep.save(self.state, self.checkpoint, overwrite=True)
        expect(saved.digest != self.digest, "a new save has the old digest")
        self.digest = saved.digest
        say(f"digest {self.digest}")
        with shardkeep.open(self.checkpoint) as opened:
            expect(opened["step"] == 2, "the old step is still there")
            say(f"step is now {opened['step']}; the old files are gone:")
        listing(self.checkpoint)
        self.check_is(self.state, "the new state")

    def flip_a_bit(self) -> None:
        self.step("Flip one bit of one data file")
        name = "adam.embedding.v"
        with shardkeep.open(self.checkpoint) as opened:
            place = opened.metadata.storage_data[MetadataIndex(name)]
        at = place.offset + place.nbytes // 2
        flip(self.checkpoint / place.file, at)
        say(f"bit 3 of byte {at} of {short(place.file)}")

        report = shardkeep.verify(self.checkpoint)
        expect(len(report.problems) == 1, f"verify found {len(report.problems)} problems, not 1")
        problem = report.problems[0]
        say(f"verify: block {problem.block} of {short(problem.file)}")
        say(f"        which holds {', '.join(problem.names)}")
        expect(problem.file == place.file and name in problem.names, "verify blames another place")
        try:
            shardkeep.load(blank(self.state), self.checkpoint)
        except CorruptionError as error:
            say(f"load:   {type(error).__name__}, names {', '.join(error.names)}")
            expect(name in error.names, "load blames another tensor")
        else:
            raise NotAsPromised("load did not notice a flipped bit")
        part = {"model": blank(self.state["model"])}
        shardkeep.load(part, self.checkpoint)
        expect(bit_equal(part["model"], self.state["model"]), "the undamaged part differs")
        say("what lies elsewhere still loads, checked: load({'model': ...}) is bit-equal")
        flip(self.checkpoint / place.file, at)
        expect(shardkeep.verify(self.checkpoint).ok, "flipping the bit back did not heal it")
        say("flipped back: verify is content again")

    def read_lazily(self) -> None:
        self.step("Read ten rows of a large tensor")
        counter = read_counter()
        with shardkeep.open(self.checkpoint) as opened:
            view = opened[EMBEDDING]
            rows = view[1000:1010]
            shape, nbytes = view.shape, opened.nbytes
        expect(bit_equal(rows, self.state["model"]["embedding"][1000:1010]), "other rows came")
        say(f"{EMBEDDING}{list(shape)}[1000:1010] is bit-equal: {rows.nbytes / 1024:.0f} KiB")
        if counter is None:
            say("(this system has no /proc/self/io to count what was read)")
            return
        read = (read_counter() or 0) - counter
        say(f"read {read / 1024:.0f} KiB of {nbytes / MIB:.1f} MiB: record, index, digests, blocks")
        expect(read < nbytes / 8, "reading ten rows read far too much")

    def open_with_other_tools(self) -> None:
        self.step("Read a data file without Shardkeep: it is a plain safetensors file")
        with shardkeep.open(self.checkpoint) as opened:
            file = opened.metadata.storage_data[MetadataIndex(EMBEDDING)].file
        with (self.checkpoint / file).open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            header = json.loads(data.read(length))
            start, stop = header[EMBEDDING]["data_offsets"]
            data.seek(8 + length + start)
            raw = data.read(stop - start)
        names = sorted(name for name in header if not name.startswith("__"))
        say(f"{len(names)} tensors, __metadata__ {header['__metadata__']}")
        for name in names[:: max(1, len(names) // 4)]:
            entry = header[name]
            say(f"  {name:26} {entry['dtype']:5} {entry['shape']}  at {entry['data_offsets']}")
        expect(raw == self.state["model"]["embedding"].tobytes(), "the plain bytes differ")
        say(f"the bytes of {EMBEDDING}, cut out by hand, are the array's own")

    def reshard(self) -> None:
        self.step("Save on 4 ranks, load on 3, cut another way")
        whole = self.state["adam"]["embedding"]["m"]
        weight = self.state["model"]["layers.0.up"]

        def save(ranks: Any) -> None:
            state = {
                "m": shard(whole, 0, ranks.rank, 4),
                "w": shard(weight, 0, ranks.rank, 4),
                "step": self.state["step"],
            }
            shardkeep.save(state, self.resharded, process_group=ranks)

        def load(ranks: Any) -> State:
            state = {
                "m": shard(np.zeros_like(whole), 0, ranks.rank, 3),
                "w": shard(np.zeros_like(weight), 1, ranks.rank, 3),
                "step": None,
            }
            return shardkeep.load(state, self.resharded, process_group=ranks).state_dict  # type: ignore[no-any-return]

        ThreadRanks(4).run(save)
        with shardkeep.open(self.resharded) as opened:
            chunks = len(opened["m"].metadata.chunks)
            expect(chunks == 4, f"4 ranks made {chunks} chunks")
        say(f"saved: m{list(whole.shape)} and w{list(weight.shape)} by rows, 4 chunks each")
        parts = ThreadRanks(3).run(load)
        local = {name: [part[name].local_shards[0].array for part in parts] for name in ("m", "w")}
        say(f"loaded: m by rows, {[list(a.shape) for a in local['m']]}")
        say(f"        w by columns, {[list(a.shape) for a in local['w']]}")
        expect(bit_equal(np.concatenate(local["m"], 0), whole), "m differs after resharding")
        expect(bit_equal(np.concatenate(local["w"], 1), weight), "w differs after resharding")
        expect(all(part["step"] == self.state["step"] for part in parts), "step differs")
        say("put together again, both are bit-equal")

    def check_is(self, state: State, what: str) -> None:
        """Load everything and compare every bit."""
        found = shardkeep.load(blank(state), self.checkpoint, expect_digest=self.digest).state_dict
        expect(bit_equal(found, state), f"what was loaded is not {what}")
        say(f"loaded again: bit for bit {what}")


# --- small things


def say(text: str) -> None:
    print(f"   {text}", flush=True)


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotAsPromised(otherwise)


def shard(array: np.ndarray, dim: int, rank: int, world_size: int) -> ShardedArray:
    """A rank's part of an array, as even as it goes."""
    parts = np.array_split(array, world_size, axis=dim)
    offsets = [0] * array.ndim
    offsets[dim] = sum(part.shape[dim] for part in parts[:rank])
    return ShardedArray.from_local(np.ascontiguousarray(parts[rank]), offsets, array.shape)


def files_of(checkpoint: Path) -> list[str]:
    return sorted(
        p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file()
    )


def listing(checkpoint: Path) -> None:
    for name in files_of(checkpoint):
        say(f"  {name}  {(checkpoint / name).stat().st_size / MIB:.2f} MiB")


def short(file: str) -> str:
    """A data file's name with its 32-digit save id cut."""
    return f"data/{file[5:9]}...{file[37:]}"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0b1000]))


def written(path: Path) -> int:
    """Bytes of a preallocated file that are not zero, counted in pages."""
    data = np.fromfile(path, np.uint8)
    pages = data[: len(data) // 4096 * 4096].reshape(-1, 4096)
    return 4096 * int(pages.any(axis=1).sum())


def read_counter() -> int | None:
    """Bytes this process has read from anything so far, where the system counts them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in lines)["rchar"])


if __name__ == "__main__":
    sys.exit(main())

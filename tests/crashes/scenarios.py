"""Everything that writes, as scenarios of the crash machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

from generations import (
    ABSENT,
    FROZEN,
    assert_clean,
    blank,
    exact,
    generation_at,
    state,
    weights,
    weights_at,
)
from machine import Scenario

import shardkeep
import shardkeep.foreign.writing as writing
from shardkeep import CheckpointManager, FastTier
from shardkeep.formats.native.commit import collect_garbage
from shardkeep.formats.native.names import data_file, lease_name, new_save_id
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.naming import StepNames
from shardkeep.stores.local import LocalStore

OPTIONS = {"memory_budget": 8 << 20, "no_dist": True}


def save(place, generation, **options):
    writer = shardkeep.NativeWriter(place, block=4096, overwrite=options.get("overwrite", False))
    return shardkeep.save(state(generation), place, storage_writer=writer, **OPTIONS, **options)


def allowed(marks, first=ABSENT):
    """Generations that may be there: begun, and not older than one the program was told of."""
    begun, returned = {first: -1}, {first: -1}
    for at, label in enumerate(marks):
        what, number = label.split()
        (begun if what == "begin" else returned).setdefault(int(number), at)
    never = len(marks)
    return {
        one
        for one in begun
        if not any(begun[other] > returned.get(one, never) for other in returned)
    }


class Saves(Scenario):
    """Saves to one place of the native format."""

    place = "run/ckpt"

    def __init__(self, name, generations, first=ABSENT, how="save", base=None):
        self.name, self.generations, self.first = name, generations, first
        self.how, self.base = how, base

    def prepare(self, base):
        if self.first:
            save(base / self.place, self.first)
        if self.base == "other":
            save(base / "other", FROZEN)

    def run(self, base, mark):
        place = base / self.place
        for generation in self.generations:
            options = {"overwrite": generation != self.generations[0] or self.first != ABSENT}
            if self.base is not None:
                options["base"] = base / "other" if self.base == "other" else place
            mark(f"begin {generation}")
            if self.how == "save":
                save(place, generation, **options)
            else:
                with shardkeep.Checkpointer(no_dist=True, memory_budget=8 << 20) as keeper:
                    keeper.async_save(state(generation), place, **options).result()
            mark(f"return {generation}")

    def look(self, base):
        if self.base == "other":
            assert generation_at(base / "other", thorough=False) == FROZEN
        return generation_at(base / self.place)

    def judge(self, found, marks):
        may_be = allowed(marks, self.first)
        assert found in may_be, f"found {found}, promised {may_be}"

    def assert_clean(self, base, found, error):
        if error is not None and found != self.first:
            return  # it is there, but may not be after a crash: the files of both stay
        if (base / self.place).is_dir():
            assert_clean(base / self.place)

    def recover(self, base, found, number):
        place = base / self.place
        if place.is_dir():
            collect_garbage(LocalStore(place), stale_s=0)
            assert_clean(place)
            assert generation_at(place, thorough=False) == found, "gc changed what loads"
        if number % 3 == 0:
            save(place, 99, overwrite=True)
            assert generation_at(place, thorough=False) == 99
            assert_clean(place)


class Ranks(Saves):
    """The same by two ranks, each with its rows."""

    def run(self, base, mark):
        place = base / self.place

        def work(coordinator):
            rank = coordinator.rank
            held = state(self.generations[0])
            rows = held["big"][1500 * rank : 1500 * (rank + 1)]
            held["big"] = shardkeep.ShardedArray.from_local(rows, (1500 * rank,), (3000,))
            shardkeep.save(
                held, place, overwrite=True, process_group=coordinator, memory_budget=8 << 20
            )

        mark(f"begin {self.generations[0]}")
        one, other = shardkeep.ThreadRanks(2).outcomes(work)
        assert type(one) is type(other), f"one rank saw {one!r}, the other {other!r}"
        if one is not None:
            raise one
        mark(f"return {self.generations[0]}")


class Collection(Saves):
    """gc of what several killed saves have left beside a checkpoint."""

    def __init__(self):
        super().__init__("gc", [], first=1)

    def prepare(self, base):
        super().prepare(base)
        place = base / self.place
        killed = new_save_id()
        (place / lease_name(killed)).write_bytes(b"")
        for number in range(2):
            (place / data_file(killed, 0, number)).write_bytes(bytes(100))
        (place / data_file(new_save_id(), 0, 0)).write_bytes(bytes(100))
        (place / "gc-0123456789abcdef.tmp").write_bytes(b"")

    def run(self, base, mark):
        assert shardkeep.gc(base / self.place, stale_s=0).removed

    def assert_clean(self, base, found, error):
        """Who cannot clean leaves what there was."""


# --- a folder of steps


def steps_in(root):
    """Steps that a manager would restore; all that are listed are whole."""
    listing = Catalog(root, StepNames(), LocalStore).look()
    assert not listing.damaged, listing.damaged
    for step in listing.steps:
        assert generation_at(step.path) == step.step + FROZEN
    return tuple(step.step for step in listing.steps)


def assert_folder_clean(root, steps):
    assert set(os.listdir(root)) - {".shardkeep"} == {f"step-{step}" for step in steps}
    for step in steps:
        assert_clean(Path(root) / f"step-{step}")


class Run(Scenario):
    """A manager saves steps and keeps two of them; later ones share files with earlier ones."""

    KEPT = 2

    def __init__(self, name="retention", how="save", tiers=False, full_every=3, last=5):
        self.name, self.how, self.tiers = name, how, tiers
        self.full_every, self.last = full_every, last

    def manager(self, base):
        fast = FastTier(base / "fast", keep=1, close_s=60) if self.tiers else None
        return CheckpointManager(
            base / "run",
            keep=self.KEPT,
            fast=fast,
            full_every=self.full_every,
            stale_s=0,
            **OPTIONS,
        )

    def run(self, base, mark):
        with self.manager(base) as manager:
            for step in range(1, self.last + 1):
                mark(f"begin {step}")
                if self.how == "save":
                    manager.save(step, state(step + FROZEN))
                else:
                    manager.async_save(step, state(step + FROZEN)).result()
                mark(f"return {step}")
                if self.tiers and step % 2 == 0:
                    manager.wait_copied()
                    mark(f"copied {step}")
                manager.wait_retention()
        mark("closed 0")

    def look(self, base):
        durable = steps_in(base / "run")
        return durable, steps_in(base / "fast") if self.tiers else ()

    def judge(self, found, marks):
        durable, fast = found
        told = {what: [int(m.split()[1]) for m in marks if m.startswith(what)]
                for what in ("begin", "return", "copied")}  # fmt: skip
        there = {*durable, *fast}
        assert there <= set(told["begin"]), "a step that nobody saved"
        if told["return"]:
            assert told["return"][-1] in there, "a step is gone that the program was told of"
        if told["copied"]:
            assert max(durable, default=0) >= told["copied"][-1], "a copy is gone"
        if not self.tiers:
            assert len(durable) >= min(self.KEPT, len(told["return"])), "too few are left"

    def recover(self, base, found, number):
        there = {*found[0], *found[1]}
        (base / "run").mkdir(exist_ok=True)
        with self.manager(base) as manager:
            target = blank(state(FROZEN))
            restored = manager.restore(target)
            assert (restored.step if restored else None) == max(there, default=None)
            if restored:
                assert exact(restored.state_dict) == exact(state(restored.step + FROZEN))
            new = max(there, default=0) + 1
            manager.save(new, state(new + FROZEN))
        kept = steps_in(base / "run")
        assert kept[-1] == new
        assert len(kept) <= self.KEPT
        assert_folder_clean(base / "run", kept)
        if self.tiers:
            assert_folder_clean(base / "fast", steps_in(base / "fast"))


class Deletion(Run):
    """A step is deleted on purpose."""

    def __init__(self):
        super().__init__("delete")

    def prepare(self, base):
        with self.manager(base) as manager:
            manager.save(1, state(1 + FROZEN))
            manager.save(2, state(2 + FROZEN))

    def run(self, base, mark):
        mark("deleting 1")
        with self.manager(base) as manager:
            manager.delete(1)
        mark("deleted 1")

    def judge(self, found, marks):
        may_be = [(2,)] if "deleted 1" in marks else [(1, 2), (2,)] if marks else [(1, 2)]
        assert found[0] in may_be


# --- Hugging Face's files

CONFIG = b'{"model_type": "toy"}'


class Export(Scenario):
    """Weights saved as safetensors, over others that lie beside a configuration."""

    def __init__(self, name, generation, first=ABSENT):
        self.name, self.generation, self.first = name, generation, first

    def save(self, base, generation, **options):
        writer = shardkeep.HuggingFaceWriter(max_shard_size=8000)
        place = base / "out" / "model"
        shardkeep.save(weights(generation), place, storage_writer=writer, **OPTIONS, **options)

    def prepare(self, base):
        if self.first:
            self.save(base, self.first)
            (base / "out/model/config.json").write_bytes(CONFIG)

    def run(self, base, mark):
        mark(f"begin {self.generation}")
        self.save(base, self.generation, overwrite=True)
        mark(f"return {self.generation}")

    def look(self, base):
        place = base / "out/model"
        if self.first:
            assert (place / "config.json").read_bytes() == CONFIG
        return weights_at(place)

    def judge(self, found, marks):
        may_be = allowed(marks, self.first)
        assert found in may_be, f"found {found}, promised {may_be}"

    def assert_clean(self, base, found, error):
        if (base / "out").is_dir():
            assert set(os.listdir(base / "out")) <= {"model"}

    def recover(self, base, found, number):
        if number % 3 == 0:
            self.save(base, 99, overwrite=True)
            assert self.look(base) == 99


# --- conversions


@cache
def source(generation, kind="weights"):
    """A checkpoint to convert from, which stays where it is."""
    folder = Path(tempfile.mkdtemp(prefix="shardkeep-source-"))
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shardkeep.save(weights(generation), folder / "source", **OPTIONS)
    return folder / "source"


class Conversion(Scenario):
    """A checkpoint is converted to a place where another may be."""

    def __init__(self, name, to, first=ABSENT, resumed=False, **options):
        self.name, self.to, self.first, self.options = name, to, first, options
        self.resumed = resumed

    def place(self, base):
        return base / ("out.pt" if self.to == "torch-save" else "out")

    def convert(self, base, generation, **options):
        with self.settings():
            shardkeep.convert(
                source(generation), self.place(base), to=self.to, memory_budget=16 << 20,
                **self.options, **options,
            )  # fmt: skip

    def settings(self):
        """Progress is noted every few pages."""
        small = contextlib.ExitStack()
        small.enter_context(mock.patch.object(writing, "WINDOW", 4096))
        small.enter_context(mock.patch.object(writing, "NOTE_EVERY", 8192))
        return small

    def prepare(self, base):
        source(2), source(3)
        if self.first:
            self.convert(base, self.first)
        if self.resumed:
            # An attempt that was interrupted in the middle.
            def stop(done, total):
                if done > total // 2:
                    raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt):
                generation = 2 if self.resumed == "same" else 3
                self.convert(base, generation, overwrite=True, progress=stop)
            assert list(base.glob("*.converting"))

    def run(self, base, mark):
        mark("begin 2")
        self.convert(base, 2, overwrite=self.first != ABSENT)
        mark("return 2")

    def look(self, base):
        return weights_at(self.place(base))

    def judge(self, found, marks):
        may_be = allowed(marks, self.first)
        assert found in may_be, f"found {found}, promised {may_be}"

    def assert_clean(self, base, found, error):
        kept = self.resumed or getattr(error, "transient", False)  # to be gone on with
        assert set(os.listdir(base)) <= {self.place(base).name} or kept

    def recover(self, base, found, number):
        generation = 2 + number % 2  # the same again, or another one
        self.convert(base, generation, overwrite=True)
        assert self.look(base) == generation
        assert os.listdir(base) == [self.place(base).name]


# --- reading


class Reading(Scenario):
    """What only reads: a disk may fail under it, and it says so."""

    def __init__(self, name, read):
        self.name, self.read = name, read

    def prepare(self, base):
        save(base / "ckpt", FROZEN)

    def run(self, base, mark):
        self.read(base / "ckpt")

    def look(self, base):
        return generation_at(base / "ckpt")

    def judge(self, found, marks):
        assert found == FROZEN


def read_all(place):
    with shardkeep.open(place) as checkpoint:
        assert exact(checkpoint.state_dict()) == exact(state(FROZEN))


def load_all(place):
    found = shardkeep.load(blank(state(FROZEN)), place, **OPTIONS).state_dict
    assert exact(found) == exact(state(FROZEN))


def readings():
    """Those that change nothing, by name."""
    found = [
        Reading("open", read_all),
        Reading("load", load_all),
        Reading("verify", lambda place: shardkeep.verify(place).raise_if_damaged()),
    ]
    return {scenario.name: scenario for scenario in found}


def scenarios():
    """All of them, by name."""
    shards = {"max_shard_size": 8000}
    found = [
        Saves("create", [1]),
        Saves("overwrite", [2], first=1),
        Saves("overwrite twice", [2, 3], first=1),
        Saves("async", [1, 2], how="async"),
        Saves("incremental", [FROZEN + 1, FROZEN + 2], first=FROZEN, base="same"),
        Saves("incremental of another", [FROZEN + 1], base="other"),
        Saves("async incremental", [FROZEN + 1], how="async", base="other"),
        Ranks("overwrite by two ranks", [2], first=1),
        Collection(),
        Run(),
        Run("retention, async", how="async", last=4),
        Run("tiers", tiers=True, last=4),
        Run("tiers, async", tiers=True, how="async", last=3, full_every=None),
        Deletion(),
        Export("export", 1),
        Export("export over another", 2, first=1),
        Conversion("convert to native", "native", **shards),
        Conversion("convert over native", "native", first=1, **shards),
        Conversion("convert to native, resumed", "native", resumed="same", **shards),
        Conversion("convert to native, begun anew", "native", resumed="other", **shards),
        Conversion("convert to hf", "hf", **shards),
        Conversion("convert over hf", "hf", first=1, **shards),
        Conversion("convert to hf, resumed", "hf", resumed="same", **shards),
        Conversion("convert to hf, begun anew", "hf", resumed="other", **shards),
        Conversion("convert to a file", "torch-save"),
        Conversion("convert over a file", "torch-save", first=1),
    ]
    return {scenario.name: scenario for scenario in found}

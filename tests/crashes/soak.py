"""Anything in any order on any number of ranks, with crashes in between, against a model that knows
what must be there.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from pathlib import Path

from folders import Run, assert_folder_clean, steps_in
from generations import (
    ABSENT,
    FROZEN,
    allowed,
    assert_clean,
    blank,
    exact,
    generation_at,
    state,
)

import shardkeep
from shardkeep.formats.native.commit import collect_garbage
from shardkeep.stores.local import LocalStore
from shardkeep.testing.disk import Disk
from shardkeep.testing.operations import Mark, materialize
from shardkeep.testing.recording import OperationLog
from shardkeep.testing.system_calls import recorded

PLACES = ("a", "b", "c/d")
RANKS = (1, 1, 2, 3)
EPISODE = 6
"""Most operations between two crashes."""


def part(generation, rank, world):
    """A rank's rows of the large tensors; all else is held by all of them."""
    whole = state(generation)
    for name in ("big", "frozen"):
        rows = len(whole[name])
        low, high = rows * rank // world, rows * (rank + 1) // world
        local = whole[name][low:high].copy()
        whole[name] = shardkeep.ShardedArray.from_local(local, (low,), (rows,))
    return whole


class Soak:
    """One world, worked on, crashed and looked at, again and again."""

    def __init__(self, folder, seed):
        self.folder, self.chance = Path(folder), random.Random(seed)
        self.run_of = Run(tiers=self.chance.random() < 0.5)
        self.there = dict.fromkeys(PLACES, ABSENT)
        self.steps = ()
        """Steps of the run that must be there; the newest is what it goes on from."""
        self.generation = FROZEN
        self.counts = Counter()
        self.number = 0
        self.base = self.folder / "0"
        self.base.mkdir(parents=True)

    def go(self, seconds=None, crashes=None):
        """For so long, or so often."""
        begun = time.monotonic()
        while True:
            self.episode()
            if crashes is not None and self.counts["crash"] >= crashes:
                break
            if seconds is not None and time.monotonic() - begun > seconds:
                break
        return self.counts

    def episode(self):
        """Some operations, a crash at any moment of them, and a look."""
        self.log = OperationLog(self.base)
        self.before, self.steps_before = dict(self.there), self.steps
        script = []
        try:
            with recorded(self.log):
                for _ in range(self.chance.randint(1, EPISODE)):
                    script.append(self.act())
            self.crash()
        except Exception as problem:
            raise AssertionError(f"after {script}: {problem!r}") from problem

    def act(self):
        name = self.chance.choice(("save",) * 5 + ("load", "load", "gc", "steps", "restore"))
        self.counts[name] += 1
        return name, getattr(self, f"do_{name}")()

    # --- what is done

    def do_save(self):
        chance = self.chance
        place, world = chance.choice(PLACES), chance.choice(RANKS)
        how, keep = chance.choice(("save", "async")), chance.choice((None, *PLACES))
        self.generation += 1
        generation, path = self.generation, self.base / place
        options = {"overwrite": True, "memory_budget": 8 << 20}
        if keep is not None and self.there[keep] != ABSENT:
            options["base"] = self.base / keep
            self.counts["incremental"] += 1
        self.log.mark(f"begin {place} {generation}")

        def work(coordinator):
            held = part(generation, coordinator.rank, world)
            given = {} if world == 1 else {"process_group": coordinator}
            given = given or {"no_dist": True}
            if how == "save":
                shardkeep.save(held, path, **given, **options)
            else:
                with shardkeep.Checkpointer(memory_budget=8 << 20, **given) as keeper:
                    rest = {k: v for k, v in options.items() if k != "memory_budget"}
                    keeper.async_save(held, path, **rest).result()

        for outcome in shardkeep.ThreadRanks(world).outcomes(work):
            if outcome is not None:
                raise outcome
        self.log.mark(f"return {place} {generation}")
        self.there[place] = generation
        return place, generation, world, options.get("base")

    def do_load(self):
        place, world = self.chance.choice(PLACES), self.chance.choice(RANKS)
        if self.there[place] == ABSENT:
            return place
        generation, path = self.there[place], self.base / place
        found = [None] * world

        def work(coordinator):
            target = part(generation, coordinator.rank, world)
            for name in ("big", "frozen"):
                target[name].local_shards[0].array[...] = 0
            target |= {"step": None, "name": None}
            given = {"no_dist": True} if world == 1 else {"process_group": coordinator}
            found[coordinator.rank] = shardkeep.load(target, path, **given).state_dict

        for outcome in shardkeep.ThreadRanks(world).outcomes(work):
            if outcome is not None:
                raise outcome
        for rank, got in enumerate(found):
            wanted = part(generation, rank, world)
            for name in ("big", "frozen"):
                assert exact(got[name].local_shards[0].array) == exact(
                    wanted[name].local_shards[0].array
                )
            assert exact(got["model"]) == exact(wanted["model"])
            assert got["step"] == generation
        return place, generation, world

    def do_gc(self):
        place = self.chance.choice(PLACES)
        if (self.base / place).is_dir():
            collect_garbage(LocalStore(self.base / place), stale_s=0)
        return place

    def do_steps(self):
        with self.run_of.manager(self.base) as manager:
            manager.restore(blank(state(FROZEN)))
            last = max(self.steps, default=0)
            for step in range(last + 1, last + 1 + self.chance.randint(1, 3)):
                self.log.mark(f"begin run {step}")
                if self.chance.random() < 0.5:
                    manager.save(step, state(step + FROZEN))
                else:
                    manager.async_save(step, state(step + FROZEN)).result()
                self.log.mark(f"return run {step}")
                self.steps = (*self.steps, step)
        return self.steps[-1]

    def do_restore(self):
        if not self.steps:
            return None
        with self.run_of.manager(self.base) as manager:
            found = manager.restore(blank(state(FROZEN)))
            assert found.step == self.steps[-1]
            assert exact(found.state_dict) == exact(state(found.step + FROZEN))
        return found.step

    # --- what is left

    def crash(self):
        """The machine stops, or only the program; then every place is looked at."""
        self.counts["crash"] += 1
        operations = self.log.operations
        position = self.chance.randint(0, len(operations))
        disk = Disk(self.log.initial)
        for operation in operations[:position]:
            disk.apply(operation)
        left = disk.whole()
        if self.chance.random() < 0.8:
            self.counts["power cut"] += 1
            left = self.chance.choice([each for _, each in disk.crashes(self.chance, 20)])
        self.number += 1
        old, self.base = self.base, self.folder / str(self.number)
        materialize(left, self.base)
        shutil.rmtree(old)
        marks = [op.label for op in operations[:position] if isinstance(op, Mark)]
        for place in PLACES:
            self._settle(place, [m.replace(f" {place} ", " ") for m in marks if f" {place} " in m])
        self._settle_run([m.replace(" run ", " ") for m in marks if " run " in m])

    def _settle(self, place, marks):
        path, may_be = self.base / place, allowed(marks, self.before[place])
        found = generation_at(path)
        assert found in may_be, f"{place}: found {found}, promised {may_be}"
        if path.is_dir() and self.chance.random() < 0.5:
            collect_garbage(LocalStore(path), stale_s=0)
            assert_clean(path)
        self.there[place] = found

    def _settle_run(self, marks):
        there = {*steps_in(self.base / "run"), *(
            steps_in(self.base / "fast") if self.run_of.tiers else ())}  # fmt: skip
        told = [int(m.split()[1]) for m in marks if m.startswith("return")]
        newest = told[-1] if told else max(self.steps_before, default=0)
        assert not newest or newest in there, f"step {newest} is gone; there are {there}"
        self.steps = tuple(sorted(there))
        if self.chance.random() < 0.3 and there:
            with self.run_of.manager(self.base) as manager:
                manager.clean()
            assert_folder_clean(self.base / "run", steps_in(self.base / "run"))


def soak(folder, seed, *, seconds=None, crashes=None):
    """One world."""
    return Soak(folder, seed).go(seconds, crashes)

"""Real processes, killed at any instant while they save in every way, and looked at by others.

The parent has imported everything and holds no thread: each life is a fork of it that works on one
place until it is killed, and each verdict is that of another fork, which knows what the first one
was told, and nothing else.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from folders import assert_folder_clean, steps_in
from generations import (
    ABSENT,
    FROZEN,
    OPTIONS,
    assert_clean,
    generation_at,
    state,
    weights,
    weights_at,
)
from outward import source

import shardkeep
from shardkeep import CheckpointManager, FastTier
from shardkeep.foreign.detecting import detect
from shardkeep.formats.native.commit import collect_garbage
from shardkeep.stores.local import LocalStore

LIFE_S = 0.08
"""Most time from the first sign of life to the kill."""
LONGEST_S = 2.0


class Place:
    """Something that is saved again and again, one generation after the other."""

    def __init__(self, base, name):
        self.path = Path(base) / name
        self.name = name
        self.found = ABSENT
        """The generation that was there when somebody last looked."""

    def live(self, generation, say, chance):
        """Save for ever."""
        while True:
            say(f"begin {generation}")
            self.save(generation, chance)
            say(f"return {generation}")
            generation += 1

    def value(self, generation):
        """What a save of this generation leaves."""
        return generation

    def allowed(self, marks):
        """What may be there: what was begun since the program was last told of one, or that."""
        may_be = {self.found}
        for mark in marks:
            what, number = mark.split()
            kept = may_be if what == "begin" else set()
            may_be = {*kept, self.value(int(number))}
        return may_be

    def verify(self, marks):
        """The generation that is there."""
        found = self.look()
        may_be = self.allowed(marks)
        assert found in may_be, f"found {found}, promised {may_be}"
        self.clean()
        assert self.look() == found, "cleaning changed what is there"
        return found


class Native(Place):
    """One checkpoint, replaced: at once or behind, in full or with files of the one before."""

    def __init__(self, base, name, how):
        super().__init__(base, name)
        self.how = how

    def save(self, generation, chance):
        options = {"overwrite": True}
        if self.how == "incremental" and generation > FROZEN + 1 and self.path.is_dir():
            options["base"] = self.path
        if self.how == "async":
            keeper = shardkeep.Checkpointer(no_dist=True, memory_budget=8 << 20)
            keeper.async_save(state(generation), self.path, **options).result()
            keeper.close()
        else:
            shardkeep.save(state(generation), self.path, **OPTIONS, **options)

    def look(self):
        return generation_at(self.path)

    def clean(self):
        if self.path.is_dir():
            collect_garbage(LocalStore(self.path), stale_s=0)
            assert_clean(self.path)


class Created(Native):
    """A new name for every checkpoint; the ones before go once they are not the last."""

    def __init__(self, base, name):
        super().__init__(base, name, "create")

    def save(self, generation, chance):
        shardkeep.save(state(generation), self.path / str(generation), **OPTIONS)

    def look(self):
        numbers = sorted(int(name) for name in os.listdir(self.path)) if self.path.is_dir() else []
        there = [number for number in numbers if generation_at(self.path / str(number))]
        for number in there:
            assert generation_at(self.path / str(number)) == number
        return max(there, default=ABSENT)

    def clean(self):
        if not self.path.is_dir():
            return
        last = self.look()
        for name in os.listdir(self.path):
            collect_garbage(LocalStore(self.path / name), stale_s=0)
            assert_clean(self.path / name)
            if int(name) != last:
                shutil.rmtree(self.path / name)


class Steps(Place):
    """A run with a fast tier: saved, copied, removed."""

    def manager(self):
        return CheckpointManager(
            self.path / "run",
            keep=2,
            fast=FastTier(self.path / "fast", keep=1, close_s=60),
            full_every=3,
            stale_s=0,
            **OPTIONS,
        )

    def live(self, generation, say, chance):
        with self.manager() as manager:
            while True:
                step = generation - FROZEN
                say(f"begin {generation}")
                if chance.random() < 0.5:
                    manager.save(step, state(generation))
                else:
                    manager.async_save(step, state(generation)).result()
                say(f"return {generation}")
                generation += 1

    def look(self):
        there = {*steps_in(self.path / "run"), *steps_in(self.path / "fast")}
        return max(there, default=ABSENT - FROZEN) + FROZEN

    def clean(self):
        for folder in ("run", "fast"):  # the first save may have been killed before it made them
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        with self.manager() as manager:
            manager.should_save(0)
            manager.wait_copied()
            manager.wait_retention()
        for folder in ("run", "fast"):
            assert_folder_clean(self.path / folder, steps_in(self.path / folder))


class Converted(Place):
    """The result of a conversion, replaced; what was begun is gone on with."""

    def __init__(self, base, name, to):
        super().__init__(base, name)
        self.to = to

    def save(self, generation, chance):
        shardkeep.convert(
            source(self.value(generation)),
            self.path / "out",
            to=self.to,
            overwrite=True,
            memory_budget=16 << 20,
            max_shard_size=8000,
        )

    def live(self, generation, say, chance):
        self.path.mkdir(exist_ok=True)
        super().live(generation, say, chance)

    def look(self):
        return weights_at(self.path / "out")

    def value(self, generation):
        return 1 + generation % 3

    def clean(self):
        return


class Exported(Place):
    """Weights as safetensors beside a configuration, replaced."""

    def save(self, generation, chance):
        writer = shardkeep.HuggingFaceWriter(max_shard_size=8000)
        shardkeep.save(weights(generation), self.path / "model", storage_writer=writer,
                       overwrite=True, **OPTIONS)  # fmt: skip

    def look(self):
        return weights_at(self.path / "model")

    def clean(self):
        return


def places(base):
    return [
        Created(base, "created"),
        Native(base, "overwritten", "save"),
        Native(base, "behind", "async"),
        Native(base, "incremental", "incremental"),
        Steps(base, "steps"),
        Converted(base, "native", "native"),
        Converted(base, "hf", "hf"),
        Exported(base, "export"),
    ]


@dataclass
class Outcome:
    kills: int = 0
    cut: int = 0
    """Kills in the middle of something."""
    saves: int = 0
    """Saves that the program was told of."""
    seconds: float = 0.0
    by_place: Counter = field(default_factory=Counter)


def forked(work):
    """A child, and the end of a pipe from which what it says is read."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        os.close(reading)
        work(lambda text: os.write(writing, text.encode() + b"\n"))
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stderr.flush()
        os._exit(status)


def heard(reading):
    parts = []
    while part := os.read(reading, 1 << 16):
        parts.append(part)
    os.close(reading)
    lines = b"".join(parts).splitlines(keepends=True)
    return [line.decode().strip() for line in lines if line.endswith(b"\n")]


def kill_once(place, generation, chance):
    """One life; what it said before it was killed."""

    def live(say):
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S)  # as deadly, if this process is held up
        place.live(generation, say, chance)

    child, reading = forked(live)
    first = os.read(reading, 1)  # it has begun
    time.sleep(chance.uniform(0, LIFE_S))
    os.kill(child, signal.SIGKILL)
    marks = heard(reading)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{place.name} ended by itself"
    if marks and first:
        marks[0] = first.decode() + marks[0]
    return marks


def kill(base, times, seed=0):
    """Kill so many lives; raises if anything is not as promised."""
    for generation in (1, 2, 3):
        source(generation)
    detect(Path(base))  # imports every format, so that no fork has to
    chance, outcome, begun = random.Random(seed), Outcome(), time.perf_counter()
    everywhere = places(base)
    generation = FROZEN + 1
    for number in range(times):
        place = everywhere[number % len(everywhere)]
        marks = kill_once(place, generation, chance)
        child, reading = forked(lambda say, marks=marks, place=place: say(str(place.verify(marks))))
        said = heard(reading)
        _, status = os.waitpid(child, 0)
        if status or not said:
            raise AssertionError(f"kill {number} of {place.name}, after {marks[-3:]}")
        place.found = int(said[0])
        outcome.kills += 1
        outcome.cut += bool(marks) and marks[-1].startswith("begin")
        outcome.saves += sum(mark.startswith("return") for mark in marks)
        outcome.by_place[place.name] += 1
        generation += len(marks) + 1
    outcome.seconds = time.perf_counter() - begun
    return outcome

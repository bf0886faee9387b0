"""Saves to one place of the native format, and collections there, as scenarios."""

from __future__ import annotations

from generations import ABSENT, FROZEN, allowed, assert_clean, generation_at, save, state
from machine import Scenario

import shardkeep
from shardkeep.formats.native.commit import collect_garbage
from shardkeep.formats.native.names import data_file, lease_name, new_save_id
from shardkeep.stores.local import LocalStore


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

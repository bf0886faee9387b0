"""Everything that writes, and what only reads, as scenarios of the crash machine."""

from __future__ import annotations

from folders import Deletion, Run
from generations import FROZEN, OPTIONS, blank, exact, generation_at, save, state
from machine import Scenario
from outward import Conversion, Export
from saves import Collection, Ranks, Saves

import shardkeep


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
        Conversion("convert over hf in two steps", "hf", first=1, exchange=False, **shards),
        Conversion("convert to hf, resumed", "hf", resumed="same", **shards),
        Conversion("convert to hf, begun anew", "hf", resumed="other", **shards),
        Conversion("convert to a file", "torch-save"),
        Conversion("convert over a file", "torch-save", first=1),
    ]
    return {scenario.name: scenario for scenario in found}

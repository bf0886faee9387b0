"""Folders of steps: saved, kept, copied between tiers and deleted, as scenarios."""

from __future__ import annotations

import os
from pathlib import Path

from generations import FROZEN, OPTIONS, assert_clean, blank, exact, generation_at, state
from machine import Scenario

from shardkeep import CheckpointManager, FastTier
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.naming import StepNames
from shardkeep.stores.local import LocalStore


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

# SPDX-License-Identifier: Apache-2.0
"""What `ls` finds in the folder of a run, and what `rm`, `pin` and `gc` do there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from shardkeep.cli.texts import human_size, jsonable, printable
from shardkeep.errors import CheckpointNotFoundError, StorageError
from shardkeep.formats.native.names import DATA, RECORD, lease_save_id
from shardkeep.manager.catalog import MANAGED, Catalog
from shardkeep.manager.cleaning import Cleaned, clean
from shardkeep.manager.naming import StepNames
from shardkeep.manager.pins import Pins
from shardkeep.manager.removal import Removal, make_lasting, remove_steps
from shardkeep.manager.steps import Listing, Step
from shardkeep.manager.wholeness import any_whole, look_at_files
from shardkeep.stores.local import LocalStore

__all__ = ["Run", "RunRow", "State", "is_run", "run_cells", "run_object", "tiered"]

State: TypeAlias = Literal["whole", "damaged", "unfinished"]


@dataclass(frozen=True, slots=True)
class RunRow:
    """One step, as `ls` shows it."""

    step: int
    """Its number."""
    name: str
    """Of its directory."""
    state: State
    """Whether every file that its record names is there, with its size."""
    problem: str = ""
    """What is wrong, if anything is."""
    nbytes: int = 0
    """Bytes of its files."""
    shared: int = 0
    """Bytes of those that other steps share."""
    saved_at: float | None = None
    """When, in seconds since 1970."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What it was saved with."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's own."""
    pinned: str = ""
    """By whom, or nothing."""
    save_id: str = ""
    """The save that wrote it."""
    tier: str = ""
    """`fast` or `durable`, where there are two."""


class Run:
    """The folder of a run, for the command."""

    def __init__(self, root: str, step_name: str) -> None:
        """There must be a folder."""
        if not os.path.isdir(root):
            raise CheckpointNotFoundError(f"no directory at {root}")
        self.root = root
        self._catalog = Catalog(root, StepNames(step_name))
        self._pins = Pins(self._catalog.store)

    def rows(self) -> list[RunRow]:
        """Every step; costs a call to the system for each file, and reads no data."""
        listing, pins = self._catalog.look(), self._pins.held()

        def pinned(name: str) -> str:
            return self._pins.describe(pins[name]) if name in pins else ""

        rows = [self._row(step, pinned) for step in listing.steps]
        for bad in listing.damaged:
            name = os.path.basename(bad.path)
            rows.append(RunRow(bad.step, name, "damaged", bad.problem, pinned=pinned(name)))
        for name in listing.unfinished:
            step = self._catalog.names.step(name)
            assert step is not None
            problem = "being saved, or left by a save that was killed"
            rows.append(RunRow(step, name, "unfinished", problem, _size(self._catalog, name)))
        return sorted(rows, key=lambda row: row.step)

    def _row(self, step: Step, pinned: Any) -> RunRow:
        name = self._catalog.names.of(step.step)
        problem, shared = look_at_files(step)
        return RunRow(
            step.step,
            name,
            "damaged" if problem else "whole",
            problem,
            step.nbytes,
            shared,
            step.saved_at,
            step.metrics,
            step.metadata,
            pinned(name),
            step.save_id,
        )

    def remove(self, steps: Sequence[int], *, force: bool, dry_run: bool) -> Removal:
        """Remove steps; refuses, before anything goes, what should be thought about twice."""
        listing = self._catalog.look()
        names = [self._name(step, listing, unfinished=force) for step in steps]
        pins = self._pins.held()
        if not force:
            left = [step for step in listing.steps if step.step not in steps]
            if listing.steps and not any_whole(reversed(left)):
                raise StorageError(
                    f"no whole step would be left in {self.root}; pass --force if that is meant"
                )
            for name in names:
                if name in pins:
                    raise StorageError(
                        f"{name} is pinned by {self._pins.describe(pins[name])}; wait, remove the "
                        "pin, or pass --force"
                    )
        if dry_run:
            nbytes = sum(_size(self._catalog, name) for name in names)
            return Removal(tuple(names), nbytes=nbytes)
        if not force:
            make_lasting(left)
        return remove_steps(self._catalog.store, self._pins, names, force=force)

    def pin(self, step: int, why: str) -> None:
        """Hold a step for good."""
        name = self._name(step, self._catalog.look())
        self._pins.hold(name, why)
        if not self._catalog.copies(step):
            self._pins.drop(name)
            raise CheckpointNotFoundError(f"{name} was removed from {self.root} just now")

    def unpin(self, step: int) -> int:
        """Let go of it; how many pins it had."""
        return self._pins.drop(self._called(step))

    def clean(self, *, stale_s: float, dry_run: bool) -> Cleaned:
        """Remove what killed saves, removals and readers left."""
        listing = self._catalog.look()
        return clean(self._catalog, self._pins, listing, stale_s=stale_s, dry_run=dry_run)

    def _name(self, step: int, listing: Listing, *, unfinished: bool = False) -> str:
        name = self._called(step)
        there = {found.step for found in listing.steps} | {bad.step for bad in listing.damaged}
        if step in there or (unfinished and name in listing.unfinished):
            return name
        if name in listing.unfinished:
            raise CheckpointNotFoundError(
                f"step {step} in {self.root} was not committed: it is being saved, or its save was "
                "killed, and gc removes it in time"
            )
        raise CheckpointNotFoundError(f"no step {step} in {self.root}: no {name}")

    def _called(self, step: int) -> str:
        try:
            return self._catalog.names.of(step)
        except ValueError as error:  # too large, or too long a name
            raise CheckpointNotFoundError(f"no step {step} in {self.root}: {error}") from error


def tiered(fast: Sequence[RunRow], durable: Sequence[RunRow]) -> list[RunRow]:
    """The rows of two tiers, by step; what is only in the fast one says so."""
    copied = {row.save_id for row in durable if row.state == "whole"}
    rows = [replace(row, tier="durable") for row in durable]
    for row in fast:
        alone = row.state == "whole" and row.save_id not in copied
        rows.append(replace(row, tier="fast", problem="not copied" if alone else row.problem))
    return sorted(rows, key=lambda row: (row.step, row.tier))


def _size(catalog: Catalog, name: str) -> int:
    total = 0
    for folder, _, files in os.walk(catalog.store.root / name):
        for file in files:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size
            except FileNotFoundError:
                continue
    return total


def is_run(path: str, step_name: str) -> bool:
    """Whether a directory holds steps, and is not a checkpoint itself."""
    store = LocalStore(path)
    names = store.list()
    if RECORD in names or DATA in names or any(lease_save_id(name) for name in names):
        return False
    if MANAGED in names:
        return True
    listing = Catalog(path, StepNames(step_name)).look()
    return bool(listing.steps or listing.damaged or listing.unfinished or listing.leaving)


def age_text(saved_at: float | None) -> str:
    """How long ago, in short.

    >>> age_text(time.time() - 7300)
    '2.0 h'
    """
    if saved_at is None:
        return ""
    age = max(0.0, time.time() - saved_at)
    for unit, seconds in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if age >= seconds:
            return f"{age / seconds:.1f} {unit}"
    return f"{age:.0f} s"


# --- as text, and as JSON


def run_cells(row: RunRow) -> tuple[str, ...]:
    """Step, state, size, shared, age, metrics, and a remark; the tier goes with the state."""
    metrics = "  ".join(f"{printable(name)}={value:.6g}" for name, value in row.metrics.items())
    notes = [row.problem, f"pinned by {row.pinned}" if row.pinned else ""]
    shared = human_size(row.shared) if row.shared else ""
    return (
        str(row.step),
        f"{row.state}, {row.tier}" if row.tier else row.state,
        human_size(row.nbytes),
        shared,
        age_text(row.saved_at),
        metrics,
        printable("; ".join(note for note in notes if note)),
    )


def run_object(row: RunRow) -> dict[str, Any]:
    """The row with stable keys."""
    return {
        "step": row.step,
        "name": row.name,
        "state": row.state,
        "problem": row.problem or None,
        "bytes": row.nbytes,
        "shared_bytes": row.shared,
        "saved_at": row.saved_at,
        "metrics": jsonable(row.metrics),
        "metadata": jsonable(row.metadata),
        "pinned": row.pinned or None,
        "save_id": row.save_id or None,
        "tier": row.tier or None,
    }

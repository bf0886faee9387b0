# SPDX-License-Identifier: Apache-2.0
"""What killed saves, killed removals and dead readers left in a run's folder."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardkeep.errors import CheckpointError
from shardkeep.formats.native.commit import STALE_S, collect_garbage, server_time
from shardkeep.formats.native.names import DATA
from shardkeep.manager.catalog import MANAGED, Catalog, leaving_name
from shardkeep.manager.pins import Pins
from shardkeep.manager.publishing import remove_dead_copies
from shardkeep.manager.removal import finish_removals
from shardkeep.manager.steps import Listing
from shardkeep.stores.local import LocalStore

__all__ = ["Cleaned", "clean", "joined_cleaned"]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What a cleaning removed, or would."""

    removed: tuple[str, ...] = ()
    """Files and directories, relative to the folder."""
    nbytes: int = 0
    """Bytes of the files."""
    live: tuple[str, ...] = ()
    """Names of steps that seem to be being saved, and were left alone."""
    problems: tuple[str, ...] = ()
    """What could not be cleaned, and why."""

    def under(self, folder: str) -> Cleaned:
        """The same, of a folder that is named."""
        removed, live, problems = (
            tuple(f"{folder}/{each}" for each in part)
            for part in (self.removed, self.live, self.problems)
        )
        return Cleaned(removed, self.nbytes, live, problems)


def joined_cleaned(parts: Sequence[Cleaned]) -> Cleaned:
    """What several cleanings did."""
    return Cleaned(
        tuple(name for part in parts for name in part.removed),
        sum(part.nbytes for part in parts),
        tuple(name for part in parts for name in part.live),
        tuple(text for part in parts for text in part.problems),
    )


def clean(
    catalog: Catalog,
    pins: Pins,
    listing: Listing,
    *,
    stale_s: float = STALE_S,
    busy: Collection[str] = (),
    dry_run: bool = False,
) -> Cleaned:
    """Remove leftovers by age; `busy` names steps that are known to be saved just now.

    Never a committed step's own files, nor those of a save whose lease is fresh.
    """
    store = catalog.store
    removed: list[str] = []
    live: list[str] = []
    problems: list[str] = []
    nbytes = 0
    if dry_run:
        removed += listing.leaving
    else:
        done = finish_removals(store, pins, listing.leaving)
        removed += done.removed
        nbytes += done.nbytes
        problems += [f"{name} could not be removed wholly" for name in done.failed]
        try:
            pins.remove_dead()
        except OSError as error:
            problems.append(f"pins: {error}")
    gone, freed = remove_dead_copies(catalog, listing.copying, stale_s, dry_run=dry_run)
    removed += gone
    nbytes += freed
    suspects = [name for name in listing.unfinished if name not in busy]
    suspects += [name for name in _with_extras(catalog, listing, problems) if name not in busy]
    now = _now(store) if suspects else 0.0
    for name in suspects:
        inside = catalog.open_store(store.root / name)
        try:
            # Its own age first: what is collected in it makes it young again.
            idle = now - _modified(store, name) >= stale_s
            found = collect_garbage(inside, stale_s=stale_s, dry_run=dry_run)
        except FileNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            problems.append(f"{name}: {error}")
            continue
        removed += [f"{name}/{file}" for file in found.removed]
        nbytes += found.nbytes
        if found.live:
            live.append(name)
        elif idle and name in listing.unfinished and not dry_run:
            removed += _remove_empty(store, name)
    return Cleaned(tuple(removed), nbytes, tuple(live), tuple(problems))


def _with_extras(catalog: Catalog, listing: Listing, problems: list[str]) -> list[str]:
    """Committed steps that hold more than their record names, as killed overwrites leave them."""
    suspects = []
    for step in listing.steps:
        name = catalog.names.of(step.step)
        try:
            if len(catalog.store.list(f"{name}/{DATA}")) != step.files or any(
                inner.endswith(".tmp") for inner in catalog.store.list(name)
            ):
                suspects.append(name)
        except OSError as error:
            problems.append(f"{name}: {error}")
    return suspects


def _now(store: LocalStore) -> float:
    store.make_directory(MANAGED)
    return server_time(LocalStore(store.root / MANAGED))


def _modified(store: LocalStore, name: str) -> float:
    """When something last came or went in it; a collection leaves its mark only beside `data`."""
    with contextlib.suppress(FileNotFoundError):
        return store.stat(f"{name}/{DATA}").modified
    return store.stat(name).modified


def _remove_empty(store: LocalStore, name: str) -> list[str]:
    """A directory in which nothing is left; one that holds anything stays.

    A save may begin there meanwhile, and needs all of it or none: so it goes in one move, and is
    moved back if it was not empty.
    """
    leaving = leaving_name(name, secrets.token_hex(8))
    with contextlib.suppress(OSError):
        if _holds_anything(store, name):
            return []
        store.rename(name, leaving)
        if _holds_anything(store, leaving):
            store.rename(leaving, name)
            return []
        if DATA in store.list(leaving):
            store.remove_directory(f"{leaving}/{DATA}")
        store.remove_directory(leaving)
        return [name]
    return []


def _holds_anything(store: LocalStore, name: str) -> bool:
    return bool(set(store.list(name)) - {DATA} or store.list(f"{name}/{DATA}"))

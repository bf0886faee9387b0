# SPDX-License-Identifier: Apache-2.0
"""A step goes: in one move, and then byte by byte. Every removal of a step is done here.

It first gets another name, which no listing takes for a step, and that name is made durable. So a
step is whole or absent also while it goes. What a killed remover leaves has that name, and whoever
comes next knows what to do with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.errors import CheckpointExistsError, StorageError
from shardkeep.formats.native.names import RECORD
from shardkeep.manager.catalog import Catalog, leaving_name, left_step
from shardkeep.manager.pins import Pins
from shardkeep.manager.steps import Step
from shardkeep.storage import CheckpointId
from shardkeep.stores.local import LocalStore, storage_errors

__all__ = [
    "Removal",
    "finish_removals",
    "make_lasting",
    "refuse_replacing",
    "remove_steps",
    "remove_tree",
]

log = logging.getLogger("shardkeep")


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of steps that were to go."""

    removed: tuple[str, ...] = ()
    """Names that are gone."""
    pinned: tuple[str, ...] = ()
    """Names that were left, because somebody reads or holds them."""
    failed: tuple[str, ...] = ()
    """Names that could not be removed, or not wholly."""
    nbytes: int = 0
    """Bytes of the files that went; those with other names are counted too."""


def remove_steps(
    store: LocalStore,
    pins: Pins,
    names: Sequence[str],
    *,
    force: bool = False,
    moving: contextlib.AbstractContextManager[Any] | None = None,
    may_go: Callable[[str], bool] = lambda name: True,
    progress: Callable[[int], None] = lambda files: None,
) -> Removal:
    """Remove steps; pinned ones are left unless `force`. The last of all bytes is gone on return.

    `may_go` is asked of each right before it is moved away, inside of `moving`: whoever decides
    otherwise meanwhile does it in there. `progress` is told of every file that goes.

    A reader pins and then looks whether the step is there; this moves it away and then looks at the
    pins. Whichever comes first, one of the two finds the other.
    """
    pinned: list[str] = []
    moved: dict[str, str] = {}
    failed = []
    for name in names:
        if not force and name in pins.held():
            pinned.append(name)
            continue
        try:
            with moving or contextlib.nullcontext():
                if not may_go(name):
                    continue
                leaving = _move_away(store, name)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s could not be removed: %s", store.root / name, error)
            failed.append(name)
            continue
        if not force and name in pins.held() and _move_back(store, leaving, name):
            pinned.append(name)
        else:
            moved[name] = leaving
    if moved:
        with storage_errors(f"syncing {store.root}"):
            # Before any byte goes: after a crash the old name must not be there without them.
            store.sync_directory()
    removed: list[str] = []
    nbytes = 0
    for name, leaving in moved.items():
        size, gone = remove_tree(store, leaving, progress)
        nbytes += size
        (removed if gone else failed).append(name)
    return Removal(tuple(removed), tuple(pinned), tuple(failed), nbytes)


def make_lasting(
    steps: Iterable[Step], open_store: Callable[[CheckpointId], LocalStore] = LocalStore
) -> bool:
    """Have the steps for whose sake others go survive a crash; whether all are there.

    A step is seen before it is durable: who saved it may have been killed just then, or told that
    it failed.
    """
    for path in (path for step in steps for path in step.copies):
        with storage_errors(f"syncing {path}"):
            try:
                open_store(path).sync_directory()
            except FileNotFoundError:
                return False
    return True


def finish_removals(store: LocalStore, pins: Pins, names: Sequence[str]) -> Removal:
    """Remove what killed removers left; `names` are those that were given to it on its way."""
    if not names:
        return Removal()
    removed: list[str] = []
    pinned: list[str] = []
    failed: list[str] = []
    nbytes = 0
    held = pins.held()
    with storage_errors(f"syncing {store.root}"):
        store.sync_directory()  # its remover may have been killed before
    for leaving in names:
        name = left_step(leaving)
        # Pinned between the move and the look that its remover never took.
        if name in held and _is_whole(store, leaving) and _move_back(store, leaving, name):
            pinned.append(name)
            continue
        size, gone = remove_tree(store, leaving)
        nbytes += size
        (removed if gone else failed).append(name)
    return Removal(tuple(removed), tuple(pinned), tuple(failed), nbytes)


def refuse_replacing(catalog: Catalog, pins: Pins, step: int, *, replace: bool) -> None:
    """Raise where a save would go through a link, or replace a step that is pinned for good.

    A reader's pin does not keep a training from going on: what is replaced in place stays whole,
    and a load that meets it begins again.
    """
    name = catalog.names.of(step)
    if os.path.islink(catalog.store.root / name):
        raise StorageError(
            f"{name} in {catalog.root} is a symbolic link, which does not count as a step: what is "
            "saved there would not be found again. Remove the link, or save under another number"
        )
    if not replace or catalog.find(step) is None:
        return
    held = [pin for pin in pins.held().get(name, ()) if pin.forever]
    if held:
        raise CheckpointExistsError(
            f"{name} in {catalog.root} is pinned by {pins.describe(held)} and is not replaced. Let "
            f"go of it with `shardkeep pin {catalog.root} {step} --remove`, or save into another "
            "folder"
        )


def _move_away(store: LocalStore, name: str) -> str:
    leaving = leaving_name(name, secrets.token_hex(8))
    try:
        store.rename(name, leaving)
    except FileNotFoundError:
        # A network file system that was asked twice says so too, though it did move.
        if not store.is_directory(leaving):
            raise
    return leaving


def _move_back(store: LocalStore, leaving: str, name: str) -> bool:
    """Whether the step has its name again; not if it is taken, or another remover was faster."""
    try:
        if store.is_directory(name):
            return False
        store.rename(leaving, name)
    except OSError as error:
        if store.is_directory(name) and not store.is_directory(leaving):
            return True  # it did move, and was asked twice
        log.warning("%s is pinned, but is being removed: %s", store.root / name, error)
        return False
    with storage_errors(f"syncing {store.root}"):
        store.sync_directory()
    return True


def _is_whole(store: LocalStore, name: str) -> bool:
    """The record is the first to go."""
    try:
        store.stat(f"{name}/{RECORD}")
    except OSError:
        return False
    return True


def remove_tree(
    store: LocalStore, name: str, progress: Callable[[int], None] = lambda files: None
) -> tuple[int, bool]:
    """Remove a directory and what is in it, the record first; bytes, and whether all of it went.

    Others may be at the same. What a link leads to is not touched.
    """
    nbytes, gone = 0, True
    try:
        if not store.is_directory(name):
            with contextlib.suppress(FileNotFoundError):
                store.unlink(name)
            return 0, True
        names = store.list(name)
    except OSError as error:
        # One that cannot even be looked at must not keep others from going.
        log.warning("%s could not be removed: %s", store.root / name, error)
        return 0, False
    for inner in sorted(names, key=lambda inner: (inner != RECORD, inner)):
        path = f"{name}/{inner}"
        try:
            if store.is_directory(path):
                size, done = remove_tree(store, path, progress)
                nbytes, gone = nbytes + size, gone and done
                continue
            size = store.stat(path).size
            store.unlink(path)
            nbytes += size
            progress(1)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s could not be removed: %s", store.root / path, error)
            gone = False
    if not gone:
        return nbytes, False
    try:
        store.remove_directory(name)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s could not be removed: %s", store.root / name, error)
        return nbytes, False
    return nbytes, True

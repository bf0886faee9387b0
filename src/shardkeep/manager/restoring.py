# SPDX-License-Identifier: Apache-2.0
"""The newest whole step, the same on every rank, checked as it is loaded."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import msgspec

from shardkeep import errors
from shardkeep.checkpointer import Checkpointer
from shardkeep.default_load_planner import DefaultLoadPlanner
from shardkeep.dtypes import Cast
from shardkeep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    RankError,
    StorageError,
)
from shardkeep.loading import LoadResult
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.pins import Pins
from shardkeep.manager.steps import DamagedStep, Step
from shardkeep.progress import Progress
from shardkeep.storage import ReadOnce
from shardkeep.wording import names_text

__all__ = ["LoadOptions", "Restored", "restore"]

log = logging.getLogger("shardkeep")

TRIES = 20
"""Steps that may vanish under a restore before it says so."""
PAUSE_S = 0.002


class LoadOptions(TypedDict, total=False):
    """What `shardkeep.load` takes besides the state and the place."""

    planner: DefaultLoadPlanner | None
    strict: bool
    keys: Sequence[str] | None
    optional: Sequence[str]
    cast: Cast
    verify: bool
    expect_digest: str | None
    allow_pickle: bool
    device: object
    read_once: ReadOnce
    memory_budget: int | None
    progress: Progress


@dataclass(frozen=True)
class Restored:
    """What a restore did; the same on every rank but for `result`."""

    step: int
    """The step that was loaded."""
    path: str
    """Where it lies."""
    metrics: Mapping[str, float]
    """What it was saved with."""
    metadata: Mapping[str, Any]
    """The user's own."""
    damaged: tuple[DamagedStep, ...]
    """Newer steps that could not be used, the newest first."""
    result: LoadResult
    """Of the load."""

    @property
    def state_dict(self) -> Any:
        """The filled tree: the target itself where it is mutable."""
        return self.result.state_dict


class _Choice(msgspec.Struct):
    """What the coordinator tells all ranks."""

    step: Step | None
    damaged: list[DamagedStep]


def restore(
    state: object,
    step: int | None,
    catalog: Catalog,
    pins: Pins,
    keeper: Checkpointer,
    *,
    fall_back: bool,
    options: LoadOptions,
) -> Restored | None:
    """Load a step, or the newest that is whole; None if there is none, and never was.

    With `fall_back` a step that turns out to be damaged is passed over, on all ranks alike.
    """
    damaged: list[DamagedStep] = []
    begun: Step | None = None
    vanished = 0
    while True:
        with contextlib.ExitStack() as inside:
            passed = [found.step for found in damaged]
            choice = _choose(step, passed, catalog, pins, keeper, inside)
            for found in choice.damaged:
                _refuse(found)
                _say(found, keeper)
            damaged += choice.damaged
            if damaged and not fall_back:
                raise CorruptionError(_text(damaged[-1]))
            chosen = choice.step
            if chosen is None:
                if damaged:
                    texts = "\n  ".join(_text(found) for found in damaged)
                    raise CorruptionError(f"no step in {catalog.root} is whole:\n  {texts}")
                if step is not None:
                    raise CheckpointNotFoundError(f"no step {step} in {catalog.root}")
                return None
            try:
                result = keeper.load(state, chosen.path, **options)
            except CheckpointNotFoundError:
                # Removed by somebody before it was pinned.
                vanished += 1
                if vanished == TRIES:
                    raise
                continue
            except (CorruptionError, RankError) as error:
                if not _is_damage(error):
                    raise
                if not fall_back:
                    error.add_note(f"in {chosen.path}")
                    raise
                found = DamagedStep(chosen.step, chosen.path, str(error))
                _say(found, keeper)
                damaged.append(found)
                begun = chosen
                continue
        if begun is not None and result.missing:
            raise CorruptionError(
                f"step {begun.step} is damaged, and {chosen.path} does not have all that was being "
                f"loaded: {names_text(result.missing)} may hold parts of step {begun.step}. "
                f"Restore step {chosen.step} by its number into a new state"
            )
        return Restored(
            chosen.step, chosen.path, chosen.metrics, chosen.metadata, tuple(damaged), result
        )


def _choose(
    step: int | None,
    passed: list[int],
    catalog: Catalog,
    pins: Pins,
    keeper: Checkpointer,
    inside: contextlib.ExitStack,
) -> _Choice:
    """One rank looks, and pins what it finds; the others take its word."""

    def pinned(found: Step) -> Step | None:
        pin = pins.take(catalog.names.of(found.step), "restore")
        copies = catalog.copies(found.step)  # still there, now that it is pinned
        if pin is not None:
            if copies:
                inside.callback(pin.release)
            else:
                pin.release()
        return replace(found, path=copies[0]) if copies else None

    def lead() -> bytes:
        listing = catalog.look()
        if step is not None and all(found.step != step for found in listing.steps):
            # Moved away by a remover that then finds it pinned, it is back at once.
            time.sleep(0.05)
            listing = catalog.look()
        chosen: Step | None = None
        for _ in range(TRIES):
            wanted = [s for s in listing.steps if s.step not in passed and step in (None, s.step)]
            chosen = pinned(wanted[-1]) if wanted else None
            if chosen is not None or not wanted:
                break
            # It made way for a newer one, which an older one must not be taken for.
            time.sleep(PAUSE_S)
            listing = catalog.look()
        else:
            raise StorageError(
                f"steps of {catalog.root} are removed faster than they can be pinned; try again",
                transient=True,
            )
        newer = [
            bad
            for bad in reversed(listing.damaged)
            if bad.step not in passed
            and (bad.step == step if step is not None else chosen is None or bad.step > chosen.step)
        ]
        return msgspec.msgpack.encode(_Choice(chosen, newer))

    word = keeper.coordinator.lead("choose a step", lead)
    return msgspec.msgpack.decode(word, type=_Choice)


def _is_damage(error: CheckpointError) -> bool:
    if isinstance(error, CorruptionError):
        return True
    return any(text.startswith(CorruptionError.__name__) for text in error.failures.values())


def _text(found: DamagedStep) -> str:
    return f"step {found.step} ({found.path}) is damaged: {found.problem}"


def _refuse(found: DamagedStep) -> None:
    """A newer version's step, or one that may not be read, is not damaged: to pass it over would
    lose what was trained."""
    if found.kind != CorruptionError.__name__:
        kind: type[CheckpointError] = getattr(errors, found.kind)
        raise kind(
            f"step {found.step} is the newest, and cannot be read: {found.problem}. To go on from "
            "an older one, restore it by its number."
        )


def _say(found: DamagedStep, keeper: Checkpointer) -> None:
    if keeper.coordinator.rank == 0:
        log.error("%s. It is passed over for an older one.", _text(found))

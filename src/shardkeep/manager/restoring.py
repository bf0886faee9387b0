# SPDX-License-Identifier: Apache-2.0
"""The newest whole step, the same on every rank, checked as it is loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
from shardkeep.formats.native.foreign import foreign_format
from shardkeep.formats.native.names import RECORD
from shardkeep.loading import LoadResult
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.steps import DamagedStep, Step
from shardkeep.manager.tiers import Tiers, release_all
from shardkeep.progress import Progress
from shardkeep.storage import ReadOnce
from shardkeep.wording import names_text

__all__ = ["LoadOptions", "Restored", "restore"]

log = logging.getLogger("shardkeep")

TRIES = 20
"""Steps that may vanish under a restore before it says so."""
PAUSE_S = 0.002
OTHERS = 3
"""Checkpoints that are no steps, named where there is no step."""
LOOKED = 100
"""Entries among which they are sought."""


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
    save_id: str
    """The save that wrote it."""
    metrics: Mapping[str, float]
    """What it was saved with."""
    metadata: Mapping[str, Any]
    """The user's own."""
    damaged: tuple[DamagedStep, ...]
    """Newer steps, and other copies of this one, that could not be used; the newest first."""
    hidden: tuple[int, ...]
    """Newer steps that lie where not all ranks see them, and were passed over."""
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
    tiers: Tiers,
    keeper: Checkpointer,
    *,
    fall_back: bool,
    options: LoadOptions,
) -> Restored | None:
    """Load a step, or the newest that is whole; None if there is none, and never was.

    A copy that is damaged, or cannot be read, is passed over for another one of the same step; and
    with `fall_back` a damaged step for an older one. On all ranks alike.
    """
    damaged: list[DamagedStep] = []
    begun: Step | None = None
    hidden: list[Step] = []
    vanished = 0
    while True:
        with contextlib.ExitStack() as inside:
            passed = [found.path for found in damaged]
            passed += [path for found in hidden for path in found.copies]
            choice = _choose(step, passed, tiers, keeper, inside)
            chosen = choice.step
            for found in choice.damaged:
                if chosen is None or found.step > chosen.step:
                    _refuse(found)
                _say(found, keeper, chosen)
            damaged += choice.damaged
            older = [bad for bad in damaged if chosen is None or bad.step != chosen.step]
            if older and not fall_back:
                raise CorruptionError(_text(older[-1]))
            if chosen is None:
                _explain_none(step, damaged, hidden, tiers)
                if keeper.coordinator.rank == 0:
                    _tell_of_others(tiers)
                return None
            seen = tiers.seen_by_all(chosen, keeper.coordinator)
            if seen is None:
                _say_hidden(chosen, keeper)
                hidden.append(chosen)
                continue
            try:
                result = keeper.load(state, seen.path, **options)
            except CheckpointNotFoundError:
                # Removed by somebody before it was pinned.
                vanished += 1
                if vanished == TRIES:
                    raise
                continue
            except (CorruptionError, RankError, StorageError) as error:
                has_others = len(seen.copies) > 1
                damage = _is_of(error, CorruptionError)
                if not damage and not (has_others and _is_of(error, StorageError)):
                    raise
                if not fall_back and not has_others:
                    error.add_note(f"in {seen.path}")
                    raise
                kind = CorruptionError if damage else StorageError
                found = DamagedStep(seen.step, seen.path, str(error), kind.__name__)
                _say(found, keeper, seen if has_others else None)
                damaged.append(found)
                begun = seen
                continue
            except CheckpointError as error:
                if begun is None or begun.save_id == seen.save_id:
                    raise
                raise CorruptionError(
                    f"step {begun.step} is damaged, and what was to be loaded does not fit step "
                    f"{seen.step} ({seen.path}): {error}. It may hold parts of step {begun.step} "
                    "now. Restore an older step by its number into a new state"
                ) from error
        if begun is not None and begun.save_id != seen.save_id and result.missing:
            raise CorruptionError(
                f"step {begun.step} is damaged, and {seen.path} does not have all that was being "
                f"loaded: {names_text(result.missing)} may hold parts of step {begun.step}. "
                f"Restore step {seen.step} by its number into a new state"
            )
        return Restored(
            seen.step,
            seen.path,
            seen.save_id,
            seen.metrics,
            seen.metadata,
            tuple(damaged),
            tuple(found.step for found in hidden),
            result,
        )


def _choose(
    step: int | None,
    passed: list[str],
    tiers: Tiers,
    keeper: Checkpointer,
    inside: contextlib.ExitStack,
) -> _Choice:
    """One rank looks, and pins what it finds; the others take its word."""

    def pinned(found: Step) -> Step | None:
        there, pins = tiers.pin(found, "restore")
        inside.callback(release_all, pins)
        return there

    def left(found: Step) -> Step:
        return replace(found, copies=tuple(path for path in found.copies if path not in passed))

    def lead() -> bytes:
        listing = tiers.look()
        if step is not None and all(found.step != step for found in listing.steps):
            # Moved away by a remover that then finds it pinned, it is back at once.
            time.sleep(0.05)
            listing = tiers.look()
        chosen: Step | None = None
        for _ in range(TRIES):
            wanted = [left(found) for found in listing.steps if step in (None, found.step)]
            wanted = [found for found in wanted if found.copies]
            chosen = pinned(wanted[-1]) if wanted else None
            if chosen is not None or not wanted:
                break
            # It made way for a newer one, which an older one must not be taken for.
            time.sleep(PAUSE_S)
            listing = tiers.look()
        else:
            raise StorageError(
                f"steps of {tiers.text} are removed faster than they can be pinned; try again",
                transient=True,
            )
        newer = [
            bad
            for bad in reversed(listing.damaged)
            if bad.path not in passed
            and step in (None, bad.step)
            and (chosen is None or tiers.comes_before(bad, chosen))
        ]
        return msgspec.msgpack.encode(_Choice(chosen, newer))

    word = keeper.coordinator.lead("choose a step", lead)
    return msgspec.msgpack.decode(word, type=_Choice)


def _explain_none(
    step: int | None, damaged: list[DamagedStep], hidden: list[Step], tiers: Tiers
) -> None:
    """Nothing can be loaded: an error, unless there never was a step."""
    if hidden:
        raise StorageError(
            f"step {hidden[0].step} lies only in {hidden[0].path}, which not all ranks see, and no "
            "other can be restored. Start the job where that folder is, on ranks that share it"
        )
    if damaged:
        texts = "\n  ".join(_text(found) for found in damaged)
        raise CorruptionError(f"no step in {tiers.text} is whole:\n  {texts}")
    if step is not None:
        raise CheckpointNotFoundError(f"no step {step} in {tiers.text}")


def _tell_of_others(tiers: Tiers) -> None:
    """A run that begins anew beside checkpoints that are no steps of it: by another `step_name`,
    or another system's. Nobody else would say so."""
    for tier in tiers.all:
        found = list(islice(_others(tier.catalog), OTHERS))
        if found:
            log.warning(
                "no step is in %s, and the run begins anew, though checkpoints are there: %s. If "
                "they are of this run, pass the step_name that they have, or convert them",
                tier.catalog.root,
                ", ".join(found),
            )


def _others(catalog: Catalog) -> Iterator[str]:
    with contextlib.suppress(CheckpointError):
        for name in catalog.store.list()[:LOOKED]:
            path = os.path.join(catalog.root, name)
            if name.startswith(".") or not os.path.isdir(path):
                continue
            store = catalog.open_store(path)
            system = "" if RECORD in store.list() else foreign_format(store)
            if system is not None:
                yield f"{name} ({system})" if system else name


def _say_hidden(found: Step, keeper: Checkpointer) -> None:
    if keeper.coordinator.rank == 0:
        log.warning(
            "step %d (%s) is not seen by all ranks, and is passed over for an older one",
            found.step,
            found.path,
        )


def _is_of(error: CheckpointError, kind: type[CheckpointError]) -> bool:
    """Whether that is what happened, on any rank."""
    if isinstance(error, kind):
        return True
    return any(text.startswith(kind.__name__) for text in error.failures.values())


def _text(found: DamagedStep) -> str:
    what = "is damaged" if found.kind == CorruptionError.__name__ else "cannot be read"
    return f"step {found.step} ({found.path}) {what}: {found.problem}"


def _refuse(found: DamagedStep) -> None:
    """A newer version's step, or one that may not be read, is not damaged: to pass it over would
    lose what was trained."""
    if found.kind != CorruptionError.__name__:
        kind: type[CheckpointError] = getattr(errors, found.kind)
        raise kind(
            f"step {found.step} is the newest, and cannot be read: {found.problem}. To go on from "
            "an older one, restore it by its number."
        )


def _say(found: DamagedStep, keeper: Checkpointer, instead: Step | None) -> None:
    if keeper.coordinator.rank == 0:
        same = instead is not None and instead.step == found.step
        other = "another copy of it" if same else "an older one"
        log.error("%s. It is passed over for %s.", _text(found), other)

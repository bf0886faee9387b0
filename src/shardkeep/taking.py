# SPDX-License-Identifier: Apache-2.0
"""How a snapshot is taken: what is copied before the caller goes on, and what after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from shardkeep.arrays import HostSource, Source, StagedSource, Staging
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.engine.filling import Chunks
from shardkeep.engine.snapshot import Copying, Mask, Snapshot
from shardkeep.memory import Spans
from shardkeep.planner import SavePlanner

__all__ = ["SnapshotKind", "Steps", "plan_steps"]

SnapshotKind: TypeAlias = Literal["eager", "lazy"]

MOST_ON_HOST = 16 << 20
"""Bytes of host memory that are copied beside what a device keeps."""


@dataclass(eq=False)
class Steps:
    """How a snapshot is taken."""

    now: list[Copying] = field(default_factory=list)
    """Copied before the caller goes on."""
    later: list[Copying] = field(default_factory=list)
    """Copied while the caller goes on."""
    before_writing: int = 0
    """How many of these copies come before anything is written: those of a device are begun by many
    turns at the interpreter."""
    follow: Callable[[], None] = lambda: None
    """Has what another thread copies come after what the caller had asked of a device."""
    changed: Callable[[], Sequence[str]] = tuple
    """Names of what was copied late and is not what it was; asked once all is there."""
    keep: Callable[[], bool] = lambda: False
    """Has a device keep what is copied later as it is, on the thread that copies it; whether
    nothing of the caller's is read from then on."""
    needs_state: bool = False
    """Whether what is copied later is read from the caller's arrays."""


def plan_steps(
    taken: Snapshot, staging: Staging | None, kind: SnapshotKind, planner: SavePlanner
) -> Steps:
    """For all chunks of a snapshot, of which nothing is copied yet."""
    held = taken.held
    deferred, within = np.zeros(len(held.rows), np.bool_), None
    steps = Steps()
    if kind == "lazy" and isinstance(planner, DefaultSavePlanner):
        deferred, within, changed = planner.deferrable(held.items, held.rows)
        if deferred.any():
            steps.changed, steps.needs_state = changed, True
    if staging is None:
        steps.now = [taken.expect(~deferred, still=True)]
        steps.later = [taken.expect(deferred, within=within)]
        return steps
    if steps.needs_state:
        steps.follow = staging.here()
    if not taken.is_ready(staging) and _duplicate(taken, staging, deferred, within, steps):
        return steps
    steps.now.append(taken.expect(~deferred, staging))
    if steps.needs_state:
        steps.later.append(taken.expect(deferred, staging, within=within))
    steps.before_writing = len(steps.now) + len(steps.later)
    return steps


def _duplicate(
    taken: Snapshot, staging: Staging, deferred: Mask, within: Spans | None, steps: Steps
) -> bool:
    """The arena takes long to make ready: has the device keep its chunks as they are meanwhile.

    False if it has no room for those that are not deferred.
    """
    held = taken.held
    sources = held.planner.sources(held.items, held.rows[~deferred])
    on_device = np.zeros(len(held.rows), np.bool_)
    on_device[~deferred] = [isinstance(source, StagedSource) for source in sources]
    doubles = staging.duplicate([one for one in sources if isinstance(one, StagedSource)])
    if doubles is None:
        return False
    steps.now.append(taken.expect(~on_device & ~deferred, still=True))
    steps.later.append(taken.expect(on_device, staging, doubles))
    if steps.needs_state:
        kept: list[Source] = []
        steps.later.append(taken.expect(deferred, staging, kept, within=within))
        steps.keep = partial(_keep, held.part(deferred, within=within), staging, kept, doubles)
    return True


def _keep(
    chunks: Chunks, staging: Staging, kept: list[Source], beside: Sequence[StagedSource]
) -> bool:
    """The same for what is deferred. What of it is in host memory, as the steps that an optimizer
    counts, is copied there, unless it is large: then none is kept."""
    sources = chunks.sources(0, len(chunks.start))
    staged = [source for source in sources if isinstance(source, StagedSource)]
    on_host = [source for source in sources if not isinstance(source, StagedSource)]
    plain = [source for source in on_host if type(source) is HostSource]
    if len(plain) < len(on_host) or sum(source.array.nbytes for source in plain) > MOST_ON_HOST:
        return False
    doubles = staging.duplicate(staged, beside)
    if doubles is None:
        return False
    copies = (HostSource(source.array.copy()) for source in plain)
    of_device = iter(doubles)
    kept.extend(
        next(of_device) if isinstance(source, StagedSource) else next(copies) for source in sources
    )
    return True

# SPDX-License-Identifier: Apache-2.0
"""What is to be copied from the fast tier, and what may leave it: rules over two lists of steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shardkeep.manager.keeping import KeepPolicy
from shardkeep.manager.steps import Step

__all__ = ["joined", "uncopied", "wanted"]


def joined(fast: Sequence[Step], durable: Sequence[Step]) -> list[Step]:
    """All steps of both, in ascending order, each with where it lies, the fast copy first.

    Where the two hold different saves of one step, the later one is meant: the run went back and
    reached it again, or the fast tier is of an earlier run. Of saves of one moment it is the
    durable one.
    """
    found = {step.step: step for step in durable}
    for step in fast:
        other = found.get(step.step)
        if other is not None and other.save_id == step.save_id:
            found[step.step] = replace(step, copies=(*step.copies, *other.copies))
        elif other is None or other.saved_at < step.saved_at:
            found[step.step] = step
    return [found[number] for number in sorted(found)]


def wanted(
    steps: Sequence[Step], keep: KeepPolicy | None, now: float, spared: Collection[int] = ()
) -> list[Step]:
    """Of the steps of both tiers, those that the durable one is to have.

    What its policy holds, what is spared, and the newest, which it would hold if it had it.
    """
    if keep is None or not steps:
        return list(steps)
    held = {*keep.holds(steps, now), *spared, steps[-1].step}
    return [step for step in steps if step.step in held]


def uncopied(wanted: Sequence[Step], durable: Sequence[Step]) -> list[Step]:
    """Those that must not leave the fast tier, as they are to be copied first: the newest first."""
    there = {step.save_id for step in durable}
    return [step for step in reversed(wanted) if step.save_id not in there]

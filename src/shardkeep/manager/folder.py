# SPDX-License-Identifier: Apache-2.0
"""The folder of a run, for who looks, evaluates and removes; it decides nothing by itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from shardkeep.checkpointer import Checkpointer
from shardkeep.coordination import check_same, encode_asked
from shardkeep.errors import CheckpointNotFoundError, StorageError
from shardkeep.manager.checking import checked_step
from shardkeep.manager.cleaning import Cleaned, clean, joined_cleaned
from shardkeep.manager.keeping import KeepPolicy, best_rules, best_step, find_best
from shardkeep.manager.removal import Removal, make_lasting, remove_steps
from shardkeep.manager.steps import Step
from shardkeep.manager.tiers import Tier, Tiers
from shardkeep.manager.waiting import PinnedStep, next_step
from shardkeep.manager.wholeness import any_whole
from shardkeep.wording import names_text

__all__ = ["RunFolder"]

log = logging.getLogger("shardkeep")

POLL_S = 5.0
"""The longest pause between two looks for a new step."""


class RunFolder:
    """What is there, and what may be done with it."""

    def __init__(
        self,
        tiers: Tiers,
        keeper: Checkpointer,
        keep: KeepPolicy | None,
        stale_s: float,
    ) -> None:
        """Nothing is touched."""
        self._tiers = tiers
        self._catalog = tiers.first.catalog
        """Where steps are saved."""
        self._keeper = keeper
        self._keep_policy = keep
        self._stale_s = stale_s
        self._busy: set[int] = set()
        """Steps that are being saved."""
        self._moving = threading.Lock()
        """Held while a step begins to be saved, and while one is moved away or into its place."""
        self._deleted: Callable[[int], None] = lambda step: None
        """Told of a step that was removed because somebody wanted it to be."""
        self._told_unranked = False

    @property
    def root(self) -> str:
        """The durable folder, as an absolute path."""
        return self._tiers.durable.catalog.root

    @property
    def checkpointer(self) -> Checkpointer:
        """What it saves and loads with."""
        return self._keeper

    # --- looking

    def steps(self) -> list[Step]:
        """The committed steps, in ascending order, with metrics and metadata; reads no data.

        With a fast tier, those of both; `copies` tells where each lies.
        """
        return list(self._tiers.look().steps)

    def latest(self) -> Step | None:
        """The newest step; derived from the directory each time."""
        steps = self._tiers.look().steps
        return steps[-1] if steps else None

    def best(self, metric: str | None = None, *, highest: bool | None = None) -> Step | None:
        """The best step by a metric: the one named, or that of the `KeepBest` in `keep`.

        `highest` says whether more is better; without it that rule does.
        """
        rule = find_best(self._keep_policy, metric)
        if metric is None:
            if rule is None:
                raise ValueError("pass the name of a metric, or keep=KeepBest(...)")
            metric = rule.metric
        if highest is None:
            if rule is None:
                raise ValueError(
                    f"no KeepBest in keep= says which {metric!r} is better; pass highest=True, or "
                    "highest=False for a loss"
                )
            highest = rule.highest
        return best_step(self._tiers.look().steps, metric, highest)

    def _warn_unranked(self, step: int, metrics: Mapping[str, object] | None) -> None:
        """Once, when a save lacks what `keep` ranks by: of a name that is misspelt none is best."""
        lacks = {rule.metric for rule in best_rules(self._keep_policy)} - set(metrics or ())
        if lacks and not self._told_unranked:
            self._told_unranked = True
            log.warning(
                "step %d of %s has no metric %s, which keep=KeepBest(...) ranks by: it is never "
                "the best. It has %s",
                step,
                self.root,
                names_text(sorted(lacks)),
                names_text(sorted(map(str, metrics))) if metrics else "none",
            )

    def _follow_fork(self) -> None:
        """Begin with locks and threads of one's own, where a fork may have inherited others'."""

    # --- removing

    def delete(self, step: int, *, force: bool = False) -> None:
        """Remove a step, all copies of it. One that is pinned, or the only one there is, only with
        `force`."""
        self._follow_fork()
        self._agree_on("deletions", step, force=force)
        step = checked_step(step)

        def lead() -> bytes:
            listing = self._tiers.look()
            there = [found.step for found in listing.steps]
            if step in self._busy:
                raise StorageError(
                    f"step {step} in {self.root} is being saved; wait for its handle first",
                    transient=True,
                )
            if step not in there and all(found.step != step for found in listing.damaged):
                raise CheckpointNotFoundError(f"no step {step} in {self._tiers.text}")
            others = [found for found in reversed(listing.steps) if found.step != step]
            if not force and step in there and not any_whole(others):
                raise StorageError(
                    f"step {step} is the only whole one in {self._tiers.text}; pass force=True to "
                    "be left with none"
                )
            if not force:
                make_lasting(others)
            self._remove([step], force=force)
            self._deleted(step)
            return b""

        self._keeper.coordinator.lead("delete", lead)

    def _agree_on(self, what: str, step: int | None, **asked: object) -> None:
        """Ranks must have been asked for the same thing: one of them decides for all. What is no
        step on one of them is an error of all."""

        def tell() -> bytes:
            return encode_asked({"step": None if step is None else checked_step(step), **asked})

        def join(told: list[bytes]) -> list[bytes]:
            check_same(told, what)
            return [b""] * len(told)

        coordinator = self._keeper.coordinator
        coordinator.gather_scatter(f"compare {what}", tell, join)

    def _remove(self, steps: Sequence[int], *, force: bool) -> None:
        for tier, done in self._remove_all(steps, force=force):
            root, pins = tier.catalog.root, tier.pins
            if done.pinned:
                held = pins.held()
                who = pins.describe([pin for name in done.pinned for pin in held.get(name, [])])
                raise StorageError(
                    f"{', '.join(done.pinned)} in {root} is pinned by {who}; wait, or pass "
                    "force=True",
                    transient=True,
                )
            if done.failed:
                raise StorageError(f"{', '.join(done.failed)} in {root} could not be removed")

    def _remove_all(
        self, steps: Sequence[int], *, force: bool = False
    ) -> Iterator[tuple[Tier, Removal]]:
        """From each tier, the fast one first: what is gone there is not copied any more."""
        names = [self._tiers.names.of(step) for step in steps]
        for tier in self._tiers.all:
            yield (
                tier,
                remove_steps(
                    tier.catalog.store,
                    tier.pins,
                    names,
                    force=force,
                    moving=self._moving,
                    progress=self._keeper.coordinator.advance,  # the other ranks wait for it
                ),
            )

    def _newer(self, than: int) -> list[int]:
        return [found.step for found in self._tiers.look().steps if found.step > than]

    def _drop_newer(self, than: int, passed: set[int]) -> bytes:
        """But for those that are pinned, and those that could not be read: they may be, later."""
        for tier, left in self._remove_all([s for s in self._newer(than) if s not in passed]):
            for name in (*left.pinned, *left.failed):
                where = tier.catalog.root
                log.warning("%s is newer than what was restored, and stays in %s", name, where)
        return b""

    def _tell_of_newer(self, than: int) -> None:
        newer = self._newer(than)
        if newer:
            log.warning(
                "steps %d to %d of %s lie beyond step %d, where this run stands: a restart would "
                "resume from them. Remove them with restore(..., drop_newer=True), or delete(step)",
                newer[0],
                newer[-1],
                self.root,
                than,
            )

    def clean(self, *, dry_run: bool = False) -> Cleaned:
        """Remove now what killed saves, copies and removals left, as saving does by itself; local.

        Of several tiers, names in the fast one are told with its path.
        """
        self._follow_fork()
        busy = {self._tiers.names.of(step) for step in self._busy.copy()}
        found = []
        for tier in reversed(self._tiers.all):
            listing = tier.catalog.look()
            done = clean(
                tier.catalog,
                tier.pins,
                listing,
                stale_s=self._stale_s,
                busy=busy,
                dry_run=dry_run,
            )
            found.append(done if tier is self._tiers.durable else done.under(tier.catalog.root))
        return joined_cleaned(found)

    # --- for who evaluates

    def wait_for(
        self, step: int | None = None, timeout: float | None = None, *, poll_s: float = POLL_S
    ) -> PinnedStep:
        """Wait for a step, or for the first newer one there is; without a number, for any: the
        newest. It is pinned until it is released, or `with` is left. `TimeoutError` if none comes.
        """
        least = 0 if step is None else checked_step(step)
        found = self._next(least, step is None, timeout, poll_s)
        if found is None:
            what = "a step" if step is None else f"step {step} or a newer one"
            raise TimeoutError(f"{what} did not appear in {self.root} within {timeout} s")
        return found

    def watch(
        self,
        after: int | None = None,
        timeout: float | None = None,
        *,
        newest: bool = False,
        poll_s: float = POLL_S,
    ) -> Iterator[Step]:
        """Steps as they appear, each pinned until the next is asked for; also what is there now.

        Begins beyond `after`; with `newest`, leaves out what is not the newest when it is asked
        for. Ends when none comes for `timeout` seconds.
        """
        least = 0 if after is None or after == -1 else checked_step(after) + 1
        while True:
            found = self._next(least, newest, timeout, poll_s)
            if found is None:
                return
            with found:
                yield found.info
            least = found.step + 1

    def _next(
        self, least: int, newest: bool, timeout: float | None, poll_s: float
    ) -> PinnedStep | None:
        return next_step(
            self._tiers,
            self._keeper,
            least=least,
            newest=newest,
            timeout=timeout,
            poll_s=poll_s,
        )

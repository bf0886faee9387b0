# SPDX-License-Identifier: Apache-2.0
"""The folder of a run, for who looks, evaluates and removes; it decides nothing by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardkeep.checkpointer import Checkpointer
from shardkeep.errors import CheckpointNotFoundError, StorageError
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.cleaning import Cleaned, clean
from shardkeep.manager.keeping import KeepPolicy, best_step, find_best
from shardkeep.manager.pins import Pins
from shardkeep.manager.removal import remove_steps
from shardkeep.manager.steps import Step
from shardkeep.manager.waiting import PinnedStep, next_step
from shardkeep.manager.wholeness import any_whole

__all__ = ["RunFolder"]

POLL_S = 5.0
"""The longest pause between two looks for a new step."""


class RunFolder:
    """What is there, and what may be done with it."""

    def __init__(
        self,
        catalog: Catalog,
        pins: Pins,
        keeper: Checkpointer,
        keep: KeepPolicy | None,
        stale_s: float,
    ) -> None:
        """Nothing is touched."""
        self._catalog = catalog
        self._pins = pins
        self._keeper = keeper
        self._keep_policy = keep
        self._stale_s = stale_s
        self._busy: set[int] = set()
        """Steps that are being saved."""

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return self._catalog.root

    @property
    def checkpointer(self) -> Checkpointer:
        """What it saves and loads with."""
        return self._keeper

    # --- looking

    def steps(self) -> list[Step]:
        """The committed steps, in ascending order, with metrics and metadata; reads no data."""
        return list(self._catalog.look().steps)

    def latest(self) -> Step | None:
        """The newest step; derived from the directory each time."""
        steps = self._catalog.look().steps
        return steps[-1] if steps else None

    def best(self, metric: str | None = None, *, highest: bool | None = None) -> Step | None:
        """The best step by a metric: the one named, or that of the `KeepBest` in `keep`."""
        rule = find_best(self._keep_policy, metric)
        if metric is None:
            if rule is None:
                raise ValueError("pass the name of a metric, or keep=KeepBest(...)")
            metric = rule.metric
        if highest is None:
            highest = rule is not None and rule.highest
        return best_step(self._catalog.look().steps, metric, highest)

    # --- removing

    def delete(self, step: int, *, force: bool = False) -> None:
        """Remove a step. One that is pinned, or the only one there is, only with `force`."""

        def lead() -> bytes:
            listing = self._catalog.look()
            there = [found.step for found in listing.steps]
            if step in self._busy:
                raise StorageError(
                    f"step {step} in {self.root} is being saved; wait for its handle first",
                    transient=True,
                )
            if step not in there and all(found.step != step for found in listing.damaged):
                raise CheckpointNotFoundError(f"no step {step} in {self.root}")
            others = [found for found in reversed(listing.steps) if found.step != step]
            if not force and step in there and not any_whole(others):
                raise StorageError(
                    f"step {step} is the only whole one in {self.root}; pass force=True to be left "
                    "with none"
                )
            self._remove([step], force=force)
            return b""

        self._keeper.coordinator.lead("delete", lead)

    def _remove(self, steps: Sequence[int], *, force: bool) -> None:
        names = [self._catalog.names.of(step) for step in steps]
        done = remove_steps(
            self._catalog.store,
            self._pins,
            names,
            force=force,
            progress=self._keeper.coordinator.advance,  # the other ranks wait for it
        )
        if done.pinned:
            held = self._pins.held()
            who = self._pins.describe([pin for name in done.pinned for pin in held.get(name, [])])
            raise StorageError(
                f"{', '.join(done.pinned)} in {self.root} is pinned by {who}; wait, or pass "
                "force=True",
                transient=True,
            )
        if done.failed:
            raise StorageError(f"{', '.join(done.failed)} in {self.root} could not be removed")

    def clean(self, *, dry_run: bool = False) -> Cleaned:
        """Remove now what killed saves and removals left, as saving does by itself; local."""
        return clean(
            self._catalog,
            self._pins,
            self._catalog.look(),
            stale_s=self._stale_s,
            busy={self._catalog.names.of(step) for step in self._busy.copy()},
            dry_run=dry_run,
        )

    # --- for who evaluates

    def wait_for(
        self, step: int | None = None, timeout: float | None = None, *, poll_s: float = POLL_S
    ) -> PinnedStep:
        """Wait for a step, or for the first newer one there is; without a number, for any: the
        newest. It is pinned until it is released, or `with` is left. `TimeoutError` if none comes.
        """
        found = self._next(0 if step is None else step, step is None, timeout, poll_s)
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
        least = 0 if after is None else after + 1
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
            self._catalog,
            self._pins,
            self._keeper,
            least=least,
            newest=newest,
            timeout=timeout,
            poll_s=poll_s,
        )

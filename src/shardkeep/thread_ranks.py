# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shardkeep.heartbeats import Patience
from shardkeep.planes import Bulk, SharedDict, ThreadBulk
from shardkeep.ranks import Ranks

__all__ = ["ThreadRanks"]


class ThreadRanks:
    """N ranks as threads of one process: for tests and simulations.

    >>> ThreadRanks(3).run(lambda coordinator: coordinator.rank * 10)
    [0, 10, 20]
    """

    def __init__(
        self, world_size: int, timeout_s: float = 60.0, patience: Patience = Patience()
    ) -> None:
        """A group of `world_size` ranks that share memory and nothing else."""
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.patience = patience

    def run(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """Run `work(coordinator)` on every rank; returns what each gave, or raises rank 0's error.

        Errors of all ranks are in the `failures` of a `CheckpointError`; `outcomes` gives them one
        by one.
        """
        results = self.outcomes(work)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def outcomes(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """Like `run`, with the error of a rank in place of its result."""
        space = SharedDict()
        results: list[Any] = [None] * self.world_size

        def rank_main(rank: int) -> None:
            def connect(name: str) -> Bulk:
                return ThreadBulk(rank, self.world_size, space, self.timeout_s, name)

            ranks = Ranks(rank, self.world_size, space, connect, self.timeout_s, self.patience)
            try:
                results[rank] = work(ranks)
            except BaseException as error:
                results[rank] = error

        if self.world_size == 1:
            rank_main(0)
            return results
        threads = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

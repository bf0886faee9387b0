# SPDX-License-Identifier: Apache-2.0
"""Which group of processes a call belongs to."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from typing import Any

from shardkeep.coordination import Coordinator, SingleProcess
from shardkeep.errors import PlanError
from shardkeep.heartbeats import default_timeout_s
from shardkeep.ranks import Ranks

__all__ = ["coordinator_for", "flush"]

_LAUNCHED_AS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class _Groups:
    """The coordinators in use, one for each process group, made on first use."""

    def __init__(self) -> None:
        self._open: list[tuple[weakref.ref[Any], Ranks]] = []

    def get(self, group: Any) -> Ranks:
        from shardkeep.adapters.torch_groups import DESTROYED, TorchRanks, is_alive

        if not is_alive(group):
            self.close(group)
            raise PlanError(DESTROYED)
        for known, ranks in list(self._open):
            held = known()
            if held is group:
                return ranks
            if held is None or not is_alive(held):
                self.close(held, known)
        ranks = TorchRanks(group)
        self._open.append((weakref.ref(group), ranks))
        return ranks

    def close(self, group: Any = None, which: weakref.ref[Any] | None = None) -> None:
        """Close those of one group, or of one reference to a group that is no more."""
        for entry in list(self._open):
            known, ranks = entry
            if known is which or (group is not None and known() is group):
                self._open.remove(entry)
                ranks.close()

    def memories(self) -> list[dict[str, Any]]:
        """What is remembered for each."""
        return [ranks.memory for _, ranks in self._open]

    def close_all(self) -> bool:
        """Whether any was open."""
        closing, self._open = self._open, []
        for _, ranks in closing:
            with contextlib.suppress(Exception):
                ranks.close()
        return bool(closing)


_groups = _Groups()
_alone = SingleProcess()


def flush() -> None:
    """Wait for saves in the background, and let go of the groups of processes; on every rank.

    To be called before `torch.distributed.destroy_process_group()`. The next save or load makes
    what it needs anew.
    """
    with contextlib.ExitStack() as errors:  # all is let go of, whatever one says
        errors.callback(_groups.close_all)
        for memory in (_alone.memory, *_groups.memories()):
            for kept in list(memory.values()):
                if hasattr(kept, "close"):
                    errors.callback(kept.close)
            errors.callback(memory.clear)


def coordinator_for(
    process_group: object = None, no_dist: bool = False, timeout_s: float | None = None
) -> Coordinator:
    """The coordinator the caller named, that of torch.distributed, or the only process there is."""
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s!r}; it must be positive")
    if no_dist:
        return _alone
    if process_group is not None and all(
        hasattr(process_group, name) for name in ("agree", "gather_scatter", "lead", "call")
    ):
        if timeout_s is not None and isinstance(process_group, Ranks):
            process_group.timeout_s = timeout_s
        return process_group  # type: ignore[return-value]
    group = _torch_group(process_group)
    if group is not None:
        if group.size() == 1:
            return _alone
        ranks = _groups.get(group)
        ranks.timeout_s = default_timeout_s() if timeout_s is None else timeout_s
        return ranks
    if process_group is not None:
        raise TypeError(
            f"process_group is a {type(process_group).__qualname__}; pass a torch process group, a "
            "DeviceMesh of one dimension or a shardkeep Coordinator"
        )
    if _groups.close_all():
        from shardkeep.adapters.torch_groups import DESTROYED

        raise PlanError(DESTROYED)
    for name in _LAUNCHED_AS:
        size = os.environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise PlanError(
                f"{name}={size} says that {size} processes were launched, but this one stands "
                "alone: every one of them would write the same checkpoint. Pass process_group=..., "
                "or no_dist=True if this process owns the whole checkpoint."
            )
    return _alone


def _torch_group(process_group: object) -> Any:
    """A group of torch.distributed, looked up only where a program has imported it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return None
    if process_group is None and not (
        distributed.is_initialized() and distributed.get_world_size() > 1
    ):
        return None
    from shardkeep.adapters.torch_groups import find_group

    return find_group(process_group)

# SPDX-License-Identifier: Apache-2.0
"""Which group of processes a call belongs to."""

from __future__ import annotations

import os
import sys

from shardkeep.coordination import Coordinator, Ranks, SingleProcess
from shardkeep.errors import PlanError

__all__ = ["coordinator_for"]

_LAUNCHED_AS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def coordinator_for(
    process_group: object = None, no_dist: bool = False, timeout_s: float | None = None
) -> Coordinator:
    """The coordinator the caller named, or the only process there is."""
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s!r}; it must be positive")
    if no_dist:
        return SingleProcess()
    if process_group is not None:
        if all(hasattr(process_group, name) for name in ("agree", "gather_scatter", "lead")):
            if timeout_s is not None and isinstance(process_group, Ranks):
                process_group.timeout_s = timeout_s
            return process_group  # type: ignore[return-value]
        raise TypeError(
            f"process_group is a {type(process_group).__qualname__}; this version takes a "
            "shardkeep Coordinator"
        )
    distributed = sys.modules.get("torch.distributed")
    if (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        raise PlanError(
            "torch.distributed is initialised with more than one rank, which this version does not "
            "coordinate yet; pass no_dist=True if this process owns the whole checkpoint"
        )
    for name in _LAUNCHED_AS:
        size = os.environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise PlanError(
                f"{name}={size} says that {size} processes were launched, but this one stands "
                "alone: every one of them would write the same checkpoint. Pass process_group=..., "
                "or no_dist=True if this process owns the whole checkpoint."
            )
    return SingleProcess()

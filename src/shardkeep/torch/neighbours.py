# SPDX-License-Identifier: Apache-2.0
"""How many ranks share this machine, as far as torch's driver lets a storage know."""

from __future__ import annotations

import os

import torch

__all__ = ["ranks_on_host", "world_size"]

MOST = 8
"""Ranks on a machine, where neither the launcher nor its devices say more."""


def world_size() -> int:
    """Ranks of the default group, or one."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ranks_on_host(ranks: int) -> int:
    """Of so many that take part: what torchrun says, or as many as a machine mostly has."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    most = int(told) if told.isdecimal() else max(MOST, torch.cuda.device_count())
    return max(1, min(ranks, most))

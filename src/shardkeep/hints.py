# SPDX-License-Identifier: Apache-2.0
"""What names tell about a mistake: a sentence more for an error, or nothing.

PyTorch's own state dicts have traps that show in the names alone. Each hint says which one it is,
and that `shardkeep.torch.AppState` is without it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

__all__ = ["mismatch_hint", "ranks_hint"]

_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
}
_NUMBERED = re.compile(r"(?:^|\.)state\.\d+\.[^.\s:]+(?=[\s:]|$)")
_STATISTICS = re.compile(r"(?:^|\.)(?:running_mean|running_var|num_batches_tracked)\b")


def mismatch_hint(
    wanted: Collection[str], missing: Iterable[str], unexpected: Iterable[str]
) -> str | None:
    """Why names of a target are not those of the checkpoint, where that can be told."""
    unexpected = list(unexpected)
    return _wrapped(missing, unexpected) or _without_state(wanted, unexpected)


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _wrapped(missing: Iterable[str], unexpected: Iterable[str]) -> str | None:
    stored = {_bare(name): name for name in unexpected}
    for name in missing:
        other = stored.get(_bare(name))
        if other is not None:
            odd = set(name.split(".")) ^ set(other.split("."))
            who = " and ".join(_WRAPPERS[part] for part in sorted(odd & _WRAPPERS.keys()))
            return (
                f"{name} in the target and {other} in the checkpoint differ by what {who} puts "
                "into names. Save and load shardkeep.torch.AppState(model, optimizer): its names "
                "do not depend on what wraps the model."
            )
    return None


def _without_state(wanted: Collection[str], unexpected: Iterable[str]) -> str | None:
    for name in unexpected:
        found = _NUMBERED.search(name)
        if found is None:
            continue
        begin = name[: found.start()]
        inside = f"{begin}." if begin else ""
        here = [other for other in wanted if other.startswith(inside)]
        has_state = any(other.startswith(f"{inside}state.") for other in here)
        if not has_state and any(other.startswith(f"{inside}param_groups") for other in here):
            return (
                f"the optimizer under {begin or 'the root'} has no state yet: it makes it in its "
                "first step, so there is nothing to load into. Save and load "
                "shardkeep.torch.AppState(model, optimizer), which makes room for what is stored."
            )
    return None


def ranks_hint(names: Iterable[str], advice: str) -> str:
    """What to do where ranks hold different things under one name; more, where names tell why."""
    hint = _differing(names)
    return advice if hint is None else f"{advice}\n{hint}"


def _differing(names: Iterable[str]) -> str | None:
    for name in names:
        if _NUMBERED.search(name):
            return (
                f"{_first(name)}: optimizers number their parameters from 0 on every rank. Save "
                "shardkeep.torch.AppState(model, optimizer), which goes by their names."
            )
        if _STATISTICS.search(name):
            return (
                f"{_first(name)}: each rank has seen other data. shardkeep.torch.AppState takes "
                "what the first rank has: under DistributedDataParallel, as that does; elsewhere "
                "with buffers_from=..."
            )
    return None


def _first(described: str) -> str:
    """A name without what is said of it."""
    return described.split(" ", 1)[0].rstrip(":")

# SPDX-License-Identifier: Apache-2.0
"""Which optimizers an `AppState` can hold, and which of them can take what another has kept."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from shardkeep.errors import UnsupportedValueError

__all__ = ["check_state", "check_supported", "class_names", "is_akin"]

_Optimizer = torch.optim.Optimizer

_ONLY_CONVERT = ("bitsandbytes.",)
"""Libraries whose own `state_dict` has nothing that is not kept of a parameter."""

_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

_INSTEAD = (
    "or save the optimizer itself beside an AppState of the model: "
    "{'app': AppState(model), 'optimizer': optimizer}"
)

_VARIANT = re.compile(r"_*(?:Fused|Paged|DeepSpeedCPU|CPU)*(.*?)(?:\d+bit|Fp8)?")
"""Other ways to compute the same: what is left is the name of the method."""


def check_supported(optimizer: object) -> None:
    """Refuse optimizers whose state is not that of named parameters."""
    if not isinstance(optimizer, _Optimizer):
        raise TypeError(f"optimizers holds a {type(optimizer).__qualname__}, expected optimizers")
    kinds = {cls.__name__ for cls in type(optimizer).__mro__}
    why = None
    if "LBFGS" in kinds:
        why = "keeps one history over all parameters of a process, in their order"
    elif "ZeroRedundancyOptimizer" in kinds:
        why = "spreads its state over the ranks in a way that it alone knows"
    if why is not None:
        raise UnsupportedValueError(
            f"AppState cannot hold a {type(optimizer).__qualname__}: it {why}, and no other number "
            "of ranks could use it. Save its state_dict() beside the AppState, in PerRank"
        )
    for method in ("state_dict", "load_state_dict"):
        owner = next(cls for cls in type(optimizer).__mro__ if method in vars(cls))
        if owner is not _Optimizer and not owner.__module__.startswith(_ONLY_CONVERT):
            raise UnsupportedValueError(
                f"AppState cannot hold a {type(optimizer).__qualname__}: it has a {method} of its "
                "own, and what that adds to the state of parameters would be lost. Do without and "
                "put what it adds into extra=...; pass the optimizers that it wraps, if it does; "
                f"{_INSTEAD}"
            )


def check_state(optimizer: _Optimizer) -> None:
    """Refuse state that belongs to no parameter: it would be lost."""
    kind = type(optimizer).__qualname__
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    for key, kept in optimizer.state.items():
        if kept and key not in mine:
            what = f"a tensor of shape {tuple(key.shape)}" if torch.is_tensor(key) else repr(key)
            raise UnsupportedValueError(
                f"{kind} keeps state of {what}, which is no parameter of its groups, and AppState "
                "goes by the names of parameters. Keep it elsewhere than in the optimizer's state "
                f"and put it into extra=..., {_INSTEAD}"
            )
    for name in _HOOKS:
        if getattr(optimizer, name, None):
            hook = name.removeprefix("_optimizer_").removesuffix("s")
            raise UnsupportedValueError(
                f"{kind} has a {hook}, and AppState calls neither state_dict() nor "
                "load_state_dict() of an optimizer. Remove it and put what it adds into "
                f"extra=..., {_INSTEAD}"
            )


def class_names(optimizer: _Optimizer) -> list[str]:
    """The class of an optimizer and those it derives from, as stored."""
    kinds = type(optimizer).__mro__
    return [cls.__name__ for cls in kinds[: kinds.index(_Optimizer)]]


def is_akin(stored: Sequence[str], mine: Sequence[str]) -> bool:
    """Whether one derives from the other, or they are variants of one method."""
    theirs, own = [_method(name) for name in stored], [_method(name) for name in mine]
    return not theirs or not own or theirs[0] in own or own[0] in theirs


def _method(name: str) -> str:
    found = _VARIANT.fullmatch(name)
    method = found[1] if found is not None else name
    return "Adam" if method == "AdamW" else method

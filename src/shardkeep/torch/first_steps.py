# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps of a parameter once it has taken its first step.

A new optimizer keeps nothing, so there is nothing to load into. PyTorch's own answer is a step with
zero gradients and no learning rate: it counts as a step, runs every hook, and needs gradients of
all parameters at once. Here a stand-in of the optimizer takes that step, on stand-ins of the
parameters, some at a time. Nothing of the program's is touched.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardkeep.errors import UnsupportedValueError
from shardkeep.metadata import TensorStorageMetadata
from shardkeep.torch.copying import copied
from shardkeep.tree import Stored

__all__ = ["first_states"]

AT_ONCE = 64 << 20
"""Bytes of parameters that take the step together: few enough not to matter."""

_MADE_ANEW = ("state", "param_groups")

Kept = dict[Any, Any]
"""What an optimizer keeps of one parameter."""


def first_states(
    optimizer: torch.optim.Optimizer, wanted: Mapping[Tensor, Stored]
) -> dict[Tensor, Kept]:
    """What the first step would have it keep of these parameters; contents do not matter.

    What is stored of each decides where the optimizer cannot take a step by itself.
    """
    made: dict[Tensor, Kept] = {}
    for group in optimizer.param_groups:
        for some in _portions([p for p in group["params"] if p in wanted]):
            error, kept = _after_step(optimizer, group, some)
            if error is not None:
                kept = {p: _alone(optimizer, group, p, wanted[p]) for p in some}
            made |= kept
    return made


def _alone(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor, stored: Stored
) -> Kept:
    """One parameter, after a step of several went wrong."""
    error, made = _after_step(optimizer, group, [parameter])
    kept = made[parameter]
    if error is None:
        return kept
    if stored and {name.partition(".")[0] for name in stored} == set(map(str, kept)):
        return kept  # it had made its state already
    return _like_stored(optimizer, parameter, stored, error)


def _portions(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    nbytes = 0
    for parameter in parameters:
        local = getattr(parameter, "_local_tensor", parameter)
        nbytes += local.nbytes
        some.append(parameter)
        if nbytes >= AT_ONCE:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _after_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: list[Tensor]
) -> tuple[Exception | None, dict[Tensor, Kept]]:
    """What went wrong, and what was kept in spite of that."""
    versions = [parameter._version for parameter in parameters]
    failed: Exception | None = None
    with _undisturbed(parameters):
        doubles = [_double(parameter) for parameter in parameters]
        stand_in = _stand_in(optimizer, group, doubles)
        try:
            type(optimizer).step(stand_in)
        except Exception as error:
            failed = error
    if versions != [parameter._version for parameter in parameters]:
        raise UnsupportedValueError(
            f"{type(optimizer).__qualname__} keeps its parameters elsewhere than in its groups, "
            "and has changed them while its state was prepared; take a step with it, then load "
            "everything again"
        )
    return failed, {
        parameter: dict(stand_in.state.get(double, {}))
        for parameter, double in zip(parameters, doubles, strict=True)
    }


def _double(parameter: Tensor) -> Tensor:
    zeros = torch.zeros_like(parameter.detach())
    made = torch.nn.Parameter(zeros, requires_grad=zeros.is_floating_point() or zeros.is_complex())
    made.grad = torch.zeros_like(made)
    return made


def _stand_in(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], doubles: list[Tensor]
) -> Any:
    """An optimizer of the same class and options, that knows nobody: hooks, schedulers."""
    made: Any = object.__new__(type(optimizer))
    # Tensors stay: whoever finds its parameters in an attribute is found out by their versions.
    own = {k: v for k, v in vars(optimizer).items() if not callable(v) and k not in _MADE_ANEW}
    made.__dict__ |= copied(own, lambda tensor: tensor)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(made, name, type(value)() if isinstance(value, dict) else OrderedDict())
    made.state = defaultdict(dict)
    options = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    made.param_groups = [{**options, "params": doubles}]
    return made


@contextlib.contextmanager
def _undisturbed(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Random numbers stay where they are, nobody is told, nothing is compiled for one step."""
    devices = sorted(
        {p.device.index for p in parameters if p.is_cuda and p.device.index is not None}
    )
    with (
        _no_global_hooks(),
        torch.random.fork_rng(devices),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Hooks for the steps of all optimizers take the stand-in for one of the program's."""
    module = importlib.import_module("torch.optim.optimizer")  # no attribute of torch.optim
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    tables: list[dict[Any, Any]] = [getattr(module, name, {}) for name in names]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def _like_stored(
    optimizer: torch.optim.Optimizer, parameter: Tensor, stored: Stored, error: Exception
) -> Kept:
    """What is stored of a parameter, where it is as large as the parameter, or one number."""
    kept: Kept = {}
    for key in stored:
        what = stored[key]
        if not isinstance(what, TensorStorageMetadata):
            kept[key] = None
        elif "." not in key and tuple(what.size) == tuple(parameter.shape):
            kept[key] = torch.zeros_like(parameter.detach(), dtype=_dtype(what))
        elif "." not in key and math.prod(what.size) == 1:
            kept[key] = torch.zeros(what.size, dtype=_dtype(what))
        else:
            raise UnsupportedValueError(
                f"{type(optimizer).__qualname__} has no state yet to load {key} into, and cannot "
                f"take a first step by itself ({error}); take one step with it before loading"
            ) from error
    return kept


def _dtype(what: TensorStorageMetadata) -> torch.dtype:
    found: torch.dtype = getattr(torch, what.properties.dtype)
    return found

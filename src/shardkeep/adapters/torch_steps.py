# SPDX-License-Identifier: Apache-2.0
"""Which tensors only an optimizer's step changes: its parameters, and what it keeps of them.

A state dict does not say which of its tensors are parameters, so the optimizers of this process are
asked for theirs. They are found among the objects that Python's collector knows, once for every set
of tensors that no known optimizer owns, and never kept alive. Each gets a hook that counts its
steps: torch does not count what happens inside a DTensor.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["before_step", "stepped", "versions"]


class _Steps:
    """The steps of one optimizer."""

    def __init__(self) -> None:
        self.begun = 0
        self.awaited: list[Callable[[], object]] = []
        """What the next one waits for."""

    def begin(self, *_: Any) -> None:
        awaited, self.awaited = self.awaited, []
        for wait in awaited:
            wait()
        self.begun += 1


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
_nobodys: set[int | None] = set()
"""Where tensors begin that no optimizer owned when we last looked for more of them."""


def stepped(values: Sequence[torch.Tensor]) -> list[bool]:
    """For each tensor, whether an optimizer owns its memory."""
    global _nobodys
    places = [_place(value) for value in values]
    owned = _owned()
    others = {place for place in places if place not in owned}
    if not others <= _nobodys:
        _find()
        owned = _owned()
        _nobodys = {place for place in places if place not in owned}
    return [place in owned for place in places]


def versions(values: Sequence[torch.Tensor]) -> list[int]:
    """A number for each that grows when it is changed in place, or by a step of its optimizer."""
    owned = _owned()
    steps = [owned.get(_place(value)) for value in values]
    return [
        (0 if value.is_inference() else value._version) + (0 if of is None else of.begun)
        for value, of in zip(values, steps, strict=True)
    ]


def before_step(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Have the next step of an optimizer begin with a call."""
    _know(optimizer).awaited.append(wait)


def _place(value: torch.Tensor) -> int | None:
    """Where its storage begins; hosts and devices share one space of addresses."""
    try:
        return value.untyped_storage().data_ptr()
    except Exception:  # a class may refuse anything, as parameters without a shape do
        return None


def _know(optimizer: torch.optim.Optimizer) -> _Steps:
    steps = _known.get(optimizer)
    if steps is None:
        steps = _Steps()
        optimizer.register_step_pre_hook(steps.begin)
        _known[optimizer] = steps
    return steps


def _find() -> None:
    # By type alone: quick, and an object may do anything when asked for its class.
    kinds = {torch.optim.Optimizer}
    todo = [torch.optim.Optimizer]
    while todo:
        more = set(todo.pop().__subclasses__()) - kinds
        kinds |= more
        todo.extend(more)
    for found in [found for found in gc.get_objects() if type(found) in kinds]:
        with contextlib.suppress(AttributeError):  # one that is only half made
            _know(found)


def _owned() -> dict[int | None, _Steps]:
    owned: dict[int | None, _Steps] = {
        _place(getattr(tensor, "_local_tensor", tensor)): steps
        for optimizer, steps in list(_known.items())
        for tensor in _tensors_of(optimizer)
    }
    owned.pop(None, None)
    return owned


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for kept in optimizer.state.values():
        if isinstance(kept, dict):
            yield from _tensors_in(kept.values())


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value

# SPDX-License-Identifier: Apache-2.0
"""Which tensors only an optimizer's step changes: its parameters, and what it keeps of them.

A state dict does not say which of its tensors are parameters, so the optimizers of this process are
asked for theirs. They are found among the objects that Python's collector knows, once for every set
of tensors that no known optimizer owns, and never kept alive.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

__all__ = ["stepped", "versions"]

_known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_nobodys: set[int] = set()
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


def versions(values: Sequence[torch.Tensor]) -> list[int | None]:
    """How often each was changed in place, as far as torch counts that."""
    return [None if value.is_inference() else value._version for value in values]


def _place(value: torch.Tensor) -> int:
    """Where its storage begins; hosts and devices share one space of addresses."""
    return value.untyped_storage().data_ptr()


def _find() -> None:
    # By type alone: quick, and an object may do anything when asked for its class.
    kinds = {torch.optim.Optimizer}
    todo = [torch.optim.Optimizer]
    while todo:
        more = set(todo.pop().__subclasses__()) - kinds
        kinds |= more
        todo.extend(more)
    _known.update([found for found in gc.get_objects() if type(found) in kinds])


def _owned() -> set[int]:
    return {
        _place(getattr(tensor, "_local_tensor", tensor))
        for optimizer in list(_known)
        for tensor in _tensors_of(optimizer)
    }


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

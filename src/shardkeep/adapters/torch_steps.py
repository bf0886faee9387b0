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

__all__ = ["before_step", "stepped"]

_Span = tuple[int, int, int]
"""Where a storage begins, and the first byte of a part of it and the one after it."""


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
_nobodys: set[_Span | None] = set()
"""Tensors that no optimizer owned when we last looked for more of them."""


def stepped(values: Sequence[torch.Tensor]) -> tuple[list[bool], Callable[[], list[bool]]]:
    """For each tensor, whether optimizers own its memory; and what says of each whether it was
    changed in place since, got other memory, or one of its optimizers began a step."""
    global _nobodys
    spans = [_span(value) for value in values]
    owners = _owners(spans)
    if not {span for span, of in zip(spans, owners, strict=True) if not of} <= _nobodys:
        _find()
        owners = _owners(spans)
        _nobodys = {span for span, of in zip(spans, owners, strict=True) if not of}
    seen = [_marks(*one) for one in zip(values, owners, strict=True)]

    def changed() -> list[bool]:
        now = map(_marks, values, owners)
        return [
            marks != before or (bool(of) and _span(value) != span)
            for marks, before, of, value, span in zip(now, seen, owners, values, spans, strict=True)
        ]

    return [bool(of) for of in owners], changed


def _marks(value: torch.Tensor, owners: Sequence[_Steps]) -> tuple[int, int]:
    """What a change in place counts up, and what a step does."""
    version = 0 if value.is_inference() else value._version
    return version, sum(steps.begun for steps in owners)


def before_step(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Have the next step of an optimizer begin with a call."""
    _know(optimizer).awaited.append(wait)


def _span(value: torch.Tensor) -> _Span | None:
    """The storage and the bytes of it that a tensor lies in; hosts and devices share one space of
    addresses."""
    try:
        low, nbytes = value.data_ptr(), value.nbytes
        if nbytes and not value.is_contiguous():
            steps = zip(value.shape, value.stride(), strict=True)
            nbytes = (1 + sum((n - 1) * step for n, step in steps)) * value.element_size()
        return (value.untyped_storage().data_ptr(), low, low + nbytes) if nbytes else None
    except Exception:  # a class may refuse anything, as parameters without a shape do
        return None


def _owners(spans: Sequence[_Span | None]) -> list[list[_Steps]]:
    """For each, the steps of the optimizers one of whose tensors has all of it.

    A storage may hold more than that, such as the statistics beside a parameter.
    """
    owned: dict[int, list[tuple[int, int, _Steps]]] = {}
    for optimizer, steps in list(_known.items()):
        for tensor in _tensors_of(optimizer):
            span = _span(getattr(tensor, "_local_tensor", tensor))
            if span is not None:
                owned.setdefault(span[0], []).append((*span[1:], steps))
    found = []
    for span in spans:
        parts = owned.get(span[0], ()) if span is not None else ()
        found.append(
            [steps for low, high, steps in parts if span and low <= span[1] and span[2] <= high]
        )
    return found


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

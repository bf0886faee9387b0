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
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.arrays import Stepped
from shardkeep.columns import Ints
from shardkeep.memory import Spans

__all__ = ["before_step", "stepped"]

_data_ptr = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_nbytes = attrgetter("nbytes")
_untyped_storage = torch.Tensor.untyped_storage
_PLAIN = {torch.Tensor, torch.nn.Parameter}


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
_nobodys: set[tuple[int, int]] = set()
"""Spans that no optimizer owned when we last looked for more of them."""


def stepped(values: Sequence[torch.Tensor]) -> Stepped:
    """The tensors whose memory optimizers own. As changed counts what was changed in place, got
    other memory, or had one of its optimizers begin a step."""
    global _nobodys
    spans = _spans(values)
    owners = _Owners(spans)
    nobodys = owners.nobodys()
    if not nobodys <= _nobodys:
        _find()
        owners = _Owners(spans)
        _nobodys = owners.nobodys()
    versions, begun = _versions(values), owners.begun()
    # Kept, so that memory of others cannot come to lie where that of a tensor lay.
    storages = [_untyped_storage(values[row]) for row in np.flatnonzero(owners.is_owned).tolist()]

    def changed(_kept: object = storages) -> Sequence[bool]:
        other = (_versions(values) != versions) | (owners.begun() != begun)
        moved = (_spans(values) != spans).any(axis=1)
        found: list[bool] = (other | (moved & owners.is_owned)).tolist()
        return found

    owned: list[bool] = owners.is_owned.tolist()
    return Stepped(owned, spans, changed, owners.is_owned)


def _versions(values: Sequence[torch.Tensor]) -> Ints:
    """What a change in place counts up."""
    return np.array([0 if value.is_inference() else value._version for value in values], np.int64)


def before_step(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Have the next step of an optimizer begin with a call."""
    _know(optimizer).awaited.append(wait)


def _spans(values: Sequence[torch.Tensor]) -> Spans:
    """Of each; without a loop of ours where nothing is odd, as every lazy save asks for them."""
    spans = np.zeros((len(values), 2), np.uint64)
    try:
        if all(map(_is_contiguous, values)):
            spans[:, 0] = np.fromiter(map(_data_ptr, values), np.uint64, len(values))
            spans[:, 1] = np.fromiter(map(_nbytes, values), np.uint64, len(values))
            spans[:, 1] += spans[:, 0]
            spans[(spans[:, 0] == 0) | (spans[:, 0] == spans[:, 1])] = 0
            return spans
    except Exception:  # a class may refuse anything, as parameters without a shape do
        pass
    for row, value in enumerate(values):
        with contextlib.suppress(Exception):
            spans[row] = _span(value)
    return spans


def _span(value: torch.Tensor) -> tuple[int, int]:
    low, nbytes = value.data_ptr(), value.nbytes
    if nbytes and not value.is_contiguous():
        steps = zip(value.shape, value.stride(), strict=True)
        nbytes = (1 + sum((n - 1) * step for n, step in steps)) * value.element_size()
    return (low, low + nbytes) if low and nbytes else (0, 0)


class _Owners:
    """For each span, the steps of the optimizers one of whose tensors has all of it."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._several: list[tuple[_Steps, ...]] = [()]
        """Whose a span may be: nobody's, or that of one or of several optimizers."""
        known: list[Spans] = [np.zeros((0, 2), np.uint64)]
        for optimizer, steps in list(_known.items()):
            tensors = _tensors_of(optimizer)
            known.append(_spans([one if type(one) in _PLAIN else _local(one) for one in tensors]))
            self._several.append((steps,))
        self._number = self._find(
            np.concatenate(known), np.repeat(np.arange(len(known)), list(map(len, known)))
        )
        """For each span, which of them."""

    def _find(self, known: Spans, number: Ints) -> Ints:
        # Tensors of optimizers rarely overlap: what does is looked at together, one by one.
        order = np.lexsort((known[:, 1], known[:, 0]))
        order = order[known[order, 1] > 0]
        low, high, number = known[order, 0], known[order, 1], number[order]
        apart = np.ones(len(order), np.bool_)
        apart[1:] = low[1:] >= np.maximum.accumulate(high)[:-1]
        first = np.flatnonzero(apart)
        count = np.diff([*first, len(order)])
        if not len(first):
            return np.zeros(len(self._spans), np.int64)
        at = np.searchsorted(low[first], self._spans[:, 0], "right") - 1
        found = number[first[at]]
        found[(at < 0) | (self._spans[:, 1] > high[first[at]]) | (self._spans[:, 1] == 0)] = 0
        for row in np.flatnonzero((count[at] > 1) & (at >= 0)).tolist():
            mine = slice(int(first[at[row]]), int(first[at[row]] + count[at[row]]))
            has = (low[mine] <= self._spans[row, 0]) & (self._spans[row, 1] <= high[mine])
            found[row] = self._together(np.unique(number[mine][has]).tolist())
        return found

    def _together(self, numbers: list[int]) -> int:
        """The number of what several optimizers own."""
        if len(numbers) < 2:
            return sum(numbers)
        several = tuple(steps for number in numbers for steps in self._several[number])
        if several not in self._several:
            self._several.append(several)
        return self._several.index(several)

    @property
    def is_owned(self) -> npt.NDArray[np.bool_]:
        """Whether anybody has it."""
        return self._number > 0

    def nobodys(self) -> set[tuple[int, int]]:
        """Spans that nobody has."""
        return set(map(tuple, self._spans[self._number == 0].tolist()))

    def begun(self) -> Ints:
        """For each span, what a step of any of its owners counts up."""
        counts = [sum(steps.begun for steps in several) for several in self._several]
        return np.array(counts, np.int64)[self._number]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    held: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return held


def _know(optimizer: torch.optim.Optimizer) -> _Steps:
    steps = _known.get(optimizer)
    if steps is None:
        steps = _Steps()
        optimizer.register_step_pre_hook(steps.begin)
        _known[optimizer] = steps
    return steps


def _find() -> None:
    # By type alone: an object may do anything when asked for its class, or a class for its hash.
    kinds = {torch.optim.Optimizer}
    todo = [torch.optim.Optimizer]
    while todo:
        more = set(todo.pop().__subclasses__()) - kinds
        kinds |= more
        todo.extend(more)
    numbers = set(map(id, kinds))
    objects = gc.get_objects()  # hundreds of thousands: no loop of ours
    for found in list(compress(objects, map(numbers.__contains__, map(id, map(type, objects))))):
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

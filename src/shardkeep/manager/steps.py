# SPDX-License-Identifier: Apache-2.0
"""One step of a run, and what a folder of them holds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardkeep.errors import UnsupportedValueError

__all__ = ["DamagedStep", "Listing", "Step", "encode_metrics", "metrics_of", "user_metadata_of"]


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step; all of this is known without reading its data."""

    step: int
    """Its number."""
    path: str
    """Where it lies: to be given to `shardkeep.load` and `shardkeep.open`."""
    save_id: str
    """The save that wrote it."""
    nbytes: int
    """Bytes of its files, the record's included."""
    files: int
    """How many there are, without the record."""
    saved_at: float
    """When, in seconds since 1970."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What it was saved with."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's own, as JSON has it."""
    copies: tuple[str, ...] = ()
    """Where it lies, the copy that is read first in front; `path` is that one."""


@dataclass(frozen=True, slots=True)
class DamagedStep:
    """A step that is there and cannot be used."""

    step: int
    """Its number."""
    path: str
    """Where it lies."""
    problem: str
    """What is wrong with it."""
    kind: str = "CorruptionError"
    """The class of the error; only this one means that bytes are not what they were."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a folder of steps holds; each in ascending order."""

    steps: tuple[Step, ...] = ()
    """Committed, with a sound record."""
    damaged: tuple[DamagedStep, ...] = ()
    """Committed, with a record that cannot be read."""
    unfinished: tuple[str, ...] = ()
    """Names of steps without a record: being saved, or left by a save that was killed."""
    leaving: tuple[str, ...] = ()
    """Names of what is being removed, or was when its remover was killed."""
    copying: tuple[str, ...] = ()
    """Names of copies that are being made, or were when their maker was killed."""


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | str]:
    """Metrics as the record has them: numbers, and names of those that JSON lacks.

    >>> encode_metrics({"loss": float("nan"), "accuracy": 1})
    {'loss': 'NaN', 'accuracy': 1.0}
    """
    made: dict[str, float | str] = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedValueError(
                f"the metric {name!r} is a {type(value).__qualname__}, which is not one number; "
                "put it into metadata=, or into the state"
            ) from error
        except OverflowError as error:
            raise UnsupportedValueError(
                f"the metric {name!r} is too large for a float; save its logarithm, or put it into "
                "the state"
            ) from error
        if math.isnan(number):
            made[name] = "NaN"
        elif math.isinf(number):
            made[name] = "Infinity" if number > 0 else "-Infinity"
        else:
            made[name] = number
    return made


def user_metadata_of(
    step: int,
    saved_at: float,
    metrics: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What the record of a step has as `user`."""
    for what, given in (("metrics", metrics), ("metadata", metadata)):
        if given is not None and not isinstance(given, Mapping):
            raise UnsupportedValueError(
                f"{what} is a {type(given).__qualname__}; use a mapping, such as "
                f"{what}={{'name': value}}"
            )
    made: dict[str, Any] = {"step": step, "saved_at": saved_at}
    if metrics:
        made["metrics"] = encode_metrics(metrics)
    if metadata:
        made["metadata"] = metadata
    return made


def metrics_of(user: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in what a record has as `user`; what is none is left out."""
    found = user.get("metrics")
    if not isinstance(found, dict):
        return {}
    made = {}
    for name, value in found.items():
        if isinstance(value, str) and value in _NOT_FINITE:
            made[name] = _NOT_FINITE[value]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                made[name] = float(value)
    return made

# SPDX-License-Identifier: Apache-2.0
"""Errors as they travel between ranks, and the one error they become on all of them."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shardkeep import errors
from shardkeep.errors import CheckpointError, MismatchError, RankError

__all__ = ["Failure", "blamed", "describe", "merge_failures", "revive"]

MAX_TEXT = 64 << 10
MAX_TRACE = 8000
MAX_NAMES = 10_000


class Failure(msgspec.Struct):
    """An error as it travels: never a pickle."""

    rank: int
    kind: str
    text: str
    trace: str = ""
    details: dict[str, Any] = {}

    @property
    def is_silent(self) -> bool:
        """Whether the rank did not say so itself: it may only have stood still, and come back."""
        return self.kind in ("gone", "stuck", "absent")


def describe(error: BaseException, rank: int) -> Failure:
    """What other ranks are told of an error; works for any exception, and is of bounded size."""
    details: dict[str, Any] = {}
    if isinstance(error, MismatchError):
        details = {
            "missing": _names(error.missing),
            "unexpected": _names(error.unexpected),
            "mismatched": {_clean(n, 4096): _clean(t, 4096) for n, t in _few(error.mismatched)},
        }
    elif isinstance(error, errors.CorruptionError):
        details = {"names": _names(error.names)}
    elif isinstance(error, errors.StorageError):
        details = {"transient": error.transient}
    try:
        text = _clean(str(error), MAX_TEXT)
    except Exception:
        text = "<no text>"
    try:
        trace = _clean("".join(traceback.format_exception(error))[-MAX_TRACE:], MAX_TRACE)
    except Exception:
        trace = ""
    kind = type(error)
    for cls in kind.__mro__:
        if cls.__module__ == errors.__name__ and cls.__name__ in errors.__all__:
            return Failure(rank, cls.__name__, text, trace, details)
    return Failure(rank, _clean(kind.__qualname__, 200), text, trace, details)


def blamed(error: BaseException) -> list[Failure]:
    """Of an error that tells of other ranks, what it tells of each; for any other, nothing."""
    if not isinstance(error, RankError):
        return []
    told = [(rank, *text.partition(": ")) for rank, text in error.failures.items()]
    return [Failure(rank, kind, _clean(text, MAX_TEXT)) for rank, kind, mid, text in told if mid]


def _names(names: Iterable[str]) -> list[str]:
    return [_clean(name, 4096) for name in itertools.islice(names, MAX_NAMES)]


def _few(pairs: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return itertools.islice(pairs.items(), MAX_NAMES)


def _clean(text: str, limit: int) -> str:
    """Text that UTF-8 can carry, cut where it is too long."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit} more characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def revive(failure: Failure) -> Exception:
    """The error again, of its own class, for one process that was told of it by another."""
    if failure.kind in errors.__all__:
        error: Exception = getattr(errors, failure.kind)(failure.text, **failure.details)
    else:
        error = RuntimeError(f"{failure.kind}: {failure.text}")
    if failure.trace:
        error.add_note(f"in the other process:\n{failure.trace}")
    return error


def merge_failures(failures: Sequence[Failure]) -> CheckpointError:
    """One error for all ranks: its own class where all failed alike, else `RankError`."""
    failures = sorted(failures, key=lambda failure: failure.rank)
    by_rank = {f.rank: f"{f.kind}: {f.text}" for f in failures}
    kinds = {f.kind for f in failures}
    first = failures[0]
    if len(kinds) == 1 and first.kind in errors.__all__ and first.kind != "RankError":
        cls = getattr(errors, first.kind)
        ranks = ", ".join(map(str, sorted(by_rank)))
        text = (
            first.text
            if len({f.text for f in failures}) == 1
            else "\n".join(f"rank {f.rank}: {f.text}" for f in failures)
        )
        error: CheckpointError = cls(
            f"{text} [rank {ranks}]", failures=by_rank, **_merged_details(failures)
        )
    else:
        lines = [f"rank {rank}: {text}" for rank, text in sorted(by_rank.items())]
        error = RankError("ranks failed:\n  " + "\n  ".join(lines), failures=by_rank)
    if first.trace:
        error.add_note(f"on rank {first.rank}:\n{first.trace}")
    return error


def _merged_details(failures: Sequence[Failure]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for failure in failures:
        for key, value in failure.details.items():
            if isinstance(value, list):
                merged[key] = sorted(set(merged.get(key, [])) | set(value))
            elif isinstance(value, dict):
                merged[key] = {**merged.get(key, {}), **value}
            else:
                merged[key] = value
    return merged

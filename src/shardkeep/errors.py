# SPDX-License-Identifier: Apache-2.0
"""Every error Shardkeep raises, grouped by what a caller would do about it.

    CheckpointError
    ├── CheckpointNotFoundError   (FileNotFoundError)   choose another step
    ├── CheckpointExistsError     (FileExistsError)     other name, or overwrite=True
    ├── MismatchError             (ValueError)          .missing .unexpected .mismatched
    ├── UnsupportedValueError     (TypeError)           a value that cannot be stored
    ├── PlanError                                       overlap, gap, replicas that disagree
    ├── FormatError                                     not ours, or a newer version
    ├── CorruptionError                                 bytes differ from their digest
    ├── UnsafeCheckpointError                           needs pickle, or leaves the directory
    ├── StorageError              (OSError)             retry if .transient
    ├── RankError                                       ranks failed differently, or are gone
    └── MissingDependencyError    (ImportError)         install the named extra

A message says what, where, expected, found, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CorruptionError",
    "FormatError",
    "MismatchError",
    "MissingDependencyError",
    "PlanError",
    "RankError",
    "StorageError",
    "UnsafeCheckpointError",
    "UnsupportedValueError",
]


class CheckpointError(Exception):
    """Root of the tree: catching it catches everything Shardkeep raises on purpose."""

    failures: Mapping[int, str]
    """Rank to what went wrong there; empty when a single process failed."""

    def __init__(self, message: str = "", *, failures: Mapping[int, str] | None = None) -> None:
        """Keep the message and, after a collective failure, each rank's own text."""
        super().__init__(message)
        self.failures = dict(failures or {})


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No committed checkpoint lies at this place."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A checkpoint is already there, and replacing it was not asked for."""


class MismatchError(CheckpointError, ValueError):
    """The target does not fit the checkpoint; nothing was read or changed."""

    missing: tuple[str, ...]
    """Names the target wants and the checkpoint lacks."""
    unexpected: tuple[str, ...]
    """Names the checkpoint holds inside containers the target has, but the target lacks."""
    mismatched: Mapping[str, str]
    """Name to how shape, dtype or kind differ."""

    def __init__(
        self,
        message: str = "",
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
        failures: Mapping[int, str] | None = None,
    ) -> None:
        """Keep every name that does not fit, so that one run shows them all."""
        super().__init__(message, failures=failures)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})


class UnsupportedValueError(CheckpointError, TypeError):
    """The state holds a value that cannot be stored; the message names its path and type."""


class PlanError(CheckpointError):
    """What the ranks bring does not make one state: overlaps, gaps, differing replicas."""


class FormatError(CheckpointError):
    """The bytes are whole but are not a checkpoint this version reads."""


class CorruptionError(CheckpointError):
    """Stored bytes are damaged: they differ from their digest, or a file is cut or gone."""

    names: tuple[str, ...]
    """Tensors and values that lie in the damaged blocks, where known."""

    def __init__(
        self,
        message: str = "",
        *,
        names: Sequence[str] = (),
        failures: Mapping[int, str] | None = None,
    ) -> None:
        """Keep which names the damage touches."""
        super().__init__(message, failures=failures)
        self.names = tuple(names)


class UnsafeCheckpointError(CheckpointError):
    """Reading on would run code, leave the checkpoint's directory, or take without bound."""


class StorageError(CheckpointError, OSError):
    """The storage refused or lost an operation."""

    transient: bool
    """True when trying again may work."""

    def __init__(
        self,
        message: str = "",
        *,
        transient: bool = False,
        failures: Mapping[int, str] | None = None,
    ) -> None:
        """Keep whether a retry may help."""
        super().__init__(message, failures=failures)
        self.transient = transient


class RankError(CheckpointError):
    """Ranks failed for different reasons, or some are gone or stuck; never on one process."""


class MissingDependencyError(CheckpointError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""

# SPDX-License-Identifier: Apache-2.0
"""Which files a Hugging Face checkpoint consists of, and where they really are.

The hub's cache has links in place of files, which lead from a snapshot to its `blobs`. Those are
followed, and no others that lead out of the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from shardkeep.errors import CorruptionError, FormatError, UnsafeCheckpointError
from shardkeep.foreign.headers import MAX_HEADER, parse_json
from shardkeep.formats.huggingface.names import (
    INDEX_ENDING,
    MODEL,
    NUMBERED,
    TORCH_SHARD,
    WEIGHTS_ENDING,
    file_name,
    index_name,
    is_plain,
)
from shardkeep.stores.local import LocalStore, ReadFile, storage_errors
from shardkeep.wording import names_text

__all__ = ["Home", "Weights", "choose_weights", "looks_like_safetensors"]

MAX_INDEX = 64 << 20
"""Bytes of the index; that of a model with a million tensors is larger than any there is."""


class Home:
    """A directory with a checkpoint in it, or a file that is one."""

    def __init__(self, path: Path) -> None:
        """Nothing is opened yet."""
        self.given = Path(os.path.abspath(path))
        self.is_file = not self.given.is_dir()
        self.directory = self.given.parent if self.is_file else self.given
        self.root = Path(os.path.realpath(self.given)) if self.is_file else self._cache_root()
        """What names of files are relative to."""
        self._store = LocalStore(self.root)

    def _cache_root(self) -> Path:
        """The directory; or the repository's, where it is a snapshot in the hub's cache."""
        for parent in list(self.directory.parents)[:4]:
            if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
                return parent.parent
        return self.directory

    def names(self) -> list[str]:
        """What is in the directory, sorted."""
        with storage_errors(f"looking at {self.directory}"):
            return sorted(os.listdir(self.directory))

    def place(self, name: str) -> str:
        """Where a file of the directory is, relative to `root`."""
        if self.is_file:
            return ""
        if not is_plain(name):
            raise UnsafeCheckpointError(
                f"{self.directory} names the file {name!r}, which is not one of its own; no file "
                "outside of a checkpoint is read"
            )
        path = self.directory / name
        real = Path(os.path.realpath(path)) if path.is_symlink() else path
        # A directory above may be a link, which is the caller's choice.
        for root, own in (
            (self.root, self.directory),
            (Path(os.path.realpath(self.root)), Path(os.path.realpath(self.directory))),
        ):
            inside = real.is_relative_to(own)
            if inside or (root != own and real.is_relative_to(root / "blobs")):
                return real.relative_to(root).as_posix()
        raise UnsafeCheckpointError(
            f"{path} is a link to {real}, outside of the checkpoint; pass a path where the files "
            "themselves are"
        )

    def open(self, name: str) -> ReadFile:
        """Open a file of the directory."""
        place = self.place(name)
        shown = self.directory / name if name else self.given
        try:
            return self._store.open(place)
        except FileNotFoundError as error:
            raise CorruptionError(
                f"{shown} is missing; was everything copied or downloaded?"
            ) from error
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise FormatError(f"{shown} is not a regular file") from error
            with storage_errors(f"opening {shown}"):
                raise

    def read_json(self, name: str) -> dict[str, object]:
        """A file that is a JSON object."""
        file = self.open(name)
        try:
            if file.size > MAX_INDEX:
                raise FormatError(
                    f"{file.path} has {file.size} bytes; at most {MAX_INDEX} are read"
                )
            with storage_errors(f"reading {file.path}"):
                buffer = bytearray(file.size)
                file.read_into(memoryview(buffer), 0)
        finally:
            file.close()
        return parse_json(bytes(buffer), str(self.directory / name))


@dataclass(frozen=True)
class Weights:
    """The files that tensors are in."""

    files: tuple[str, ...]
    """Their names."""
    index: str = ""
    """The file that says which tensor lies where, if there is one."""
    sharded: bool = False
    """Whether each file has boxes of tensors, as ranks wrote them."""


def choose_weights(home: Home) -> Weights:
    """The files of the one checkpoint that is there; several, or none, are a `FormatError`.

    As transformers does, `model.safetensors` is preferred to an index, and both to other stems.
    """
    if home.is_file:
        return Weights(("",))
    names = home.names()
    if file_name(0, 1) in names:
        return Weights((file_name(0, 1),))
    if index_name() in names:
        return Weights((), index_name())
    indexes = [name for name in names if name.endswith(INDEX_ENDING)]
    if len(indexes) == 1:
        return Weights((), indexes[0])
    files = [name for name in names if name.endswith(WEIGHTS_ENDING)]
    shards = [name for name in files if TORCH_SHARD.match(name)]
    if not indexes and files:
        if shards == files:
            return Weights(tuple(files), sharded=True)
        if not shards and (_are_all(files, home) or len(files) == 1):
            return Weights(tuple(files))
    if not files and not indexes:
        raise FormatError(f"{home.directory} holds no {WEIGHTS_ENDING} file")
    raise FormatError(
        f"{home.directory} holds several checkpoints, and none that is called {MODEL}: "
        f"{names_text(indexes or files)}. Pass the path of a file, or of a directory that has one"
    )


def _are_all(files: list[str], home: Home) -> bool:
    """Whether these are the numbered files of one checkpoint; some missing is an error."""
    parts = [NUMBERED.match(name) for name in files]
    found = {(part["stem"], part["count"]) for part in parts if part is not None}
    if len(found) != 1 or None in parts:
        return False
    ((stem, count),) = found
    if int(count) != len(files):
        raise CorruptionError(
            f"{home.directory} holds {len(files)} of the {int(count)} files of {stem!r}, and no "
            "index; was everything copied or downloaded?"
        )
    return True


def looks_like_safetensors(path: Path) -> bool:
    """Whether a file begins as such a file does; never raises."""
    with contextlib.suppress(OSError):
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            front = file.read(9)
        length = int.from_bytes(front[:8], "little")
        return len(front) == 9 and 2 <= length <= min(MAX_HEADER, size - 8) and front[8:] == b"{"
    return False

# SPDX-License-Identifier: Apache-2.0
"""A directory built beside the place it is for, and put there in one move, whole.

Where there is nothing yet, it is renamed; where there is a directory, the two change places, and
what was there goes, once that is durable. Files of that directory that are no weights of this model
(`config.json`, the tokenizer) go along into the new one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from shardkeep.errors import CheckpointExistsError, StorageError
from shardkeep.formats.huggingface.names import NUMBERED, file_name, index_name
from shardkeep.storage import CheckpointId
from shardkeep.stores.local import LocalStore, WriteFile, storage_errors
from shardkeep.wording import names_text

__all__ = ["Building"]

log = logging.getLogger("shardkeep")

STALE_S = 3600.0
"""After so long without a change, what is being built belongs to nobody any more."""
SEEN_S = 10.0
"""How long another rank's directory may take to be seen."""
_OTHERS = (
    "checkpoint.json",
    ".metadata",
    "manifest.ocdbt",
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "common.pt",
    "param_name_map.json",
)
"""What marks a directory as another format's."""


class Building:
    """One directory on its way."""

    def __init__(
        self,
        target: CheckpointId,
        save_id: str,
        stem: str,
        open_store: Callable[[CheckpointId], LocalStore] = LocalStore,
    ) -> None:
        """Nothing is touched yet. A link to a directory stands for that directory."""
        self.target = Path(os.path.realpath(target))
        self.save_id = save_id
        self._stem = stem
        self._store = open_store(self.target.parent)
        self.name = f"{self._front()}{save_id}.partial"
        """Of the directory, until it is put in place."""
        self._identity: tuple[int, int] | None = None
        self.committed = False
        """Whether it is in place."""
        self._durable = False

    def _front(self) -> str:
        # File systems count bytes, and letters may have four.
        return f".{os.fsencode(self.target.name)[:150].decode(errors='ignore')}."

    @property
    def path(self) -> Path:
        """Where it is built."""
        return self._store.root / self.name

    # --- begin

    def refuse_occupied(self, overwrite: bool) -> None:
        """Raise unless the directory may be put there."""
        target = self.target
        if target.exists() and not target.is_dir():
            raise StorageError(f"{target} is a file; a checkpoint needs a directory of its own")
        if os.path.ismount(target):
            raise StorageError(
                f"{target} is where a file system is mounted, and nothing can be moved there; save "
                "to a directory in it"
            )
        if not self._is_filled():
            return
        names = sorted(os.listdir(target))
        other = [n for n in names if n in _OTHERS or n.endswith((".distcp", "_metadata"))]
        if other:
            raise CheckpointExistsError(
                f"{target} holds a checkpoint of another format ({names_text(other)}); two formats "
                "are never mixed in one directory, also with overwrite=True. Choose another "
                "checkpoint_id."
            )
        weights = [name for name in names if self._is_weights(name)]
        if weights and not overwrite:
            raise CheckpointExistsError(
                f"{target} already holds weights ({names_text(weights)}); choose another "
                "checkpoint_id or pass overwrite=True"
            )
        folders = [n for n in names if (target / n).is_dir() and not (target / n).is_symlink()]
        if folders:
            raise CheckpointExistsError(
                f"{target} holds directories ({names_text(folders)}), so it is not replaced as a "
                "whole; choose another checkpoint_id"
            )

    def _is_filled(self) -> bool:
        return self.target.is_dir() and bool(os.listdir(self.target))

    def _is_weights(self, name: str) -> bool:
        numbered = NUMBERED.match(name)
        return name in (file_name(0, 1, self._stem), index_name(self._stem)) or (
            numbered is not None and numbered["stem"] == self._stem
        )

    def begin(self) -> None:
        """Make the directory, and remove what killed saves left beside it long ago."""
        with storage_errors(f"making a directory beside {self.target}"):
            self._store.make_directory("")
            self._store.make_directory(self.name)
            found = os.stat(self.path)
            self._identity = (found.st_dev, found.st_ino)
            if self._is_filled():
                self._try_exchange()
                shutil.copymode(self.target, self.path)
        self._remove_stale(found.st_mtime)

    def _try_exchange(self) -> None:
        """Find out now, and not when all is written, whether directories can change places."""
        names = [f"{self.name}/try-{number}" for number in (1, 2)]
        try:
            for name in names:
                os.mkdir(self._store.root / name)
            self._store.exchange(*names)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
            self.discard()
            raise StorageError(
                f"{self.target} holds files, and this file system cannot replace a directory in "
                "one step; save to a checkpoint_id that does not exist"
            ) from error
        for name in names:
            os.rmdir(self._store.root / name)

    def _remove_stale(self, now: float) -> None:
        before, after = self._front(), ".partial"
        with contextlib.suppress(OSError):
            for name in self._store.list():
                if name.startswith(before) and name.endswith(after) and name != self.name:
                    path = self._store.root / name
                    newest = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
                    if now - newest > STALE_S:
                        log.info("removing %s, which a save left that was killed", path)
                        shutil.rmtree(path, ignore_errors=True)

    def see(self, host: str) -> None:
        """Raise unless this rank sees what the coordinator made."""
        deadline = time.monotonic() + SEEN_S
        while not self.path.is_dir():
            if time.monotonic() > deadline:
                raise StorageError(
                    f"host {socket.gethostname()} does not see the directory {self.path} that rank "
                    f"0 on host {host} made; checkpoint_id must be on storage that all ranks share"
                )
            time.sleep(0.05)

    # --- files

    def create(self, name: str, size: int) -> None:
        """Make a file of this size, of zeros, for all ranks to write into."""
        with storage_errors(f"making {self.path / name} of {size} bytes"):
            file = self._store.create(f"{self.name}/{name}")
            try:
                file.allocate(size)
                os.ftruncate(file.fd, size)
            finally:
                file.close()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, durably."""
        with storage_errors(f"writing {self.path / name}"):
            file = self._store.create(f"{self.name}/{name}")
            try:
                file.write_at(memoryview(data), 0)
                file.sync()
            finally:
                file.close()

    def open(self, name: str) -> WriteFile:
        """Open a file that the coordinator has made."""
        deadline = time.monotonic() + SEEN_S
        while True:
            try:
                return self._store.open_shared(f"{self.name}/{name}")
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def check(self, sizes: dict[str, int]) -> None:
        """Raise unless every file has its size."""
        for name, size in sizes.items():
            with storage_errors(f"looking at {self.path / name}"):
                found = self._store.stat(f"{self.name}/{name}").size
            if found != size:
                raise StorageError(f"{self.path / name} has {found} bytes, expected {size}")

    # --- end

    def commit(self, overwrite: bool, before: Callable[[], None]) -> None:
        """Put the directory in place, atomically; `before` is asked as the last thing."""
        target, name = self.target.name, self.name
        with storage_errors(f"putting {self.path} in the place of {self.target}"):
            self.refuse_occupied(overwrite)
            filled = self._is_filled()
            if filled:
                self._take_along()
            self._store.sync_directory(name)
            before()
            try:
                if filled:
                    self._store.exchange(name, target)
                else:
                    self._store.rename(name, target)
            except OSError as error:
                if not self.is_there():
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        raise CheckpointExistsError(
                            f"{self.target} was made by somebody else meanwhile"
                        ) from error
                    raise
            self.committed = True
            if filled:
                self._bring_over()
            self._store.sync_directory("")
            self._durable = True

    def is_there(self) -> bool:
        """Whether the directory that was built is the one in place."""
        with contextlib.suppress(OSError):
            found = os.stat(self.target)
            return (found.st_dev, found.st_ino) == self._identity
        return False

    def _take_along(self) -> None:
        """Everything of the directory there that is no weights of this model."""
        for entry in sorted(os.listdir(self.target)):
            if self._is_weights(entry):
                continue
            source, copy = self.target / entry, self.path / entry
            mode = os.lstat(source).st_mode
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(source), copy)
            elif stat.S_ISREG(mode):
                try:
                    os.link(source, copy)
                except OSError:
                    shutil.copy2(source, copy)
                    self._store.sync_file(f"{self.name}/{entry}")

    def _bring_over(self) -> None:
        """What others put into the directory after it was looked at for the last time."""
        moved = False
        for entry in sorted(os.listdir(self.path)):
            if self._is_weights(entry):
                continue
            old, new = self.path / entry, self.target / entry
            if not os.path.lexists(new) or os.lstat(old).st_mtime_ns > os.lstat(new).st_mtime_ns:
                os.rename(old, new)
                moved = True
        if moved:
            self._store.sync_directory(self.target.name)

    def discard(self) -> None:
        """Remove what is under the name of the directory that was built: that, or what it replaced.

        Not what it replaced, if a crash might still bring that back: without its files it would be
        neither. The next export removes it, once it is durable that it was replaced. Never raises.
        """
        if not self._durable and self._holds_replaced():
            log.warning(
                "%s holds what was in %s until now; it is not known whether what took its place "
                "would survive a crash",
                self.path,
                self.target,
            )
            return
        shutil.rmtree(self.path, ignore_errors=True)

    def _holds_replaced(self) -> bool:
        """Whether the directory under that name may be another than the one that was built."""
        if self._identity is None:
            return False  # there is none yet
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self._identity

# SPDX-License-Identifier: Apache-2.0
"""Where a result is built: a folder beside its destination, with a journal of what is done.

Nothing is at the destination before the result is whole and durable; then it is moved there in one
step. A convert that was killed leaves the folder, and the next one with the same arguments goes on
from its journal; one with others begins anew. Errors leave nothing, but for those that may pass,
and what was taken from the destination as long as a crash might bring that back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from shardkeep.errors import CheckpointExistsError, StorageError
from shardkeep.foreign.detecting import detect
from shardkeep.formats.native.names import new_save_id
from shardkeep.stores.direct import exchange_names
from shardkeep.stores.local import FileId, LocalStore, above_stdio, storage_errors, sync_fd
from shardkeep.wording import names_text

__all__ = [
    "Workplace",
    "check_free",
    "files_below",
    "fingerprint",
    "finished",
    "put_back",
    "sync_directories",
    "workplace_of",
]

log = logging.getLogger("shardkeep")

ENDING = ".converting"
_JOURNAL = "journal"
_MADE = "made"
_REPLACED = "replaced"
_PUBLISHING = "publishing"
"""In a note that the result is about to change places with what it replaces: what tells it."""

T = TypeVar("T")


def workplace_of(destination: Path) -> Path:
    """The folder in which what is for a destination is built."""
    return destination.with_name(destination.name + ENDING)


def check_free(destination: Path, *, overwrite: bool) -> None:
    """Refuse a destination that holds something, or something that is no checkpoint."""
    with storage_errors(f"looking at {destination}"):
        _check_free(destination, overwrite)


def _check_free(destination: Path, overwrite: bool) -> None:
    if not os.path.lexists(destination):
        return
    if destination.is_symlink():
        raise CheckpointExistsError(f"{destination} is a link; name what it leads to")
    if os.path.ismount(destination):
        raise StorageError(
            f"{destination} is where a file system is mounted, and nothing can be moved there; "
            "name a directory in it"
        )
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if not overwrite:
        raise CheckpointExistsError(
            f"{destination} already exists; choose another destination or pass overwrite=True"
        )
    if not destination.is_dir():
        if detect(destination) is None:
            raise CheckpointExistsError(
                f"{destination} is no checkpoint, and replacing it would remove it; move it, or "
                "choose another destination"
            )
        return
    # Knows every format, which takes a while to load; mostly nothing is replaced.
    from shardkeep.converting.own_files import not_of_checkpoint

    names = [entry.relative_to(destination).as_posix() for entry in files_below(destination)]
    strange = not_of_checkpoint(destination, names)
    if strange:
        raise CheckpointExistsError(
            f"{destination} holds files that are of no checkpoint, or of more than one, which "
            "replacing it would remove: "
            f"{', '.join(strange[:8])}. Move them, or choose another destination."
        )


class Workplace:
    """The folder. As a context: held by this process only; after an error it is gone."""

    def __init__(self, destination: Path, identity: str, *, overwrite: bool) -> None:
        """`identity` tells the same convert from another."""
        self.destination = destination
        self.overwrite = overwrite
        self.folder = workplace_of(destination)
        self.made = self.folder / _MADE
        """What is built: a directory, or a file."""
        self.entries: list[dict[str, Any]] = []
        """What an earlier attempt has noted."""
        self.save_id = new_save_id()
        self._identity = identity
        self._journal = -1
        self._built: FileId | None = None
        """What is being moved to the destination."""
        self._is_putting_back = False

    def __enter__(self) -> Self:
        with storage_errors(f"making {self.folder}"):
            try:
                LocalStore(self.folder).make_directory("")
                self._refuse_strange()
                self._journal = self._locked()
            except OSError:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()  # nobody else's, if it is empty
                raise
        try:
            with storage_errors(f"beginning in {self.folder}"):
                self.put_back()
                if not self._go_on():
                    self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # An interrupt, like a kill, may be followed by another attempt; so may what may pass.
        again = not isinstance(error, Exception) or getattr(error, "transient", False)
        if error is None or not (again or self._holds_replaced()):
            self._clean()
        with contextlib.suppress(OSError):  # what is noted there is durable, or does not count
            os.close(self._journal)

    def _clean(self) -> None:
        """All of the folder. The journal goes last: it tells what became of the result."""
        for path in (self.made, self.folder / _REPLACED):
            with contextlib.suppress(OSError):
                _remove(path)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier attempt has left something to go on from."""
        return bool(self.entries)

    def _refuse_strange(self) -> None:
        strange = set(os.listdir(self.folder)) - {_JOURNAL, _MADE, _REPLACED}
        if strange:
            raise CheckpointExistsError(
                f"{self.destination} is built in {self.folder}, which holds other things: "
                f"{names_text(sorted(strange))}. Move them, or choose another destination."
            )

    def _holds_replaced(self) -> bool:
        """Whether what was at the destination is here, and may have to be there again."""
        if self._is_putting_back:
            return True
        taken = self.folder / _REPLACED
        try:
            if _identity(taken) is None:
                taken = self.made
                if self._built is None or _identity(taken) in (None, self._built):
                    return False
        except OSError:
            pass  # who knows
        log.warning(
            "%s holds what was at %s until now; it is not known whether what took its place would "
            "survive a crash",
            taken,
            self.destination,
        )
        return True

    def _locked(self) -> int:
        path = self.folder / _JOURNAL
        while True:
            fd = above_stdio(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666))
            try:
                _lock(fd, self.folder)
                if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # removed by whoever held it until now
            LocalStore(self.folder).make_directory("")

    def put_back(self) -> None:
        """What an attempt took away that was killed before it brought something better."""
        old, destination = self.folder / _REPLACED, self.destination
        if _identity(old) is None:
            return
        if destination.is_dir() and not destination.is_symlink():
            with contextlib.suppress(OSError):
                destination.rmdir()  # if it is empty, somebody made it where there was nothing
        if _identity(destination) is None:
            self._restore()
        else:  # something better is there, and lasts
            _remove(old)

    def _restore(self) -> None:
        self._is_putting_back = True
        os.rename(self.folder / _REPLACED, self.destination)
        LocalStore(self.destination.parent).sync_directory()
        self._is_putting_back = False

    def _go_on(self) -> bool:
        """Take the notes of an earlier attempt at the same."""
        data = _content(self._journal)
        try:
            head, *entries = _entries(data)
            if head["convert"] != self._identity:
                return False
            save_id = head["save_id"]
        except (ValueError, KeyError):
            return False
        moved = _last_moved(entries)
        if moved is not None and moved[_PUBLISHING] != _mark(self.made):
            # Once it was on its way to its place, what is here may be what it has replaced.
            return False
        whole = data.rfind(b"\n") + 1
        if len(data) > whole:
            os.ftruncate(self._journal, whole)  # a line that was cut short
        self.save_id, self.entries = save_id, entries
        return True

    def _begin(self) -> None:
        """Forget what there was."""
        os.ftruncate(self._journal, 0)
        # Durable before anything is noted: old notes must not come back behind a new first line.
        sync_fd(self._journal)
        _remove(self.made)
        self.note({"convert": self._identity, "save_id": self.save_id})
        LocalStore(self.folder).sync_directory()

    def note(self, entry: dict[str, Any]) -> None:
        """Add to the journal; durable on return."""
        with storage_errors(f"writing {self.folder / _JOURNAL}"):
            line = memoryview(json.dumps(entry).encode() + b"\n")
            while line:
                line = line[os.write(self._journal, line) :]
            sync_fd(self._journal)

    def publish(self, told: Mapping[str, Any] | None = None) -> None:
        """Move the result, which is whole, to its destination, in one step.

        `told` is noted before: see `finished`.
        """
        destination = self.destination
        with storage_errors(f"moving the result to {destination}"):
            sync_directories(self.made)
            check_free(destination, overwrite=self.overwrite)
            self._built = _identity(self.made)
            self.note({_PUBLISHING: _mark(self.made), **(told or {})})
            if self.made.is_dir() or _is_filled(destination):
                self._take_place()
            else:
                self._move_file()
            LocalStore(destination.parent).sync_directory()

    def _is_there(self) -> bool:
        """Whether the result is in its place: a network file system may say that it did not move,
        when it was asked again."""
        return _identity(self.destination) == self._built

    def _move_file(self) -> None:
        destination = self.destination
        if destination.is_dir():
            destination.rmdir()  # empty
        try:
            if self.overwrite:
                os.replace(self.made, destination)
            else:
                os.link(self.made, destination)  # unlike a rename, replaces nothing
        except OSError as error:
            if self._is_there():
                return
            if self.overwrite:
                raise
            if error.errno == errno.EEXIST:
                raise _appeared(destination) from error
            os.rename(self.made, destination)

    def _take_place(self) -> None:
        destination = self.destination
        try:
            os.rename(self.made, destination)
            return
        except OSError as error:
            if self._is_there():
                return
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                raise
            if not self.overwrite:
                raise _appeared(destination) from error
        if not self._exchange():
            # Two steps, and for a moment there is neither; the old one is in our folder then.
            old = self.folder / _REPLACED
            try:
                os.rename(destination, old)
            except OSError:
                if _identity(destination) is not None or _identity(old) is None:
                    raise
            try:
                os.rename(self.made, destination)
            except OSError:
                if not self._is_there():
                    self._restore()
                    raise

    def _exchange(self) -> bool:
        """Change places with what is at the destination; False where that is not one step."""
        try:
            exchange_names(self.made, self.destination)
        except OSError as error:
            if self._is_there():
                return True
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
            return False
        return True


def put_back(destination: Path) -> None:
    """Put back what a convert that was killed took away, so that it is there to be looked at."""
    place = Workplace(destination, "", overwrite=False)
    with storage_errors(f"looking for {destination} in {place.folder}"):
        if _identity(destination) is not None or _identity(place.folder / _REPLACED) is None:
            return
        held = _held(place)
        if held is None:
            return
        try:
            place.put_back()
            # It was on its way already, so that nothing here can be gone on with.
            shutil.rmtree(place.folder, ignore_errors=True)
        finally:
            os.close(held)


def finished(destination: Path, request: str, kind: type[T]) -> T | None:
    """What `publish` was told as the `result` of the same `request`, if that is in its place.

    The attempt was killed before it had cleaned up, which is done now. Where another request was,
    or what is there is not what it made, that is an error: its source is the destination, and
    would be what another attempt has made of it.
    """
    place = Workplace(destination, "", overwrite=True)
    with storage_errors(f"looking for what is left in {place.folder}"):
        if _identity(place.folder / _JOURNAL) is None:
            return None
        held = _held(place)
        if held is None:
            return None
        try:
            moved = _last_told(held)
            if moved is None or moved[_PUBLISHING] == _mark(place.made):
                return None  # nothing was moved, and the source is what it was
            if moved["request"] != request or moved[_PUBLISHING] != _mark(destination):
                raise _not_cleaned(place)
            try:
                result = msgspec.convert(moved["result"], kind)
            except (ValueError, KeyError) as error:
                raise _not_cleaned(place) from error
            LocalStore(destination.parent).sync_directory()  # before what it replaced is gone
            place._clean()
            return result
        finally:
            os.close(held)


def _last_told(fd: int) -> dict[str, Any] | None:
    """The last note that a result is on its way, if that says what was requested."""
    try:
        moved = _last_moved(_entries(_content(fd)))
    except ValueError:
        return None
    return moved if moved is not None and "request" in moved else None


def _not_cleaned(place: Workplace) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"a convert of {place.destination} onto itself was finished, and killed before it had "
        f"cleaned up {place.folder}; this is not the same call, or something was changed since. "
        f"Look at {place.destination}, then remove that folder."
    )


def _held(place: Workplace) -> int | None:
    """The journal, held by this process; None if whoever had it is done meanwhile."""
    try:
        place._refuse_strange()
        return place._locked()
    except FileNotFoundError:
        return None


def _content(fd: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return file.read()


def _entries(data: bytes) -> list[dict[str, Any]]:
    """Every whole line of a journal; a `ValueError` where it is none."""
    try:
        entries = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if {type(entry) for entry in entries} - {dict}:
        raise ValueError("a line is no object")
    return entries


def _last_moved(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last note that the result is on its way."""
    return next((entry for entry in reversed(entries) if _PUBLISHING in entry), None)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _identity(path: Path) -> FileId | None:
    """What is there; None if there is nothing."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _is_filled(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def _appeared(destination: Path) -> CheckpointExistsError:
    return CheckpointExistsError(f"{destination} was made by somebody else meanwhile")


def _lock(fd: int, folder: Path) -> None:
    """Hold a file as long as this process lives."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise StorageError(
                f"another convert is at work in {folder}; wait for it, or choose another "
                "destination"
            ) from error
        # A file system without locks: who runs two converts to one place has been warned here.


def files_below(root: Path) -> list[Path]:
    """All that is below a directory and is none itself, links to some included.

    One that cannot be looked into is an `OSError`: `rglob` would take it for empty.
    """
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [Path(folder, name) for name in (*names, *links)]
    return found


def sync_directories(path: Path) -> None:
    """Make all names below a directory durable, if it is one."""
    if path.is_dir():
        for folder, _, _ in os.walk(path, onerror=_refuse):
            LocalStore(folder).sync_directory()


def _refuse(error: OSError) -> None:
    raise error


def fingerprint(path: Path) -> list[tuple[str, int, int, int, int]]:
    """What tells a source that was changed meanwhile: its files, their numbers, sizes and times.

    The last time is that of any change: others can be set at will. The number of the device is
    left out: it is another one after a file system was mounted again.
    """
    found = []
    entries = [path] if path.is_file() else sorted(path.rglob("*"))
    for entry in entries:
        with contextlib.suppress(OSError):
            stat = entry.stat()
            if entry.is_file():
                name = entry.relative_to(path).as_posix()
                times = stat.st_mtime_ns, stat.st_ctime_ns
                found.append((name, stat.st_ino, stat.st_size, *times))
    return found


def _mark(path: Path) -> str:
    """What tells a result from all others, wherever it is moved: that is a change of a file."""
    files = [entry[:-1] for entry in fingerprint(path)]
    found = _identity(path)
    return hashlib.sha256(repr((found and found[1], files)).encode()).hexdigest()

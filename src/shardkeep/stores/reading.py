# SPDX-License-Identifier: Apache-2.0
"""A file being read by position, through the page cache or around it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from pathlib import Path

from shardkeep.errors import StorageError
from shardkeep.stores.direct import O_DIRECT, direct_alignment
from shardkeep.stores.page_cache import is_cached

__all__ = ["ReadFile"]

_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTBLK}
"""What a file system answers to direct I/O that it cannot do."""

_NOT_THERE = {errno.EFAULT, getattr(errno, "EREMOTEIO", errno.EFAULT)}
"""What is answered where no device may write to the memory: that of other devices, or secret."""

_SEEKING = threading.Lock()
"""Where the system has no positioned reads, seeking and reading are one step."""


def _read_some(fd: int, out: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [out], offset)
    with _SEEKING:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(out))
    out[: len(data)] = data
    return len(data)


class ReadFile:
    """A file being read by position, from any thread."""

    def __init__(self, fd: int, path: Path) -> None:
        """Own the descriptor until `close`, or until nobody holds the file."""
        self.fd = fd
        self.path = path
        self._closer = weakref.finalize(self, os.close, fd)
        self._closer.atexit = False  # somebody may still be reading
        self.size = os.fstat(fd).st_size
        self._direct: int | None = None
        """A second descriptor, around the page cache: not asked for yet, or -1 for none."""
        self._alignment = 1
        self._direct_closer: weakref.finalize[[int], ReadFile] | None = None
        self._lock = threading.Lock()

    def read_into(self, out: memoryview, offset: int) -> int:
        """Fill `out` from a position; returns fewer bytes only at the end of the file."""
        done = 0
        while done < len(out):
            fd = self.fd
            if fd < 0:
                raise self._closed()
            try:
                got = _read_some(fd, out[done:] if done else out, offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if self.fd < 0:
                    raise self._closed() from error
                raise
            if got == 0:
                break
            done += got
        return done

    def _closed(self) -> StorageError:
        return StorageError(f"{self.path} was closed; open the checkpoint again")

    def is_cold(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes are better read around the page cache, and can be."""
        return self._direct_fd() >= 0 and not is_cached(self.fd, offset, nbytes)

    def read_direct(self, out: memoryview, offset: int, nbytes: int) -> tuple[int, int]:
        """Fill the first `nbytes` of `out` around the page cache, as far as that goes.

        `out` begins on a page; what follows the bytes may be overwritten too. Memory that no disk
        may write to is filled through the page cache, by the system: where nobody may, that is an
        error. Returns how many bytes there are, fewer only at the end of the file, and how many of
        them came directly.
        """
        done = 0
        while done < nbytes:
            fd, align = self._direct_fd(), self._alignment
            end = min(-(-nbytes // align) * align, len(out))
            if fd < 0 or (offset + done) % align or done % align or end % align:
                break  # refused, or cut short by something that does not count in blocks
            try:
                got = _read_some(fd, out[done:end], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno in _REFUSED:
                    self._end_direct()
                elif error.errno not in _NOT_THERE and self.fd >= 0:
                    raise
                break  # also where the file was closed meanwhile: what reads the rest says so
            if got == 0:
                return done, done
            done += got
        direct = min(done, nbytes)
        if done < nbytes:
            done += self.read_into(out[done:nbytes], offset + done)
        return min(done, nbytes), direct

    def _direct_fd(self) -> int:
        found = self._direct
        return self._open_direct() if found is None else found

    def _open_direct(self) -> int:
        with self._lock:
            if self._direct is None:
                # Known to others only once it is: they would take this for a refusal meanwhile.
                self._direct = self._try_direct()
            return self._direct

    def _try_direct(self) -> int:
        align = direct_alignment(self.fd) if self.fd >= 0 else 0
        if align:
            # The very file that is open, whatever has its name by now.
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | O_DIRECT | os.O_CLOEXEC
                fd = os.open(f"/proc/self/fd/{self.fd}", flags)
                self._alignment = align
                self._direct_closer = weakref.finalize(self, os.close, fd)
                self._direct_closer.atexit = False
                return fd
        return -1

    def _end_direct(self) -> None:
        """The descriptor stays until the file is closed: other threads may be reading from it."""
        self._direct = -1

    def close(self) -> None:
        """Let go of the file. Never raises: what was read was read."""
        self.fd = -1
        with self._lock:
            self._direct = -1
            if self._direct_closer is not None:
                with contextlib.suppress(OSError):
                    self._direct_closer()
        with contextlib.suppress(OSError):
            self._closer()

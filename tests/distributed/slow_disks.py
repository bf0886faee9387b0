"""A disk that waits or fails when it is told to, under data files."""

from __future__ import annotations

import contextlib
import threading

from shardkeep.stores.local import WriteFile

LONG_S = 30.0


class Disk:
    """Between a save and its data files."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.reached = threading.Event()
        self.error: OSError | None = None
        self._write, self._sync = WriteFile.write_at, WriteFile.sync

    def hold(self) -> None:
        """Writes wait from now on; `reached` says that one does."""
        self.reached.clear()
        self.go.clear()

    def release(self) -> None:
        self.go.set()

    def fail(self, number: int, text: str) -> None:
        """Writes fail from now on."""
        self.error = OSError(number, text)

    def heal(self) -> None:
        self.error = None

    def _pass(self, file: WriteFile) -> None:
        if file.path.parent.name == "data":
            self.reached.set()
            assert self.go.wait(LONG_S)
            if self.error is not None:
                raise self.error


@contextlib.contextmanager
def faulty_disk():
    disk = Disk()

    def write_at(self, data, offset):
        disk._pass(self)
        return disk._write(self, data, offset)

    def sync(self):
        disk._pass(self)
        return disk._sync(self)

    WriteFile.write_at, WriteFile.sync = write_at, sync
    try:
        yield disk
    finally:
        disk.heal()
        disk.release()
        WriteFile.write_at, WriteFile.sync = disk._write, disk._sync

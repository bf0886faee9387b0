# SPDX-License-Identifier: Apache-2.0
"""The writer process, from outside: started when it is needed, and again when it died.

A process that failed, or was interrupted, is ended and never asked again: whatever it was doing has
stopped for good when the caller goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator

from shardkeep.engine.arena import Arena
from shardkeep.engine.frames import (
    Channel,
    Done,
    Failed,
    Forget,
    Forgotten,
    Gone,
    Hello,
    Job,
    Memory,
    Moved,
    There,
)
from shardkeep.engine.snapshot import Snapshot
from shardkeep.errors import StorageError
from shardkeep.failures import revive
from shardkeep.stores.local import above_stdio

__all__ = ["WriterProcess", "can_start"]

log = logging.getLogger("shardkeep")

START_S = 300.0
"""A shared file system may take minutes to give a thousand ranks their modules."""
GONE_S = 60.0
"""A process that somebody stopped, and for so long did not have go on, is ended."""
END_S = 5.0
"""How long a process may take to end by itself."""
NEEDED = ("shardkeep", "numpy", "msgspec", "xxhash", "ml_dtypes", "blake3")
"""What the process imports, and is to find where this program did."""
_CODE = """\
import sys
sys.path[:] = {path!r}
from shardkeep.engine.serving import serve
serve({descriptor}, {program})
"""


def can_start() -> bool:
    """Whether there is what it takes: memory with a descriptor, and a Python to start."""
    shares = hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
    # Programs that embed Python may not know of one that can be started.
    return shares and bool(sys.executable) and not getattr(sys, "frozen", False)


class WriterProcess:
    """A process that works for this one on the memory of an arena; one job at a time."""

    def __init__(self) -> None:
        """Nothing is started yet."""
        self.gone_s = GONE_S
        """How long the process may be stopped, as by SIGSTOP."""
        self._running: _Running | None = None
        self._finalizer: weakref.finalize[..., WriterProcess] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._running is None else self._running.pid

    def share(self, arena: Arena, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Have the process see the memory of this arena, and no other; starts it if need be.

        `meanwhile` is called every second for as long as that takes, and what it raises ends it.
        """
        running = self._running
        if running is not None and not running.is_usable():
            self._end()
            running = None
        if running is None:
            running = self._running = _Running()
            self._finalizer = weakref.finalize(self, running.end)
            # At the end of the program, saves are completed first.
            self._finalizer.atexit = False
        running.gone_s = self.gone_s
        if running.sees != arena.version and arena.fd >= 0:
            # Before: whatever becomes of the message, its descriptor may be on its way.
            arena.borrowers.add(self)
            with self._ending_after_errors(running):
                running.channel.send(Memory(len(arena.memory)), arena.fd, meanwhile)
            running.sees = arena.version

    def let_go(self) -> None:
        """Have the process give back the memory it sees; one that does not is ended."""
        running = self._running
        if running is None or not running.sees:
            return
        done = False
        try:
            done = running.forget()
        finally:
            if not done:
                if running.is_usable():
                    log.warning("the writer process (pid %d) keeps memory: ended", running.pid)
                self._end(kill=True)

    def run(
        self, work: str, data: bytes, snapshot: Snapshot, progress: Callable[[int], None]
    ) -> bytes:
        """Have a function (`module:name`) called there, on memory that arrives; gives its answer.

        Its errors are raised here. If the process dies that is a `StorageError`, and the next job
        gets another process. What `progress` raises ends the job, and the process.
        """

        # No progress is told of as well: who wants to cancel need not wait for a disk.
        def meanwhile() -> None:
            progress(0)

        self.share(snapshot.arena, meanwhile)
        running = self._running
        assert running is not None
        with self._ending_after_errors(running):
            running.greet(meanwhile)
            running.channel.send(Job(work, data, snapshot.unit), meanwhile=meanwhile)
            answer: bytes | None = None
            for high in snapshot.arrivals():
                running.channel.send(There(high, snapshot.is_settled()), meanwhile=meanwhile)
                while answer is None and running.channel.has_message():
                    answer = running.hear(progress, meanwhile)
            while answer is None:
                answer = running.hear(progress, meanwhile)
            return answer

    @contextlib.contextmanager
    def _ending_after_errors(self, running: _Running) -> Iterator[None]:
        """A process whose job was not done to its end is not asked again, and touches nothing."""
        try:
            yield
        except Gone as gone:
            how = running.how_it_ended()
            self._end(kill=True)
            raise StorageError(
                f"the writer process (pid {running.pid}) {how}; nothing of this save is visible, "
                "and the next one starts another process",
                transient=True,
            ) from gone
        except BaseException:
            self._end(kill=True)
            raise

    def interrupt(self) -> None:
        """End the process at once, from any thread; a job that is running fails."""
        running = self._running
        if running is not None:
            running.kill()

    def close(self) -> None:
        """End the process, once no job is running."""
        self._end()

    def _end(self, *, kill: bool = False) -> None:
        running, self._running = self._running, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if running is not None:
            running.end(kill=kill)


class _Running:
    """A process that was started."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._deadline = time.monotonic() + START_S
        self._greeted = False
        self._looked = time.monotonic()
        self._stopped = 0.0
        self.gone_s = GONE_S
        """How long it may be stopped."""
        self.sees = 0
        """The version of the arena whose memory it sees."""
        ours, theirs = map(_above_stdio, socket.socketpair())
        with theirs:
            code = _CODE.format(
                path=_search_path(), descriptor=theirs.fileno(), program=self._owner
            )
            try:
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    cwd="/",
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                ours.close()
                raise StorageError(
                    f"a writer process with {sys.executable} could not be started: {error}",
                    transient=True,
                ) from error
        self.pid = self._popen.pid
        self.channel = Channel(ours, self._is_alive)

    def is_usable(self) -> bool:
        """Whether it lives, and is ours: not that of a process which forked this one."""
        if self._owner != os.getpid():
            return False
        # One that has died cannot be waited for before its last thread has.
        if self._popen.poll() is None and _state(self.pid) != "Z":
            return True
        log.warning("the writer process (pid %d) %s", self.pid, self.how_it_ended())
        return False

    def _is_alive(self) -> bool:
        return self._popen.poll() is None and not self._is_late() and not self._is_stopped()

    def _is_stopped(self) -> bool:
        """Whether it has been, for too long. Asked every second while there is nothing to hear."""
        # Counted in looks: a program that was itself stopped has not waited.
        now = time.monotonic()
        passed = min(now - self._looked, 2.0)
        self._looked = now
        self._stopped = self._stopped + passed if _state(self.pid) == "T" else 0.0
        return self._stopped >= self.gone_s

    def _is_late(self) -> bool:
        return not self._greeted and time.monotonic() > self._deadline

    def greet(self, meanwhile: Callable[[], None]) -> None:
        """Wait until it runs."""
        if not self._greeted:
            message, _ = self.channel.receive(meanwhile)
            assert isinstance(message, Hello)
            self._greeted = True

    def forget(self) -> bool:
        """Have it let go of memory; whether it soon did. Not while there is a job."""
        if self._owner != os.getpid():
            return True  # that is for the program which forked this one
        self.sees = 0
        deadline = time.monotonic() + END_S

        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError

        try:
            self.greet(check)
            self.channel.send(Forget(), meanwhile=check)
            return isinstance(self.channel.receive(check)[0], Forgotten)
        except (Gone, TimeoutError):
            return False

    def hear(self, progress: Callable[[int], None], meanwhile: Callable[[], None]) -> bytes | None:
        """Wait for what it says; gives the answer, when that has come."""
        message, _ = self.channel.receive(meanwhile)
        self._stopped = 0.0
        if isinstance(message, Failed):
            error = revive(message.failure)
            if isinstance(error, StorageError):
                error.errno = message.errno
            raise error
        if isinstance(message, Moved):
            progress(message.nbytes)
        return message.data if isinstance(message, Done) else None

    def how_it_ended(self) -> str:
        """In words."""
        if self._popen.poll() is None and self._is_late():
            return f"did not start within {START_S:.0f} s"
        if self._popen.poll() is None and self._stopped >= self.gone_s:
            return f"was stopped for {self.gone_s:.0f} s, as by SIGSTOP, and is ended"
        try:
            status = self._popen.wait(END_S)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if status >= 0:
            return f"ended with exit code {status}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"

    def kill(self) -> None:
        """End it at once."""
        if self._owner == os.getpid():
            self._popen.kill()
            self._wait()

    def end(self, *, kill: bool = False) -> None:
        """Have it end by itself, or kill it."""
        self.channel.close()
        if self._owner != os.getpid():
            self._popen.returncode = 0  # it is not for this process to wait for it
        elif kill or not self._wait():
            self.kill()

    def _wait(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_S)
        return self._popen.returncode is not None


def _state(pid: int) -> str:
    """One letter, as the system has it for a process; empty where that cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1].decode()
    except OSError:
        return ""


def _above_stdio(end: socket.socket) -> socket.socket:
    return socket.socket(fileno=above_stdio(end.detach()))


def _search_path() -> list[str]:
    """Where this program finds modules, but for the directory it happens to be in."""
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:
        here = ""
    path = [
        entry
        for entry in sys.path
        if isinstance(entry, str) and os.path.isabs(entry) and os.path.realpath(entry) != here
    ]
    for name in NEEDED:
        # Last, where such a directory was left out: what it holds besides is found by nobody.
        file = getattr(sys.modules.get(name), "__file__", None)
        home = os.path.dirname(os.path.dirname(os.path.abspath(file))) if file else ""
        if home and home not in path:
            path.append(home)
    return path

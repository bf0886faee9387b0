"""One process per side: nothing that one side allocates, imports or caches disturbs another.

The parent holds a `Worker` for each side; `python -m benchmarks.worker FD` is the other end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.states import Leaf, Memory

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800
"""For one save or load; then the side has failed."""


@dataclass
class Measure:
    """What one save or load took, as its own process sees it."""

    seconds: float = 0.0
    cpu: float = 0.0
    """Seconds of all threads, and of children that ended."""
    peak: int = 0
    """Bytes of resident memory at its highest, above what was resident before."""
    read: int = 0
    """Bytes that came from the disk."""
    written: int = 0
    """Bytes that went to the disk."""
    stats: dict[str, float] = field(default_factory=dict)
    """What the library tells of itself."""


@contextlib.contextmanager
def measured() -> Iterator[Measure]:
    """Measure what happens within."""
    out = Measure()
    gc.collect()
    give_memory_back()
    reset_peak()
    resident, moved, cpu = status("VmRSS"), counters(), _cpu()
    begun = time.perf_counter()
    yield out
    out.seconds = time.perf_counter() - begun
    out.cpu = _cpu() - cpu
    out.peak = max(0, status("VmHWM") - resident)
    after = counters()
    out.read = after["read_bytes"] - moved["read_bytes"]
    out.written = after["write_bytes"] - moved["write_bytes"]


def give_memory_back() -> None:
    """Let go of what the allocator keeps, or the next peak would seem lower than it is."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Let `VmHWM` begin anew, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def counters() -> dict[str, int]:
    """/proc/self/io: of all threads."""
    out = {"rchar": 0, "read_bytes": 0, "write_bytes": 0}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            key, value = line.split(": ")
            out[key] = int(value)
    return out


def _cpu() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


class SideFailed(Exception):
    """A side raised, or its process ended; the text is its traceback."""


class Worker:
    """A side in a process of its own."""

    def __init__(self, side: str, source: Memory, target: Memory) -> None:
        self.side = side
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), source.fd, target.fd)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths())}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", *map(str, fds)],
            pass_fds=fds,
            env=environment,
        )
        theirs.close()
        self.line = Connection(ours.detach())
        try:
            self._ask(side, source.leaves)
        except BaseException:
            self.close()
            raise

    def run(self, what: Literal["save", "load"], path: Path, **options: Any) -> Measure:
        measure: Measure = self._ask(what, path, options)
        return measure

    def settle(self) -> None:
        """What was loaded is in the target once this returns."""
        self._ask("settle", None, {})

    def _ask(self, *request: Any) -> Any:
        try:
            self.line.send_bytes(pickle.dumps(request))
            if not self.line.poll(TIMEOUT_S):
                raise SideFailed(f"{self.side}: no answer within {TIMEOUT_S} s")
            answer = pickle.loads(self.line.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise SideFailed(f"{self.side}: its process ended: {self.process.wait(10)}") from error
        if isinstance(answer, str):
            raise SideFailed(f"{self.side}: {answer}")
        return answer

    def close(self) -> None:
        self.line.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _paths() -> list[str]:
    return [str(ROOT), str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]


def main(line: Connection, source_fd: int, target_fd: int) -> None:
    """Be a worker until the parent closes its end."""
    from benchmarks.sides import SIDES

    side: Any = None
    with contextlib.suppress(EOFError):
        while True:
            request = pickle.loads(line.recv_bytes())
            answer: Any = None
            try:
                if side is None:
                    name, leaves = request
                    side = SIDES[name](_mapped(leaves, source_fd), _mapped(leaves, target_fd))
                elif request[0] == "settle":
                    side.settle()
                else:
                    what, path, options = request
                    with measured() as answer:
                        stats = getattr(side, what)(path, **options)
                    answer.stats = stats
            except BaseException:  # torch's CheckpointException is one
                answer = traceback.format_exc()
            line.send_bytes(pickle.dumps(answer))


def _mapped(leaves: list[Leaf], fd: int) -> Memory:
    return Memory(leaves, fd)


if __name__ == "__main__":
    # Found by its name, so that what is pickled has the class that the parent knows.
    from benchmarks import worker

    worker.main(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))

"""One execution, watched: what escapes, what takes too long, what takes too much memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType

from shardkeep.errors import CheckpointError

__all__ = ["MOST_MEMORY", "MOST_SECONDS", "Finding", "Watch"]

MOST_MEMORY = 256 << 20
"""Bytes that one input may take."""
MOST_SECONDS = 1.0
"""Seconds that it may take."""
_HANGS = 20
"""Seconds after which it is not waited for, those in which the process was stopped left out."""
_AGAIN = 4
"""How often an input that was slow is tried again: it may be the process that was stopped."""
_PAUSE = 0.5
"""Seconds between two of these."""
_HANGING = "hangs"
_SPACE = (1 << 30) + (os.cpu_count() or 1) * (256 << 20)
"""Bytes of address space that all inputs together may take: enough for threads and their stacks, of
which libraries start some for every core."""


class _Hangs(BaseException):
    """Raised in the middle of an execution that does not end."""


@dataclass(frozen=True)
class Finding:
    """Something that must not be."""

    parser: str
    """Which one."""
    kind: str
    """What is wrong, and where: the same fault has the same text."""
    text: str
    """More of it."""
    data: bytes
    """The input."""


class Watch:
    """Runs inputs in this process."""

    def __init__(self, *, limits: bool = True) -> None:
        """With `limits`, this process can no longer take much more memory than it has."""
        self.refusal: CheckpointError | None = None
        """What the last input was refused with."""
        self._ticks = -1
        self._peak = _peak()
        if limits:
            space = _status("VmSize") + _SPACE
            resource.setrlimit(resource.RLIMIT_AS, (space, resource.RLIM_INFINITY))
            signal.signal(signal.SIGALRM, self._look)
            signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)

    def _look(self, _signal: int, _frame: FrameType | None) -> None:
        # Ticks, as a process that is stopped for a minute gets one of them when it goes on.
        if self._ticks >= 0:
            self._ticks += 1
            if self._ticks > _HANGS:
                self._ticks = -1
                raise _Hangs

    def run(self, parser: str, parse: Callable[[bytes], None], data: bytes) -> Finding | None:
        """What is wrong with how an input is treated, if anything is."""
        kind, text, took = self._once(parse, data)
        peak = _peak()
        if not kind and peak > self._peak + MOST_MEMORY:
            self._peak = peak  # or all that follow would be suspected
            grown = _grown(parse, data)
            if grown > MOST_MEMORY:
                kind, text = "memory", f"{grown >> 20} MiB"
        if took > MOST_SECONDS and (not kind or kind == _HANGING):
            kind, text = self._again(parse, data, took)
        return Finding(parser, kind, text, data) if kind else None

    def _once(self, parse: Callable[[bytes], None], data: bytes) -> tuple[str, str, float]:
        """What is wrong, more of it, and how long it took."""
        kind = text = ""
        self.refusal = None
        self._ticks = 0
        begun = perf_counter()
        try:
            parse(data)
        except CheckpointError as error:
            self.refusal = error
            if _out_of_memory(error):
                kind, text = "memory: an allocation that fails", traceback.format_exc()
        except _Hangs:
            kind, text = _HANGING, traceback.format_exc()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            kind, text = f"{type(error).__name__} {_place(error)}", traceback.format_exc()
        self._ticks = -1
        return kind, text, perf_counter() - begun

    def _again(self, parse: Callable[[bytes], None], data: bytes, took: float) -> tuple[str, str]:
        """Whether it is slow every time, also when nobody stops the process meanwhile."""
        text = ""
        for _ in range(_AGAIN):
            kept = _kept_waiting()
            kind, text, again = self._once(parse, data)
            if kind and kind != _HANGING:
                return kind, text
            took = min(took, again - (_kept_waiting() - kept))
            if took <= MOST_SECONDS:
                return "", ""
            sleep(_PAUSE)
        return "slow", f"{took:.2f} s\n{text}"


def _out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _place(error: BaseException) -> str:
    """Where in the library it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "shardkeep" in frame.filename] or list(frames)
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""


def _kept_waiting() -> float:
    """Seconds in which this thread would have worked, had other processes left it a core."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _grown(parse: Callable[[bytes], None], data: bytes) -> int:
    """How far the memory of a process grows that does nothing else."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        before = _peak()
        with contextlib.suppress(BaseException):
            parse(data)
        os.write(writing, (_peak() - before).to_bytes(8, "little"))
        os._exit(0)
    os.close(writing)
    told = os.read(reading, 8)
    os.close(reading)
    os.waitpid(child, 0)
    return int.from_bytes(told, "little") if told else MOST_MEMORY + 1


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return 1 << 34

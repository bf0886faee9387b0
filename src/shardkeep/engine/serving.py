# SPDX-License-Identifier: Apache-2.0
"""The writer process, from inside: one job after the other, for as long as the program lives.

It is a Python of its own, started from nothing, with no framework and no device in it. All that it
has of the program is a socket and the memory of an arena. It never outlives the program, and ends
at once when that does, whatever it is doing: what it wrote is visible to nobody without a commit.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import platform
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from shardkeep.arrays import Bytes
from shardkeep.engine.arriving import Incoming
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
    Message,
    Moved,
    There,
)
from shardkeep.failures import describe

__all__ = ["Work", "serve"]

Work = Callable[[bytes, Incoming, Callable[[int], None]], bytes]
"""Does a job: what it is told, the memory, and whom to tell of progress; gives an answer."""

NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30}
_BEST_EFFORT_LAST = 2 << 13 | 7
"""The lowest of the usual priorities at the disk; the idle class might never get its turn."""


def serve(descriptor: int, program: int) -> NoReturn:
    """Work for the program with this process id, at the other end of this socket."""
    # Signals to a whole group or job are meant for the program. It decides what becomes of a save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _have_stdio()
    _be_modest()
    channel = Channel(socket.socket(fileno=descriptor), lambda: os.getppid() == program)
    server = _Server(channel)
    try:
        channel.send(Hello())
        threading.Thread(target=server.listen, name="shardkeep-listen", daemon=True).start()
        server.work()
    except Gone:
        pass  # the program has ended, or wants no process any more
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _have_stdio() -> None:
    """Where the program has no standard error: else a file gets its number, and its messages."""
    opened = os.open(os.devnull, os.O_RDWR)
    while opened < 3:
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)


def _be_modest() -> None:
    """The program goes first, at the cores and at the disk."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT_LAST)


class _Server:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._memory: Bytes = np.empty(0, np.uint8)
        self._incoming = Incoming(self._memory, 1)
        self._jobs: queue.SimpleQueue[tuple[Job, Incoming]] = queue.SimpleQueue()

    def listen(self) -> NoReturn:
        """Hear what the program says; when it is gone, or says what nobody understands, end."""
        status = 1
        try:
            while True:
                self._hear()
        except Gone:
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _hear(self) -> None:
        message, descriptors = self._channel.receive()
        if isinstance(message, There):
            self._incoming.reach(message.below, message.settled)
        elif isinstance(message, Job):
            self._incoming = Incoming(self._memory, message.unit)
            self._jobs.put((message, self._incoming))
        elif isinstance(message, Forget):
            self._forget()
            self._channel.send(Forgotten())
        elif isinstance(message, Memory):
            # The memory from before must go first: the two may not have room beside each other.
            self._forget()
            (descriptor,) = descriptors
            mapped = mmap.mmap(descriptor, message.nbytes, prot=mmap.PROT_READ)
            os.close(descriptor)
            self._memory = np.frombuffer(mapped, np.uint8)

    def _forget(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._incoming = Incoming(self._memory, 1)
        gc.collect()

    def work(self) -> NoReturn:
        """Do the jobs."""
        while True:
            # Nothing of a job is held here once the program hears of its end.
            self._channel.send(self._do(*self._jobs.get()))

    def _do(self, job: Job, incoming: Incoming) -> Message:
        try:
            module, name = job.work.split(":")
            work: Work = getattr(importlib.import_module(module), name)
            return Done(work(job.data, incoming, lambda nbytes: self._channel.send(Moved(nbytes))))
        except Exception as error:
            return Failed(describe(error, 0), getattr(error, "errno", None))

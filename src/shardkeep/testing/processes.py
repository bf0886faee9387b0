# SPDX-License-Identifier: Apache-2.0
"""Ranks as real processes, for tests: torch is imported once, then every rank is a fork.

    with RankServer() as server:
        server.run(4, work)         # what work(rank) returned on each rank

Four ranks with a gloo group cost a tenth of a second instead of fifteen. Nothing is left behind: a
rank that hangs is killed at the timeout, and the error shows the stack of each of its threads.
Needs torch, and an operating system that forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Literal, Self

__all__ = ["Outcome", "RankServer", "RanksFailed", "RemoteError", "run_ranks"]

PRELOAD = (
    "numpy",
    "shardkeep.functions",
    "shardkeep.adapters.numpy_arrays",
    "shardkeep.adapters.sharded_arrays",
    "shardkeep.adapters.torch_groups",
    "shardkeep.adapters.torch_tensors",
    "torch.distributed.tensor",
)
"""What the server imports before it forks; no import may start a thread."""

_LOOK_S = 0.2
_DUMP = signal.SIGUSR2
_LOG = 20_000

StoreHost = Literal["harness", "rank 0"]


class _Clock:
    """Counts time in looks: who was stopped itself, and all ranks with it, blames nobody."""

    def __init__(self, timeout_s: float) -> None:
        self._left = timeout_s
        self._looked = time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        self._left -= min(now - self._looked, 2 * _LOOK_S)
        self._looked = now
        return self._left < 0


class RemoteError(Exception):
    """An exception of a rank that cannot be pickled; its class and text."""


class RanksFailed(AssertionError):
    """Ranks raised, died or hung; the message has all of their output."""


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    """Which one."""
    value: Any = None
    """What `work` returned."""
    error: BaseException | None = None
    """What it raised."""
    died: int = 0
    """The signal that ended the process."""
    hung: bool = False
    """Killed at the timeout."""
    log: str = ""
    """What it wrote to stdout and stderr; with the stacks of its threads if it hung."""
    seconds: float = 0.0
    """From the fork to its end."""

    @property
    def ok(self) -> bool:
        """Whether `work` returned."""
        return self.error is None and not self.died and not self.hung


@dataclass
class _Request:
    world_size: int
    work: bytes
    timeout_s: float
    init: bool
    store: StoreHost
    path: list[str] = field(default_factory=lambda: list(sys.path))
    directory: str = field(default_factory=os.getcwd)


class RankServer:
    """A process with torch imported, that forks ranks; started by the first run."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        """`preload` names the modules to import before anything is forked."""
        self._preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def outcomes(
        self,
        world_size: int,
        work: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        init: bool = True,
        store: StoreHost = "harness",
    ) -> list[Outcome]:
        """Run `work(rank, *args)` on every rank; how each ended.

        `work` is a function that can be pickled, such as one of a test module. With `init` the
        ranks are a gloo group of torch.distributed, whose store lives in a process of its own, or
        in that of rank 0. Once only ranks stopped by SIGSTOP are left, they are killed.
        """
        line = self._start()
        request = _Request(world_size, pickle.dumps((work, args)), timeout_s, init, store)
        line.send_bytes(pickle.dumps(request))
        clock = _Clock(timeout_s + 120)
        while not line.poll(_LOOK_S):
            if clock.is_over():
                self.close()
                raise RanksFailed("the server of ranks does not answer")
        answer = pickle.loads(line.recv_bytes())
        if isinstance(answer, str):
            raise RanksFailed(answer)
        return [_received(part) for part in answer]

    def run(self, world_size: int, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Like `outcomes`, but returns what the ranks returned, and raises if any did not."""
        outcomes = self.outcomes(world_size, work, *args, **options)
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed("\n\n".join(map(_told, outcomes)))
        return [outcome.value for outcome in outcomes]

    def _start(self) -> Connection:
        if self._line is not None:
            return self._line
        ours, theirs = socket.socketpair()
        code = f"from shardkeep.testing.processes import _serve; _serve({theirs.fileno()})"
        # torch looks up the name of each address it connects to; without one, that takes 5 s.
        resolver = "timeout:1 attempts:1"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": resolver}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        self._line = Connection(ours.detach())
        self._line.send_bytes(pickle.dumps(self._preload))
        return self._line

    def close(self) -> None:
        """End the server, and with it every rank."""
        line, self._line = self._line, None
        process, self._process = self._process, None
        if line is not None:
            line.close()
        if process is not None:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Self:
        """Usable in `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`RankServer().run(...)` with a server of its own."""
    with RankServer() as server:
        return server.run(world_size, work, *args, **options)


def _received(part: bytes) -> Outcome:
    outcome: Outcome = pickle.loads(part)
    return outcome


def _told(outcome: Outcome) -> str:
    how = "ok"
    if outcome.hung:
        how = f"hung, killed after {outcome.seconds:.1f} s"
    elif outcome.died:
        how = f"died of {signal.Signals(outcome.died).name}"
    elif outcome.error is not None:
        how = "".join(traceback.format_exception(outcome.error))
    return f"rank {outcome.rank}: {how}\n{outcome.log}".rstrip()


# --- the server: one thread, so that forks are safe


def _serve(fd: int) -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    line = Connection(fd)
    for name in pickle.loads(line.recv_bytes()):
        importlib.import_module(name)
    with contextlib.suppress(EOFError):
        while True:
            request: _Request = pickle.loads(line.recv_bytes())
            answer: list[bytes] | str
            try:
                answer = _run(request)
            except Exception:
                answer = traceback.format_exc()
            line.send_bytes(pickle.dumps(answer))


class _Rank:
    """A forked rank, as the server sees it."""

    def __init__(self, rank: int, request: _Request, work: Any, listener: socket.socket) -> None:
        self.outcome = Outcome(rank)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.begun = time.monotonic()
        self.stopped = False
        reading, writing = os.pipe()
        self.pipe = Connection(reading, writable=False)
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank(rank, request, work, listener, Connection(writing, readable=False), self.log)
        os.close(writing)
        self.data: bytes | None = None
        self.running = True

    def listen(self) -> None:
        """Take what the rank sent, before or after its end."""
        with contextlib.suppress(EOFError, OSError):
            if self.data is None and self.pipe.poll():
                self.data = self.pipe.recv_bytes()

    def check(self) -> None:
        """See whether it has ended, or was stopped."""
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            self.stopped = True
        elif os.WIFCONTINUED(status):
            self.stopped = False
        else:
            self._ended(status)

    def _ended(self, status: int) -> None:
        self.running = False
        self.outcome.seconds = time.monotonic() - self.begun
        if os.WIFSIGNALED(status):
            self.outcome.died = os.WTERMSIG(status)

    def kill(self) -> None:
        """End it now."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
            self._ended(os.waitpid(self.pid, 0)[1])

    def answer(self) -> bytes:
        """The outcome, with what it wrote."""
        self.pipe.close()
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - _LOG))
        self.outcome.log = self.log.read().decode(errors="replace")
        self.log.close()
        if self.data is not None:
            told: Outcome = pickle.loads(self.data)
            self.outcome.value, self.outcome.error = told.value, told.error
        elif not self.outcome.died:
            self.outcome.error = RemoteError("the process ended without a result")
        return pickle.dumps(self.outcome)


def _run(request: _Request) -> list[bytes]:
    sys.path[:] = request.path
    os.chdir(request.directory)
    work = pickle.loads(request.work)
    listener = socket.socket()
    ranks: list[_Rank] = []
    host: int | None = None
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        if request.init and request.store == "harness":
            host = os.fork()
            if host == 0:
                _be_store(listener)
        for rank in range(request.world_size):
            ranks.append(_Rank(rank, request, work, listener))
        _await(ranks, _Clock(request.timeout_s))
    finally:
        listener.close()
        for process in ranks:
            process.kill()
        if host is not None:
            os.kill(host, signal.SIGKILL)
            os.waitpid(host, 0)
    return [process.answer() for process in ranks]


def _await(ranks: list[_Rank], clock: _Clock) -> None:
    while True:
        wait([rank.pipe for rank in ranks if rank.running and rank.data is None], 0.005)
        for rank in ranks:
            rank.listen()
            if rank.running:
                rank.check()
        left = [rank for rank in ranks if rank.running]
        if all(rank.stopped for rank in left):
            for rank in left:
                rank.kill()
            return
        if clock.is_over():
            for rank in left:
                rank.outcome.hung = True
                os.kill(rank.pid, _DUMP)
                os.kill(rank.pid, signal.SIGCONT)
            time.sleep(0.3)
            return


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, where there is one


def _be_store(listener: socket.socket) -> None:
    """Hold the store until killed."""
    try:
        _die_with_parent()
        kept = _store(listener, is_master=True)
        while kept is not None:
            time.sleep(3600)
    finally:
        os._exit(1)


def _store(listener: socket.socket, *, is_master: bool) -> Any:
    import torch.distributed

    tcp_store: Any = vars(torch.distributed)["TCPStore"]  # exported, but not to type checkers

    port = listener.getsockname()[1]
    if is_master:
        return tcp_store(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
    return tcp_store("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _be_rank(
    rank: int, request: _Request, work: Any, listener: socket.socket, pipe: Connection, log: Any
) -> None:
    """Never returns."""
    code = 1
    try:
        _die_with_parent()
        for fd in (1, 2):
            os.dup2(log.fileno(), fd)
        faulthandler.enable(file=log)
        faulthandler.register(_DUMP, file=log, all_threads=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        outcome = Outcome(rank)
        try:
            if request.init:
                _init(rank, request, listener)
            outcome.value = work[0](rank, *work[1])
            data = pickle.dumps(outcome)
        except BaseException as error:
            traceback.print_exc()
            data = _pickled(Outcome(rank, error=error))
        pipe.send_bytes(data)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _init(rank: int, request: _Request, listener: socket.socket) -> None:
    import torch.distributed as dist

    store = _store(listener, is_master=request.store == "rank 0" and rank == 0)
    listener.close()
    port = str(store.port)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request.world_size)}
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=request.world_size)


def _pickled(outcome: Outcome) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
        return data
    except Exception:
        error = outcome.error
        try:
            text = f"{type(error).__qualname__}: {error}"
        except Exception:
            text = type(error).__qualname__
        return pickle.dumps(Outcome(outcome.rank, error=RemoteError(text)))

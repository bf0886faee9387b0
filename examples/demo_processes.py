# SPDX-License-Identifier: Apache-2.0
"""Starts, watches and kills the processes of `demo_training.py`; needs no torch itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from demo import NotAsPromised, expect

__all__ = ["PATIENCE_S", "Launcher", "Losses", "Report", "Training"]

PATIENCE_S = 120
GOODBYE_S = 10

Losses = dict[int, float]
Report = dict[str, Any]


class Launcher:
    """Starts trainings, one after the other; at the end of `with` no process is left.

    Ranks are forked from a process that has imported torch. Started one by one, as torchrun does
    it, those of the whole demo would be importing torch for most of a minute.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("demo_rank.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a line that is there must not hide from select
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(self._folder),  # torch makes a directory there when it is imported
                # torch looks up the name of each address it connects to; without one, it takes 5 s.
                "RES_OPTIONS": "timeout:1 attempts:1",
            },
            start_new_session=True,  # Ctrl-C is for the demo; the launcher and all ranks are killed
        )
        return self

    def start(self, world_size: int, logs: Path, *arguments: object) -> Training:
        logs.mkdir()
        request = {
            "world_size": world_size,
            "logs": str(logs),
            "arguments": [str(argument) for argument in arguments],
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return Training(self, logs, self.answer(PATIENCE_S) or [])

    def answer(self, patience_s: float) -> list[int] | None:
        """The next list it writes, or None if there is none yet."""
        line = self._line(patience_s)
        expect(line != b"", "the process that starts the ranks has ended")
        return None if line is None else json.loads(line)

    def _line(self, patience_s: float) -> bytes | None:
        """Empty once there is no process left that could write."""
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], patience_s)[0]
        return self._process.stdout.readline() if ready else None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._process, contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
            # Files must not come up any more when the folder is removed.
            while self._line(GOODBYE_S):
                pass


class Training:
    """`train_fsdp2.py` on some processes."""

    def __init__(self, launcher: Launcher, logs: Path, pids: list[int]) -> None:
        self.logs = logs
        self._launcher = launcher
        self._pids = pids
        self._codes: list[int] | None = None

    def wait(self) -> Self:
        """Until all ranks have ended well."""
        codes = self.exit_codes(PATIENCE_S)
        expect(codes is not None, f"{self.logs.name}: no end in {PATIENCE_S} s")
        # When one fails the others are killed, and are not to blame.
        for rank, code in enumerate(codes or []):
            if code not in (0, -signal.SIGKILL):
                errors = self._read(rank, "err")
                raise NotAsPromised(f"{self.logs.name}: rank {rank} ended with {code}\n{errors}")
        expect(not any(codes or []), f"{self.logs.name}: exit codes {codes}")
        return self

    def exit_codes(self, patience_s: float) -> list[int] | None:
        """Of all ranks, or None if some have not ended yet."""
        if self._codes is None:
            self._codes = self._launcher.answer(patience_s)
        return self._codes

    def kill(self) -> list[int] | None:
        """SIGKILL for every rank; how each ended."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self.exit_codes(PATIENCE_S)

    def losses(self) -> Losses:
        """By step."""
        found = re.findall(r"^step (\d+) loss (\S+)$", self._read(0, "out"), re.MULTILINE)
        return {int(step): float(loss) for step, loss in found}

    def resumed(self) -> str | None:
        """The checkpoint it went on from."""
        found = re.search(r"^resumed (.+)$", self._read(0, "out"), re.MULTILINE)
        return found and Path(found[1]).name

    def reports(self, event: str, step: int) -> list[Report]:
        """What the witness on each rank told when `saving` or `loaded` a step."""
        return [self._report(rank, event, step) for rank in range(len(self._pids))]

    def _report(self, rank: int, event: str, step: int) -> Report:
        for line in self._read(rank, "out").splitlines():
            if line.startswith("{"):
                report: Report = json.loads(line)
                if (report["event"], report["step"]) == (event, step):
                    return report
        raise NotAsPromised(f"{self.logs.name}: rank {rank} told nothing of {event} step {step}")

    def _read(self, rank: int, kind: str) -> str:
        try:
            return (self.logs / f"rank-{rank}.{kind}").read_text(errors="replace")
        except FileNotFoundError:
            return ""

"""The program ends while a save is running: it is completed, or reported."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest

import shardkeep

SLOW = """
import sys, time
import numpy as np
import shardkeep
from shardkeep.formats.native.layout import Limits
from shardkeep.stores.local import WriteFile

write_at = WriteFile.write_at

def slowly(self, data, offset):
    time.sleep({pause})
    return write_at(self, data, offset)

WriteFile.write_at = slowly
state = {{f"t{{n}}": np.full(200_000, n) for n in range(6)}}
writer = shardkeep.NativeWriter({path!r}, limits=Limits(payload=1 << 20))
handle = shardkeep.{how}(state, storage_writer=writer)
assert not handle.done()
for array in state.values():
    array[:] = -1
{end}
"""


def run(path, end="", how="async_save", pause=0.02, **environment):
    code = SLOW.format(path=str(path), end=end, how=how, pause=pause)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr, time.monotonic() - begun


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('of the program')", 1, "ValueError: of the program"),
        ("del handle, writer, state", 0, ""),
    ],
)
def test_a_save_is_completed_when_the_program_ends(tmp_path, end, code, says):
    returncode, stderr, _ = run(tmp_path / "a", end)
    assert returncode == code, stderr
    assert stderr.strip().endswith(says)
    assert bool(stderr) is bool(says)
    assert shardkeep.verify(tmp_path / "a").ok
    with shardkeep.open(tmp_path / "a") as found:
        assert [int(found[f"t{n}"][-1]) for n in range(6)] == list(range(6))


def test_a_checkpointer_that_is_never_closed(tmp_path):
    returncode, stderr, _ = run(tmp_path / "a", how="Checkpointer().async_save")
    assert (returncode, stderr) == (0, "")
    assert shardkeep.verify(tmp_path / "a").ok


def test_a_save_that_takes_too_long_is_reported(tmp_path):
    returncode, stderr, took = run(tmp_path / "a", pause=3600, SHARDKEEP_EXIT_TIMEOUT_S="0.3")
    assert returncode == 0
    assert took < 20
    assert stderr == f"shardkeep: the program ended before {tmp_path / 'a'} was saved\n"
    with pytest.raises(shardkeep.CheckpointNotFoundError):
        shardkeep.open(tmp_path / "a")


def test_a_failure_at_the_end_is_told(tmp_path):
    break_disk = "def fail(*a): raise OSError(28, 'No space left')\nWriteFile.write_at = fail"
    returncode, stderr, _ = run(tmp_path / "a", break_disk, pause=0.2)
    assert returncode == 0
    assert "in the background failed" in stderr
    assert "No space left" in stderr
    assert [p for p in (tmp_path / "a").rglob("*") if p.is_file()] == []


def test_a_forked_child_does_not_wait_for_the_save_of_its_parent(tmp_path):
    end = """
import os
child = os.fork()
if child:
    begun = time.monotonic()
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - begun < 10
"""
    returncode, stderr, _ = run(tmp_path / "a", end, SHARDKEEP_EXIT_TIMEOUT_S="30")
    assert (returncode, stderr) == (0, "")
    assert shardkeep.verify(tmp_path / "a").ok


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("7.5", 7.5),
        ("", 600.0),
        ("soon", 600.0),
        ("nan", 600.0),
        ("inf", threading.TIMEOUT_MAX),
        ("1e12", threading.TIMEOUT_MAX),
    ],
)
def test_how_long_the_end_waits(monkeypatch, given, expected):
    from shardkeep.background import exit_timeout_s

    monkeypatch.setenv("SHARDKEEP_EXIT_TIMEOUT_S", given)
    assert exit_timeout_s() == expected


def test_the_end_may_wait_for_ever(tmp_path):
    assert run(tmp_path / "a", SHARDKEEP_EXIT_TIMEOUT_S="inf")[:2] == (0, "")
    assert shardkeep.verify(tmp_path / "a").ok


@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3)])
def test_a_process_of_multiprocessing_completes_its_save(tmp_path, start, end, code):
    """One that is forked knows no `atexit`."""
    work = SLOW.format(path=str(tmp_path / "a"), end=end, how="async_save", pause=0.1)
    method = multiprocessing.get_context(start)
    process = method.Process(target=exec, args=(work, {"__name__": "work"}))
    process.start()
    process.join(60)
    assert process.exitcode == code
    assert shardkeep.verify(tmp_path / "a").ok


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_process_of_multiprocessing_reports_once(tmp_path, monkeypatch, capfd, start):
    monkeypatch.setenv("SHARDKEEP_EXIT_TIMEOUT_S", "0.3")
    work = SLOW.format(path=str(tmp_path / "a"), end="", how="async_save", pause=3600)
    method = multiprocessing.get_context(start)
    process = method.Process(target=exec, args=(work, {"__name__": "work"}))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert capfd.readouterr().err.count("the program ended before") == 1

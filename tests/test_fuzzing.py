"""The fuzzer finds what it looks for; a little of it runs here, and all that it ever found."""

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from fuzzing.__main__ import all_targets
from fuzzing.watching import Watch

from shardkeep import CheckpointError, FormatError

HOSTILE = Path(__file__).parent / "data/hostile"
FOUND = sorted(path for path in HOSTILE.iterdir() if path.suffix != ".md")
"""Inputs that were once treated wrongly: `parser-what`."""
SEED = 1


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    found = all_targets(tmp_path_factory.mktemp("fuzzing"))
    return {target.name: target for target in found}


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_what_was_found_once(targets, path):
    target = targets[path.name.partition("-")[0]]
    finding = Watch(limits=False).run(target.name, target.run, path.read_bytes())
    assert finding is None, f"{finding.kind}\n{finding.text}"


def test_good_inputs_are_accepted(targets):
    """Else the mutants of them would all be refused for one and the same reason."""
    refused = []
    for target in targets.values():
        for data in target.seeds:
            try:
                target.run(data)
            except CheckpointError as error:
                refused.append((target.name, str(error)))
    allowed = ("is encrypted", "needs tensorstore", "not on the list of what may be read")
    assert [text for text in refused if not any(why in text[1] for why in allowed)] == []


def test_a_little_of_everything(targets):
    """Each parser for a moment, in this process; `python -m fuzzing` does it at length."""
    watch = Watch(limits=False)
    moment = 5.0 / len(targets)
    done = {}
    for target in targets.values():
        rng, until = Random(SEED), time.monotonic() + moment
        done[target.name] = 0
        while time.monotonic() < until or done[target.name] < 10:
            data = target.changed(rng, target.seeds)
            finding = watch.run(target.name, target.run, data)
            assert finding is None, (
                f"{finding.parser}: {finding.kind}\n{finding.text}\n{data!r:.500}"
            )
            done[target.name] += 1


def escape(data: bytes) -> None:
    if data[:1] == b"\xff":
        raise ValueError("an escape")
    raise FormatError("refused")


def hidden_memory(data: bytes) -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        raise FormatError("refused") from error


def memory(data: bytes) -> None:
    bytearray(300 << 20)[::4096] = b"x" * (300 << 8)


def slow(data: bytes) -> None:
    time.sleep(1.1)


def slow_once(data: bytes) -> None:
    """As where the process was stopped for a while."""
    if not SLOW:
        SLOW.append(data)
        time.sleep(1.1)


SLOW: list[bytes] = []


@pytest.mark.parametrize(
    ("parse", "kind"),
    [
        (escape, "ValueError test_fuzzing.py"),
        (hidden_memory, "memory"),
        (memory, "memory"),
        (slow, "slow"),
    ],
)
def test_what_must_not_be_is_found(parse, kind):
    """In a process of its own, as memory that was once taken counts for ever.

    It is forked: one that is started has what its parent had counted to it.
    """
    code = (
        "import os, sys, test_fuzzing as t\n"
        "if os.fork(): sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "from fuzzing.watching import Watch\n"
        f"finding = Watch(limits=False).run('p', t.{parse.__name__}, b'\\xff')\n"
        "print(finding.kind)"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{root}/src:{root}:{root}/tests"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(kind), done.stdout + done.stderr


def test_a_process_that_was_stopped_once_is_not_slow():
    assert Watch(limits=False).run("p", slow_once, b"x") is None
    assert SLOW


def test_processes_count_and_tell(tmp_path):
    code = (
        "import os, sys\n"
        "from fuzzing.by_bytes import changed_bytes\n"
        "from fuzzing.targets import Target\n"
        "from fuzzing.workers import Plan, fuzz\n"
        "import test_fuzzing as t\n"
        "def die(data):\n"
        "    if len(data) > 5 and not os.path.exists('died'):\n"
        "        open('died', 'w').close()\n"
        "        os._exit(9)\n"
        "def make(scratch):\n"
        "    return [Target('odd', [b'\\0'], (changed_bytes,), t.escape, 3),\n"
        "            Target('calm', [b'a'], (changed_bytes,), lambda data: None, 1)]\n"
        "found = fuzz(make, Plan(1, 2, 4000))\n"
        "print(found['odd'].executions, found['calm'].executions, len(found['odd'].findings) > 0)\n"
        "dies = Target('dies', [b'abc'], (changed_bytes,), die)\n"
        "found = fuzz(lambda s: [dies], Plan(1, 1, 600))\n"
        "(one,) = found['dies'].findings\n"
        "print(one.kind, len(one.data) > 5, found['dies'].executions)\n"
        "def interrupt(tallies):\n"
        "    if tallies: raise KeyboardInterrupt\n"
        "found = fuzz(make, Plan(1, 1, seconds=90), interrupt)\n"
        "print(found['odd'].executions > 0)\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{root}/src:{root}:{root}/tests"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == ["3000", "1000", "True", "crash", "True", "600", "True"], (
        done.stderr
    )


def test_the_command(tmp_path):
    """Without pytest, hypothesis and torch: it runs where nothing but the library is installed."""
    root = Path(__file__).parents[1]
    blocked = (
        "import sys\nfor name in ('torch', 'pytest', 'hypothesis'): sys.modules[name] = None\n"
    )
    code = f"{blocked}from fuzzing.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    arguments = [
        "--executions",
        "300",
        "--workers",
        "2",
        "--parser",
        "record",
        "--parser",
        "values",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PYTHONPATH": f"{root}/src:{root}", "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "record" in done.stdout
    assert list(tmp_path.iterdir()) == []

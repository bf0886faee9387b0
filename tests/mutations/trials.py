"""Tests run against mutants, each in a child that is forked when all that is slow is imported.

First the tests run once as they are, and every line is noted with the tests that pass it. Then a
child imports the changed module in place of the one on disk, and runs those of its line, the short
ones first, until one fails.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

import coverage
import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shardkeep"

FILES = 4
"""Of tests, at most, for one mutant: to collect many takes longer than to run them."""

# The same examples for every mutant, and no time spent on finding the smallest that fails.
hypothesis.settings.register_profile(
    "mutations",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


class Mutated:
    """Finds one module changed, and all others as they are."""

    def __init__(self, mutant):
        self.mutant = mutant
        self.name = ".".join(mutant.source.relative_to(PACKAGE.parent).with_suffix("").parts)

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.mutant.source, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(self.mutant.code(), module.__dict__)


class Passing:
    """Notes which lines of the package each test passes, and how long it takes."""

    def __init__(self, sources):
        self.coverage = coverage.Coverage(
            data_file=None, branch=False, config_file=False, include=[str(s) for s in sources]
        )
        self.seconds = {}
        self.failed = set()

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed":  # one that is skipped says nothing either
            self.failed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid)
        begun = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - begun
            self.coverage.switch_context("")

    def lines(self):
        data, found = self.coverage.get_data(), {}
        for source in data.measured_files():
            found[str(Path(source).relative_to(PACKAGE))] = {
                line: sorted(set(tests) - self.failed)
                for line, tests in data.contexts_by_lineno(source).items()
            }
        return found


def look(tests, sources, folder):
    """What each test passes, from one run of all of them in a child."""
    answer = folder / "lines.json"

    def watch():
        passing = Passing(sources)
        passing.coverage.start()
        _pytest(tests, folder / "look", passing)
        passing.coverage.stop()
        answer.write_text(json.dumps({"seconds": passing.seconds, "lines": passing.lines()}))
        return 0

    child = _fork(watch)
    while (status := _ended(child, late=False)) is None:
        time.sleep(0.1)
    if status != 0:
        raise SystemExit(f"the tests break as they are: {status}")
    return json.loads(answer.read_text())


def chosen(known, mutant, enough_s, whole_module):
    """Tests that pass the mutant's line, and how long they take.

    Of the file that has most of them first, and there the short ones.
    """
    lines = known["lines"].get(str(mutant.source.relative_to(PACKAGE)), {})
    tests = set(lines.get(str(mutant.line), []))
    if "" in tests or whole_module:  # at import: any test of this module may see it
        tests = {test for passing in lines.values() for test in passing}
    seconds, total, taken = known["seconds"], 0.0, []
    in_files = Counter(test.partition("::")[0] for test in tests - {""})
    files = [file for file, _ in in_files.most_common(FILES)]
    for file in files:
        share = total + (enough_s - total) / (1 if file == files[-1] else 2)
        in_file = [test for test in tests if test.startswith(f"{file}::")]
        for test in sorted(in_file, key=lambda test: (seconds[test], test)):
            if taken and total + seconds[test] > share:
                break
            total += seconds[test]
            taken.append(test)
    return taken, total


def judge_all(known, wanted, folder, jobs, enough_s, *, whole_module=False):
    """Each mutant with `killed`, `too slow`, `survived`, or `never run`, as they become known.

    Each gets tests that take `enough_s` together, at least one.
    """
    waiting, running = list(wanted)[::-1], {}
    clock, before = 0.0, time.monotonic()
    while waiting or running:
        # While all of us are stopped, no time passes.
        clock, before = clock + min(time.monotonic() - before, 1), time.monotonic()
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            tests, seconds = chosen(known, mutant, enough_s, whole_module)
            if not tests:
                yield mutant, "never run"
                continue
            child = _fork(functools.partial(_attempt, mutant, tests, folder))
            running[child] = mutant, clock + 25 + 4 * seconds
        for child, (mutant, end) in list(running.items()):
            status = _ended(child, clock > end)
            if status is not None:
                del running[child]
                yield mutant, VERDICTS.get(status, "killed")
        time.sleep(0.01)


VERDICTS = {0: "survived", "too slow": "too slow"}


def _attempt(mutant, tests, folder):
    sys.meta_path.insert(0, Mutated(mutant))
    for _, some in groupby(tests, lambda test: test.partition("::")[0]):
        if status := _pytest(["-x", *some], folder / f"{os.getpid()}"):
            return status
    return 0


def _pytest(tests, base, *plugins):
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={base}"]
    options += [f"--rootdir={ROOT}", f"-c{ROOT / 'pyproject.toml'}"]
    options += ["--hypothesis-profile=mutations"]
    # hypothesis is imported before pytest could rewrite it.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return int(pytest.main([*options, *tests], plugins=list(plugins)))
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _fork(work):
    """Do it in a child, whose status is what `work` returns, or 1 if it breaks."""
    child = os.fork()
    if child:
        return child
    status = 1
    with contextlib.suppress(BaseException):
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        os.chdir(ROOT)
        # A wrong size must not fill the disk or the memory.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
        sys.dont_write_bytecode = True
        status = work()
    os._exit(status)


def _ended(child, late):
    """The status of a child, or None while it runs; what it started ends with it."""
    done, status = os.waitpid(child, os.WNOHANG)
    if not done and not late:
        return None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
        return "too slow"
    return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def scratch():
    """A folder for what the tests write."""
    folder = Path(tempfile.mkdtemp(prefix="shardkeep-mutations-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

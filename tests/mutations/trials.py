"""Tests run against mutants, each in a child of a process that has collected all tests.

First the tests run once as they are, and every line is noted with the tests that pass it. Then a
child puts the changed code into the functions that are there, and runs the tests of its line, the
short ones first, until one fails. What only an import shows is imported in place of what is there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
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
from collections import Counter, defaultdict
from itertools import groupby
from pathlib import Path
from types import FunctionType

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


class Clock:
    """While all of us are stopped, no time passes."""

    def __init__(self):
        self.total, self.before, self.stops = 0.0, time.monotonic(), 0

    def seconds(self):
        """So many, where it is asked all the time."""
        passed = time.monotonic() - self.before
        self.before += passed
        self.total += min(passed, 1)
        self.stops += passed > 5
        return self.total


def timed(known, folder):
    """The seconds of every test that passes on its own where all were collected before."""

    def each(items):
        attempt = functools.partial(_attempt_warm, folder, items, {})
        for name in items.keys() & known["seconds"].keys():
            clock = Clock()
            child = _fork(functools.partial(attempt, None, [name]))
            while (status := _ended(child, clock.seconds() > 60)) is None:
                time.sleep(0.002)
            shutil.rmtree(folder / f"{child}", ignore_errors=True)
            if status == 0:
                yield f"{clock.seconds()} {name}"

    lines = (line.partition(" ") for line in _warm(known, each, folder))
    return {name: float(seconds) for seconds, _, name in lines}


def chosen(known, mutant, enough_s, deadly, items=None):
    """Tests that pass the mutant's line, and how long they take.

    First those that are short, pass much of the module, and are `deadly`: have killed before.
    """
    lines = known["lines"].get(str(mutant.source.relative_to(PACKAGE)), {})
    tests = set(lines.get(str(mutant.line), []))
    if "" in tests:  # at import: any test of this module may see it
        tests = {test for passing in lines.values() for test in passing}
    if items is None:  # to collect many takes longer than to run them
        in_files = Counter(test.partition("::")[0] for test in tests - {""})
        files = {file for file, _ in in_files.most_common(FILES)}
        tests = {test for test in tests if test.partition("::")[0] in files}
    else:
        tests &= items
    tests &= known["seconds"].keys()
    passed = known.setdefault("passed", {})
    if mutant.source not in passed:
        passed[mutant.source] = Counter(test for passing in lines.values() for test in passing)
    seconds, total, taken = known["seconds"], 0.0, []

    def late(test):
        return seconds[test] / (1 + deadly[test]) / passed[mutant.source][test] ** 2, test

    for test in sorted(tests, key=late):
        if not taken or total + seconds[test] <= enough_s:
            total += seconds[test]
            taken.append(test)
    return taken, total


def judge_all(known, wanted, folder, jobs, enough_s):
    """Each mutant with `killed`, `too slow`, `survived`, or `never run`, as they become known.

    Each gets tests that take `enough_s` together, at least one.
    """
    left, cold = set(wanted), []
    number = {mutant: place for place, mutant in enumerate(wanted)}

    def judge(items):
        attempt = functools.partial(_attempt_warm, folder, items, _made(PACKAGE))
        for mutant, verdict in _judge(known, wanted, attempt, folder, jobs, enough_s, set(items)):
            yield f"{number[mutant]} {verdict}"

    for line in _warm(known, judge, folder):
        place, _, verdict = line.partition(" ")
        left.discard(mutant := wanted[int(place)])
        if verdict == "not there":
            cold.append(mutant)
        else:
            yield mutant, verdict
    if left:
        raise SystemExit(f"{len(left)} mutants were not judged: what judges broke")
    yield from _judge(known, cold, functools.partial(_attempt, folder), folder, jobs, enough_s)


def _warm(known, work, folder):
    """The lines that `work` yields in a child that has collected all tests, and has them given."""
    reading, writing = os.pipe()

    def tell(items):
        with os.fdopen(writing, "w") as told:
            for line in work(items):
                print(line, file=told, flush=True)

    def collect():
        os.close(reading)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        files = sorted({test.partition("::")[0] for test in known["seconds"]})
        return _pytest(["-s", *files], folder / "warm", Collected(tell))

    child = _fork(collect)
    os.close(writing)
    try:
        with os.fdopen(reading) as told:
            for line in told:
                yield line.rstrip("\n")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


class Collected:
    """Does `work` with the tests that were collected, by their names, in place of running them."""

    def __init__(self, work):
        self.work = work

    def pytest_runtestloop(self, session):
        self.work({item.nodeid: item for item in session.items})
        return True


def _made(package):
    """Every function that is there, by its code."""
    found = defaultdict(list)
    for made in gc.get_objects():
        if type(made) is FunctionType and made.__code__.co_filename.startswith(str(package)):
            found[made.__code__].append(made)
        elif type(made) is functools._lru_cache_wrapper:
            made.cache_clear()
    gc.freeze()
    return found


def _judge(known, wanted, attempt, folder, jobs, enough_s, items=None):
    waiting, running, deadly = list(wanted)[::-1], {}, defaultdict(Counter)
    clock = Clock()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop()
                kills = deadly[mutant.source]
                tests, seconds = chosen(known, mutant, enough_s, kills, items)
                if not tests:
                    yield mutant, "never run"
                    continue
                child = _fork(functools.partial(attempt, mutant, tests), int(20 + 4 * seconds))
                running[child] = mutant, clock.seconds() + 20 + 8 * seconds, clock.stops
            for child, (mutant, end, stops) in list(running.items()):
                status = _ended(child, clock.seconds() > end)
                if status is not None and status != 0 and clock.stops > stops:
                    del running[child]  # it may have failed for that
                    waiting.append(mutant)
                elif status is not None:
                    del running[child]
                    shutil.rmtree(folder / f"{child}", ignore_errors=True)
                    killer = folder / f"{child}.killer"
                    verdict = VERDICTS.get(status, "killed")
                    if killer.exists():
                        deadly[mutant.source][test := killer.read_text()] += 1
                        verdict = f"killed by {test}"
                        killer.unlink()
                    yield mutant, verdict
            time.sleep(0.01)
    finally:
        for child in running:
            _ended(child, late=True)


NOT_THERE = 77
VERDICTS = {
    0: "survived", "too slow": "too slow", -signal.SIGXCPU: "too slow", NOT_THERE: "not there",
}  # fmt: skip


def _attempt(folder, mutant, tests):
    """Import the module as it is changed, and all that imports it, and run the tests."""
    sys.meta_path.insert(0, Mutated(mutant))
    for _, some in groupby(sorted(tests), lambda test: test.partition("::")[0]):
        if status := _pytest(["-x", *some], folder / f"{os.getpid()}"):
            return status
    return 0


def _attempt_warm(folder, items, made, mutant, tests):
    """Change the functions that are there, and run the tests that were collected."""
    become = {} if mutant is None else mutant.functions()
    if become is None or not become.keys() <= made.keys():
        return NOT_THERE
    for was, now in become.items():
        for function in made[was]:
            function.__code__ = now
    tests = [items[test] for test in tests]
    session = tests[0].session
    factory = session.config._tmp_path_factory
    factory._given_basetemp, factory._basetemp = folder / f"{os.getpid()}", None
    for test, after in zip(tests, [*tests[1:], None], strict=True):
        test.config.hook.pytest_runtest_protocol(item=test, nextitem=after)
        if session.testsfailed:
            (folder / f"{os.getpid()}.killer").write_text(test.nodeid)
            return 1
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


def _fork(work, cpu_s=resource.RLIM_INFINITY):
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
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
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

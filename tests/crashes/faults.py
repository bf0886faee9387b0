"""A disk that fails: every call of a scenario on its files answers with an error once, or from then
on, or does what it was asked and says that it did not; or moves fewer bytes than it was asked for.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import shutil
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from shardkeep.errors import CheckpointError
from shardkeep.testing.system_calls import intercepted

LONG_S = 20.0
"""No fault may take longer to be told of."""

E = errno
_LOOK = (E.EIO, E.ESTALE, E.EACCES)
_CHANGE = (E.EIO, E.ENOSPC, E.EDQUOT, E.EROFS, E.EACCES, E.ESTALE)
CODES = {
    "open": (E.EIO, E.EACCES, E.EMFILE, E.ESTALE),
    "create": (*_CHANGE, E.EMFILE),
    "write": (E.EIO, E.ENOSPC, E.EDQUOT, E.ESTALE),
    "pwrite": (E.EIO, E.ENOSPC, E.EDQUOT, E.ESTALE),
    "fsync": (E.EIO, E.ENOSPC, E.EDQUOT),
    "close": (E.EIO, E.EDQUOT),
    "ftruncate": (E.EIO, E.ENOSPC),
    "fallocate": (E.EIO, E.ENOSPC, E.EDQUOT, E.EOPNOTSUPP, E.EINTR),
    "link": (*_CHANGE, E.EMLINK, E.EPERM),
    "rename": _CHANGE,
    "replace": _CHANGE,
    "exchange_names": (*_CHANGE, E.EINVAL),
    "unlink": (E.EIO, E.EACCES, E.EROFS, E.EBUSY),
    "remove": (E.EIO, E.EACCES, E.EROFS, E.EBUSY),
    "mkdir": _CHANGE,
    "rmdir": (E.EIO, E.EACCES, E.EBUSY, E.ENOTEMPTY),
    "stat": _LOOK,
    "lstat": _LOOK,
    "listdir": _LOOK,
    "scandir": _LOOK,
    "read": (E.EIO, E.ESTALE),
    "pread": (E.EIO, E.ESTALE),
    "preadv": (E.EIO, E.ESTALE),
    "utime": (E.EIO, E.EACCES),
}
AFTER = {
    "link": E.EEXIST,
    "rename": E.ENOENT,
    "replace": E.ENOENT,
    "exchange_names": E.EIO,
    "unlink": E.ENOENT,
    "mkdir": E.EEXIST,
    "rmdir": E.ENOENT,
}
"""What a network file system says when it did what it was asked, and then was asked again."""
CHANGES = frozenset(CODES) - {"open", "stat", "lstat", "listdir", "scandir", "read", "pread",
                              "preadv", "close"}  # fmt: skip
KINDS = ("before", "ever", "after", "short", "interrupted")
REMOVALS = ("unlink", "remove", "rmdir")
LOOKS = ("listdir", "scandir", "stat", "lstat", "open", "read", "pread", "preadv", "close")


@dataclass(frozen=True)
class Fault:
    """What goes wrong."""

    at: int
    """The call, counted from the first on files of the scenario."""
    name: str
    """Which it was, when nothing went wrong; another thread may come first."""
    kind: str
    """One of `KINDS`; `ever` is from then on, until the disk is well again."""
    code: int = 0

    def __str__(self):
        what = errno.errorcode.get(self.code, "")
        return f"{self.kind} {what} at call {self.at}, {self.name}"


class Faulty:
    """A handler of system calls: counts those below a folder, and answers one of them wrongly."""

    def __init__(self, base, fault=None):
        self.base, self.fault = Path(base), fault
        self.lock = threading.Lock()
        self.calls = []
        self.hit = None
        self.is_sick = False

    def __call__(self, call):
        if call.name == "close":
            path = call.path()
            is_ours = path is not None and path.is_relative_to(self.base) and not path.is_dir()
        else:
            path = call.path()
            is_ours = path is not None and path.is_relative_to(self.base)
        if not is_ours:
            return call.make()
        name = call.name
        if name == "open" and call.args[1] & os.O_CREAT:
            name = "create"
        with self.lock:
            at = len(self.calls)
            self.calls.append((name, path))
        fault = self.fault
        if fault is not None and self.is_sick and name in CHANGES and name not in REMOVALS:
            return self.fail(call, fault.code)
        if fault is None or at != fault.at:
            return call.make()
        self.hit = (name, path)
        return self.answer(call, name, fault)

    def answer(self, call, name, fault):
        if fault.kind == "short":
            return self.short(call)
        if fault.kind == "interrupted":
            if call.name not in ("pwrite", "preadv"):
                return call.make()
            raise InterruptedError(E.EINTR, "a signal came")
        if fault.kind == "after":
            done = call.make()
            if name not in AFTER:
                return done  # another thread came first
            raise OSError(AFTER[name], "replayed")
        if fault.kind == "ever":
            self.is_sick = True
            if name not in CHANGES:
                return call.make()
        return self.fail(call, fault.code)

    def fail(self, call, code):
        if call.name == "close":
            call.make()  # it is closed all the same
        raise OSError(code, os.strerror(code))

    def short(self, call):
        if call.name == "pwrite":
            descriptor, data, offset = call.args
            return call.real(descriptor, memoryview(data)[: max(1, len(data) // 3)], offset)
        if call.name == "write":
            descriptor, data = call.args
            return call.real(descriptor, memoryview(data)[: max(1, len(data) // 3)])
        if call.name == "preadv":
            descriptor, (out,), offset, *more = call.args
            return call.real(descriptor, [out[: max(1, len(out) // 3)]], offset, *more)
        return call.make()


def held():
    """Threads of ours, and open files."""
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("shardkeep"))
    names = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
    return threads, sorted(name for name in names if name.startswith("/") and "/fd" not in name)


def assert_held(before):
    """Nothing is held that was not before; threads have a moment to end."""
    for _ in range(40):
        more = [Counter(now) - Counter(then) for now, then in zip(held(), before, strict=True)]
        if not any(more):
            return
        gc.collect()
        time.sleep(0.05)
    raise AssertionError(f"left behind: {more}")


@dataclass
class Report:
    calls: int = 0
    faults: int = 0
    errors: int = 0
    """Faults that the program was told of; all others changed nothing for it."""
    slowest: float = 0.0


def listed(scenario, template, base):
    """The calls that it makes when nothing goes wrong."""
    shutil.copytree(template, base)
    handler = Faulty(base)
    with scenario.settings(), intercepted(handler):
        scenario.run(base, lambda label: None)
    shutil.rmtree(base)
    return handler.calls


def faults_of(calls, kinds=KINDS, chance=None, count=None):
    """What can go wrong with these calls, or so many of it."""
    found = []
    for at, (name, _) in enumerate(calls):
        if "before" in kinds:
            found += [Fault(at, name, "before", code) for code in CODES.get(name, ())]
        if "ever" in kinds and name in CHANGES:
            found += [Fault(at, name, "ever", code) for code in (E.ENOSPC, E.EIO, E.EROFS)]
        if "after" in kinds and name in AFTER:
            found.append(Fault(at, name, "after"))
        if "short" in kinds and name in ("pwrite", "write", "preadv"):
            found.append(Fault(at, name, "short"))
        if "interrupted" in kinds and name in ("pwrite", "preadv"):
            found.append(Fault(at, name, "interrupted"))
    if count is not None and len(found) > count:
        found = (chance or random.Random(0)).sample(found, count)
    return found


class Unkept(AssertionError):
    """A fault had a consequence that it must not have."""


def strike(scenario, template, base, fault, report):
    """One fault; raises `Unkept` if it was not borne, nor told of as it must be."""
    shutil.copytree(template, base)
    handler, marks, error, where = Faulty(base, fault), [], None, "nowhere"
    before, begun = held(), time.monotonic()
    try:
        with scenario.settings():
            try:
                with intercepted(handler):
                    scenario.run(base, marks.append)
            except Exception as caught:
                error, at = caught, traceback.extract_tb(caught.__traceback__)
                ours = [f for f in at if "/src/" in f.filename and "/testing/" not in f.filename]
                where = " ".join(f"{Path(f.filename).name}:{f.lineno}" for f in ours[-3:])
            spent = time.monotonic() - begun
            report.slowest = max(report.slowest, spent)
            _check(scenario, base, fault, handler, marks, error, spent, before)
    except Unkept:
        raise
    except Exception as problem:
        text = f"{scenario.name}, {fault}: {problem!r}; the program saw {error!r} of {where}"
        raise Unkept(text) from problem
    finally:
        report.errors += error is not None
        error = None
        shutil.rmtree(base, ignore_errors=True)
    report.faults += 1


def _check(scenario, base, fault, handler, marks, error, spent, before):
    assert spent < LONG_S, f"told of after {spent:.1f} s"
    if error is not None:
        assert isinstance(error, CheckpointError), f"{type(error).__name__} is not one of ours"
        assert fault.kind not in ("short", "interrupted"), "that is no error"
        told = getattr(error, "errno", None)
        wanted = AFTER.get(handler.hit[0]) if fault.kind == "after" else fault.code
        assert told in (None, wanted), f"errno {told}, expected {wanted}"
        error.__traceback__ = None
        for other in (error.__cause__, error.__context__):
            if other is not None:
                other.__traceback__ = None
    found = scenario.look(base)
    if error is None and handler.hit is not None:
        scenario.judge_end(found, marks)
    else:
        scenario.judge(found, marks)
    assert_held(before)
    name = handler.hit[0] if handler.hit else ""
    if fault.kind != "ever" and name not in (*REMOVALS, *LOOKS):
        scenario.assert_clean(base, found, error)
    scenario.recover(base, found, 3)


def sweep(scenario, folder, *, kinds=KINDS, count=None, seed=0,
          on_problem=None):  # fmt: skip
    """Every fault at every call, or a choice of them."""
    folder = Path(folder)
    template, base = folder / "template", folder / "base"
    template.mkdir(parents=True)
    scenario.prepare(template)
    calls = listed(scenario, template, base)
    report = Report(len(calls))
    for fault in faults_of(calls, kinds, random.Random(seed), count):
        try:
            strike(scenario, template, base, fault, report)
        except Unkept as problem:
            if on_problem is None:
                raise
            on_problem(problem)
    return report

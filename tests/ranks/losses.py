"""Ranks that are lost: what a group does, what happens to one of its ranks, and what must hold for
the others.

A trial is one call of a group of real processes. On the way, each rank passes points: before and
after its part of every step, while it awaits a verdict, when bytes move, around the commit. At one
of them, or at any instant, one rank is killed, stopped, stopped for a while, or fails.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import shardkeep
from shardkeep import CheckpointError, CheckpointManager, RankError, ShardedArray
from shardkeep.coordination import Patience
from shardkeep.engine import passing, read_once
from shardkeep.errors import CheckpointNotFoundError
from shardkeep.formats.native.commit import collect_garbage, read_record
from shardkeep.stores.local import LocalStore
from shardkeep.testing.processes import PRELOAD

SHORT = Patience(beat_s=0.25, gone_s=2.0, linger_s=1.0)
TIMEOUT_S = 6.0
"""For a rank that stops between two calls, and so gives no sign of life to miss."""
BOUND_S = 12.0
"""For what takes gone_s on a quiet machine; ours may be busy."""
HANG_S = 60.0
LEFT_S = 8.0
"""How long threads and processes may take to end: a writer process gets 5 s to do so by itself."""
MARK = "SHARDKEEP_TRIAL"
"""In the environment of every process of a trial."""

PRELOADED = (
    *PRELOAD,
    "numpy.ma",
    "numpy.random",
    "shardkeep.foreign.storage",
    "shardkeep.manager.driver",
)
"""What trials import."""

SAVES = ("save", "overwrite", "again", "base", "thread", "process", "manager", "manager behind")
LOADS = ("windows", "messages", "restore")
VERBS = (*SAVES, *LOADS)
WHATS = ("kill", "stop", "wake", "pause", "raise")
"""`wake` is a stop until all others have given up, `pause` one for a while."""


@dataclass(frozen=True)
class Case:
    """What happens to which rank, in the middle of what."""

    verb: str
    what: str
    world: int = 3
    victim: int = 1
    at: int | float | str = 0
    """The point, by its number or its name; or the instant, in seconds."""
    pause_s: float = 0.0
    store: str = "harness"
    """Who holds the job's store."""
    hosts: tuple = ()
    """Of each rank, its network, what cuts that off, and its number; where ranks are on hosts."""
    careless: str = ""
    """What is done wrong on purpose, so that it is seen that it would be noticed."""

    def __str__(self) -> str:
        moment = f"{self.at:.3f} s" if isinstance(self.at, float) else f"point {self.at!r}"
        pause = f" for {self.pause_s:.2f} s" if self.what == "pause" else ""
        host = ", which holds the store" if self.store == "rank 0" and self.victim == 0 else ""
        return (
            f"{self.verb}: {self.what} rank {self.victim} of {self.world}{host}{pause}, at {moment}"
        )


# --- what ranks hold


def state(rank, value, world):
    """Rows that are dealt to the ranks, and something that all of them hold."""
    local = np.full((3, 3000), 100 * value + rank, np.int64)
    return {
        "model": {"w": ShardedArray.from_local(local, (3 * rank, 0), (3 * world, 3000))},
        "same": np.full(40_000, value, np.int64),
        "step": value,
    }


def whole(value, world):
    """The same, of all ranks."""
    rows = [state(rank, value, world)["model"]["w"].local_shards[0].array for rank in range(world)]
    return {**state(0, value, world), "model": {"w": np.concatenate(rows)}}


def value_at(place, world):
    """Which value is stored there, whole and verified; 0 where there is nothing."""
    try:
        with shardkeep.open(place) as found:
            value = found["step"]
            wanted = whole(value, world)
            assert np.array_equal(found["model.w"][...], wanted["model"]["w"]), "a mix"
            assert np.array_equal(found["same"][...], wanted["same"]), "a mix"
    except CheckpointNotFoundError:
        return 0
    report = shardkeep.verify(place)
    assert report.ok, report.problems
    return value


# --- what happens to a rank


class Points:
    """Where a rank passes, and what happens to it at one of them."""

    def __init__(self, case, rank):
        self.case = case
        self.is_victim = rank == case.victim
        self.armed = False
        self.seen = []
        self.struck = None
        """How many points were passed by then."""
        self.connecting = False
        """Whether gloo is about to connect to all ranks."""
        self.opening = False
        """Whether torch's client is about to connect to the store."""
        self._lock = threading.Lock()

    def arm(self):
        self.armed = True
        if self.is_victim and isinstance(self.case.at, float):
            timer = threading.Timer(self.case.at, self._strike)
            timer.daemon = True
            timer.name = "trial-instant"
            timer.start()

    def reach(self, label):
        with self._lock:
            if not self.armed:
                return
            number = len(self.seen)
            self.seen.append(label)
            at = self.case.at
            due = number >= at >= 0 if isinstance(at, int) else label == at
            due = due and self.is_victim and self.struck is None
            # Only a rank's own part of a step can fail; what it passes before that does not.
            due = due and (self.case.what != "raise" or label.startswith(("work", "done")))
        if due:
            self._strike()

    def _strike(self):
        if not self.armed:
            return
        self.struck = len(self.seen)
        what = self.case.what
        if what == "raise":
            raise ValueError("disk on fire")
        if what == "cut":
            os.system(self.case.hosts[self.case.victim][1])
            return
        # To this thread, and so at once: one for the process may be taken by any of its threads.
        number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
        signal.pthread_kill(threading.get_ident(), number)


def group(points):
    """Ranks of the default group, which pass points."""
    from shardkeep.adapters import torch_groups

    class Passing(torch_groups.TorchRanks):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            post = self._line.add

            def add(key, amount):
                total = post(key, amount)
                if key.endswith("/n") and amount:
                    points.reach("wait")
                return total

            self._line.add = add
            connect = self._line.connection

            def connection(*prefix):
                points.opening = True
                made = connect(*prefix)
                points.opening = False
                return made

            self._line.connection = connection

        def _outcome(self, phase, work, tell=None):
            def passing_by():
                points.reach(f"work {phase}")
                result = work()
                points.reach(f"done {phase}")
                return result

            return super()._outcome(phase, passing_by, tell)

        def _connect_gloo(self, name):
            points.connecting = True
            made = super()._connect_gloo(name)
            points.connecting = False
            return made

        def _move(self, phase, work):
            points.reach(f"move {phase}")
            return super()._move(phase, work)

        def may_commit(self):
            points.reach("commit, before the claim")
            if points.case.careless != "commit":
                super().may_commit()
            points.reach("commit, claimed")

        def twin(self):
            other = Passing(None, self.timeout_s, self.patience)
            other.memory = self.memory
            return other

    ranks = Passing(patience=SHORT, timeout_s=TIMEOUT_S)
    for _ in range(2):  # connecting may take long, as names are looked up; then all are connected
        ranks.agree("warm up", lambda: None)
    ranks._drop_bulk()
    torch_groups.CONNECT_S = TIMEOUT_S  # from here on, also for threads of gloo that are given up
    return ranks


# --- what a group does


class Doing:
    """One rank's part of the call that a trial is about: `prepare`, `do`, `close`."""

    def __init__(self, case, rank, ranks, root):
        self.verb, self.rank, self.world = case.verb, rank, case.world
        self.ranks = ranks
        self.place = place_of(case.verb, root)
        self.keeper = self.manager = None
        if case.verb in ("thread", "process"):
            self.keeper = shardkeep.Checkpointer(process_group=ranks, writer=case.verb)
        if case.verb in ("manager", "manager behind", "restore"):
            self.manager = CheckpointManager(root, keep=2, process_group=ranks)

    def state(self, value):
        return state(self.rank, value, self.world)

    def prepare(self):
        """What is there before, and was done by this group."""
        if self.verb == "again":
            shardkeep.save(self.state(1), self.place, overwrite=True, process_group=self.ranks)
        if self.verb == "process":
            self.keeper.prewarm(self.state(1))  # starts the process
        if self.verb in ("manager", "manager behind"):
            self.manager.restore(self.state(0))

    def do(self):
        verb, ranks = self.verb, self.ranks
        if verb in ("windows", "messages"):
            self.load(lambda into: shardkeep.load(into, self.place, process_group=ranks,
                                                  read_once=True))  # fmt: skip
        elif verb == "restore":
            self.load(lambda into: self.manager.restore(into, read_once=True))
        elif verb == "manager":
            self.manager.save(2, self.state(2))
        elif verb == "manager behind":
            self.manager.async_save(2, self.state(2)).result(HANG_S)
        elif verb in ("thread", "process"):
            self.keeper.async_save(self.state(2), self.place, overwrite=True).result(HANG_S)
        else:
            base = {"base": self.place} if verb == "base" else {}
            shardkeep.save(self.state(2), self.place, overwrite=verb != "save",
                           process_group=ranks, **base)  # fmt: skip

    def load(self, fill):
        target = self.state(0)
        fill(target)
        found = target["model"]["w"].local_shards[0].array
        assert (found == 100 + self.rank).all(), "not what was saved"
        assert (target["same"] == 1).all(), "not what was saved"

    def close(self):
        for closing in (self.manager, self.keeper, self.ranks):
            if closing is not None:
                with contextlib.suppress(CheckpointError):
                    closing.close()
        self.manager = self.keeper = self.ranks = None


def place_of(verb, root):
    """Where the checkpoint lies that is saved or loaded."""
    names = {"manager": "step-2", "manager behind": "step-2", "restore": "step-1"}
    return os.path.join(root, names.get(verb, "checkpoint"))


def earlier(verb, root, world):
    """A whole checkpoint that must stay, or be replaced by another."""
    if verb in ("manager", "manager behind", "restore"):
        with CheckpointManager(root, no_dist=True) as manager:
            manager.save(1, whole(1, world))
    elif verb != "save":
        shardkeep.save(whole(1, world), place_of(verb, root), no_dist=True)


# --- one rank of a trial


@dataclass
class Report:
    """What a rank tells."""

    error: BaseException | None = None
    failures: dict = field(default_factory=dict)
    took: float = 0.0
    closing: float = 0.0
    seen: list = field(default_factory=list)
    struck: int | None = None
    left: list = field(default_factory=list)


def held():
    """What this process holds that outlives a call, if something is wrong."""
    gc.collect()
    threads = Counter(
        thread.name.rstrip("0123456789-")
        for thread in threading.enumerate()
        if not thread.name.startswith(("MainThread", "trial"))
    )
    files = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{number}")
            files[what.split(":[")[0]] += not what.startswith("/proc/")
    # Threads that Python does not know of, as gloo's.
    native = Counter(native=len(os.listdir("/proc/self/task")) - threading.active_count())
    children = Counter(
        f"process {pid}"
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    )
    return threads + files + children + native


def left_over(before, spared):
    """What is held that was not, and does not go."""
    deadline = time.monotonic() + LEFT_S
    while True:
        left = held() - before
        left = {what: count for what, count in left.items() if what not in spared}
        if not left or time.monotonic() > deadline:
            return sorted(left.items())
        time.sleep(0.02)


def trial(rank, case, root, notes, mark):
    """One rank of a trial; the work of a forked process."""
    gc.freeze()  # what was there before the fork need not be looked through again and again
    os.environ[MARK] = mark
    os.environ["TMPDIR"] = f"{notes}/tmp"
    tempfile.tempdir = None
    join_host(case, rank, notes)
    note(notes, "pid", rank, os.getpid())
    passing.STALL_S = 1.0
    if case.verb == "messages":
        read_once.make_window = lambda budget: None
    before = held()
    points = Points(case, rank)
    ranks = group(points)
    doing = Doing(case, rank, ranks, root)
    del ranks
    doing.prepare()
    waker = wake_later(case, rank, notes)
    report = Report()
    points.arm()
    begun = time.monotonic()
    try:
        doing.do()
    except BaseException as error:
        traceback.print_exc()
        report.error = error
        report.failures = dict(getattr(error, "failures", {}))
    report.took = time.monotonic() - begun
    points.armed = False
    begun = time.monotonic()
    doing.close()
    report.closing = time.monotonic() - begun
    report.seen, report.struck = points.seen, points.struck
    let_go(report.error)
    note(notes, "done", rank)
    be_careless(case, report, notes)
    report.left = left_over(before, spared(case, rank, points))
    note(notes, "gone", rank)
    if waker is not None:
        waker.join(HANG_S)
    if rank == 0 or waker is not None:
        # One that holds the store, or woke another, stays until the others are done.
        await_notes(notes, "gone", others(case, rank, waker is not None))
    return report


def be_careless(case, report, notes):
    if case.careless == "thread":
        threading.Thread(target=time.sleep, args=(LEFT_S + 5,), daemon=True).start()
    if case.careless == "file":
        Path(f"{notes}/tmp/left").touch()
    if case.careless == "names" and report.error is not None:
        report.error.failures = {}


def let_go(error):
    """Of what its frames hold, as whoever handled it does."""
    todo, seen = [error], set()
    while todo:
        error = todo.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            todo += [error.__cause__, error.__context__]


_CLIENT = {"shardkeep-helper", "socket"}
_CONNECTING = {*_CLIENT, "native", "pipe", "anon_inode"}


def spared(case, rank, points):
    """What may stay for a while, and is not waited for: torch's client of a store that does not
    answer, or died while it was connected to, and gloo's attempt to connect to a rank that has
    stopped, or died meanwhile. And where the store is, the connections of one that has stopped."""
    if case.what == "kill":
        return _CONNECTING if points.connecting else _CLIENT if points.opening else set()
    if case.what not in ("stop", "wake", "pause", "cut"):
        return set()
    if not any(label.startswith("move") for label in points.seen):
        return _CONNECTING
    if case.store == "rank 0" and (case.victim == 0 or case.hosts):
        return _CLIENT
    return {"socket"} if case.store == "rank 0" and rank == 0 else set()


def others(case, rank, woken):
    lost = {case.victim} if case.what in ("kill", "stop") and not woken else set()
    return [other for other in range(case.world) if other != rank and other not in lost]


def note(notes, what, rank, text=""):
    path = f"{notes}/{what}-{rank}"
    with open(f"{path}.new", "w") as file:
        file.write(str(text))
    os.rename(f"{path}.new", path)


def await_notes(notes, what, ranks, limit_s=BOUND_S + LEFT_S):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if all(os.path.exists(f"{notes}/{what}-{rank}") for rank in ranks):
            return True
        time.sleep(0.01)
    return False


def wake_later(case, rank, notes):
    """The rank next to the one that stops wakes it."""
    if case.what not in ("wake", "pause") or rank != (case.victim + 1) % case.world:
        return None
    thread = threading.Thread(target=wake, args=(case, notes), name="trial-waker", daemon=True)
    thread.start()
    return thread


def wake(case, notes):
    pid = int(Path(f"{notes}/pid-{case.victim}").read_text())
    while not os.path.exists(f"{notes}/done-{case.victim}"):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T":
                break
        time.sleep(0.005)
    else:
        return
    if case.what == "pause":
        time.sleep(case.pause_s)
    else:
        await_notes(notes, "done", [r for r in range(case.world) if r != case.victim])
    os.kill(pid, signal.SIGCONT)


def join_host(case, rank, notes):
    """Enter the network of a host, and make the group over it; without hosts there is one."""
    if case.hosts:
        import hosts

        hosts.join(rank, case.world, case.hosts[rank], notes)


# --- what must hold


class Wrong(AssertionError):
    """Something is not as promised."""


@dataclass
class Result:
    """How a trial ended."""

    case: Case
    outcome: str
    """`lost` with an error on every other rank, `late` where all were done already, `well`."""
    slowest: float = 0.0
    """Of the ranks that were told of it."""
    lengths: tuple = ()
    """How many points each rank passed, and how long it took."""
    repeated: int = 0
    """How often it was tried before."""


@contextlib.contextmanager
def scratch_folder():
    """In memory where there is such a place."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="shardkeep-ranks-") as folder:
        yield Path(folder)


def run(server, case, folder):
    """One trial; raises `Wrong`."""
    root, notes = Path(folder) / "place", Path(folder) / "notes"
    root.mkdir()
    (notes / "tmp").mkdir(parents=True)
    earlier(case.verb, root, case.world)
    mark = f"{os.getpid()}-{random.getrandbits(64):x}"
    outcomes = server.outcomes(
        case.world, trial, case, str(root), str(notes), mark,
        timeout_s=HANG_S, init=not case.hosts, store=case.store,
    )  # fmt: skip
    try:
        result = check(case, outcomes, root)
        check_gone(mark)
        assert os.listdir(notes / "tmp") == [], os.listdir(notes / "tmp")
        return result
    except (AssertionError, CheckpointError) as error:
        told = "\n".join(
            f"rank {o.rank}: died {o.died}, hung {o.hung}, {o.error or o.value}\n{o.log}"
            for o in outcomes
        )
        raise Wrong(f"{case}\n{type(error).__name__}: {error}\n{told}") from error


def check(case, outcomes, root):
    for outcome in outcomes:
        assert not outcome.hung, f"rank {outcome.rank} hung"
        assert outcome.error is None, f"rank {outcome.rank}: {outcome.error}"
    victim = outcomes[case.victim]
    died = victim.died == signal.SIGKILL
    assert died or not victim.died
    told = {o.rank: o.value for o in outcomes if o.value is not None}
    assert len(told) == case.world - died
    errors = {rank: report.error for rank, report in told.items() if report.error is not None}
    for rank, report in told.items():
        woken = rank == case.victim and case.what in ("wake", "pause")
        limit = BOUND_S + (BOUND_S + LEFT_S if woken else 0.0)
        assert report.took < limit, f"rank {rank} took {report.took:.1f} s"
        assert report.closing < BOUND_S, f"rank {rank} took {report.closing:.1f} s to close"
        assert not report.left, f"rank {rank} has {report.left}"
    if not case.hosts and not only_the_last_verdict(case, told):
        # Those on one side of a cut cannot know what the others were told last.
        assert len(errors) in (0, len(told)), f"only {sorted(errors)} have an error"
    accused(case, errors)
    found = value_at(place_of(case.verb, root), case.world)
    check_truth(case, errors, found, told)
    check_files(case, errors, root)
    struck = died or victim.value.struck is not None
    outcome = "lost" if errors else "late" if struck else "well"
    waited = [report.took for rank, report in told.items() if rank != case.victim]
    lengths = tuple((len(report.seen), report.took) for report in told.values())
    return Result(case, outcome, max(waited), lengths)


def only_the_last_verdict(case, told):
    """Whether all have posted their last outcome, and the store was lost while they asked what came
    of it: some have read it then, and some have not."""
    if case.store != "rank 0" or case.victim != 0:
        return False
    seen = {tuple(report.seen) for rank, report in told.items() if rank}
    return len(seen) == 1 and max(seen)[-1:] == ("wait",)


def accused(case, errors):
    """Every error is one of ours, and names the rank at fault, and no other.

    But one that was stopped with the store in it, before others could join it, names itself and
    those who did not come: it cannot know what became of them.
    """
    for rank, error in errors.items():
        assert isinstance(error, RankError), f"rank {rank}: {error!r}"
        faulty = {case.victim}
        if case.hosts:
            # Whoever is on the other side of the cut is as good as gone.
            side = case.hosts[rank]
            faulty = {other for other in range(case.world) if case.hosts[other] != side}
        assert error.failures, f"rank {rank}: {error!r}"
        if rank == case.victim == 0 and case.store == "rank 0" and 0 in error.failures:
            absent = {one for one, why in error.failures.items() if why.startswith("absent")}
            faulty |= absent
        assert set(error.failures) <= faulty, f"rank {rank}: {error!r} {error.failures}"
        assert all(f"rank {one}" in str(error) for one in error.failures), f"rank {rank}: {error!r}"
        cause = str(error)
        if case.what == "raise":
            assert "disk on fire" in cause, cause
        else:
            words = ("no sign of life", "without a sign of life", "gone", "gave rank 0 up",
                     "did not join")  # fmt: skip
            assert any(word in cause for word in words), cause
    if case.what == "pause" and case.pause_s < 0.6 * SHORT.gone_s:
        assert not errors, f"a rank that stopped for a moment was given up: {errors}"


def check_truth(case, errors, found, told):
    """What ranks were told is so."""
    before = 0 if case.verb in ("save", "manager", "manager behind") else 1
    if case.verb in LOADS:
        assert found == 1, f"{found} is stored, and was only read"
        return
    if len(errors) < len(told):
        assert found == 2, f"ranks were told of a commit, and {found} is there"
    if not errors:
        return
    assert found in (before, 2), found
    victim = told.get(case.victim)
    if case.victim == 0 and victim is not None and victim.struck is not None:
        claimed = "commit, claimed" in victim.seen[: victim.struck]
        given_up = case.what == "wake" or "gave rank 0 up" in str(errors.get(0))
        assert claimed or not given_up or found == before, "committed after it was given up"
    if found == 2 and case.what != "raise":
        for rank, error in errors.items():
            text = str(error)
            # Who is sure that nothing was committed says so; who is not, says that too.
            assert "nothing was committed" not in text, f"rank {rank}: {error!r}"
            unsure = ("'commit'", "store host", "whole if it exists")
            sure = not any(words in text for words in unsure)
            sure = sure or (case.victim == 0 and "no sign of life" in text and rank and
                            "it was committing" not in text)  # fmt: skip
            assert not sure, f"rank {rank}: {error!r}"


def check_files(case, errors, root):
    """Survivors leave nothing behind; what a rank leaves that was killed, a collection removes."""
    places = [path for path in (root, *root.iterdir()) if (path / "data").is_dir()]
    texts = " ".join(map(str, errors.values()))
    in_commit = "commit" in texts or (case.victim == 0 and "gone" in texts)
    in_commit = in_commit or case.what == "raise"  # also after it was committed
    for place in places:
        store = LocalStore(place)
        if not in_commit:
            strangers = set(store.list("data")) - named(store)
            mine = {n for n in strangers if f"-r{case.victim:05}-" in n}
            if case.victim == 0:
                mine |= {name for name in strangers if "-index" in name}
            if case.what in ("kill", "stop"):
                strangers -= mine
            assert not strangers, f"left in {place}: {strangers}"
            if case.victim or case.what not in ("kill", "stop"):
                leases = set(store.list()) - {"data", "checkpoint.json"}
                assert not leases, f"left in {place}: {leases}"
        collect_garbage(store, stale_s=0)
        assert set(store.list("data")) == named(store)
        assert set(store.list()) <= {"data", "checkpoint.json"}
    pins = root / ".shardkeep" / "pins"
    if pins.is_dir() and (case.victim or case.what not in ("kill", "stop")):
        assert os.listdir(pins) == [], "a pin is left"


def named(store):
    try:
        record = read_record(store)
    except CheckpointNotFoundError:
        return set()
    return {Path(row.name).name for row in (record.index, *record.files)}


def check_gone(mark):
    """No process of the trial is left; a writer process sees that its program is gone."""
    deadline = time.monotonic() + LEFT_S
    while left := list(marked(mark)):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.02)


def marked(mark):
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    yield path.name


# --- which


def well(verb):
    """Nothing happens."""
    return Case(verb, "raise", at=-1)


def lengths_of(verbs=VERBS):
    """Trials that tell how many points there are."""
    return [(verb, well(verb)) for verb in verbs]


def draw(chance, lengths):
    """Any trial. `lengths` is how many points a victim passes, and how long it takes, for each verb
    on the coordinator and on others."""
    verb = chance.choice(VERBS)
    world = chance.choice((2, 3, 4))
    victim = chance.randrange(world) if chance.random() < 0.7 else 0
    what = chance.choice(WHATS)
    points, span = lengths[verb, victim == 0]
    at = chance.randrange(points)
    if what in ("stop", "wake") and victim == 0 and verb in SAVES and chance.random() < 0.2:
        at = "commit, before the claim"
    elif what != "raise" and chance.random() < 0.4:
        at = chance.uniform(0, 0.7 * span)
    pause = chance.choice((chance.uniform(0.05, 0.5), chance.uniform(0.6, 1.6))) * SHORT.gone_s
    store = chance.choice(("harness", "rank 0"))
    return Case(verb, what, world, victim, at, pause, store)

"""One rank fails, dies, stops or disagrees: every other rank says which and why, and in time."""

from __future__ import annotations

import os
import signal
import time
import traceback

import numpy as np
import pytest

import shardkeep
from shardkeep import PlanError, RankError, ShardedArray
from shardkeep.coordination import Patience
from shardkeep.engine import passing, read_once

WORLD = 4
SHORT = Patience(beat_s=0.25, gone_s=2.0, linger_s=1.0)
LONG = Patience(beat_s=0.25, gone_s=30.0, linger_s=1.0)
"""Where nobody is lost, so that a busy machine is not taken for a dead one."""
BOUND_S = 12.0
"""For what takes gone_s in a quiet machine; ours may be busy."""

SAVE_STEPS = ["set up", "set up", "see storage", "plan", "plan", "compare", "compare"]
SAVE_STEPS += ["write", "commit", "commit"]
AGAIN_STEPS = ["propose plan" if step == "plan" else step for step in SAVE_STEPS]
"""Of a save that uses the plan of the last one."""
LOAD_STEPS = ["set up", "set up", "open", "open on all ranks", "plan", "plan"]
LOAD_STEPS += ["check ties", "read values", "share reads", "share reads"]
LOAD_STEPS += ["pass blocks on", "read", "fill"]
MESSAGE_STEPS = [*LOAD_STEPS[:-2], "take blocks", "read", "fill"]
"""Of a load by ranks that do not see each other's memory."""
PASS, READ = LOAD_STEPS.index("pass blocks on"), LOAD_STEPS.index("read")
WRITE, COMMIT = SAVE_STEPS.index("write"), SAVE_STEPS.index("commit")
STEPS = {"save": SAVE_STEPS, "again": AGAIN_STEPS, "load": LOAD_STEPS, "messages": MESSAGE_STEPS}
LOADS = ("load", "messages")
JOINS = {(verb, step) for verb in ("save", "again") for step in (1, 4, 6, 9)}
JOINS |= {(verb, step) for verb in LOADS for step in (1, 2, 5, 9)}
"""Steps in which only rank 0 has work."""


# --- what ranks do


def coordinator(fault=None, timeout_s=60.0, patience=LONG):
    """Ranks of the default group, with something done in a step, a move or a wait."""
    from shardkeep.adapters.torch_groups import TorchRanks

    class Faulty(TorchRanks):
        steps = -1
        seen = ()
        moves = ()

        def _outcome(self, phase, work, tell=None):
            self.steps += 1
            self.seen = (*self.seen, phase)

            def faulty_work():
                if fault is not None:
                    fault(("work", self.steps))
                return work()

            return super()._outcome(phase, faulty_work, tell)

        def _verdict(self, call, step, phase, caught, word):
            if fault is not None:
                post = self._control.add

                def add(key, amount):
                    total = post(key, amount)
                    if key.endswith("/n") and amount:
                        self._control.add = post
                        fault(("wait", self.steps))
                    return total

                self._control.add = add
            return super()._verdict(call, step, phase, caught, word)

        def _move(self, phase, work):
            self.moves = (*self.moves, self.steps)
            if fault is not None:
                fault(("move", self.steps))
            return super()._move(phase, work)

    ranks = Faulty(patience=patience)
    given, fault = fault, None
    for _ in range(2):  # connecting may take long, as names are looked up; then all are connected
        ranks.agree("warm up", lambda: None)
    fault = given
    ranks._drop_bulk()
    ranks.timeout_s, ranks.steps, ranks.seen = timeout_s, -1, ()
    return ranks


def state(rank, value, world=WORLD):
    local = np.full((3, 5), 100 * value + rank)
    return {
        "model": {"w": ShardedArray.from_local(local, (3 * rank, 0), (3 * world, 5))},
        "step": value,
    }


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.held = lambda: b

    def __reduce__(self):
        raise TypeError("no pickles")


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


def do(what):
    if what == "raise":
        raise ValueError("disk on fire")
    if what == "unpicklable":
        raise Unpicklable("cannot travel", 1)
    if what == "no text":
        raise NoText
    if what == "huge":
        raise ValueError("x" * 10_000_000)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "exit":
        raise SystemExit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def attempt(call):
    """What a call raised, and how long it took."""
    begun = time.monotonic()
    error = None
    try:
        call()
    except BaseException as caught:
        traceback.print_exc()
        error = caught
    return error, time.monotonic() - begun


def one_call(rank, where, verb, victim, at, what):
    """Fail on `victim` at a point; the error of this rank and its text."""
    armed = []
    ranks = coordinator(
        lambda point: do(what) if armed and rank == victim and point == at else None,
        patience=SHORT if what in ("kill", "stop") else LONG,
    )
    if verb == "again":
        shardkeep.save(state(rank, 1), where, overwrite=True, process_group=ranks)
        ranks.steps = -1
    armed.append(True)
    error, took = attempt(lambda: call(verb, rank, where, ranks))
    return error, getattr(error, "failures", {}), took


def call(verb, rank, where, ranks):
    passing.STALL_S = 1.0
    if verb == "messages":
        read_once.make_window = lambda budget: None
    if verb in LOADS:
        shardkeep.load(state(rank, 0), where, process_group=ranks, read_once=True)
    else:
        shardkeep.save(state(rank, 2), where, overwrite=True, process_group=ranks)


def every_step(rank, where, verb, number, whats):
    """Fail at each step in turn, on changing ranks; the same group goes on."""
    plan = [
        (step, 0 if (verb, step) in JOINS else (step + turn) % WORLD, what)
        for step in range(number)
        for turn, what in enumerate(whats)
    ]
    now = []

    def fault(point):
        step, victim, what = now[0]
        if rank == victim and point == ("work", step):
            do(what)

    now[:] = [(-1, -1, "")]
    ranks = coordinator(fault)
    results = []
    if verb == "again":
        shardkeep.save(state(rank, 1), where, overwrite=True, process_group=ranks)
    for case in plan:
        if verb == "save":
            ranks.memory.clear()
        now[:] = [case]
        ranks.steps = -1
        error, took = attempt(lambda: call(verb, rank, where, ranks))
        results.append((case, type(error).__name__, str(error)[:300], took))
    now[:] = [(-1, -1, "")]
    if verb == "save":
        ranks.memory.clear()
    ranks.seen, ranks.moves, ranks.steps = (), (), -1
    target = state(rank, 0)
    if verb not in LOADS:
        call(verb, rank, where, ranks)
    shardkeep.load(target, where, process_group=ranks, read_once=True)
    held = int(target["model"]["w"].local_shards[0].array[0, 0])
    return results, held, ranks.seen, ranks.moves


# --- what must hold


def earlier(where):
    """A whole checkpoint that a failed save must not touch."""
    whole = np.concatenate([state(r, 1)["model"]["w"].local_shards[0].array for r in range(WORLD)])
    shardkeep.save({"model": {"w": whole}, "step": 1}, where)


def check_whole(where, value=1):
    assert shardkeep.verify(where).ok
    with shardkeep.open(where) as ckpt:
        assert ckpt["step"] == value
        assert ckpt["model.w"][0, 0] == 100 * value


def check_others(outcomes, victim, cause, *, kind=RankError):
    """All but the victim raised one and the same error, which names it."""
    told = [o for o in outcomes if o.rank != victim]
    for outcome in told:
        assert outcome.ok, outcome.log
        error, failures, took = outcome.value
        assert isinstance(error, kind), error
        assert victim in failures, error
        assert cause in str(error)
        assert took < BOUND_S
    assert len({str(outcome.value[0]) for outcome in told}) == 1


@pytest.mark.parametrize(("verb", "steps"), STEPS.items())
def test_an_error_in_any_step_is_the_same_error_everywhere(processes, tmp_path, verb, steps):
    earlier(tmp_path)
    whats = ["raise", "unpicklable", "interrupt"]
    results = processes.run(WORLD, every_step, str(tmp_path), verb, len(steps), whats)
    for number, ((step, victim, what), *_) in enumerate(results[0][0]):
        told = [result[0][number] for result in results]
        assert {case for case, *_ in told} == {(step, victim, what)}
        if what == "interrupt":
            assert told[victim][1] == "KeyboardInterrupt"
            told.pop(victim)
        assert {kind for _, kind, _, _ in told} == {"RankError"}, told
        assert len({text for _, _, text, _ in told}) == 1, told
        cause = {"raise": "ValueError: disk on fire", "unpicklable": "Unpicklable: cannot travel"}
        assert f"rank {victim}: {cause.get(what, 'KeyboardInterrupt')}" in told[0][2]
        assert max(took for *_, took in told) < BOUND_S
    expected = 1 if verb in LOADS else 2
    assert [result[1] for result in results] == [100 * expected + rank for rank in range(WORLD)]
    assert list(results[0][2])[: len(steps)] == steps
    moves = {(verb, m) for m in results[0][3] if m < len(steps)}
    assert moves == {(of, step) for of, step in MOVES if of == verb}
    check_whole(tmp_path, expected)


@pytest.mark.parametrize("what", ["exit", "no text", "huge"])
def test_other_errors(processes, tmp_path, what):
    earlier(tmp_path)
    outcomes = processes.outcomes(
        WORLD, one_call, str(tmp_path), "save", 2, ("work", WRITE), what, timeout_s=30
    )
    cause = {"exit": "SystemExit: 3", "no text": "NoText: <no text>", "huge": "xxx"}[what]
    check_others(outcomes, 2, cause)
    error = outcomes[2].value[0]
    assert isinstance(error, SystemExit) == (what == "exit")
    assert len(str(outcomes[0].value[0])) < 100_000
    check_whole(tmp_path)


MOVES = {("save", step) for step in (0, 3, 4, 5, COMMIT)}
MOVES |= {(verb, step) for verb in LOADS for step in (0, 4, 8, 9)} | {("messages", PASS)}
MOVES |= {("again", step) for step in (0, 3, 5, COMMIT)}
"""Steps after which bytes move; small answers travel with the verdict."""


def points(verb, steps):
    """Where a rank can be lost: at work, awaiting a verdict, moving bytes."""
    for step in range(PASS if verb == "messages" else 0, len(steps)):
        yield "work", step
        yield "wait", step
        if (verb, step) in MOVES:
            yield "move", step


QUICK = {
    ("save", ("work", WRITE), "kill", 2),
    ("save", ("wait", 3), "kill", 2),
    ("save", ("move", 3), "stop", 2),
    ("save", ("work", 4), "kill", 0),
    ("save", ("work", WRITE), "stop", 2),
    ("again", ("move", 3), "kill", 2),
    ("again", ("work", 5), "stop", 2),
    ("load", ("work", READ), "kill", 2),
    ("load", ("work", READ), "stop", 0),
    ("load", ("move", 0), "kill", 2),
    ("load", ("work", PASS), "kill", 2),
    ("messages", ("move", PASS), "kill", 2),
}
"""These run in every check, the others with --all."""

LOSSES = [
    pytest.param(
        verb,
        at,
        what,
        victim,
        marks=() if (verb, at, what, victim) in QUICK else pytest.mark.slow,
        id=f"{verb}-{at[0]}-{at[1]}-{what}-{victim}",
    )
    for verb, steps in STEPS.items()
    for at in points(verb, steps)
    for what in ("kill", "stop")
    for victim in (0, 2)
]
assert len([param for param in LOSSES if not param.marks]) == len(QUICK)


@pytest.mark.parametrize(("verb", "at", "what", "victim"), LOSSES)
def test_a_rank_is_lost(processes, tmp_path, verb, at, what, victim):
    earlier(tmp_path)
    outcomes = processes.outcomes(
        WORLD, one_call, str(tmp_path), verb, victim, at, what, timeout_s=30
    )
    assert outcomes[victim].died == signal.SIGKILL
    if at == ("wait", len(STEPS[verb]) - 1) and victim != 0:
        # All ranks had told that they are done: the others are right to return.
        assert all(o.ok and o.value[0] is None for o in outcomes if o.rank != victim)
    else:
        check_others(outcomes, victim, "no sign of life")
    # Lost after the commit, or beside it: the others cannot know, and what is there is whole.
    committed = verb not in LOADS and at[1] == COMMIT + 1 and (at[0] == "wait" or victim)
    check_whole(tmp_path, 2 if committed else 1)


def saving_with(rank, where, options, value):
    """A save with options of its own on one rank."""
    ranks = coordinator()
    mine = {"overwrite": True, **options.get(rank, {})}
    where = mine.pop("where", where)
    version = mine.pop("version", None)
    if version is not None:
        shardkeep.__version__ = version
    what = value.get(rank, state(rank, 2))
    error, took = attempt(lambda: shardkeep.save(what, where, process_group=ranks, **mine))
    return error, getattr(error, "failures", {}), took


def loading_with(rank, where, options, value):
    ranks = coordinator()
    mine = {**options.get(rank, {})}
    where = mine.pop("where", where)
    version = mine.pop("version", None)
    if version is not None:
        shardkeep.__version__ = version
    what = value.get(rank, state(rank, 0))
    error, took = attempt(lambda: shardkeep.load(what, where, process_group=ranks, **mine))
    return error, getattr(error, "failures", {}), took


DIFFERENT = {
    "path": ({2: {"where": "/elsewhere"}}, {}, PlanError, "checkpoint_id"),
    "version": ({2: {"version": "9.9"}}, {}, PlanError, "version is '0.1.0' on rank 0 and '9.9'"),
    "option": ({2: {"allow_pickle": True}}, {}, PlanError, "allow_pickle"),
}


@pytest.mark.parametrize("work", [saving_with, loading_with])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_were_asked_for_different_things(processes, tmp_path, work, what):
    earlier(tmp_path)
    options, value, kind, text = DIFFERENT[what]
    values = processes.run(WORLD, work, str(tmp_path), options, value)
    assert len({str(error) for error, *_ in values}) == 1
    for error, _, took in values:
        assert isinstance(error, kind)
        assert text in str(error)
        assert "rank 2" in str(error)
        assert took < BOUND_S
    check_whole(tmp_path)


def test_ranks_with_different_structures(processes, tmp_path):
    earlier(tmp_path)
    other = {2: {"model": [np.ones(3)], "step": 2}}
    values = processes.run(WORLD, saving_with, str(tmp_path), {}, other)
    assert len({str(error) for error, *_ in values}) == 1
    assert all(isinstance(error, PlanError) for error, *_ in values)
    assert "model" in str(values[0][0])
    other = {2: {"model": {"w": np.zeros((1, 1))}, "step": 0}}
    values = processes.run(WORLD, loading_with, str(tmp_path), {}, other)
    assert len({str(error) for error, *_ in values}) == 1
    assert all(isinstance(error, shardkeep.MismatchError) for error, *_ in values)
    check_whole(tmp_path)


def test_what_one_rank_refuses_before_the_first_step(processes, tmp_path):
    earlier(tmp_path)
    outcomes = processes.outcomes(WORLD, saving_with, str(tmp_path), {}, {2: [1, 2]})
    check_others(outcomes, 2, "save a mapping", kind=shardkeep.UnsupportedValueError)
    outcomes = processes.outcomes(WORLD, loading_with, str(tmp_path), {0: {"cast": "maybe"}}, {})
    check_others(outcomes, 0, "maybe")
    check_whole(tmp_path)


# --- slow, stuck, stopped, late


def slow_rank(rank, where, timeout_s, pause_s, progress):
    """Rank 2 takes long to write; with or without progress."""
    ranks = None

    def fault(point):
        if rank == 2 and point == ("work", WRITE):
            end = time.monotonic() + pause_s
            while time.monotonic() < end:
                time.sleep(0.1)
                if progress:
                    ranks.advance(1)

    ranks = coordinator(fault, timeout_s)
    error, took = attempt(
        lambda: shardkeep.save(state(rank, 2), where, overwrite=True, process_group=ranks)
    )
    return error, getattr(error, "failures", {}), took


def test_a_slow_rank_that_makes_progress_is_not_failed(processes, tmp_path):
    earlier(tmp_path)
    values = processes.run(WORLD, slow_rank, str(tmp_path), 1.0, 3.5, True)
    assert [error for error, *_ in values] == [None] * WORLD
    assert min(took for *_, took in values) > 3
    check_whole(tmp_path, 2)


def test_a_rank_without_progress_is_stuck(processes, tmp_path):
    earlier(tmp_path)
    outcomes = processes.outcomes(WORLD, slow_rank, str(tmp_path), 1.0, 4.0, False)
    check_others(outcomes, 2, "without progress for 1 s in 'write'")
    assert min(o.value[2] for o in outcomes if o.rank != 2) < 3.5
    # The stuck one learns of the verdict when it comes round.
    assert str(outcomes[2].value[0]) == str(outcomes[0].value[0])
    check_whole(tmp_path)


def late_rank(rank, where, pause_s):
    ranks = coordinator(timeout_s=1.0)
    if rank == 2:
        time.sleep(pause_s)
    error, took = attempt(
        lambda: shardkeep.save(state(rank, 2), where, overwrite=True, process_group=ranks)
    )
    return error, getattr(error, "failures", {}), took


def test_a_rank_that_never_comes(processes, tmp_path):
    earlier(tmp_path)
    outcomes = processes.outcomes(WORLD, late_rank, str(tmp_path), 4.0)
    check_others(outcomes, 2, "did not join the others in 'set up' within 1 s")
    check_whole(tmp_path)


def stopped_coordinator(rank, where, store):
    """Rank 0 stops just before its commit; the last rank wakes it once all have given up."""
    import torch.distributed as dist

    ranks = coordinator(patience=SHORT)
    pids = [None] * WORLD
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        real = ranks.may_commit

        def stop_first():
            os.kill(os.getpid(), signal.SIGSTOP)
            real()

        ranks.may_commit = stop_first
    error, took = attempt(
        lambda: shardkeep.save(state(rank, 2), where, overwrite=True, process_group=ranks)
    )
    if rank == WORLD - 1:
        time.sleep(1.0)
        os.kill(pids[0], signal.SIGCONT)
    if rank:
        time.sleep(2.0)  # rank 0 finds a store and peers, and still must not commit
    return error, getattr(error, "failures", {}), took


@pytest.mark.parametrize("store", ["harness", "rank 0"])
def test_a_coordinator_that_was_given_up_does_not_commit(processes, tmp_path, store):
    earlier(tmp_path)
    outcomes = processes.outcomes(
        WORLD, stopped_coordinator, str(tmp_path), store, timeout_s=30, store=store
    )
    check_others(outcomes, 0, "no sign of life" if store == "harness" else "store host")
    assert outcomes[0].ok, outcomes[0].log
    assert isinstance(outcomes[0].value[0], RankError)
    check_whole(tmp_path)
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) >= 3


def test_the_host_of_the_store_dies(processes, tmp_path):
    earlier(tmp_path)
    outcomes = processes.outcomes(
        WORLD,
        one_call,
        str(tmp_path),
        "save",
        0,
        ("work", WRITE),
        "kill",
        timeout_s=30,
        store="rank 0",
    )
    check_others(outcomes, 0, "rank 0 (store host) is gone")
    check_whole(tmp_path)


def locked_store(rank, folder):
    """The store of the job is a file; rank 1 stops while it has locked it, and rank 2 fails."""
    import fcntl

    import torch.distributed as dist

    path = f"{folder}/store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    ranks = coordinator(patience=Patience(beat_s=0.25, gone_s=1.0, linger_s=0.2))

    def await_path(path):
        while not os.path.exists(path):
            time.sleep(0.01)

    def work():
        os.mkdir(f"{folder}/{rank}")
        if rank == 1:
            for other in (0, 2):
                await_path(f"{folder}/{other}")
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.mkdir(f"{folder}/locked")
                os.kill(os.getpid(), signal.SIGSTOP)
        await_path(f"{folder}/locked")
        if rank == 2:
            raise ValueError("disk on fire")

    def together():
        with ranks.call("save"):
            ranks.agree("first", lambda: None)
            ranks.agree("second", work)

    error, took = attempt(together)
    begun = time.monotonic()
    ranks.close()
    return error, took, time.monotonic() - begun


def test_a_store_that_a_stopped_rank_has_locked(processes, tmp_path):
    outcomes = processes.outcomes(3, locked_store, str(tmp_path), timeout_s=20, init=False)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.log
        error, took, closing = outcome.value
        assert isinstance(error, RankError), error
        assert "the job's store does not answer" in str(error)
        assert not error.failures  # nobody can tell whose lock it is
        assert took < BOUND_S
        assert closing < BOUND_S

"""Coordination among threads: agreement, heartbeats, patience, and the errors that travel."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
import pytest

from shardkeep import (
    CheckpointNotFoundError,
    CorruptionError,
    MismatchError,
    PlanError,
    RankError,
    SingleProcess,
    StorageError,
    ThreadRanks,
)
from shardkeep.coordination import Patience, check_same, encode_asked
from shardkeep.failures import MAX_TEXT, Failure, describe, merge_failures, revive
from shardkeep.heartbeats import Beat, Heart, Watch, beat_key, default_timeout_s
from shardkeep.planes import FAILED, Helper, SharedDict, ThreadBulk

QUICK = Patience(beat_s=0.05, gone_s=0.6, linger_s=0.5)


def outcomes(world_size, work, timeout_s=30.0, patience=QUICK):
    return ThreadRanks(world_size, timeout_s, patience).outcomes(work)


# --- steps


def test_bytes_go_to_rank_0_and_back():
    def work(ranks):
        told = []

        def join(parts):
            told.extend(parts)
            return [part * 2 for part in parts]

        with ranks.call("x"):
            mine = ranks.gather_scatter("double", lambda: bytes([ranks.rank]), join)
            word = ranks.lead("word", lambda: b"word of %d" % ranks.rank)
            ranks.agree("nothing", lambda: None)
        return mine, word, told

    for rank, (mine, word, told) in enumerate(outcomes(3, work)):
        assert mine == bytes([rank, rank])
        assert word == b"word of 0"
        assert told == ([b"\0", b"\1", b"\2"] if rank == 0 else [])


def test_one_process_agrees_with_itself():
    alone = SingleProcess()
    with alone.call("x"):
        assert alone.gather_scatter("y", lambda: b"a", lambda parts: parts) == b"a"
        assert alone.lead("y", lambda: b"b") == b"b"
        alone.advance(1)
        alone.may_commit()
        with pytest.raises(KeyError):
            alone.agree("z", lambda: {}["a"])
    alone.close()


def test_a_group_goes_on_after_an_error():
    def work(ranks):
        told = []
        for turn in range(6):
            try:
                ranks.agree("turn", lambda turn=turn: 1 / (turn - ranks.rank))
            except RankError as error:
                told.append((turn, list(error.failures)))
            assert ranks.lead("word", lambda turn=turn: b"%d" % turn) == b"%d" % turn
        return told

    assert outcomes(3, work) == [[(0, [0]), (1, [1]), (2, [2])]] * 3


def test_a_driver_may_try_again_inside_one_call():
    def work(ranks):
        def fail():
            if ranks.rank == 1:
                raise StorageError("replaced", transient=True)

        with ranks.call("load"):
            for _ in range(3):
                with pytest.raises(StorageError) as caught:
                    ranks.agree("read", fail)
                assert caught.value.transient
                assert list(caught.value.failures) == [1]
            return ranks.lead("word", lambda: b"done")

    assert outcomes(3, work) == [b"done"] * 3


def test_all_failures_are_told():
    def work(ranks):
        def fail():
            if ranks.rank != 1:
                raise MismatchError(f"rank {ranks.rank}", missing=[f"m{ranks.rank}", "both"])

        ranks.agree("plan", fail)

    errors = outcomes(3, work)
    assert {str(error) for error in errors} == {"rank 0: rank 0\nrank 2: rank 2 [rank 0, 2]"}
    assert all(error.missing == ("both", "m0", "m2") for error in errors)
    assert sorted(errors[0].failures) == [0, 2]


@pytest.mark.parametrize("where", ["between", "waiting"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_leaves_outside_of_any_step_is_named(where, victim):
    def work(ranks):
        with ranks.call("save"):
            ranks.agree("first", lambda: None)
            if ranks.rank == victim:
                if where == "waiting":

                    def interrupt(*args):
                        raise KeyboardInterrupt

                    ranks._control = Interrupted(ranks._control, interrupt)
                else:
                    raise KeyboardInterrupt
            if ranks.rank == (victim + 1) % 3 and where == "waiting":
                ranks.agree("second", lambda: time.sleep(0.3))
            ranks.agree("second", lambda: None)

    class Interrupted:
        def __init__(self, control, interrupt):
            self.control = control
            self.get = self.count = interrupt

        def __getattr__(self, name):
            return getattr(self.control, name)

    errors = outcomes(3, work, timeout_s=5)
    assert isinstance(errors.pop(victim), KeyboardInterrupt)
    assert all(isinstance(error, RankError) for error in errors), errors
    assert all(list(error.failures) == [victim] for error in errors)
    assert "KeyboardInterrupt" in str(errors[0])


def test_calls_that_end_leave_no_keys_and_no_threads():
    kept = []

    def work(ranks):
        for _ in range(5):
            ranks.gather_scatter("x", lambda: b"a", lambda parts: parts)
        kept.append(ranks._control)
        ranks.agree("last", lambda: None)
        return len(kept[0]._values), len(kept[0]._sums)

    before = threading.active_count()
    sizes = outcomes(3, work)
    assert max(size for pair in sizes for size in pair) < 20
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before  # threads of earlier tests may have ended


def test_ranks_must_be_asked_for_the_same():
    same = encode_asked({"a": 1, "b": [None, "x"]})
    check_same([same, same], "saves")
    with pytest.raises(PlanError, match="different saves: a is 1 on rank 0 and 2 on rank 1"):
        check_same([same, encode_asked({"a": 2, "b": [None, "x"]})], "saves")
    with pytest.raises(PlanError, match="c is None on rank 0 and 3 on rank 1"):
        check_same([same, encode_asked({"a": 1, "b": [None, "x"], "c": 3})], "saves")


# --- the commit


def stand_still(ranks, until):
    """No sign of life, and no step further, as of a process that is stopped."""

    def stopped(beat):
        raise RuntimeError("stopped")

    post, ranks._heart._post = ranks._heart._post, stopped
    assert until.wait(20)
    ranks._heart._post = post


def note_standstill(ranks, lapse_s=0.9 * QUICK.gone_s):
    """As if no sign of life had been given for so long, until now."""
    ranks._heart._silence.longest = lapse_s


class Losing:
    """A control plane that does not answer this rank when it asks for a verdict."""

    def __init__(self, control, host=0):
        self._control = control
        self._failures = {} if host is None else {host: "gone: store host"}

    def __getattr__(self, name):
        return getattr(self._control, name)

    def get(self, key, timeout_s):
        raise RankError("the store is gone", failures=self._failures)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", ["at work", "moving bytes"])
def test_a_rank_that_stood_still_learns_why_it_was_left(victim, where):
    """Also where the others have closed the group since: it neither waits for them, nor accuses
    them of never having come."""
    closed, told = [threading.Event() for _ in range(3)], {}
    all_closed = threading.Event()

    def work(ranks):
        def stop(at):
            if ranks.rank == victim and where == at:
                stand_still(ranks, all_closed)

        move = ranks._move
        ranks._move = lambda *args: (stop("moving bytes"), move(*args))[1]
        begun = time.monotonic()
        try:
            with ranks.call("save"):
                ranks.agree("first", lambda: None)
                ranks.agree("step", lambda: stop("at work"))
                ranks.gather_scatter("deal", lambda: b"", lambda told: [b"0", b"1", b"2"])
                ranks.agree("last", lambda: None)
        except RankError as error:
            told[ranks.rank] = error, time.monotonic() - begun
        ranks.close()
        closed[ranks.rank].set()
        if all(closed[rank].is_set() for rank in range(3) if rank != victim):
            all_closed.set()

    outcomes(3, work, timeout_s=8.0)
    assert sorted(told) == [0, 1, 2]
    for error, took in told.values():
        assert set(error.failures) == {victim}, error
        assert took < 6, error


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("others", ["gone", "in another", "unwinding", "there before"])
def test_a_rank_that_stood_still_ends_no_call_that_the_others_left(victim, others):
    """Not even where it finds all it needs when it wakes, as others who wait to be connected, in a
    call that ends with that; wherever they are by then; nor where they were seen to be there after
    it had stood still before, and for longer."""
    came, told, wake = [threading.Event() for _ in range(3)], {}, threading.Event()
    ended, left = threading.Event(), threading.Barrier(2, wake.set)

    def work(ranks):
        connect, is_victim = ranks._connect, ranks.rank == victim

        def meet(name):
            if is_victim:
                stand_still(ranks, wake)
            came[ranks.rank].set()
            assert all(one.wait(20) for one in came)
            return connect(name)

        def stand_still_before():
            if is_victim and others == "there before":
                note_standstill(ranks, 10 * QUICK.gone_s)

        ranks._connect = meet
        begun = time.monotonic()
        with contextlib.ExitStack() as after:
            if is_victim:
                after.callback(ended.set)
            caught = after.enter_context(pytest.raises(RankError))
            with ranks.call("first"):
                try:
                    ranks.agree("step", stand_still_before)
                finally:
                    if others == "unwinding" and not is_victim:
                        left.wait(20)
                        assert ended.wait(20)
        told[ranks.rank] = caught.value, time.monotonic() - begun
        if not is_victim and others != "unwinding":
            with ranks.call("second") if others == "in another" else contextlib.nullcontext():
                left.wait(20)
                assert came[victim].wait(20)
                time.sleep(2 * QUICK.look_s)

    assert outcomes(3, work, timeout_s=8.0) == [None] * 3
    for error, took in told.values():
        assert set(error.failures) == {victim}, error
        assert "no sign of life" in str(error)
        assert took < 6, error


@pytest.mark.parametrize("at_fault", [0, 1])
def test_a_call_that_others_left_is_not_followed_by_another(at_fault):
    """One has all it needs before it hears that another was given up: it is told in its next call,
    and does not wait there for those who got the error."""

    def work(ranks):
        if ranks.rank == 0:
            with contextlib.suppress(RankError), ranks.call("first"):
                ranks.agree("step", lambda: None)
                raise RankError("gone", failures={at_fault: "gone: no sign of life"})
            return 0.0
        ranks.agree("first", lambda: None)
        begun = time.monotonic()
        with pytest.raises(RankError) as caught:
            ranks.agree("second", lambda: None)
        assert dict(caught.value.failures) == {at_fault: "gone: no sign of life"}
        return time.monotonic() - begun

    took = outcomes(2, work, timeout_s=8.0)
    assert all(isinstance(one, float) and one < 4 for one in took), took


def test_an_error_after_a_call_does_not_end_the_next():
    """Only where ranks were given up; one that failed alone, after all that ranks do together, may
    go on with the others."""

    def work(ranks):
        with contextlib.suppress(ValueError), ranks.call("first"):
            ranks.agree("step", lambda: None)
            if ranks.rank == 0:
                raise ValueError("in a progress callback")
        if ranks.rank == 0:
            time.sleep(3 * QUICK.look_s)
        ranks.agree("second", lambda: None)

    assert outcomes(2, work, timeout_s=8.0) == [None, None]


def test_who_loses_the_plane_says_why_it_left():
    """The host of the store was stopped: it wakes, and reads that it was given up."""
    lost = RankError("rank 0 (store host) is gone", failures={0: "gone: store host"})

    def work(ranks):
        with ranks.call("save"):
            if ranks.rank == 1:
                raise lost
            ranks.agree("step", lambda: None)

    for error in outcomes(2, work):
        assert dict(error.failures) == {0: "gone: store host"}


def test_a_coordinator_that_stood_still_asks_who_is_there():
    """It held the store: another posted its outcome, got no answer, and has left meanwhile."""

    def work(ranks):
        def stand_still():
            if ranks.rank == 0:
                note_standstill(ranks)

        with ranks.call("load"):
            ranks.agree("first", lambda: None)
            if ranks.rank == 1:
                ranks._control = Losing(ranks._control)
            ranks.agree("last", stand_still)

    for error in outcomes(2, work):
        assert isinstance(error, RankError)
        assert dict(error.failures) == {0: "gone: store host"}


def test_a_coordinator_that_stands_still_again_asks_again():
    """That all were there after the first time says nothing of the second, however short it was."""

    def work(ranks):
        def stand_still(lapse_s):
            if ranks.rank == 0:
                note_standstill(ranks, lapse_s)

        with ranks.call("load"):
            ranks.agree("first", lambda: stand_still(QUICK.gone_s))
            if ranks.rank == 1:
                ranks._control = Losing(ranks._control)
            ranks.agree("last", lambda: stand_still(0.9 * QUICK.gone_s))

    for error in outcomes(2, work):
        assert isinstance(error, RankError)
        assert dict(error.failures) == {0: "gone: store host"}


@pytest.mark.parametrize("host", [0, None])
def test_a_coordinator_that_stood_still_knows_who_is_about_to_leave(host):
    """Hearts beat until their ranks are out of the call, which may take long. Also where nobody can
    tell with whom the plane was lost, as where it is a file that one has locked."""
    leaving, asked = threading.Event(), threading.Event()

    def work(ranks):
        def stand_still():
            if ranks.rank == 0:
                assert leaving.wait(20)
                note_standstill(ranks)

        with ranks.call("load"):
            ranks.agree("first", lambda: None)
            if ranks.rank == 1:
                ranks._control = Losing(ranks._control, host)
            try:
                ranks.agree("last", stand_still)
            finally:
                if ranks.rank == 0:
                    asked.set()
                else:
                    leaving.set()
                    assert asked.wait(20)

    for rank, error in enumerate(outcomes(2, work)):
        assert isinstance(error, RankError)
        assert "the store is gone" in str(error) if host is None else 0 in error.failures, rank


def test_a_coordinator_that_stood_still_hears_of_nobody_who_is_in_another_call():
    """It could not say why it left: what it says now is of what it does now."""

    def work(ranks):
        def stand_still():
            if ranks.rank == 0:
                note_standstill(ranks)

        with ranks.call("load"):
            ranks.agree("first", lambda: None)
            if ranks.rank == 1:
                ranks._control = Losing(ranks._control)
                stop = ranks._heart.stop
                ranks._heart.stop = lambda left: stop([])
            ranks.agree("last", stand_still)

    first, second = outcomes(2, work)
    assert isinstance(second, RankError)
    assert isinstance(first, RankError)
    assert "ended the call" in first.failures[1]


@pytest.mark.parametrize("stood", [True, False])
def test_a_coordinator_that_stood_still_names_itself_beside_who_never_came(stood):
    """With the store in its process they could not even join the call to say why they left."""

    def work(ranks):
        if ranks.rank == 1:
            return
        with ranks.call("load"):
            ranks.agree("first", lambda: note_standstill(ranks) if stood else None)

    error, _ = outcomes(2, work, timeout_s=1.0)
    assert isinstance(error, RankError)
    assert list(error.failures) == ([0, 1] if stood else [1])
    assert ("without a sign of life" in str(error)) == stood


def test_a_rank_that_took_long_to_enter_a_call_gave_no_sign_of_life_meanwhile():
    """Others, who need the store that its process has, may have given it up before it joined."""

    def work(ranks):
        with ranks._in_call(time.monotonic() - 2 * QUICK.gone_s):
            return ranks._heart.stood_still_s()

    assert min(outcomes(2, work)) >= 2 * QUICK.gone_s


def test_a_coordinator_that_stood_still_goes_on_where_all_are_there():
    def work(ranks):
        def stand_still():
            if ranks.rank == 0:
                note_standstill(ranks)

        begun = time.monotonic()
        with ranks.call("load"):
            ranks.agree("first", stand_still)
            for _ in range(60):  # asked once, not in every step
                ranks.agree("another", lambda: None)
        return time.monotonic() - begun

    for took in outcomes(3, work):
        assert QUICK.beat_s < took < 60 * QUICK.beat_s


def test_a_coordinator_that_stood_still_commits_where_all_are_there():
    def work(ranks):
        with ranks.call("save"):
            ranks.agree("write", lambda: None if ranks.rank else note_standstill(ranks))
            ranks.agree("commit", lambda: None if ranks.rank else ranks.may_commit())

    assert outcomes(2, work) == [None, None]


def test_bytes_that_do_not_flow_after_a_rank_stood_still():
    """The others went on without it, and say nothing of it any more."""

    def work(ranks):
        def move(bulk):
            note_standstill(ranks)
            raise RuntimeError("Connection closed by peer")

        with ranks.call("load"):
            ranks.agree("first", lambda: None)
            ranks.gather_scatter("deal", lambda: b"x" * 9000, lambda told: told)
            if ranks.rank == 1:
                ranks._move("deal", move)

    error = outcomes(2, work)[1]
    assert dict(error.failures).keys() == {1}
    assert "without a sign of life" in str(error)


def test_the_coordinator_may_commit_unless_it_was_given_up():
    def work(ranks):
        with ranks.call("save"):
            ranks.agree("all here", lambda: None)
            if ranks.rank:
                ranks._control.claim("0/commit", b"given up")
            ranks.agree("claimed", lambda: None)
            if ranks.rank == 0:
                with pytest.raises(RankError, match="gave rank 0 up"):
                    ranks.may_commit()

    assert outcomes(2, work) == [None, None]


def test_a_coordinator_without_heartbeats_commits_nothing():
    def work(ranks):
        with ranks.call("save"):
            ranks.agree("all here", lambda: None)
            if ranks.rank == 0:
                ranks.may_commit()
                note_standstill(ranks)
                with pytest.raises(RankError, match="nothing was committed"):
                    ranks.may_commit()

    assert outcomes(2, work) == [None, None]


def test_a_coordinator_that_stood_still_during_the_claim_commits_nothing():
    """It holds the store, which stood still with it: the others gave it up and could not say so."""

    def work(ranks):
        def stopped_in_claim(key, value):
            standing = claim(key, value)
            note_standstill(ranks)
            return standing

        claim, ranks._control.claim = ranks._control.claim, stopped_in_claim

        def commit():
            if ranks.rank == 0:
                ranks.may_commit()

        with ranks.call("save"):
            ranks.agree("commit", commit)

    for error in outcomes(2, work):
        assert isinstance(error, RankError)
        assert "nothing was committed" in str(error)


def test_a_coordinator_that_stood_still_while_it_committed_says_so():
    """The others may have given it up, where they could not tell it so."""

    def work(ranks):
        def commit():
            if ranks.rank == 0:
                ranks.may_commit()
                note_standstill(ranks)

        with ranks.call("save"):
            ranks.agree("commit", commit)

    for error in outcomes(2, work):
        assert isinstance(error, RankError)
        assert set(error.failures) == {0}
        assert "whole if it exists" in str(error)


# --- watching


def watching(beats, timeout_s=1.0, step=0, call=3):
    return Watch(
        beats, [1], call=call, step=step, phase="write", timeout_s=timeout_s, patience=QUICK
    )


def looks(watch, beats, made, until_s=3.0):
    """Look until somebody is accused; how long that took."""
    begun = time.monotonic()
    number = 0
    while time.monotonic() < begun + until_s:
        beat = made(number)
        if beat is not None:
            beats.set(beat_key(1), msgspec.msgpack.encode(beat))
        found = watch.look()
        if found:
            return found, time.monotonic() - begun
        time.sleep(QUICK.look_s)
        number += 1
    return [], until_s


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda n: Beat(1, 3, 1, -1, None), "gone"),
        (lambda n: Beat(n, 3, 1, -1, None), "stuck"),
        (lambda n: None, "absent"),
        (lambda n: Beat(n, 2, n, 5, []), "absent"),
        (lambda n: Beat(n, 3, n, -1, None), None),
        (lambda n: Beat(n, 3, 1, 0, None), None),  # it has posted, and waits itself
        (lambda n: Beat(1, 3, 1, 0, []), None),
        (lambda n: Beat(1, 4, 1, -1, None), None),
        (lambda n: Beat(1, 3, 1, 0, [Failure(2, "ValueError", "x")]), "ValueError"),
    ],
    ids=["silent", "idle", "never", "earlier", "busy", "posted", "done", "ahead", "failed"],
)
def test_what_beats_say(made, kind):
    beats = SharedDict()
    found, _ = looks(watching(beats), beats, made, 1.8)
    assert [failure.kind for failure in found] == ([] if kind is None else [kind])


def test_a_watcher_that_slept_accuses_nobody():
    beats = SharedDict()
    watch = watching(beats)
    beats.set(beat_key(1), msgspec.msgpack.encode(Beat(1, 3, 1, -1, None)))
    assert watch.look() == []
    time.sleep(1.5 * QUICK.gone_s)
    assert watch.look() == []


def test_a_heart_beats_while_in_a_call():
    posted = []
    heart = Heart(lambda data: posted.append(msgspec.msgpack.decode(data, type=Beat)), QUICK)
    heart.start(7, 30.0)
    heart.advance(100)
    time.sleep(0.3)
    heart.posted(2)
    assert heart.stood_still_s() == 0
    heart.stop([])
    count = len(posted)
    assert count >= 4
    time.sleep(0.2)
    assert len(posted) == count
    assert [beat.count for beat in posted] == list(range(1, count + 1))
    assert {beat.call for beat in posted} == {7}
    assert posted[0].left is None
    assert posted[-1].left == []
    assert posted[-1].posted == 2
    assert posted[-1].progress >= 101


def test_a_heart_notices_that_it_stood_still():
    def slow(data):
        time.sleep(0.9 * QUICK.gone_s)

    heart = Heart(slow, QUICK)
    heart.start(0, 30.0)
    assert heart.stood_still_s() >= 0.9 * QUICK.gone_s
    heart.forget_standstill()
    assert heart.stood_still_s() == 0
    heart.stop([])


def test_patience_must_make_sense(monkeypatch):
    with pytest.raises(ValueError, match="gone_s"):
        Patience(beat_s=5, gone_s=6)
    monkeypatch.setenv("SHARDKEEP_TIMEOUT_S", "12.5")
    assert default_timeout_s() == 12.5
    monkeypatch.setenv("SHARDKEEP_TIMEOUT_S", "-1")
    with pytest.raises(ValueError, match="SHARDKEEP_TIMEOUT_S"):
        default_timeout_s()


# --- planes


def test_a_helper_can_be_given_up():
    helper, gate = Helper(), threading.Event()

    def give_up():
        raise TimeoutError("enough")

    assert helper.run(lambda: 1, give_up, 5.0) == 1
    with pytest.raises(TimeoutError, match="enough"):
        helper.run(gate.wait, give_up, 0.05)
    assert helper.run(lambda: 2, give_up, 5.0) == 2
    with pytest.raises(KeyError):
        helper.run(lambda: {}["a"], give_up, 5.0)
    gate.set()
    helper.stop()


def test_a_dict_shared_by_threads():
    space = SharedDict()
    assert space.claim("a", b"1") == b"1"
    assert space.claim("a", b"2") == b"1"
    assert space.get("b", 0.01) is None
    assert space.add("n", 2 + FAILED) == 2 + FAILED
    assert space.count("n", 2, 0) == 2 + FAILED
    assert space.get_many(["a", "b"]) == [b"1", None]
    space.forget(["a", "n"])
    assert space.get_many(["a"]) == [None]
    assert space.count("n", 1, 0.01) == 0


# --- errors


def test_any_error_can_be_told():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    class Derived(CheckpointNotFoundError):
        pass

    def told(error):
        return msgspec.msgpack.decode(msgspec.msgpack.encode(describe(error, 4)), type=Failure)

    assert told(Silent()).text == "<no text>"
    assert told(Derived("x")).kind == "CheckpointNotFoundError"
    assert told(ValueError("\udc80")).text == "\\udc80"
    huge = told(ValueError("x" * 5_000_000))
    assert len(huge.text) < MAX_TEXT + 100
    assert "more characters" in huge.text
    many = told(MismatchError("x", missing=[str(n) for n in range(50_000)]))
    assert len(many.details["missing"]) == 10_000
    assert told(KeyboardInterrupt()).kind == "KeyboardInterrupt"


def test_failures_of_one_class_stay_that_class():
    same = merge_failures([describe(StorageError("full", transient=True), r) for r in (2, 1)])
    assert isinstance(same, StorageError)
    assert same.transient
    assert str(same) == "full [rank 1, 2]"
    mixed = merge_failures([describe(StorageError("full"), 0), describe(ValueError("x"), 3)])
    assert isinstance(mixed, RankError)
    assert dict(mixed.failures) == {0: "StorageError: full", 3: "ValueError: x"}


def test_a_helper_without_a_thread_works_itself(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    helper = Helper()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert helper.run(threading.get_ident, lambda: None, 0.01) == threading.get_ident()
        with pytest.raises(KeyError):
            helper.run(lambda: {}[1], lambda: None, 0.01)
    assert helper.run(threading.get_ident, lambda: None, 0.01) != threading.get_ident()
    helper.stop()


# --- errors of one process, told to another


def test_an_error_is_of_its_own_class_again():
    error = revive(Failure(0, "CorruptionError", "a bit", details={"names": ["w"]}, trace="there"))
    assert type(error) is CorruptionError
    assert (error.names, error.__notes__) == (("w",), ["in the other process:\nthere"])
    other = revive(Failure(0, "KeyError", "'x'"))
    assert type(other) is RuntimeError
    assert str(other) == "KeyError: 'x'"
    assert not hasattr(other, "__notes__")


def test_messages_that_do_not_come():
    bulk = ThreadBulk(1, 2, SharedDict(), 0.01, "x")
    with pytest.raises(TimeoutError, match="no message"):
        bulk.broadcast(None)


def test_the_same_message_to_all():
    space = SharedDict()
    bulks = [ThreadBulk(rank, 2, space, 5.0, "x") for rank in range(2)]
    assert [bulks[0].broadcast(b"abc"), bulks[1].broadcast(None)] == [b"abc", b"abc"]

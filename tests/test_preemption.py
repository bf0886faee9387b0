"""A signal is noted, told to all ranks, and does nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import shardkeep
from shardkeep.preemption import is_preempted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handlers_stay_as_they_are():
    before = [signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)] == before


@pytest.fixture
def keeper():
    with shardkeep.Checkpointer() as keeper:
        yield keeper


def test_a_signal_is_noted_and_forgotten_on_leaving(keeper):
    with shardkeep.catch_preemption() as catching:
        assert not keeper.should_stop()
        signal.raise_signal(signal.SIGTERM)
        assert catching.caught
        assert keeper.should_stop()
        assert keeper.should_stop()
    assert not keeper.should_stop()


def test_a_handler_of_the_program_is_called_after_the_note():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *told: seen.append((told[0], is_preempted())))
    try:
        with shardkeep.catch_preemption():
            signal.raise_signal(signal.SIGTERM)
        assert seen == [(signal.SIGTERM, True)]
        signal.raise_signal(signal.SIGTERM)
        assert seen[1:] == [(signal.SIGTERM, False)]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_is_a_signal_like_others():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with shardkeep.catch_preemption([signal.SIGINT]) as catching:
            signal.raise_signal(signal.SIGINT)
            assert catching.caught
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_several_signals_and_one_inside_the_other():
    with shardkeep.catch_preemption(SIGNALS) as outer:
        with shardkeep.catch_preemption([signal.SIGUSR1, signal.SIGUSR1]) as inner:
            signal.raise_signal(signal.SIGTERM)
            assert (outer.caught, inner.caught) == (True, False)
            signal.raise_signal(signal.SIGUSR1)
            assert inner.caught
        assert is_preempted()
    assert not is_preempted()


def test_a_handler_that_came_later_stays():
    seen = []
    with shardkeep.catch_preemption():
        before = signal.signal(signal.SIGTERM, lambda *told: seen.append(told[0]))
    try:
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert callable(before)


def test_a_signal_that_cannot_be_caught_leaves_the_others_alone():
    with pytest.raises(OSError, match="Invalid argument"):
        shardkeep.catch_preemption([signal.SIGTERM, signal.SIGKILL])
    assert not is_preempted()


def test_only_in_the_main_thread():
    caught = []

    def call():
        try:
            shardkeep.catch_preemption()
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


def test_a_plain_call_holds_to_the_end():
    code = """
import signal, shardkeep
shardkeep.catch_preemption()
signal.raise_signal(signal.SIGTERM)
assert shardkeep.Checkpointer().should_stop()
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_a_forked_child_ends_as_it_would_have():
    code = """
import os, signal, shardkeep
shardkeep.catch_preemption()
child = os.fork()
if child == 0:
    signal.raise_signal(signal.SIGTERM)
    os._exit(1)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ranks_that_are_threads_agree(tmp_path):
    """One process, one flag: every rank sees it, and at the same question."""

    def work(ranks):
        answers = []
        with shardkeep.Checkpointer(process_group=ranks) as keeper:
            for step in range(4):
                ranks.agree("step", lambda: None)
                if step == 2 and ranks.rank == 0:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
                answers.append(keeper.should_stop())
            keeper.save({"w": np.ones(3)}, tmp_path)
        return answers

    with shardkeep.catch_preemption():
        answers = shardkeep.ThreadRanks(3).run(work)
    assert len(set(map(tuple, answers))) == 1
    assert answers[0][:2] == [False, False]
    assert answers[0][3]

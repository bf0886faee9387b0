"""The collector is paused while others plan, and never for good."""

import contextlib
import gc
import os
import pickle
import threading
import time

import pytest

from shardkeep import collector
from shardkeep.collector import CollectorPause, is_collector_paused, paused_collector


@pytest.fixture
def pause(end_all_pauses):
    end_all_pauses()
    made = CollectorPause()
    yield made
    made.end()


def wait_until_resumed(seconds=10.0):
    end = time.monotonic() + seconds
    while is_collector_paused() and time.monotonic() < end:
        time.sleep(0.005)
    assert not is_collector_paused()


def test_from_one_call_to_the_other(pause):
    pause.begin()
    assert is_collector_paused()
    pause.end()
    assert not is_collector_paused()
    pause.end()
    assert not is_collector_paused()


def test_a_driver_that_fails_between_them(pause, monkeypatch):
    monkeypatch.setattr(collector, "MOST_S", 0.05)
    pause.begin()
    assert is_collector_paused()
    wait_until_resumed()


def test_a_moment_after_the_last_call(pause, monkeypatch):
    monkeypatch.setattr(collector, "SOON_S", 0.05)
    pause.begin()
    pause.end_soon()
    assert is_collector_paused()
    wait_until_resumed()
    pause.end_soon()
    assert not is_collector_paused()


def test_a_pause_ends_with_who_made_it(end_all_pauses):
    end_all_pauses()
    one = CollectorPause()
    one.begin()
    assert is_collector_paused()
    del one
    assert not is_collector_paused()


def test_an_end_that_comes_late_ends_no_other_pause(pause, monkeypatch):
    monkeypatch.setattr(collector, "SOON_S", 0.05)
    pause.begin()
    pause.end_soon()
    pause.begin()
    time.sleep(0.2)
    assert is_collector_paused()


def test_whether_it_is_on_stays_the_programs_own(pause, monkeypatch):
    """Before, inside and after, however the program keeps it in mind."""
    monkeypatch.setattr(collector, "SOON_S", 0.05)
    try:
        gc.disable()
        pause.begin()
        pause.end()
        assert not gc.isenabled()
        gc.enable()
        pause.begin()
        assert gc.isenabled()
        pause.end_soon()
        was = gc.isenabled()
        gc.disable()
        wait_until_resumed()
        assert not gc.isenabled()
        if was:
            gc.enable()
        assert gc.isenabled()
    finally:
        gc.enable()


def test_a_threshold_that_the_program_sets_meanwhile_stays(pause):
    before = gc.get_threshold()
    try:
        pause.begin()
        gc.set_threshold(1234, 5, 6)
        pause.end()
        assert gc.get_threshold() == (1234, 5, 6)
    finally:
        gc.set_threshold(*before)
    pause.begin()
    pause.end()
    assert gc.get_threshold() == before


def test_two_pauses_end_with_the_last(end_all_pauses):
    end_all_pauses()
    before = gc.get_threshold()
    one, other = CollectorPause(), CollectorPause()
    one.begin()
    other.begin()
    one.end()
    assert is_collector_paused()
    other.end()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("moment", ["set_threshold", "get_threshold"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupt_anywhere_leaves_it_on(end_all_pauses, monkeypatch, moment, count):
    end_all_pauses()
    before, real = gc.get_threshold(), getattr(gc, moment)
    left = [count]

    def interrupted(*args):
        out = real(*args)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(gc, moment, interrupted)
        with paused_collector():
            pass
    assert gc.get_threshold() == before
    with paused_collector():
        assert is_collector_paused()
    assert gc.get_threshold() == before


def test_a_handler_of_a_signal_may_save_too(pause, monkeypatch):
    """It interrupts the main thread wherever it is."""
    start = threading.Timer.start

    def interrupted(timer):
        monkeypatch.setattr(threading.Timer, "start", start)
        pause.begin()
        start(timer)

    monkeypatch.setattr(threading.Timer, "start", interrupted)
    pause.begin()
    assert is_collector_paused()
    pause.end()
    assert not is_collector_paused()


def test_a_driver_on_another_thread_pauses_nothing(pause):
    seen = []
    thread = threading.Thread(target=lambda: (pause.begin(), seen.append(is_collector_paused())))
    thread.start()
    thread.join()
    assert seen == [False]


def test_inside_of_another_pause(pause):
    with paused_collector():
        pause.begin()
        pause.end()
        assert is_collector_paused()
    pause.begin()
    with paused_collector():
        pass
    assert is_collector_paused()


def test_no_thread_is_to_be_had(pause, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    pause.begin()
    monkeypatch.setattr(threading.Thread, "start", start)
    pause.end_soon()
    assert not is_collector_paused()
    pause.begin()
    assert not is_collector_paused()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_has_no_timer(pause):
    pause.begin()
    child = os.fork()
    if not child:
        fine = not is_collector_paused()
        pause.begin()
        os._exit(0 if fine and is_collector_paused() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_collector_paused()


def test_a_pause_is_not_sent_along(pause):
    pause.begin()
    other = pickle.loads(pickle.dumps(pause))
    other.end()
    assert is_collector_paused()


def test_threads_of_pauses_end(pause):
    for _ in range(5):
        pause.begin()
        pause.end_soon()
    pause.end()
    end = time.monotonic() + 5
    while any(isinstance(one, threading.Timer) for one in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.005)

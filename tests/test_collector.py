"""The collector is paused while others plan, and never for good."""

import gc
import os
import pickle
import threading
import time

import pytest

from shardkeep import collector
from shardkeep.collector import CollectorPause, paused_collector


def end_all_pauses():
    """Also those of tests before, in which a save failed."""
    for one in list(collector._pauses):
        one.end()


@pytest.fixture
def pause():
    end_all_pauses()
    made = CollectorPause()
    yield made
    made.end()
    gc.enable()


def wait_until_enabled(seconds=10.0):
    end = time.monotonic() + seconds
    while not gc.isenabled() and time.monotonic() < end:
        time.sleep(0.005)
    assert gc.isenabled()


def test_from_one_call_to_the_other(pause):
    pause.begin()
    assert not gc.isenabled()
    pause.end()
    assert gc.isenabled()
    pause.end()
    assert gc.isenabled()


def test_a_driver_that_fails_between_them(pause, monkeypatch):
    monkeypatch.setattr(collector, "MOST_S", 0.05)
    pause.begin()
    assert not gc.isenabled()
    wait_until_enabled()


def test_a_moment_after_the_last_call(pause, monkeypatch):
    monkeypatch.setattr(collector, "SOON_S", 0.05)
    pause.begin()
    pause.end_soon()
    assert not gc.isenabled()
    wait_until_enabled()
    pause.end_soon()
    assert gc.isenabled()


def test_a_pause_ends_with_who_made_it():
    end_all_pauses()
    one = CollectorPause()
    one.begin()
    assert not gc.isenabled()
    del one
    assert gc.isenabled()


def test_an_end_that_comes_late_ends_no_other_pause(pause, monkeypatch):
    monkeypatch.setattr(collector, "SOON_S", 0.05)
    pause.begin()
    pause.end_soon()
    pause.begin()
    time.sleep(0.2)
    assert not gc.isenabled()


def test_a_collector_that_the_program_has_turned_off_stays_off(pause):
    gc.disable()
    pause.begin()
    pause.end_soon()
    pause.end()
    assert not gc.isenabled()


def test_a_driver_on_another_thread_pauses_nothing(pause):
    seen = []
    thread = threading.Thread(target=lambda: (pause.begin(), seen.append(gc.isenabled())))
    thread.start()
    thread.join()
    assert seen == [True]


def test_inside_of_another_pause(pause):
    with paused_collector():
        pause.begin()
        pause.end()
        assert not gc.isenabled()
    pause.begin()
    with paused_collector():
        pass
    assert not gc.isenabled()


def test_no_thread_is_to_be_had(pause, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    pause.begin()
    monkeypatch.setattr(threading.Thread, "start", start)
    pause.end_soon()
    assert gc.isenabled()
    pause.begin()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_has_no_timer(pause):
    pause.begin()
    child = os.fork()
    if not child:
        fine = gc.isenabled()
        pause.begin()
        os._exit(0 if fine and not gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not gc.isenabled()


def test_a_pause_is_not_sent_along(pause):
    pause.begin()
    other = pickle.loads(pickle.dumps(pause))
    other.end()
    assert not gc.isenabled()


def test_threads_of_pauses_end(pause):
    for _ in range(5):
        pause.begin()
        pause.end_soon()
    pause.end()
    end = time.monotonic() + 5
    while any(isinstance(one, threading.Timer) for one in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.005)

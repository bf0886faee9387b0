"""Tasks on threads: all done, in order, and no error lost."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from shardkeep.engine import parallel
from shardkeep.engine.parallel import Behind, Crew, run_in_order


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_task_is_done_once(threads):
    done = []
    run_in_order(range(100), done.append, threads)
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("here", [False, True])
def test_one_task_alone_is_done_by_the_caller_where_it_may_be(count, here):
    names = []
    run_in_order([0] * count, lambda _: names.append(threading.get_ident()), 4, alone_here=here)
    assert [name == threading.get_ident() for name in names] == [here] * count


def test_an_interrupt_does_not_wait_for_one_task_alone(monkeypatch):
    """A disk that hangs takes no signal."""
    monkeypatch.setattr(parallel, "GRACE_S", 0.1)
    release = threading.Event()
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_order([0], lambda _: release.wait(30), 4)
    assert time.monotonic() - begun < 10
    release.set()
    timer.join()


@pytest.fixture(autouse=True)
def interrupts():
    """A shell starts what runs behind it with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("bad", [0, 7, 99])
def test_an_error_on_any_thread_is_raised(threads, bad):
    def work(task):
        if task == bad:
            raise KeyError(task)

    with pytest.raises(KeyError):
        run_in_order(range(100), work, threads)


def test_nothing_is_started_after_an_error():
    started = []

    def work(task):
        started.append(task)
        if task == 0:
            raise ValueError
        time.sleep(0.01)

    with pytest.raises(ValueError):  # noqa: PT011
        run_in_order(range(1000), work, 4)
    count = len(started)
    time.sleep(0.05)
    assert len(started) == count < 20


def test_a_stuck_thread_does_not_keep_the_error(monkeypatch):
    monkeypatch.setattr(parallel, "GRACE_S", 0.1)
    release = threading.Event()

    def work(task):
        if task == 0:
            release.wait(30)
        else:
            raise OSError("disk")

    begun = time.monotonic()
    with pytest.raises(OSError, match="disk"):
        run_in_order(range(2), work, 2)
    assert time.monotonic() - begun < 10
    release.set()


# --- a pipeline's next step


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_crew_does_everything_before_it_is_left(threads):
    done, dropped = [], []

    def work(task):
        time.sleep(0.001)
        done.append(task)

    with Crew(work, dropped.append, threads, "test") as crew:
        run_in_order(range(50), crew.hand, 2)
    assert sorted(done) == list(range(50))
    assert not dropped


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("bad", [0, 20, 49])
def test_an_error_of_a_crew_is_raised_and_everything_is_let_go_of(threads, bad):
    """Whoever hands over may wait for what tasks hold: one place for each, as buffers are."""
    places = threading.Semaphore(2)
    error = OSError("disk")

    def work(task):
        places.release()
        if task == bad:
            raise error

    def drop(task):
        places.release()

    def run():
        with Crew(work, drop, threads, "test") as crew:
            for task in range(50):
                assert places.acquire(timeout=10)
                crew.hand(task)

    with pytest.raises(OSError, match="disk") as caught:
        run()
    assert caught.value is error
    assert places.acquire(timeout=10)
    assert places.acquire(timeout=10)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_the_caller_drops_what_is_left(threads):
    go = threading.Event()
    done, dropped = [], []

    def work(task):
        go.wait(10)
        done.append(task)

    def fail_later():
        time.sleep(0.05)
        go.set()

    def run():
        with Crew(work, dropped.append, threads, "test") as crew:
            for task in range(20):
                crew.hand(task)
            while crew._tasks.qsize() > 20 - threads:
                time.sleep(0.001)
            threading.Thread(target=fail_later).start()
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert sorted(done + dropped) == list(range(20))
    assert len(done) == threads


def test_a_stuck_crew_does_not_keep_the_error(monkeypatch):
    monkeypatch.setattr(parallel, "GRACE_S", 0.1)
    release = threading.Event()

    def work(task):
        if task == 0:
            release.wait(30)
        else:
            raise OSError("disk")

    def run():
        with Crew(work, lambda _: None, 2, "test") as crew:
            crew.hand(0)
            crew.hand(1)

    begun = time.monotonic()
    with pytest.raises(OSError, match="disk"):
        run()
    assert time.monotonic() - begun < 10
    release.set()


# --- one task behind the caller


def test_behind_runs_one_at_a_time_and_in_order():
    behind, done, now = Behind(), [], []

    def work(number):
        now.append(number)
        time.sleep(0.01)
        assert now == [number]
        now.clear()
        done.append(number)

    for number in range(5):
        behind.run(lambda number=number: work(number))
    behind.wait()
    assert done == list(range(5))
    behind.wait()


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_error_behind_is_raised_once(kind):
    def fail():
        raise kind("disk")

    behind = Behind()
    behind.run(fail)
    with pytest.raises(kind, match="disk"):
        behind.run(lambda: None)
    behind.wait()
    behind.run(fail)
    with pytest.raises(kind, match="disk"):
        behind.wait()
    behind.wait()


def test_giving_up_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(parallel, "GRACE_S", 0.05)
    release = threading.Event()
    behind = Behind()
    behind.run(lambda: release.wait(30))
    begun = time.monotonic()
    behind.give_up()
    assert time.monotonic() - begun < 10
    release.set()


@pytest.mark.parametrize("started", [False, True])
def test_an_interrupt_while_a_thread_starts_stays_one(monkeypatch, started):
    start = threading.Thread.start

    def interrupted(self):
        if started:
            start(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    behind = Behind()
    with pytest.raises(KeyboardInterrupt):
        behind.run(lambda: None)
    behind.give_up()
    with pytest.raises(KeyboardInterrupt):
        run_in_order(range(3), lambda _: None, 2)
    with pytest.raises(KeyboardInterrupt), Crew(print, print, 2, "test"):
        pass


@pytest.fixture(params=[0, 1, 3])
def few_threads(request, monkeypatch):
    """So many threads can be started, and no more."""
    start, left = threading.Thread.start, [request.param]

    def limited(self):
        if not left[0]:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        left[0] -= 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return request.param


def test_tasks_are_done_with_the_threads_there_are(few_threads):
    done, names = [], set()

    def work(task):
        done.append(task)
        names.add(threading.current_thread().name)

    run_in_order(range(50), work, 4)
    assert sorted(done) == list(range(50))
    assert (threading.current_thread().name in names) is (few_threads == 0)


@pytest.mark.parametrize("kind", [OSError, RuntimeError, KeyboardInterrupt])
def test_errors_of_work_stay_errors_where_threads_are_few(few_threads, kind):
    stopped = []

    def work(task):
        if task == 3:
            raise kind("of the work")

    with pytest.raises(kind, match="of the work"):
        run_in_order(range(50), work, 4, lambda: stopped.append(True))
    assert stopped == [True]


def test_a_crew_of_those_there_are(few_threads):
    done = []
    with Crew(done.append, pytest.fail, 4, "test") as crew:
        for task in range(50):
            crew.hand(task)
    assert sorted(done) == list(range(50))


def test_nobody_behind(few_threads):
    done, behind = [], Behind()
    for task in range(5):
        behind.run(lambda task=task: done.append(task))
    behind.wait()
    assert done == list(range(5))

    def fail():
        raise OSError("disk")

    behind.run(fail)
    with pytest.raises(OSError, match="disk"):
        behind.wait()
    behind.give_up()


def test_an_interrupt_while_a_thread_begins_is_not_taken_for_a_refusal(monkeypatch):
    """Python may answer it with an error of its lock; the thread runs, and is not done without."""
    real = threading.Thread.start

    def start(self):
        real(self)
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    done = []
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run_in_order(range(1000), done.append, 2)
    assert done == sorted(set(done))
    behind = Behind()
    with pytest.raises(KeyboardInterrupt):
        behind.run(lambda: done.append("behind"))
    behind.give_up()
    assert done.count("behind") == 1
    with pytest.raises(KeyboardInterrupt), Crew(done.append, done.append, 2, "test") as crew:
        crew.hand("crew")
    assert "crew" not in done
    assert not [one for one in threading.enumerate() if one.name.startswith("shardkeep-test")]

"""Many trials, several at once: most of their time is spent waiting for ranks that are gone."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from dataclasses import replace

from losses import PRELOADED, VERBS, WHATS, draw, lengths_of, run, scratch_folder

from shardkeep.testing.processes import RankServer

__all__ = ["VERBS", "WHATS", "each", "run_seeds"]

LAPSE_S = 0.7
"""Of this process, after which it says nothing about ranks that they took long or gave one up."""
TRIES = 5


class Pulse:
    """Notes when the whole machine stood still, which ranks cannot tell from one that is gone."""

    def __init__(self):
        self.lapses = 0
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        last = time.monotonic()
        while not self._ended.wait(0.05):
            now = time.monotonic()
            self.lapses += now - last > LAPSE_S
            last = now

    def close(self):
        self._ended.set()


def each(cases, jobs, seconds=None, *, stop=False):
    """Run cases, so many at once; gives the key of each, the case, and its result or what is wrong.

    `cases` are pairs of a key and a case. `jobs` is a number, or servers that are there.
    """
    if isinstance(jobs, int):
        with contextlib.ExitStack() as servers:
            made = [servers.enter_context(RankServer(PRELOADED)) for _ in range(jobs)]
            yield from each(cases, made, seconds, stop=stop)
        return
    todo, done = queue.SimpleQueue(), queue.SimpleQueue()
    pulse = Pulse()

    for case in cases:
        todo.put(case)
    ended = threading.Event()
    deadline = time.monotonic() + (seconds or float("inf"))

    def work(server):
        while not ended.is_set() and time.monotonic() < deadline:
            try:
                key, case = todo.get_nowait()
            except queue.Empty:
                break
            done.put((key, case, attempt(server, case, pulse)))
        done.put(None)

    threads = [
        threading.Thread(target=work, args=(server,), daemon=True) for server in jobs[: len(cases)]
    ]
    for thread in threads:
        thread.start()
    try:
        running = len(threads)
        while running:
            result = done.get()
            if result is None:
                running -= 1
                continue
            yield result
            if stop and isinstance(result[-1], BaseException):
                return
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        pulse.close()


def attempt(server, case, pulse):
    """The result of a trial, or what is wrong; again where the machine stood still meanwhile."""
    for repeated in range(TRIES):
        lapses = pulse.lapses
        try:
            with scratch_folder() as folder:
                return replace(run(server, case, folder), repeated=repeated)
        except Exception as error:
            wrong = error
        time.sleep(0.2)  # for the pulse to notice
        if pulse.lapses == lapses:
            break
    return wrong


def run_seeds(seeds, jobs, seconds=None, *, stop=False):
    """Trials that are drawn by seeds."""
    lengths = {}
    with contextlib.ExitStack() as servers:
        made = [servers.enter_context(RankServer(PRELOADED)) for _ in range(jobs)]
        for _, case, ended in each(lengths_of(), made, stop=True):
            if isinstance(ended, BaseException):
                raise ended
            for rank in (0, 1):
                lengths[case.verb, rank == 0] = ended.lengths[rank]
        drawn = [(seed, draw(random.Random(seed), lengths)) for seed in seeds]
        yield from each(drawn, made, seconds, stop=stop)

"""Two that work on one place at once: between any two calls of one, all of the other happens."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from faults import listed
from generations import (
    ABSENT,
    OPTIONS,
    assert_clean,
    blank,
    exact,
    generation_at,
    save,
    state,
    weights,
    weights_at,
)
from machine import Scenario
from outward import source

import shardkeep
from shardkeep.errors import CheckpointError, CheckpointNotFoundError
from shardkeep.formats.native.commit import collect_garbage
from shardkeep.stores.local import LocalStore
from shardkeep.testing.system_calls import intercepted


@dataclass(frozen=True)
class Deed:
    """What one of them does at a place, and what it says then."""

    what: str
    generation: int = ABSENT

    def do(self, base):
        place = base / "ckpt"
        match self.what:
            case "create":
                save(place, self.generation)
            case "overwrite":
                save(place, self.generation, overwrite=True)
            case "incremental":
                save(place, self.generation, overwrite=True, base=place)
            case "async":
                with shardkeep.Checkpointer(no_dist=True, memory_budget=8 << 20) as keeper:
                    keeper.async_save(state(self.generation), place, overwrite=True).result()
            case "gc":
                shardkeep.gc(place)
            case "gc of all":
                collect_garbage(LocalStore(place), stale_s=0)
            case "load":
                return self._load(place)
            case "open":
                with shardkeep.open(place) as checkpoint:
                    found = checkpoint.state_dict()
                assert exact(found) == exact(state(found["step"])), "a mix of generations"
                return found["step"]
            case "verify":
                report = shardkeep.verify(place)
                assert report.ok, report.problems
            case "remove":
                shutil.rmtree(place)
            case "export":
                writer = shardkeep.HuggingFaceWriter(max_shard_size=8000)
                shardkeep.save(
                    weights(self.generation), base / "out", storage_writer=writer,
                    overwrite=True, **OPTIONS,
                )  # fmt: skip
            case "convert to native" | "convert to hf":
                shardkeep.convert(
                    source(self.generation), base / "out", to=self.what.split()[-1],
                    overwrite=True, memory_budget=16 << 20,
                )  # fmt: skip
            case "read":
                return weights_at(base / "out")
        return self.generation

    def again(self, generation):
        return Deed(self.what, generation)

    def _load(self, place):
        found = shardkeep.load(blank(state(self.generation)), place).state_dict
        assert exact(found) == exact(state(found["step"])), "a mix of generations"
        return found["step"]

    @property
    def saves(self):
        return self.what in ("create", "overwrite", "incremental", "async") or self.is_outward

    @property
    def is_outward(self):
        """Whether it is done at a place for other formats."""
        return self.what in ("export", "convert to native", "convert to hf")


class Both(Scenario):
    """One of the deeds, for counting its calls."""

    def __init__(self, deed):
        self.deed = deed

    def run(self, base, mark):
        self.deed.do(base)


def attempt(deed, base):
    """What it said, or the error."""
    try:
        return deed.do(base), None
    except CheckpointError as error:
        return None, error


class Between:
    """A handler that lets something happen before a call."""

    def __init__(self, base, at, deed):
        self.base, self.at, self.deed = base, at, deed
        self.count, self.outcome = 0, None
        self.lock = threading.Lock()

    def __call__(self, call):
        path = call.path()
        if path is None or not path.is_relative_to(self.base):
            return call.make()
        with self.lock:
            mine, self.count = self.count == self.at, self.count + 1
        if mine:
            self.outcome = attempt(self.deed, self.base)
        return call.make()


def meet(first, second, folder, *, there, every=1):
    """Every point of the first at which the second may come; how many that were."""
    folder = Path(folder)
    template, base = folder / "template", folder / "base"
    template.mkdir()
    if there:
        if first.is_outward or second.is_outward:
            (first if first.is_outward else second).again(there).do(template)
        else:
            save(template / "ckpt", there)
    count = len(listed(Both(first), template, base))
    for at in range(0, count, every):
        shutil.copytree(template, base)
        handler = Between(base, at, second)
        try:
            with intercepted(handler):
                outcome = attempt(first, base)
            judge(first, outcome, second, handler.outcome, base, there)
        except Exception as problem:
            raise AssertionError(
                f"{second} before call {at} of {first}: {problem!r}; "
                f"they said {outcome}, {handler.outcome}"
            ) from problem
        finally:
            shutil.rmtree(base)
    return count


def judge(first, outcome, second, other, base, there):
    """What both were told, and what is there now, fit together."""
    done = [(first, outcome)] + ([(second, other)] if other is not None else [])
    saved = {deed.generation for deed, (_, error) in done if deed.saves and error is None}
    begun = {deed.generation for deed, _ in done if deed.saves}
    place = base / "ckpt"
    outward = first.is_outward or second.is_outward
    found = weights_at(base / "out") if outward else generation_at(place)
    if second.what == "remove":
        assert found in {ABSENT, *saved}
        return
    assert found in (saved or {there}), f"found {found}, of {saved or there}"
    for deed, (said, error) in done:
        if deed.what in ("load", "open", "read") and error is None:
            assert said in {there, *begun}
        if deed.what in ("load", "verify"):
            assert error is None, error
        if deed.what == "gc":
            assert error is None or isinstance(error, CheckpointNotFoundError), error
    if place.is_dir():
        collect_garbage(LocalStore(place), stale_s=0)
        assert_clean(place)
        assert generation_at(place) == found

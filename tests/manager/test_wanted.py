"""What is copied and what goes, tier by tier, against a plain model of it."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import described

from shardkeep import FastTier, KeepBest, KeepEvery, KeepLast
from shardkeep.formats.native.names import RECORD, index_file, new_save_id
from shardkeep.formats.native.record import FileRow, Record, encode_record
from shardkeep.manager.belonging import bind
from shardkeep.manager.naming import StepNames
from shardkeep.manager.pins import Pins
from shardkeep.manager.steps import user_metadata_of
from shardkeep.manager.tiers import Tiers
from shardkeep.manager.upkeep import Upkeep
from shardkeep.manager.wanted import joined, uncopied, wanted
from shardkeep.stores.local import LocalStore


def saved(number, save, at, where):
    """One save of a step in a tier."""
    found = described(number, float(at))
    return type(found)(
        number, f"/{where}/{number}", save, 1, 1, found.saved_at, {}, {}, (f"/{where}/{number}",)
    )


@st.composite
def tiers(draw):
    """Steps of two tiers; some in both, of one save or of two."""
    fast, durable = [], []
    for number in sorted(draw(st.sets(st.integers(0, 20), max_size=10))):
        one, other = f"a{number}", draw(st.sampled_from([f"a{number}", f"b{number}"]))
        ats = [draw(st.integers(0, 3))] * 2
        if one != other:
            ats[1] = draw(st.integers(0, 3))
        places = draw(st.sampled_from(["fast", "durable", "both"]))
        if places != "durable":
            fast.append(saved(number, one, ats[0], "fast"))
        if places != "fast":
            durable.append(saved(number, other, ats[1], "durable"))
    return fast, durable


@given(tiers())
def test_both_tiers_are_seen_as_one(found):
    fast, durable = ({step.step: step for step in tier} for tier in found)
    steps = joined(*found)
    assert [step.step for step in steps] == sorted({*fast, *durable})
    for step in steps:
        one, other = fast.get(step.step), durable.get(step.step)
        if one is None or other is None:
            assert step == (one or other)
        elif one.save_id == other.save_id:
            assert (step.path, step.copies) == (one.path, (one.path, other.path))
        else:
            assert step == (one if one.saved_at > other.saved_at else other)


@given(tiers(), st.integers(1, 4), st.integers(1, 5), st.sets(st.integers(0, 20), max_size=2))
def test_what_is_copied_is_what_the_policy_would_hold(found, last, every, spared):
    fast, durable = found
    steps = joined(fast, durable)
    keep = KeepLast(last) | KeepEvery(every)
    left = uncopied(wanted(steps, keep, 0.0, spared), durable)
    for step in steps:
        newer = sum(other.step > step.step for other in steps)
        holds = newer < last or step.step % every == 0 or step.step in spared
        there = any(other.save_id == step.save_id for other in durable)
        assert (step in left) == (holds and not there)
    assert left == sorted(left, key=lambda step: -step.step)
    assert uncopied(wanted(steps, None, 0.0), durable) == [
        step for step in reversed(steps) if len(step.copies) == 1 and step in fast
    ]


# --- passes over real folders, of records only


@pytest.fixture(scope="module", autouse=True)
def unsynced():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "_sync_directory", lambda self, path: None)
        yield


class Run:
    """A run whose saves and copies are records."""

    def __init__(self, folder, keep, keep_fast):
        self.fast, self.root = os.path.join(folder, "fast"), os.path.join(folder, "run")
        tier = FastTier(self.fast, keep=keep_fast)
        self.tiers = Tiers(self.root, tier, StepNames(), 900.0)
        self.keep, self.keep_fast = keep, tier.policy
        self.kept = None
        self.step = self.clock = 0
        bind(LocalStore(self.fast), LocalStore(self.root))
        self.upkeep = Upkeep(
            self.tiers,
            keep,
            tier,
            stale_s=3600.0,
            leads=False,
            spared=lambda: set() if self.kept is None else {self.kept},
            busy=frozenset,
            moving=threading.Lock(),
        )
        for retention in self.upkeep._retentions:
            retention.poke = lambda: None  # passes are ours to make

    def save(self, loss):
        self.step += 1
        self.clock += 1
        where = os.path.join(self.fast, f"step-{self.step}")
        shutil.rmtree(where, ignore_errors=True)
        os.makedirs(os.path.join(where, "data"))
        save_id = new_save_id()
        user = user_metadata_of(self.step, float(self.clock), {"loss": loss}, None)
        row = FileRow(index_file(save_id), 8192, 4096, "0" * 32)
        with open(os.path.join(where, RECORD), "xb") as file:
            file.write(encode_record(Record(save_id, row, (), user=user)))
        self.kept = self.step
        self.upkeep.saved(self.step, save_id)

    def copy(self):
        left = self.upkeep.waiting()
        if left:
            where = os.path.join(self.root, f"step-{left[0].step}")
            shutil.rmtree(where, ignore_errors=True)
            shutil.copytree(left[0].path, where)
            self.upkeep._was_copied(left[0])

    def go_back(self, by):
        steps = self.tiers.look().steps
        if steps:
            to = steps[max(0, len(steps) - 1 - by)]
            self.kept = self.step = to.step
            self.upkeep.restored(to.step, to.save_id, to.path, ())

    def pin(self, number):
        for tier in self.tiers.all:
            for step in tier.catalog.look().steps[-number:][:1]:
                Pins(tier.catalog.store).hold(f"step-{step.step}")

    def run_pass(self, which):
        self.upkeep._retentions[which].run()

    def look(self):
        return [tier.catalog.look().steps for tier in self.tiers.all]


OPERATIONS = st.one_of(
    st.tuples(st.just("save"), st.integers(0, 9)),
    st.just(("copy",)),
    st.tuples(st.just("run_pass"), st.sampled_from([0, 1])),
    st.tuples(st.just("go_back"), st.integers(0, 4)),
    st.tuples(st.just("pin"), st.integers(1, 3)),
)
KEEPS = st.sampled_from(
    [None, KeepLast(1), KeepLast(3), KeepLast(1) | KeepEvery(3), KeepLast(1) | KeepBest(2, "loss")]
)


def pinned(tier):
    return {int(name[5:]) for name in tier.pins.held()}


def lasts(run, before, after, which):
    """What a pass has done, said as plainly as possible."""
    fast, durable = before
    there = {step.save_id for step in durable}
    everything = joined(fast, durable)
    pins = [pinned(tier) for tier in run.tiers.all]
    held = {step.step for step in everything} if run.keep is None else set()
    if run.keep is not None and everything:
        held = run.keep.holds(everything, 0.0) | {everything[-1].step, run.kept} | pins[0]
    current = {step.save_id for step in everything}
    if which == 1:
        for step in fast:
            only = step.save_id in current and step.step in held and step.save_id not in there
            policy = {} if run.keep_fast is None else run.keep_fast.holds(fast, 0.0)
            stays = (
                step.step in policy
                or step.step in pins[0]
                or step.step == run.kept
                or step == fast[-1]
                or only
            )
            assert (step in after[0]) == stays, step
        assert after[1] == durable
    else:
        for step in durable:
            if run.keep is None or step == durable[-1] or step.step in held | pins[1]:
                assert step in after[1], step
        assert after[0] == fast


@given(KEEPS, st.sampled_from([1, 2, KeepEvery(2)]), st.lists(OPERATIONS, min_size=5, max_size=25))
def test_passes_take_what_neither_tier_needs_and_nothing_else(keep, keep_fast, operations):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, keep, keep_fast)
        run.save(5)
        for name, *args in operations:
            before = run.look()
            getattr(run, name)(*args)
            if name == "run_pass":
                lasts(run, before, run.look(), *args)
            everything = {step.step for tier in run.look() for step in tier}
            assert run.kept in everything, "what the run stands at is gone"
        # Once all is copied, both tiers are as large as their policies say.
        while run.upkeep.waiting():
            run.copy()
        run.run_pass(1)
        run.run_pass(0)
        fast, durable = run.look()
        extra = len(pinned(run.tiers.all[0]) | pinned(run.tiers.all[1])) + 2
        if keep_fast in (1, 2):
            assert len(fast) <= keep_fast + extra
        if keep is not None and not isinstance(keep, KeepLast):
            return
        if keep is not None:
            assert len(durable) <= 2 * keep.n + extra

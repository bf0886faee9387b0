"""When to save and what to keep: policies against plain models of them."""

from __future__ import annotations

import math
import shutil
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import described, fill_records

import shardkeep
from shardkeep import (
    AtSteps,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepNewer,
    Moment,
    OnPreemption,
    PlanError,
    ThreadRanks,
    WhenIdle,
)
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.naming import MAX_NAME, StepNames
from shardkeep.manager.pins import Pins
from shardkeep.manager.retention import Retention, doomed
from shardkeep.manager.steps import metrics_of

# --- what to keep

METRIC = st.one_of(
    st.none(), st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0]), st.integers(-3, 3)
)


@st.composite
def runs(draw):
    numbers = sorted(draw(st.sets(st.integers(0, 60), max_size=25)))
    return [
        described(
            number,
            float(draw(st.integers(0, 50))),
            **{
                name: float(value)
                for name in ("loss", "accuracy")
                if (value := draw(METRIC)) is not None
            },
        )
        for number in numbers
    ]


RULES = st.one_of(
    st.tuples(st.just("last"), st.integers(1, 5)),
    st.tuples(st.just("every"), st.integers(1, 20)),
    st.tuples(st.just("seconds"), st.integers(1, 20)),
    st.tuples(st.just("newer"), st.integers(1, 60)),
    st.tuples(
        st.just("best"), st.integers(1, 5), st.sampled_from(["loss", "accuracy"]), st.booleans()
    ),
)


def policy(rules):
    made = None
    for rule in rules:
        match rule:
            case ("last", n):
                part = KeepLast(n)
            case ("every", n):
                part = KeepEvery(n)
            case ("seconds", s):
                part = KeepEvery(seconds=s)
            case ("newer", s):
                part = KeepNewer(s)
            case ("best", n, metric, highest):
                part = KeepBest(n, metric, highest)
        made = part if made is None else made | part
    return made


def model(rule, steps, now):
    """What a rule holds, said as plainly as possible: one step at a time, against all others."""
    held = set()
    for me in steps:
        match rule:
            case ("last", n):
                holds = sum(other.step > me.step for other in steps) < n
            case ("every", n):
                holds = me.step % n == 0
            case ("newer", s):
                holds = now - s <= me.saved_at
            case ("seconds", s):
                before = [o for o in steps if o.step in held]
                last = before[-1].saved_at if before else math.inf
                holds = me.saved_at < last or me.saved_at >= last + s
            case ("best", n, metric, highest):
                holds = known(me, metric) and (
                    sum(known(o, metric) and better(o, me, metric, highest) for o in steps) < n
                )
        if holds:
            held.add(me.step)
    return held


def known(step, metric):
    return metric in step.metrics and step.metrics[metric] == step.metrics[metric]


def better(one, other, metric, highest):
    mine, theirs = one.metrics[metric], other.metrics[metric]
    if mine == theirs:
        return one.step > other.step
    return mine > theirs if highest else mine < theirs


@given(runs(), st.lists(RULES, min_size=1, max_size=3), st.sets(st.integers(0, 60), max_size=5))
def test_what_goes_is_what_the_model_says(steps, rules, spared):
    now = 50.0
    gone = {step.step for step in doomed(steps, policy(rules), now, spared)}
    held = set().union(*(model(rule, steps, now) for rule in rules))
    newest = {steps[-1].step} if steps else set()
    assert gone == {step.step for step in steps} - held - spared - newest


@given(runs(), st.lists(RULES, min_size=1, max_size=3))
def test_once_they_are_gone_nothing_more_goes(steps, rules):
    gone = {step.step for step in doomed(steps, policy(rules), 50.0)}
    left = [step for step in steps if step.step not in gone]
    assert doomed(left, policy(rules), 50.0) == []
    assert bool(left) == bool(steps)


MANY = KeepLast(3) | KeepEvery(1000) | KeepBest(20, "loss") | KeepNewer(3600)


def test_a_decision_about_ten_thousand_steps_takes_less_than_a_second():
    steps = [described(n, 1000.0 + n, loss=(n * 7919) % 1000) for n in range(10_000)]
    began = time.perf_counter()
    victims = doomed(steps, MANY, 12_000.0)
    assert time.perf_counter() - began < 1.0
    assert len(victims) == 10_000 - len(MANY.holds(steps, 12_000.0))


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_pass_over_a_folder_of_many_steps_takes_less_than_a_second(tmp_path, count):
    fill_records(tmp_path, range(count))
    catalog = Catalog(tmp_path, StepNames())
    began = time.perf_counter()
    assert len(catalog.look().steps) == count
    read_s = time.perf_counter() - began
    keep = KeepLast(count) | MANY
    retention = Retention(catalog, Pins(catalog.store), keep, stale_s=3600)
    retention.run()  # looks for leftovers, as the first pass of a job does
    began = time.perf_counter()
    assert retention.run() == []
    pass_s = time.perf_counter() - began
    print(f"{count} steps: first look {read_s:.2f} s, a pass {pass_s:.2f} s")
    assert pass_s < 1.0
    shutil.rmtree(tmp_path)


# --- when to save


def asked(wanted, steps, **facts):
    previous, found = None, []
    for step in steps:
        if wanted.wants(Moment(step, previous, **facts)):
            found.append(step)
        previous = step
    return found


@given(st.integers(1, 9), st.lists(st.integers(1, 7), max_size=30), st.integers(0, 30))
def test_every_steps_misses_no_multiple_where_steps_are_skipped(n, jumps, first):
    steps = [first]
    for jump in jumps:
        steps.append(steps[-1] + jump)
    found = asked(EverySteps(n), steps)
    for multiple in range(n * (first // n + 1), steps[-1] + 1, n):
        assert next(step for step in steps if step >= multiple) in found
    passed = {first, *(a for b, a in pairwise(steps) if a // n > b // n)}
    assert set(found) <= passed


def test_policies_join():
    assert asked(EverySteps(3), range(10)) == [3, 6, 9]
    assert asked(AtSteps([0, 4]) | EverySteps(5), range(10)) == [0, 4, 5]
    assert asked(EverySteps(2) & WhenIdle(), range(5)) == []
    assert asked(EverySteps(2) & WhenIdle(), range(5), idle=True) == [2, 4]
    assert asked(EverySeconds(60), range(3), since_s=59.9) == []
    assert asked(EverySeconds(60), range(3), since_s=60) == [0, 1, 2]
    assert asked(OnPreemption(), range(2), preempted=True) == [0, 1]
    assert (EverySteps(3) | AtSteps([1])).follows_step
    assert not (EverySteps(3) | OnPreemption()).follows_step


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (EverySteps, (0,)),
        (EverySteps, (True,)),
        (EverySeconds, (0,)),
        (KeepLast, (0,)),
        (KeepLast, (2.0,)),
        (KeepBest, (0, "loss")),
        (KeepEvery, ()),
        (KeepEvery, (3, 3.0)),
        (KeepEvery, (None, 0)),
        (KeepNewer, (-1,)),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(kind, given):
    with pytest.raises(ValueError, match=r".+"):
        kind(*given)


def test_what_is_no_policy_is_refused(tmp_path):
    with pytest.raises(TypeError, match="EverySteps"):
        EverySteps(3) | 5
    with pytest.raises(TypeError, match="KeepLast"):
        KeepLast(3) | EverySteps(5)
    with pytest.raises(TypeError, match="KeepLast"):
        shardkeep.CheckpointManager(tmp_path, keep=EverySteps(3))
    with pytest.raises(TypeError, match="EverySteps"):
        shardkeep.CheckpointManager(tmp_path, save=KeepLast(3))


@pytest.mark.parametrize(
    "given_",
    [{"ask_every": 0}, {"ask_every": True}, {"stale_s": -1}, {"pin_stale_s": 0.0}],
    ids=repr,
)
def test_numbers_that_a_manager_cannot_use(tmp_path, given_):
    with pytest.raises(ValueError, match=next(iter(given_))):
        shardkeep.CheckpointManager(tmp_path, **given_)


def test_every_steps_after_the_loop_went_back():
    policy = EverySteps(10)
    assert policy.wants(Moment(20, 35, 0.0, False, True))
    assert not policy.wants(Moment(25, 35, 0.0, False, True))


def test_ranks_that_ask_about_different_steps(tmp_path):
    def ask(ranks):
        with shardkeep.CheckpointManager(
            tmp_path, save=EverySeconds(5), process_group=ranks
        ) as run:
            run.should_save(3 + ranks.rank)

    with pytest.raises(PlanError, match="3 on rank 0, 4 on rank 1"):
        ThreadRanks(2).run(ask)


def test_metrics_that_are_no_numbers_are_left_out():
    found = {"loss": 1, "on": True, "text": "x", "list": [1], "huge": 10**400, "nan": "NaN"}
    made = metrics_of({"metrics": found})
    assert set(made) == {"loss", "nan"}
    assert metrics_of({"metrics": [1]}) == {}


# --- names


@given(
    st.sampled_from(
        ["step-{step}", "{step}", "{step:08}", "a{{b}}-{step:03d}.ckpt", "{{{step}}}", "{step}}}c"]
    ),
    st.data(),
)
def test_names_lead_to_their_step_and_no_other_does(template, data):
    names = StepNames(template)
    step = data.draw(st.integers(0, 10**17))
    assert names.step(names.of(step)) == step
    other = data.draw(st.text(alphabet="step-0123456789{}ab.", max_size=20))
    found = names.step(other)
    assert found is None or names.of(found) == other


@pytest.mark.parametrize(
    "template",
    [
        *("step", "{step}{step}", "{other}", "a/{step}", ".{step}", "{step:x}", "{step!r}/"),
        *("{step:,}", "{step:g}", "{step:.0f}", "a\0{step}"),
    ],
)
def test_templates_that_make_no_names_are_refused(template):
    with pytest.raises(ValueError, match="step_name"):
        StepNames(template)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", 10**18])
def test_steps_that_have_no_name(step):
    with pytest.raises(ValueError, match="step is"):
        StepNames("{step}").of(step)


def test_a_name_that_no_directory_can_have():
    names = StepNames("a" * (MAX_NAME - 8) + "{step}")
    assert names.of(10**7)
    with pytest.raises(ValueError, match="longer than"):
        names.of(10**8)

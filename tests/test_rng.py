"""Random generators that go on where they were, or on other streams by a fixed rule."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep import MismatchError, ThreadRanks, UnsupportedValueError, rng
from shardkeep import torch as keeping

KINDS = ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]


@pytest.fixture(autouse=True)
def _leave_the_generators_alone():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draws(generators=()):
    """From every generator, and of kinds that keep half of what they made for the next time."""
    made = [random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal()]
    made += [torch.rand(3).tolist(), torch.randn(1).tolist(), torch.randperm(5).tolist()]
    return made + [draw(one) for one in generators]


def draw(one):
    if isinstance(one, random.Random):
        return one.random(), one.gauss(0, 1)
    if isinstance(one, np.random.Generator):
        return one.random(), one.integers(0, 9, dtype=np.uint32), one.standard_normal()
    if isinstance(one, np.random.RandomState):
        return one.random_sample(), one.standard_normal()
    return torch.rand(2, generator=one).tolist()


def make_generators(seed):
    made = {kind: np.random.Generator(getattr(np.random, kind)(seed)) for kind in KINDS}
    return {
        **made,
        "own": random.Random(seed),
        "legacy": np.random.RandomState(seed),
        "torch": torch.Generator().manual_seed(seed),
    }


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("background", [False, True])
def test_draws_after_a_restore_are_those_of_a_run_that_never_stopped(tmp_path, background):
    generators = make_generators(5)
    seed_all(5)
    for _ in range(3):
        draws(generators.values())
    state = {"rng": keeping.rng_state(generators), "w": torch.ones(2)}
    if background:
        handle = shardkeep.async_save(state, tmp_path)
        expected = [draws(generators.values()) for _ in range(4)]
        handle.result(timeout=60)
    else:
        shardkeep.save(state, tmp_path)
        expected = [draws(generators.values()) for _ in range(4)]
    other = make_generators(99)
    seed_all(99)
    shardkeep.load({"rng": keeping.rng_state(other), "w": torch.zeros(2)}, tmp_path)
    assert [draws(other.values()) for _ in range(4)] == expected


def test_a_save_and_a_load_draw_nothing(tmp_path):
    seed_all(3)
    expected = [draws() for _ in range(2)]
    seed_all(3)
    shardkeep.save({"w": torch.ones(2)}, tmp_path)
    first = draws()
    shardkeep.load({"w": torch.zeros(2)}, tmp_path)
    assert [first, draws()] == expected


def test_without_torch(tmp_path):
    code = f"""
import random, sys
import numpy as np, shardkeep
from shardkeep import rng
mine = np.random.default_rng(3)
random.seed(1); np.random.seed(1)
shardkeep.save({{"rng": rng.rng_state({{"mine": mine}})}}, {str(tmp_path)!r})
expected = random.random(), np.random.random(), mine.random()
random.seed(2); np.random.seed(2)
other = np.random.default_rng(4)
shardkeep.load({{"rng": rng.rng_state({{"mine": other}})}}, {str(tmp_path)!r})
assert (random.random(), np.random.random(), other.random()) == expected
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_states_are_plain_values(tmp_path):
    shardkeep.save({"rng": keeping.rng_state(make_generators(1))}, tmp_path)
    with shardkeep.open(tmp_path) as ckpt:
        assert ckpt.nbytes == 0
        assert ckpt["rng.0.generators.PCG64.state.state"] > 2**64
        assert len(ckpt["rng.0.torch.state"]) == len(torch.get_rng_state())


def test_a_single_state_without_per_rank(tmp_path):
    generator = np.random.default_rng(1)
    shardkeep.save({"rng": rng.RngState({"a": generator}, include_global=False)}, tmp_path)
    expected = draw(generator)
    other = np.random.default_rng(2)
    shardkeep.load({"rng": rng.RngState({"a": other}, include_global=False)}, tmp_path)
    assert draw(other) == expected


# --- another number of ranks


def saved_by(world, path, drawn=2):
    """Generators of ranks as threads, which share those of the process."""

    def work(ranks):
        generators = make_generators(100 + ranks.rank)
        for _ in range(drawn):
            [draw(one) for one in generators.values()]
        state = {"rng": keeping.rng_state(generators, include_global=False)}
        shardkeep.save(state, path, process_group=ranks)
        return [draw(one) for one in generators.values()]

    return ThreadRanks(world).run(work)


def loaded_by(world, path):
    def work(ranks):
        generators = make_generators(7)
        state = {"rng": keeping.rng_state(generators, include_global=False)}
        shardkeep.load(state, path, process_group=ranks)
        return [draw(one) for one in generators.values()]

    return ThreadRanks(world).run(work)


def test_other_numbers_of_ranks_have_streams_of_their_own(tmp_path):
    expected = saved_by(4, tmp_path)
    assert loaded_by(4, tmp_path) == expected
    seen = {str(one) for rank in expected for one in rank}
    count = len(seen)
    for world in (1, 2, 3, 8):
        drawn = loaded_by(world, tmp_path)
        assert drawn == loaded_by(world, tmp_path)
        new = {str(one) for rank in drawn for one in rank}
        assert len(new) == world * len(drawn[0])
        seen |= new
        count += len(new)
    assert len(seen) == count  # other streams on every number of ranks, and never an old one


def test_streams_follow_from_where_the_run_was(tmp_path):
    saved_by(2, tmp_path / "a", drawn=2)
    saved_by(2, tmp_path / "b", drawn=3)
    saved_by(2, tmp_path / "c", drawn=2)
    streams = [loaded_by(3, tmp_path / name) for name in "abc"]
    assert streams[0] == streams[2]
    assert streams[0] != streams[1]


@given(st.binary(min_size=32, max_size=32), st.integers(1, 10_000))
def test_no_two_ranks_have_one_seed(key, world):
    from shardkeep.torch.rng import _seed_of

    ranks = {0, 1, world // 2, world - 1, world}
    seeds = {
        _seed_of(rng.Seed(key, rank), device, number) % 2**32
        for rank in ranks
        for device in ["cpu"]
        for number in range(3)
    }
    assert len(seeds) == 3 * len(ranks)


def test_the_rule_does_not_change():
    """Runs that were loaded on another number of ranks must give the same again next year."""
    saved = [{"python": {"version": 3, "words": b"\1\2\3\4", "gauss": None}}]
    told = rng.reseed(saved, 1, 4)
    assert told["reseed"].hex()[:32] == "07e23a6b08ed15c19a34127a786ed7b5"
    generators = {"np": np.random.default_rng(0), "py": random.Random(0), "t": torch.Generator()}
    keeping.RngState(generators, include_global=False).load_state_dict(told)
    assert int(generators["np"].bit_generator.random_raw()) == 14243404152138335352
    assert generators["py"].getrandbits(64) == 8423861693725318018
    assert generators["t"].initial_seed() == 3656244854


def test_all_generators_of_the_process_are_seeded_anew(tmp_path):
    shardkeep.save({"rng": keeping.rng_state()}, tmp_path)

    def work(ranks):
        shardkeep.load({"rng": keeping.rng_state()}, tmp_path, process_group=ranks)

    before = [str(one) for one in draws()]
    ThreadRanks(2).run(work)
    after = [str(one) for one in draws()]
    assert not set(before) & set(after)


# --- what does not fit


def test_generators_must_be_those_that_were_saved(tmp_path):
    save = rng.RngState({"a": random.Random()}, include_global=False).state_dict()
    with pytest.raises(MismatchError, match="a was saved but is not here; b was not saved"):
        rng.RngState({"b": random.Random()}, include_global=False).load_state_dict(save)
    with pytest.raises(MismatchError, match=r"numpy, python was not saved"):
        rng.RngState({"a": random.Random()}).load_state_dict(save)
    with pytest.raises(MismatchError, match="torch was saved but is not here"):
        rng.RngState().load_state_dict(keeping.RngState().state_dict())
    made = make_generators(1)
    state = rng.RngState({"a": made["PCG64"]}, include_global=False).state_dict()
    with pytest.raises(MismatchError, match="state of a PCG64 was saved, here is a MT19937"):
        rng.RngState({"a": made["MT19937"]}, include_global=False).load_state_dict(state)


def test_nothing_is_set_if_one_state_does_not_fit():
    generator, state = random.Random(1), keeping.RngState()
    told = keeping.RngState({"a": generator}).state_dict()
    told["generators"]["a"]["words"] = b"1234"
    expected = random.getstate()
    random.seed(4)
    now = random.getstate()
    assert now != expected
    with pytest.raises(MismatchError, match="Python's random refuses the state"):
        keeping.RngState({"a": generator}).load_state_dict(told)
    assert random.getstate() == now
    broken = state.state_dict()
    broken["torch"]["state"] = b"12"
    with pytest.raises(MismatchError, match="torch refuses the state"):
        state.load_state_dict(broken)


@pytest.mark.parametrize("kind", [*KINDS, "RandomState", "global"])
def test_nothing_is_set_if_numpy_refuses_a_state(kind):
    made = {"RandomState": np.random.RandomState, "global": lambda seed: None}
    one = made.get(kind, getattr(np.random, kind, None))(1)
    state = rng.RngState({} if one is None else {"a": one})
    told = state.state_dict()
    inner = told["numpy"] if one is None else told["generators"]["a"]
    words = "key" if "key" in inner["state"] else "state"
    # A single word would do for all four of SFC64.
    right, wrong = inner["state"][words], ["<u8", bytes(24 if kind == "SFC64" else 8)]
    random.seed(4)
    np.random.seed(4)
    before = state.state_dict()
    for broken in (wrong, "no state", None):
        inner["state"][words] = broken
        with pytest.raises(MismatchError, match="numpy refuses the state"):
            state.load_state_dict(told)
        assert state.state_dict() == before
    inner["state"][words] = right
    state.load_state_dict(told)
    assert state.state_dict() == told


@pytest.mark.parametrize("one", [object(), "seed", random.SystemRandom()])
def test_what_has_no_state_is_refused(one):
    with pytest.raises(UnsupportedValueError):
        rng.RngState({"x": one})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is absent here")
def test_the_state_of_an_absent_device():
    state = keeping.RngState().state_dict()
    assert "cuda" not in state
    state["cuda"] = {"current": 1, "states": [bytes(16), bytes(16)]}
    with pytest.raises(MismatchError, match=r"cuda:0, cuda:1 was saved .*absent_devices='skip'"):
        keeping.RngState().load_state_dict(state)
    keeping.RngState(absent_devices="skip").load_state_dict(state)
    with pytest.raises(ValueError, match="absent_devices"):
        keeping.RngState(absent_devices="ignore")

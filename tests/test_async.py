"""Saving in the background: a checkpoint holds the state as it was when it was asked for."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_disks import LONG_S, faulty_disk

import shardkeep
import shardkeep.background
from shardkeep import PlanError, ShardedArray, ThreadRanks
from shardkeep.behind import Run
from shardkeep.engine.moves import Mover
from shardkeep.engine.snapshot import Snapshot

KINDS = ["<f4", "<f8", "<i8", "<u2", "|u1", "|b1", "<c16", "<f2"]


@pytest.fixture
def keeper():
    with shardkeep.Checkpointer() as keeper:
        yield keeper


@pytest.fixture
def staging(monkeypatch):
    """Copies that are made behind the caller wait until this is set."""
    go = threading.Event()
    real = Snapshot.copy

    def copy_late(self, copying):
        if threading.current_thread().name == "shardkeep-stage":
            assert go.wait(LONG_S)
        real(self, copying)

    monkeypatch.setattr(Snapshot, "copy", copy_late)
    yield go
    go.set()


@pytest.fixture
def disk():
    """Data files are written once it is released."""
    with faulty_disk() as disk:
        disk.hold()
        yield disk


def is_equal(one, two):
    """Bit for bit, in nested containers of arrays, tensors and plain values."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(is_equal(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(is_equal, one, two))
    if hasattr(one, "resolve_conj"):
        import torch

        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        one, two = (x.detach().contiguous().view(-1).view(torch.uint8).numpy() for x in (one, two))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes())
    return type(one) is type(two) and (one == two or (one != one and two != two))


def scribble(state):
    """Over every array, in place, and over every value and container."""
    if isinstance(state, dict):
        for key, value in list(state.items()):
            scribble(value)
            if not hasattr(value, "shape"):
                state[key] = "scribbled"
        state["new"] = np.ones(3)
    elif isinstance(state, list):
        for value in state:
            scribble(value)
        state.append("scribbled")
    elif isinstance(state, np.ndarray):
        state[...] = np.frombuffer(b"\x5a" * 16, np.uint8)[: state.itemsize].view(state.dtype)[0]
    elif hasattr(state, "fill_"):
        state.detach().fill_(77)


# --- eager


@st.composite
def states(draw):
    def array():
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        rng = np.random.default_rng(draw(st.integers(0, 9)))
        kind = np.dtype(draw(st.sampled_from(KINDS)))
        raw = rng.integers(0, 256, int(np.prod(shape)) * kind.itemsize, np.uint8)
        made = (raw % 2 == 1 if kind.kind == "b" else raw.view(kind)).reshape(shape)
        way = draw(st.sampled_from(["as it is", "turned", "every second"]))
        return made if way == "as it is" or not shape else made.T if way == "turned" else made[::2]

    def node(depth):
        kinds = ["array", "array", "value", *(["dict", "list"] if depth else [])]
        what = draw(st.sampled_from(kinds))
        if what == "array":
            return array()
        if what == "value":
            return draw(st.one_of(st.integers(), st.text(max_size=5), st.floats(), st.none()))
        size = range(draw(st.integers(0, 3)))
        return (
            {f"k{n}": node(depth - 1) for n in size}
            if what == "dict"
            else [node(depth - 1) for n in size]
        )

    return {f"s{n}": node(2) for n in range(draw(st.integers(1, 4)))}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=states(), second=states(), unit=st.sampled_from([64, 1024, 8 << 20]))
def test_whatever_is_changed_after_the_call_is_not_in_it(
    tmp_path_factory, keeper, first, second, unit
):
    folder = tmp_path_factory.mktemp("eager")
    for number, state in enumerate((first, second, first)):
        before = copy.deepcopy(state)
        with mock.patch("shardkeep.background.HOST_UNIT", unit):
            handle = keeper.async_save(state, folder / str(number))
        scribble(state)
        handle.result(LONG_S)
        assert is_equal(shardkeep.open(folder / str(number)).state_dict(), before)


def torch_state():
    torch = pytest.importorskip("torch")
    weight = torch.randn(50, 30)
    complex_ = torch.randn(20, 4, dtype=torch.complex64)
    return {
        "plain": torch.randn(1000, 70),
        "turned": torch.randn(40, 60).T,
        "half": torch.randn(33).to(torch.bfloat16),
        "embedding": weight,
        "head": weight,
        "conj": complex_.conj(),
        "negative": complex_.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(7, 7)),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "nested": {"list": [torch.arange(5), {"deep": np.arange(9.0)}], "text": "abc"},
        "numbers": (1, 2.5, None, True),
        "lr": [0.1, 0.2],
    }


def holds(path, expected):
    """Whether a checkpoint has exactly this state; loaded over another."""
    target = blank(expected)
    shardkeep.load(target, path)
    return is_equal(target, expected)


def blank(state):
    """A copy with other contents."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)([blank(value) for value in state])
    if not hasattr(state, "shape"):
        return type(state)() if state is not None else None
    made = copy.deepcopy(state)
    scribble(made)
    return made


def test_it_stores_what_a_save_at_that_moment_stores(tmp_path, keeper):
    state = torch_state()
    for number in range(2):
        keeper.save(state, tmp_path / f"sync{number}")
        handle = keeper.async_save(state, tmp_path / f"async{number}")
        scribble(state)
        handle.result(LONG_S)
        sync = shardkeep.open(tmp_path / f"sync{number}").state_dict()
        assert is_equal(shardkeep.open(tmp_path / f"async{number}").state_dict(), sync)
        assert len(sync) == len(state) - 1
        state = torch_state()


def test_ties_stay_ties(tmp_path, keeper):
    weight = np.arange(1000.0)
    state = {"embedding": weight, "head": weight}
    assert keeper.async_save(state, tmp_path / "a").result(LONG_S).nbytes == weight.nbytes
    assert holds(tmp_path / "a", state)


def test_the_state_may_go_while_it_is_written(tmp_path, keeper, disk):
    state = {"w": np.arange(100_000.0), "step": 3}
    alive = weakref.ref(state["w"])
    handle = keeper.async_save(state, tmp_path / "a")
    handle.wait_staged(LONG_S)
    del state
    gc.collect()
    assert not handle.done()
    assert alive() is None
    disk.release()
    handle.result(LONG_S)
    assert shardkeep.open(tmp_path / "a")["w"][-1] == 99_999


def test_the_state_may_go_after_an_error_too(tmp_path, keeper, monkeypatch):
    def fail(self, copying):
        raise MemoryError("no room")

    state = {"w": np.ones(1000)}
    alive = weakref.ref(state["w"])
    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "copy", fail)
        patch.setattr(logging.getLogger("shardkeep"), "disabled", True)  # records keep frames
        handle = keeper.async_save(state, tmp_path / "a")
        assert isinstance(handle.exception(LONG_S), MemoryError)
    handle.exception().__traceback__ = None
    del state
    gc.collect()
    assert alive() is None


# --- the same state, changed between saves


def test_states_that_change_between_saves(tmp_path, keeper):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(20, 10)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.state_dict(keep_vars=True), "optim": optimizer.state_dict(), "step": 0}
    number = 0

    def check(expected_names=()):
        nonlocal number
        number += 1
        before = copy.deepcopy(state)
        handle = keeper.async_save(state, tmp_path / str(number))
        for name, value in state["model"].items():
            value.detach().add_(1)
            assert not is_equal(value, before["model"][name])
        handle.result(LONG_S)
        assert holds(tmp_path / str(number), before)
        for name in expected_names:
            assert name in shardkeep.open(tmp_path / str(number))

    check()
    check()
    model(torch.ones(3, 20)).sum().backward()
    optimizer.step()
    state["optim"] = optimizer.state_dict()
    check(["optim.state.0.exp_avg"])  # optimizer state appears
    model.weight.requires_grad_(False)
    check()  # frozen
    state["more"] = {"list": [torch.ones(2), 5]}
    check(["more.list.0"])  # structure grows
    del state["more"]["list"][0]
    check()  # and shrinks
    state["model"]["weight"] = model.weight.detach().to(torch.bfloat16)
    check()  # another dtype
    model.bias.data = torch.randn(17)
    check()  # another shape, of the same object
    grown = torch.randn(6)
    state["grown"] = grown
    check()
    grown.resize_(500).fill_(2)
    check()  # resized under the same object
    state["array"] = np.arange(10)
    check()
    state["array"].resize(25, refcheck=False)
    check()  # the same in numpy
    state["array"] = state["array"].astype("f4")
    check()


def test_a_state_that_no_plan_fits_is_refused_and_leaves_nothing(tmp_path, keeper):
    keeper.async_save({"a": np.ones(3)}, tmp_path / "a").result(LONG_S)
    with pytest.raises(shardkeep.UnsupportedValueError, match="bad"):
        keeper.async_save({"a": np.ones(3), "bad": object()}, tmp_path / "b")
    assert [p for p in (tmp_path / "b").rglob("*") if p.is_file()] == []
    keeper.async_save({"a": np.ones(3)}, tmp_path / "b").result(LONG_S)


def test_an_error_before_the_first_byte_leaves_nothing(tmp_path, keeper, monkeypatch):
    def fail(*args):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("shardkeep.background.Snapshot", fail)
        with pytest.raises(MemoryError):
            keeper.async_save({"a": np.ones(3)}, tmp_path / "a")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    keeper.async_save({"a": np.ones(3)}, tmp_path / "a").result(LONG_S)


def test_an_interrupt_is_raised_once(tmp_path, keeper, monkeypatch):
    def interrupt(self, copying):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            keeper.async_save({"a": np.ones(3)}, tmp_path / "a")
    keeper.async_save({"a": np.ones(3)}, tmp_path / "a").result(LONG_S)


# --- lazy


class Net:
    """A model with buffers that a forward pass changes, its optimizer, and their state."""

    def __init__(self, kind):
        import torch

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)
        )
        make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
        options = {} if kind == "adamw" else {"momentum": 0.9}
        self.optimizer = make(self.model.parameters(), lr=0.1, **options)
        self.ema = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.step()

    def backward(self):
        import torch

        self.model(torch.randn(32, 8)).square().mean().backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self):
        state = {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}
        return {**state, "ema": self.ema}


@pytest.fixture(params=["sgd", "adamw"])
def net(request):
    pytest.importorskip("torch")
    return Net(request.param)


def test_a_guarded_step_waits_for_a_lazy_snapshot(tmp_path, keeper, staging, net):
    before = copy.deepcopy(net.state)
    handle = keeper.async_save(net.state, tmp_path / "a", snapshot="lazy")
    shardkeep.torch.guard(net.optimizer, handle)
    net.backward()  # changes the buffers of the batch norm
    for kept in net.ema.values():
        kept.zero_()  # nobody's: it was copied before
    assert not handle.staged.done()
    threading.Timer(0.2, staging.set).start()
    net.optimizer.step()
    assert handle.staged.done()
    handle.result(LONG_S)
    assert not is_equal(net.state["model"]["1.running_mean"], before["model"]["1.running_mean"])
    assert holds(tmp_path / "a", before)


def test_a_step_without_a_guard_is_an_error_that_names_what_changed(tmp_path, keeper, staging, net):
    handle = keeper.async_save(net.state, tmp_path / "a", snapshot="lazy")
    net.step()
    staging.set()
    with pytest.raises(PlanError, match=r"model\.0\.bias.*guard"):
        handle.result(LONG_S)
    with pytest.raises(PlanError):
        handle.wait_staged()
    assert "running_mean" not in str(handle.exception())
    with pytest.raises(shardkeep.CheckpointNotFoundError):
        shardkeep.open(tmp_path / "a")
    keeper.async_save(net.state, tmp_path / "a", snapshot="lazy").result(LONG_S)


def be_zero(parameters):
    import torch

    torch.nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in parameters)), parameters)


def be_double(parameters):
    for parameter in parameters:
        parameter.data = parameter.data.double()


@pytest.mark.parametrize("change", [be_zero, be_double])
def test_parameters_that_got_other_memory_are_an_error(tmp_path, keeper, staging, net, change):
    """Torch does not count `parameter.data = ...`, as of its own `vector_to_parameters`."""
    named = keeper.async_save(dict(net.model.named_parameters()), tmp_path / "a", snapshot="lazy")
    change(list(net.model.parameters()))
    staging.set()
    with pytest.raises(PlanError, match=r"0\.bias.*changed before the snapshot"):
        named.result(LONG_S)


def test_other_memory_for_a_while_is_an_error_too(tmp_path, keeper, staging, net, monkeypatch):
    """As where an average's weights stand in for an evaluation: place and version end as before."""
    parameters = list(net.model.parameters())
    own = [parameter.data for parameter in parameters]
    check = Run._check_unchanged

    def swap_back(self, steps):
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data
        check(self, steps)

    monkeypatch.setattr(Run, "_check_unchanged", swap_back)
    handle = keeper.async_save(dict(net.model.named_parameters()), tmp_path / "a", snapshot="lazy")
    for parameter in parameters:
        parameter.data = parameter.data.clone().zero_()
    staging.set()
    with pytest.raises(PlanError, match="another shape, type or place"):
        handle.result(LONG_S)


def test_a_neighbour_in_the_same_memory_is_another(tmp_path, keeper, staging, monkeypatch):
    torch = pytest.importorskip("torch")
    both = torch.stack([torch.zeros(100), torch.ones(100)], 1)  # a value, and its average
    parameter = torch.nn.Parameter(both[:, 0])
    own, optimizer = parameter.data, torch.optim.SGD([parameter], lr=0.1)
    check = Run._check_unchanged

    def swap_back(self, steps):
        parameter.data = own
        check(self, steps)

    monkeypatch.setattr(Run, "_check_unchanged", swap_back)
    handle = keeper.async_save({"w": parameter}, tmp_path / "a", snapshot="lazy")
    parameter.data = both[:, 1]
    staging.set()
    with pytest.raises(PlanError, match="another shape, type or place"):
        handle.result(LONG_S)
    assert optimizer.param_groups


def test_a_state_dict_has_the_memory_that_parameters_had(tmp_path, keeper, staging, net):
    before = copy.deepcopy(net.state)
    handle = keeper.async_save(net.state, tmp_path / "a", snapshot="lazy")
    be_zero(list(net.model.parameters()))
    staging.set()
    handle.result(LONG_S)
    assert holds(tmp_path / "a", before)


@pytest.mark.parametrize("who", [0, 1])
def test_each_optimizer_of_a_parameter_is_watched(tmp_path, keeper, staging, who):
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(4))
    both = [torch.optim.SGD([weight], lr=0.1, fused=True) for _ in range(2)]
    weight.grad = torch.ones(4)
    handle = keeper.async_save({"w": weight}, tmp_path / "a", snapshot="lazy")
    both[who].step()  # at once, which torch does not count
    staging.set()
    with pytest.raises(PlanError, match="w changed before the snapshot"):
        handle.result(LONG_S)


def test_a_guard_does_not_stop_a_step_when_the_save_is_no_more(tmp_path, keeper, staging, net):
    handle = keeper.async_save(net.state, tmp_path / "a", snapshot="lazy")
    shardkeep.torch.guard(net.optimizer, handle)
    handle.cancel()
    staging.set()
    net.step()
    assert wait_for(handle.cancelled)
    net.step()


def test_a_guard_lets_go_however_the_save_ended(net):
    for outcome in (None, ValueError("disk"), KeyboardInterrupt()):
        handle = shardkeep.SaveHandle("somewhere")
        shardkeep.torch.guard(net.optimizer, handle)
        handle.end(outcome)
        net.step()
        with pytest.raises(BaseException):  # noqa: B017, PT011
            handle.wait_staged(0)


def wait_for(condition):
    deadline = threading.Event()
    for _ in range(500):
        if condition():
            return True
        deadline.wait(0.01)
    return False


def test_only_what_an_optimizer_owns_is_copied_late(tmp_path, keeper, staging, net):
    """With every tensor nobody's, nothing is left to copy: the snapshot is there on return."""
    late = keeper.async_save(net.state, tmp_path / "a", snapshot="lazy")
    assert not late.staged.done()
    staging.set()
    late.result(LONG_S)
    staging.clear()
    handle = keeper.async_save({"ema": net.ema, "x": np.ones(5)}, tmp_path / "b", snapshot="lazy")
    assert handle.staged.done()
    handle.result(LONG_S)


def test_an_optimizer_made_later_is_found(tmp_path, keeper, staging):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 4)
    assert keeper.async_save(model.state_dict(), tmp_path / "a", snapshot="lazy").staged.done()
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    extra = torch.ones(3)  # something new to look at
    state = {**model.state_dict(), "extra": extra}
    handle = keeper.async_save(state, tmp_path / "b", snapshot="lazy")
    assert not handle.staged.done()
    with torch.no_grad():
        model.bias.zero_()  # nobody's
    extra.zero_()
    staging.set()
    handle.result(LONG_S)
    assert shardkeep.open(tmp_path / "b")["extra"][0] == 1
    assert optimizer


def test_parameters_without_memory_do_not_matter(tmp_path, keeper, staging, net):
    import torch

    odd = torch.nn.LazyLinear(3)
    optimizer = torch.optim.SGD(odd.parameters(), lr=0.1)
    handle = keeper.async_save({**net.state, "x": torch.ones(2)}, tmp_path / "a", snapshot="lazy")
    assert not handle.staged.done()
    staging.set()
    handle.result(LONG_S)
    assert optimizer


def test_what_is_stored_under_another_name_is_watched_too(tmp_path, staging):
    torch = pytest.importorskip("torch")

    def work(ranks):
        weight = torch.nn.Parameter(torch.ones(4) * ranks.rank)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with shardkeep.Checkpointer(process_group=ranks) as keeper:
            # Two paths, one name: one of them is stored under another.
            state = {"own.w": weight} if ranks.rank else {"own": {"w": weight}}
            handle = keeper.async_save(state, tmp_path / "a", snapshot="lazy")
            if ranks.rank == 1:
                weight.grad = torch.ones(4)
                optimizer.step()
            ranks.agree("stepped", lambda: None)
            staging.set()
            return handle.exception(LONG_S)

    errors = ThreadRanks(2).outcomes(work)
    assert all(isinstance(error, PlanError) for error in errors)
    assert "changed before the snapshot was complete" in str(errors[0])


def test_arguments_are_checked(tmp_path, keeper):
    with pytest.raises(ValueError, match="snapshot"):
        keeper.async_save({}, tmp_path, snapshot="later")
    with pytest.raises(ValueError, match="on_overlap"):
        keeper.async_save({}, tmp_path, on_overlap="queue")
    with pytest.raises(ValueError, match="writer"):
        shardkeep.Checkpointer(writer="fibre")
    with pytest.raises(ValueError, match="checkpoint_id"):
        keeper.async_save({"a": 1})


# --- a snapshot that is not of now


def test_a_state_that_does_not_change_is_warned_of(tmp_path, keeper, caplog):
    state = {"w": np.arange(1000.0), "step": 0}
    with caplog.at_level(logging.WARNING, "shardkeep"):
        keeper.async_save(state, tmp_path / "0").result(LONG_S)
        state["w"][5] += 1
        keeper.async_save(state, tmp_path / "1").result(LONG_S)
        keeper.async_save(state, tmp_path / "1", overwrite=True).result(LONG_S)
        keeper.async_save({"step": 1}, tmp_path / "2").result(LONG_S)
        keeper.async_save({"step": 2}, tmp_path / "3").result(LONG_S)
        assert caplog.records == []
        keeper.async_save(state, tmp_path / "4").result(LONG_S)
        state["step"] = 1
        keeper.async_save(state, tmp_path / "5").result(LONG_S)
    (record,) = caplog.records
    assert "bit-equal" in record.getMessage()
    assert str(tmp_path / "5") in record.getMessage()


# --- groups


def sharded(rank, world, value):
    local = np.full((3, 5), 100 * value + rank)
    array = ShardedArray.from_local(local, (3 * rank, 0), (3 * world, 5))
    return {"w": array, "same": np.full(7, value), "step": value}


class Foreign:
    """A coordinator of somebody else, who has never heard of twins."""

    def __init__(self, ranks):
        self._ranks = ranks
        self._users = set()
        self.memory = {}

    def __getattr__(self, name):
        if name == "twin":
            raise AttributeError(name)
        found = getattr(self._ranks, name)
        if name in ("agree", "gather_scatter", "lead", "exchange"):

            def watched(*args):
                self._users.add(threading.current_thread().name)
                assert len(self._users) == 1, self._users
                try:
                    return found(*args)
                finally:
                    self._users.clear()

            return watched
        return found


def every_call(ranks, where, foreign):
    group = Foreign(ranks) if foreign else ranks
    with shardkeep.Checkpointer(process_group=group) as keeper:
        keeper.prewarm(sharded(ranks.rank, 3, 0))
        for value in range(3):
            handle = keeper.async_save(sharded(ranks.rank, 3, value), f"{where}/{value}")
            assert not keeper.should_stop()
            keeper.save(sharded(ranks.rank, 3, value), f"{where}/sync{value}")
            target = sharded(ranks.rank, 3, -1)
            shardkeep.load(target, f"{where}/sync{value}", process_group=group)
            assert target["step"] == value
        if foreign:  # never overlaps
            for kind in ("skip", "error"):
                state = sharded(ranks.rank, 3, 9)
                handle = keeper.async_save(state, f"{where}/{kind}", on_overlap=kind)
        handle.result(LONG_S)
    return handle.skipped


@pytest.mark.parametrize("foreign", [False, True])
def test_every_call_beside_a_save(tmp_path, foreign):
    """Also over a coordinator that does one thing at a time."""
    results = ThreadRanks(3).run(lambda ranks: every_call(ranks, tmp_path, foreign))
    assert results == [False] * 3
    for value in range(3):
        assert shardkeep.verify(tmp_path / str(value)).ok
        with shardkeep.open(tmp_path / str(value)) as found:
            assert found["w"][-1, -1] == 100 * value + 2
    for kind in ("skip", "error") if foreign else ():
        assert shardkeep.verify(tmp_path / kind).ok


def test_how_long_ranks_wait_can_change_from_save_to_save(tmp_path):
    def work(ranks):
        found = []
        for number, timeout_s in enumerate((5.0, 7.0)):
            state = {"a": np.full(3, number)}
            path = tmp_path / str(number)
            shardkeep.async_save(state, path, process_group=ranks, timeout_s=timeout_s).result()
            found.append(ranks.memory["keeper/thread"]._background.coordinator.timeout_s)
        return found

    assert ThreadRanks(2).run(work) == [[5.0, 7.0]] * 2


def test_two_checkpointers_over_one_foreign_coordinator(tmp_path):
    def work(ranks):
        group = Foreign(ranks)
        first = shardkeep.Checkpointer(process_group=group)
        second = shardkeep.Checkpointer(process_group=group)
        handles = [
            keeper.async_save(sharded(ranks.rank, 2, n), tmp_path / str(n))
            for n, keeper in enumerate((first, second, first))
        ]
        shardkeep.save(sharded(ranks.rank, 2, 5), tmp_path / "s", process_group=group)
        for handle in handles:
            handle.result(LONG_S)
        first.close()
        second.close()

    ThreadRanks(2).run(work)
    assert all(shardkeep.verify(tmp_path / name).ok for name in ("0", "1", "2", "s"))


def test_other_calls_go_on_beside_a_save(tmp_path, disk):
    other = tmp_path / "other"
    with shardkeep.Checkpointer() as first, shardkeep.Checkpointer() as second:
        disk.release()
        first.save({"a": np.ones(5)}, other)
        disk.hold()
        handle = first.async_save({"a": np.arange(5.0)}, tmp_path / "a")
        target = {"a": np.zeros(5)}
        first.load(target, other)
        assert target["a"][0] == 1
        assert shardkeep.open(other)["a"][0] == 1
        assert not first.should_stop()
        also = second.async_save({"b": np.arange(6.0)}, tmp_path / "b")
        assert not handle.done()
        assert not also.done()
        disk.release()
        first.save({"c": np.arange(7.0)}, tmp_path / "c")
        handle.result(LONG_S)
        also.result(LONG_S)
    for name, value in (("a", 4), ("b", 5), ("c", 6)):
        assert shardkeep.open(tmp_path / name)[name][-1] == value


def test_flush_waits_for_the_saves_of_every_checkpointer(tmp_path, disk):
    keeper = shardkeep.Checkpointer()
    handle = keeper.async_save({"a": np.ones(5)}, tmp_path / "a")
    threading.Timer(0.2, disk.release).start()
    shardkeep.flush()
    assert handle.done()
    keeper.async_save({"a": np.ones(5)}, tmp_path / "b").result(LONG_S)
    keeper.close()


def test_the_function_uses_one_checkpointer_again_and_again(tmp_path):
    first = shardkeep.async_save({"a": np.ones(5)}, tmp_path / "a")
    second = shardkeep.async_save({"a": np.zeros(5)}, tmp_path / "b")
    assert first.done()
    second.result(LONG_S)
    shardkeep.flush()
    shardkeep.async_save({"a": np.ones(5)}, tmp_path / "c").result(LONG_S)
    shardkeep.flush()


# --- memory


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_saves_in_a_row_take_one_copy_of_the_state_and_no_more(tmp_path):
    size, budget = 96 << 20, 16 << 20
    state = {f"t{n}": np.full(size // 8, n, np.uint8) for n in range(8)}
    with shardkeep.Checkpointer(memory_budget=budget) as keeper:
        keeper.async_save({"a": np.ones(9)}, tmp_path / "warm").result(LONG_S)
        before = resident()
        seen = []
        for step in range(10):
            state["t0"][:] = step + 1
            handle = keeper.async_save(state, tmp_path / "a", overwrite=True)
            handle.result(60)
            seen.append(resident() - before)
    slack = 24 << 20
    assert max(seen) < size + size // 16 + budget + slack, seen
    assert seen[-1] < seen[1] + slack, seen


def test_the_disk_is_at_work_before_the_last_byte_is_copied(tmp_path, keeper, monkeypatch):
    monkeypatch.setattr("shardkeep.background.HOST_UNIT", 1 << 20)
    monkeypatch.setattr("shardkeep.background.MOST_COPYING", 1)
    state = {f"w{n}": np.full(1 << 20, n, np.uint8) for n in range(8)}
    move, pwrite, writing = Mover.fill, os.pwrite, threading.Event()

    def fill(mover, low, high, data):
        if low >= 4 << 20:  # not before something was written
            assert writing.wait(LONG_S)
        move(mover, low, high, data)

    def note(fd, data, offset):
        if len(data) >= 1 << 19:
            writing.set()
        return pwrite(fd, data, offset)

    monkeypatch.setattr(Mover, "fill", fill)
    monkeypatch.setattr(os, "pwrite", note)
    for number in range(2):
        writing.clear()
        state["w7"][:] = number
        keeper.async_save(state, tmp_path / str(number)).result(LONG_S)
        shardkeep.verify(tmp_path / str(number))
        with shardkeep.open(tmp_path / str(number)) as saved:
            assert all((saved[name][:] == state[name]).all() for name in state)

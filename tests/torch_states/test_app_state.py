"""AppState on one process: every optimizer comes back bit by bit, and nothing else is touched."""

from __future__ import annotations

import copy
import gc
from collections import namedtuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel  # noqa: E402

import shardkeep  # noqa: E402
from shardkeep import MismatchError, UnsupportedValueError  # noqa: E402
from shardkeep.torch import AppState, guard  # noqa: E402
from shardkeep.torch.copying import copied  # noqa: E402
from shardkeep.torch.options import _in_place  # noqa: E402
from shardkeep.torch.rng import rng_state  # noqa: E402
from shardkeep.torch.supported import is_akin  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are too small for more, and where others compute too, waiting takes long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """A linear layer, statistics, and a parameter that nothing uses."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def bits(value):
    """What is compared: types, shapes, dtypes, bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return type(value), value.shape, value.dtype, value.device, bytes(flat.numpy())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    return type(value), repr(value)


def all_bits(model, optimizer):
    return bits(dict(model.state_dict())), bits(optimizer.state_dict())


def train(model, optimizer, steps=3, seed=1):
    numbers = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4, generator=numbers)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def split(model):
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    return decay, other


def two_groups(model):
    decay, other = split(model)
    groups = [
        {"params": decay, "weight_decay": 0.1, "lr": 2e-2},
        {"params": other, "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def half(model):
    return torch.optim.AdamW(model.first.parameters(), lr=1e-2)


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.5),
    "adamw with a tensor lr": lambda m: torch.optim.AdamW(
        m.parameters(), lr=torch.tensor(1e-2), weight_decay=0.5, foreach=False
    ),
    "adamw amsgrad foreach": lambda m: torch.optim.AdamW(
        m.parameters(), lr=1e-2, amsgrad=True, foreach=True
    ),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "adamw groups": two_groups,
    "adamw subset": half,
    "adam l2": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.5),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.5),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1, weight_decay=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), weight_decay=0.1),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), maximize=True),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
}


def built(make, seed=0):
    model = Net(seed)
    return model, make(model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every optimizer, after some steps and before the first, in one checkpoint."""
    path = tmp_path_factory.mktemp("trained") / "all"
    used = {name: built(make) for name, make in OPTIMIZERS.items()}
    for model, optimizer in used.values():
        train(model, optimizer)
    new = {f"new {name}": built(make) for name, make in OPTIMIZERS.items()}
    everything = {name: AppState(*one) for name, one in {**used, **new}.items()}
    before = {name: all_bits(*one) for name, one in {**used, **new}.items()}
    shardkeep.save(everything, path)
    assert {name: all_bits(*one) for name, one in {**used, **new}.items()} == before
    return path, before, {name: train(*one, seed=2) for name, one in {**used, **new}.items()}


@pytest.mark.parametrize("was_used", [False, True], ids=["into new ones", "into used ones"])
def test_every_optimizer_comes_back_bit_by_bit(was_used, trained):
    """Also those saved before their first step: nothing is made up."""
    path, before, losses = trained
    again = {name: built(OPTIMIZERS[name.removeprefix("new ")], seed=9) for name in before}
    for model, optimizer in again.values() if was_used else ():
        train(model, optimizer, steps=1, seed=7)
    random = torch.get_rng_state()
    shardkeep.load({name: AppState(*one) for name, one in again.items()}, path)
    assert torch.equal(torch.get_rng_state(), random)
    for name, one in again.items():
        assert all_bits(*one) == before[name], name
        assert train(*one, seed=2) == losses[name], name


def test_a_refused_load_changes_nothing(trained, tmp_path):
    """Not even a new optimizer gets the state that would have been loaded."""
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    shardkeep.save({"app": AppState(model, optimizer), "other": torch.ones(3)}, tmp_path / "a")
    again, into = built(OPTIMIZERS["adamw"], seed=9)
    before = all_bits(again, into)
    with pytest.raises(MismatchError, match="other"):
        shardkeep.load({"app": AppState(again, into), "other": torch.ones(4)}, tmp_path / "a")
    assert all_bits(again, into) == before


def damage(path):
    (data,) = (path / "data").glob("*-r*")
    damaged = bytearray(data.read_bytes())
    damaged[5000] ^= 1
    data.chmod(0o600)
    data.write_bytes(damaged)


def test_a_load_that_breaks_off_leaves_no_half_made_state(tmp_path):
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    damage(tmp_path / "a")
    again, into = built(OPTIMIZERS["adamw"], seed=9)
    with pytest.raises(shardkeep.CorruptionError):
        shardkeep.load(AppState(again, into), tmp_path / "a")
    assert not into.state


def test_a_scheduler_that_fails_to_load_says_so(tmp_path):
    class Broken:
        def state_dict(self):
            return {"last": 1}

        def load_state_dict(self, state):
            raise RuntimeError("broken scheduler")

    model, optimizer = built(OPTIMIZERS["adamw"])
    shardkeep.save(AppState(model, optimizer, Broken()), tmp_path / "a")
    with pytest.raises(RuntimeError, match="broken scheduler") as caught:
        shardkeep.load(AppState(model, optimizer, Broken()), tmp_path / "a")
    assert "undefined" in "".join(caught.value.__notes__)


# --- names --------------------------------------------------------------------------------------


def wrap_checkpointed(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.first = checkpoint_wrapper(model.first)
    return model


def wrap_compiled(model):
    return torch.compile(model, backend="eager")


def wrap_inside(model):
    model.last = torch.compile(model.last, backend="eager")
    return wrap_checkpointed(model)


WRAPPERS = {
    "bare": lambda model: model,
    "compiled": wrap_compiled,
    "checkpointed": wrap_checkpointed,
    "compiled and checkpointed": lambda model: wrap_compiled(wrap_checkpointed(model)),
    "compiled inside": wrap_inside,
    "data parallel": nn.DataParallel,
}


def wrapped(wrap, seed=0):
    """A model that was trained, without running it: compiling takes long."""
    model = wrap(Net(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return model, optimizer


def test_names_do_not_depend_on_what_wraps_the_model(tmp_path):
    expected = None
    paths = {}
    for name, wrap in WRAPPERS.items():
        model, optimizer = wrapped(wrap)
        paths[name] = tmp_path / name
        shardkeep.save(AppState(model, optimizer), paths[name])
        with shardkeep.open(paths[name]) as saved:
            names = sorted(saved.keys())
        expected = expected or names
        assert names == expected, name
    assert set(Net().state_dict()) <= {name.removeprefix("model.") for name in expected}
    for (source, path), wrap in zip(paths.items(), [*WRAPPERS.values()][::-1], strict=True):
        model, optimizer = wrapped(wrap, seed=9)
        shardkeep.load(AppState(model, optimizer), path)
        bare = getattr(model, "_orig_mod", getattr(model, "module", model))
        reference, other = wrapped(WRAPPERS[source])
        reference = getattr(reference, "_orig_mod", getattr(reference, "module", reference))
        one = [bits(p) for p in bare.parameters()]
        assert one == [bits(p) for p in reference.parameters()]
        assert bits(optimizer.state_dict()) == bits(other.state_dict())


def test_a_module_may_really_be_called_module(tmp_path):
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    found = AppState(nn.DataParallel(model)).state_dict()
    assert list(found["model"]) == ["module.weight", "module.bias"]


def test_several_models_and_optimizers(tmp_path):
    def build(seed):
        models = {"g": Net(seed), "d": Net(seed + 1)}
        optimizers = {
            "g": torch.optim.AdamW(models["g"].parameters()),
            "d": torch.optim.SGD(models["d"].parameters(), lr=0.1, momentum=0.9),
        }
        return models, optimizers

    models, optimizers = build(0)
    for name in models:
        train(models[name], optimizers[name])
    shardkeep.save(AppState(models, optimizers), tmp_path / "a")
    again, into = build(5)
    shardkeep.load(AppState(again, into), tmp_path / "a")
    for name in models:
        assert all_bits(again[name], into[name]) == all_bits(models[name], optimizers[name])
    with shardkeep.open(tmp_path / "a") as saved:
        assert "model.g.first.weight" in saved
        assert "optimizer.d.state.d.first.weight.momentum_buffer" in saved


def test_parts_of_one_model_and_an_optimizer_per_parameter(tmp_path):
    """As pipelines have them, and optimizers that step during the backward pass."""

    def build(seed):
        model = Net(seed)
        parts = [nn.ModuleDict({"first": model.first}), nn.ModuleDict({"last": model.last})]
        optimizers = [torch.optim.Adam([p]) for part in parts for p in part.parameters()]
        return model, parts, optimizers

    model, parts, optimizers = build(0)
    model(torch.randn(6, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    shardkeep.save(AppState(parts, optimizers), tmp_path / "a")
    other, others, into = build(5)
    shardkeep.load(AppState(others, into), tmp_path / "a")
    assert [bits(o.state_dict()) for o in into] == [bits(o.state_dict()) for o in optimizers]
    with pytest.raises(UnsupportedValueError, match="dict"):
        AppState([model, other]).state_dict()
    with pytest.raises(UnsupportedValueError, match="two optimizers"):
        AppState(parts, [*optimizers, optimizers[0]]).state_dict()


def test_rename(tmp_path):
    """Two ranks that both number their layers from 0 can give them other names."""
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    renamed = AppState(model, optimizer, rename=lambda name: f"stage1.{name}")
    shardkeep.save(renamed, tmp_path / "a")
    with shardkeep.open(tmp_path / "a") as saved:
        assert "model.stage1.first.weight" in saved
        assert "optimizer.state.stage1.first.weight.exp_avg" in saved
    again, into = built(OPTIMIZERS["adamw"], seed=9)
    shardkeep.load(AppState(again, into, rename=lambda n: f"stage1.{n}"), tmp_path / "a")
    assert all_bits(again, into) == all_bits(model, optimizer)


# --- parameters ---------------------------------------------------------------------------------


def test_frozen_later_thawed_later(tmp_path):
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    model.first.requires_grad_(False)
    train(model, optimizer)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    for frozen in (True, False):
        again, into = built(OPTIMIZERS["adamw"], seed=9)
        again.first.requires_grad_(not frozen)
        shardkeep.load(AppState(again, into), tmp_path / "a")
        assert all_bits(again, into) == all_bits(model, optimizer)
        assert again.first.weight.requires_grad is not frozen


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def step_tied(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.arange(7)).square().sum()
    loss.backward()
    optimizer.step()


def test_tied_weights_stay_tied(tmp_path):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    step_tied(model, optimizer)
    result = shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    assert result.nbytes == 3 * 7 * 4 * 4 + 4  # once
    again = Tied()
    into = torch.optim.AdamW(again.parameters())
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert again.head.weight is again.embed.weight
    assert all_bits(again, into) == all_bits(model, optimizer)


def test_untied_then_tied(tmp_path):
    """The stages of a pipeline have a copy each; they are equal, or they do not fit."""
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    again = Tied()
    into = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert bits(again.embed.weight) == bits(model.embed.weight)
    (kept,) = into.state.values()
    assert bits(kept["momentum_buffer"]) == bits(
        optimizer.state[model.head.weight]["momentum_buffer"]
    )
    optimizer.state[model.head.weight]["momentum_buffer"] += 1
    shardkeep.save(AppState(model, optimizer), tmp_path / "b")
    with pytest.raises(MismatchError, match="shares memory"):
        shardkeep.load(AppState(again, into), tmp_path / "b")


def test_meta_device(tmp_path):
    """The optimizer made over abstract parameters goes on with the real ones; ties hold."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    step_tied(model, optimizer)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    with torch.device("meta"):
        again = Tied()
    into = torch.optim.AdamW(again.parameters())
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert again.head.weight is again.embed.weight
    assert into.param_groups[0]["params"][0] is again.embed.weight
    assert all_bits(again, into) == all_bits(model, optimizer)
    step_tied(model, optimizer)
    step_tied(again, into)
    assert all_bits(again, into) == all_bits(model, optimizer)


def test_buffers_left_on_the_meta_device_are_an_error(tmp_path):
    class Rotary(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("angles", torch.ones(2), persistent=False)

    shardkeep.save(AppState(Rotary()), tmp_path / "a")
    with torch.device("meta"):
        again = Rotary()
    with pytest.raises(UnsupportedValueError, match="angles"):
        shardkeep.load(AppState(again), tmp_path / "a")


def test_optimizer_state_keeps_its_dtype(tmp_path):
    """PyTorch's own load would cast it to that of the parameter."""

    class Wide(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        kept = self.state[p]
                        if not kept:
                            kept["sum"] = torch.zeros_like(p, dtype=torch.float64)
                            kept["count"] = 0
                            kept["nested"] = {"a": [torch.zeros(2)], 3: (1, 2.5)}
                        kept["count"] += 1
                        kept["sum"] += p.grad.double() / 3
                        kept["nested"]["a"][0] += 1
                        p.data -= group["lr"] * kept["sum"].to(p.dtype)

    def build(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 3).bfloat16()
        return model, Wide(model.parameters())

    model, optimizer = build(0)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    again, into = build(3)
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert all_bits(again, into) == all_bits(model, optimizer)


# --- optimizers ---------------------------------------------------------------------------------


def test_hooks_and_schedulers_of_a_new_optimizer_do_not_notice_a_load(trained, tmp_path):
    model, optimizer = built(OPTIMIZERS["adamw"])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer)
    schedule.step()
    shardkeep.save(AppState(model, optimizer, schedule), tmp_path / "a")

    again, into = built(OPTIMIZERS["adamw"], seed=9)
    steps = []
    into.register_step_post_hook(lambda *_: steps.append(1))
    new = torch.optim.lr_scheduler.StepLR(into, 1)
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: everywhere.append("pre")),
        register_optimizer_step_post_hook(lambda *_: everywhere.append("post")),
    ]
    everywhere = []
    shardkeep.load(AppState(again, into, new), tmp_path / "a")
    assert not steps
    assert not everywhere
    torch.optim.SGD(Net().parameters(), lr=0.1).step()
    assert everywhere == ["pre", "post"]
    for hook in hooks:
        hook.remove()
    assert all(parameter.grad is None for parameter in again.parameters())
    assert new.get_last_lr() == schedule.get_last_lr()
    assert train(again, into) == train(model, optimizer)
    assert len(steps) == 3


class Logging(torch.optim.SGD):
    """Notes what it does in containers of its own."""

    def __init__(self, params):
        self.log = {"steps": [], "kinds": set()}
        super().__init__(params, lr=0.1, momentum=0.9)

    def step(self, closure=None):
        self.log["steps"].append(1)
        self.log["kinds"].add("step")
        return super().step(closure)


def test_containers_of_a_new_optimizer_do_not_notice_a_load(tmp_path):
    model, optimizer = built(lambda m: Logging(m.parameters()))
    train(model, optimizer)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    again, into = built(lambda m: Logging(m.parameters()), seed=9)
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert into.log == {"steps": [], "kinds": set()}
    assert all_bits(again, into) == all_bits(model, optimizer)


@pytest.mark.parametrize(
    ("saved", "other"),
    [("adamw", "radam"), ("sgd", "adamw"), ("new adamw", "adagrad"), ("new nadam", "rprop")],
)
def test_another_kind_of_optimizer_is_refused(saved, other, tmp_path):
    model, optimizer = built(OPTIMIZERS[saved.removeprefix("new ")])
    if not saved.startswith("new"):
        train(model, optimizer)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    again, into = built(OPTIMIZERS[other], seed=9)
    before = bits(into.state_dict())
    with pytest.raises(MismatchError, match=f"{type(optimizer).__name__}.*{type(into).__name__}"):
        shardkeep.load(AppState(again, into), tmp_path / "a")
    assert bits(into.state_dict()) == before
    shardkeep.load(AppState(again, into), tmp_path / "a", keys=["model.*"])


def test_optimizers_of_one_kind(tmp_path):
    class Mine(torch.optim.AdamW):
        pass

    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    for make in (torch.optim.Adam, lambda p: torch.optim.AdamW(p, fused=True), Mine):
        again = Net(9)
        into = make(again.parameters())
        shardkeep.load(AppState(again, into), tmp_path / "a")
        assert all_bits(again, into) == all_bits(model, optimizer)
    assert is_akin(["AdamW8bit", "_AdamBase"], ["FusedAdam"])
    assert not is_akin(["RAdam"], ["Adam"])
    assert not is_akin(["Adamax"], ["Adam"])


def test_a_checkpoint_that_does_not_tell_the_kind(tmp_path):
    """As written before kinds were stored."""
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    state = AppState(model, optimizer).state_dict()
    for told in state["optimizer"]["param_groups"].values():
        del told["class"]
    shardkeep.save(state, tmp_path / "a")
    again, into = built(OPTIMIZERS["adamw"], seed=9)
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert all_bits(again, into) == all_bits(model, optimizer)


def test_names_that_would_hide_another():
    model = Net()
    one, other = (torch.optim.SGD(some, lr=0.1) for some in split(model))
    schedulers = [SCHEDULERS["cosine"](optimizer) for optimizer in (one, other)]
    for names, why in ((("", "b"), "empty name"), ((1, "1"), "two of the name 1")):
        with pytest.raises(ValueError, match=f"optimizers .*{why}"):
            AppState(model, dict(zip(names, (one, other), strict=True)))
        with pytest.raises(ValueError, match=f"schedulers .*{why}"):
            AppState(model, [one, other], dict(zip(names, schedulers, strict=True)))
        with pytest.raises(ValueError, match=f"model .*{why}"):
            AppState(dict(zip(names, (Net(), Net()), strict=True)))


def test_optimizers_that_cannot_take_a_step_alone(tmp_path):
    class WithClosure(torch.optim.SGD):
        def step(self, closure):
            closure()
            return super().step()

    def build(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 3)
        return model, WithClosure(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = build(0)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step(lambda: None)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    again, into = build(3)
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert all_bits(again, into) == all_bits(model, optimizer)


def test_lbfgs_is_refused_by_name():
    model = Net()
    with pytest.raises(UnsupportedValueError, match=r"LBFGS.*PerRank"):
        AppState(model, torch.optim.LBFGS(model.parameters()))


class Counting(torch.optim.SGD):
    """Keeps state of no parameter."""

    def step(self, closure=None):
        self.state["global"]["k"] = self.state["global"].get("k", 0) + 1
        return super().step(closure)


class Told(torch.optim.SGD):
    """Has state besides that of its parameters."""

    def state_dict(self):
        return {**super().state_dict(), "n": 1}


class Taking(torch.optim.SGD):
    """Takes it back in its own way."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)


def test_state_of_no_parameter_is_refused(tmp_path):
    """It would be lost, and nobody would notice."""
    model, optimizer = built(lambda m: Counting(m.parameters(), lr=0.1))
    app = AppState(model, optimizer)
    shardkeep.save(app, tmp_path / "a")
    train(model, optimizer, 1)
    why = r"Counting keeps state of 'global'.*extra"
    with pytest.raises(UnsupportedValueError, match=why):
        shardkeep.save(app, tmp_path / "b")
    with pytest.raises(UnsupportedValueError, match=why):
        shardkeep.load(app, tmp_path / "a")


@pytest.mark.parametrize(("kind", "method"), [(Told, "state_dict"), (Taking, "load_state_dict")])
def test_state_dicts_of_an_optimizers_own_are_refused(kind, method):
    model = Net()
    with pytest.raises(UnsupportedValueError, match=f"{kind.__name__}: it has a {method} of its"):
        AppState(model, kind(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "register",
    [
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_hooks_of_state_dicts_are_refused(register):
    model, optimizer = built(OPTIMIZERS["sgd"])
    app = AppState(model, optimizer)
    hook = getattr(optimizer, register)(lambda *_: None)
    with pytest.raises(UnsupportedValueError, match=register.removeprefix("register_")):
        app.state_dict()
    hook.remove()
    app.state_dict()


def test_a_parameter_of_no_model_is_refused():
    with pytest.raises(UnsupportedValueError, match=r"group 0 of SGD.*\(8, 4\)"):
        AppState(nn.Linear(1, 1), torch.optim.SGD(Net().first.parameters())).state_dict()


def test_groups_that_were_split_or_joined(tmp_path):
    model, optimizer = built(two_groups)
    train(model, optimizer)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    again = Net(9)
    into = torch.optim.AdamW([{"params": [p]} for p in again.parameters()])
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert {group["weight_decay"] for group in into.param_groups} == {0.1, 0.0}
    assert train(again, into) == train(model, optimizer)
    joined = torch.optim.AdamW(again.parameters())
    with pytest.raises(MismatchError, match=r"one group.*weight_decay 0.0 and 0.1"):
        shardkeep.load(AppState(again, joined), tmp_path / "a")
    keep = ["lr", "weight_decay", "betas"]
    shardkeep.load(AppState(again, joined, keep_options=keep), tmp_path / "a")
    assert joined.param_groups[0]["lr"] == 1e-3


def test_options_that_do_not_fit_are_refused_before_tensors_are_read(tmp_path):
    model, optimizer = built(two_groups)
    train(model, optimizer)
    shardkeep.save({"app": AppState(model, optimizer)}, tmp_path / "a")
    again = Net(9)
    before = {name: tensor.clone() for name, tensor in again.state_dict().items()}
    for into, why in (
        (torch.optim.AdamW(again.parameters()), "weight_decay 0.0 and 0.1"),
        (torch.optim.SGD(again.parameters(), momentum=0.9), "in the hands of AdamW"),
    ):
        with pytest.raises(MismatchError, match=why) as caught:
            shardkeep.load({"app": AppState(again, into)}, tmp_path / "a", strict=False)
        assert "undefined" not in "".join(getattr(caught.value, "__notes__", ()))
        assert len(caught.value.mismatched) >= 1
        assert not into.state
        assert all(torch.equal(before[name], t) for name, t in again.state_dict().items())


def test_joined_groups_whose_options_hold_tensors(tmp_path):
    def build(rates):
        model = Net()
        groups = [
            {"params": some, "lr": torch.tensor([rate])}
            for some, rate in zip(split(model), rates, strict=True)
        ]
        return model, torch.optim.SGD(groups)

    shardkeep.save(AppState(*build([0.5, 0.5])), tmp_path / "same")
    shardkeep.save(AppState(*build([0.5, 0.25])), tmp_path / "other")
    model = Net()
    joined = torch.optim.SGD(model.parameters(), lr=torch.tensor([3.0]))
    shardkeep.load(AppState(model, joined, keep_options="lr"), tmp_path / "other")
    assert joined.param_groups[0]["lr"] == 3
    with pytest.raises(MismatchError, match=r"(?s)one group.*: lr .*undefined"):
        shardkeep.load(AppState(model, joined), tmp_path / "other")
    assert joined.param_groups[0]["lr"] == 3
    shardkeep.load(AppState(model, joined), tmp_path / "same")
    assert joined.param_groups[0]["lr"] == 0.5


def test_groups_that_share_a_learning_rate_tensor_may_part(tmp_path):
    def build(lr):
        model = Net()
        decay, other = split(model)
        groups = [{"params": decay}, {"params": other}]
        return model, torch.optim.AdamW(groups, lr=lr, foreach=False)

    model, optimizer = build(torch.tensor(1e-2))
    optimizer.param_groups[1]["lr"] = torch.tensor(3e-2)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    again, into = build(torch.tensor(5.0))
    first = into.param_groups[0]["lr"]
    assert into.param_groups[1]["lr"] is first
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert [g["lr"].item() for g in into.param_groups] == [
        g["lr"].item() for g in optimizer.param_groups
    ]
    assert into.param_groups[0]["lr"] is first


def test_keep_options_and_options_of_other_versions(tmp_path):
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    optimizer.param_groups[0]["of another version"] = 3
    del optimizer.param_groups[0]["maximize"]
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    again = Net(9)
    into = torch.optim.AdamW(again.parameters(), lr=7.0, weight_decay=7.0, maximize=True)
    shardkeep.load(AppState(again, into, keep_options=["lr"]), tmp_path / "a")
    (group,) = into.param_groups
    assert (group["lr"], group["weight_decay"], group["maximize"]) == (7.0, 0.5, True)


def with_arrays(seed, value):
    """An optimizer whose options are more than plain values."""
    model = Net(seed)
    group = {
        "params": list(model.parameters()),
        "pair": (torch.tensor(value), torch.tensor(0.9)),
        "config": {"a": value, "t": torch.full((2,), value)},
    }
    lr = torch.full((1,), value)
    return model, torch.optim.AdamW([group], lr=lr, foreach=False)


def options_of(optimizer):
    (group,) = optimizer.param_groups
    return {name: group[name] for name in ("lr", "pair", "config")}


def test_options_that_hold_tensors_come_back_in_place(tmp_path):
    shardkeep.save(AppState(*with_arrays(0, 0.5)), tmp_path / "a")
    again, into = with_arrays(1, 0.25)
    before = options_of(into)
    shardkeep.load(AppState(again, into), tmp_path / "a")
    assert bits(options_of(into)) == bits(options_of(with_arrays(0, 0.5)[1]))
    assert options_of(into)["lr"] is before["lr"]
    assert options_of(into)["pair"][0] is before["pair"][0]
    assert options_of(into)["config"]["t"] is before["config"]["t"]


def test_options_that_hold_tensors_are_kept_too(tmp_path):
    shardkeep.save(AppState(*with_arrays(0, 0.5)), tmp_path / "a")
    again, into = with_arrays(1, 0.25)
    before = bits(options_of(into))
    keep = ["lr", "pair", "config"]
    shardkeep.load(AppState(again, into, keep_options=keep), tmp_path / "a")
    assert bits(options_of(into)) == before


def test_a_load_that_fails_changes_no_option_and_holds_no_memory(tmp_path):
    model, optimizer = with_arrays(0, 0.5)
    train(model, optimizer)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")
    damage(tmp_path / "a")
    again, into = with_arrays(1, 0.25)
    before = bits(options_of(into))
    app = AppState(again, into)
    with pytest.raises(shardkeep.CorruptionError):
        shardkeep.load(app, tmp_path / "a")
    assert bits(options_of(into)) == before
    gc.collect()
    assert app._given is None or app._given() is None


def test_an_option_may_not_have_the_name_of_an_entry():
    for name in ("state", "options", "class"):
        model = Net()
        group = {"params": list(model.parameters()), name: {"x": 1}}
        with pytest.raises(UnsupportedValueError, match=f"option {name} .*Call it otherwise"):
            AppState(model, torch.optim.SGD([group], lr=0.1)).state_dict()


# --- all the rest of a program ------------------------------------------------------------------


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedulers_ema_and_extras(tmp_path):
    def build(seed):
        model = Net(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        scheduler = SCHEDULERS["lambda"](optimizer)
        return model, optimizer, scheduler, AveragedModel(model)

    model, optimizer, scheduler, ema = build(0)
    for _ in range(3):
        train(model, optimizer, 1)
        scheduler.step()
        ema.update_parameters(model)
    extra = {"step": 3, "seen": [1, 2], "noise": torch.ones(2), "name": "run"}
    app = AppState(model, optimizer, scheduler, ema, extra=extra)
    shardkeep.save({"app": app}, tmp_path / "a")

    again, into, schedule, average = build(5)
    other = {"step": 0, "seen": [], "noise": torch.zeros(2), "name": ""}
    loaded = AppState(again, into, schedule, average, extra=other)
    shardkeep.load({"app": loaded}, tmp_path / "a")
    assert all_bits(again, into) == all_bits(model, optimizer)
    assert bits(dict(average.state_dict())) == bits(dict(ema.state_dict()))
    assert bits(schedule.state_dict()) == bits(scheduler.state_dict())
    assert other == {**extra, "noise": other["noise"]}
    assert loaded.extra is other
    scheduler.step()
    schedule.step()
    assert into.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert train(again, into) == train(model, optimizer)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_schedulers_by_list_and_name(make, tmp_path):
    def build(seed):
        model, optimizer = built(OPTIMIZERS["sgd momentum"], seed)
        return model, optimizer, make(optimizer)

    model, optimizer, scheduler = build(0)
    for _ in range(3):
        train(model, optimizer, 1)
        scheduler.step()
    for wrap in (lambda one: [one], lambda one: {"main": one}):
        shardkeep.save(AppState(model, optimizer, wrap(scheduler)), tmp_path / "a", overwrite=True)
        again, into, schedule = build(5)
        shardkeep.load(AppState(again, into, wrap(schedule)), tmp_path / "a")
        assert bits(schedule.state_dict()) == bits(scheduler.state_dict())
        train(again, into, 1)
        schedule.step()
        expected = copy.deepcopy((optimizer, scheduler))
        expected[0].step()
        expected[1].optimizer = expected[0]
        expected[1].step()
        assert schedule.get_last_lr() == expected[1].get_last_lr()


class Shadow:
    """An average that has one tensor under two names, as its own state dict tells it."""

    def __init__(self, value):
        self.tensor = torch.full((3,), value)
        self.other = self.tensor

    def state_dict(self):
        return {"tensor": self.tensor, "all": [self.other]}

    def load_state_dict(self, state):
        self.tensor = state["tensor"].clone()
        self.other = state["all"][0].clone()


def test_tensors_that_are_shared_only_for_now(tmp_path):
    """A sequence of schedulers has the learning rate of the last one that ran."""

    def build(seed):
        model = Net(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        then = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], [2])
        return model, optimizer, scheduler, Shadow(float(seed))

    model, optimizer, scheduler, ema = build(0)
    for _ in range(3):
        train(model, optimizer, 1)
        scheduler.step()
    ema.other = torch.ones(3)
    shardkeep.save(AppState(model, optimizer, scheduler, ema), tmp_path / "a")
    again, into, schedule, average = build(5)
    shardkeep.load(AppState(again, into, schedule, average), tmp_path / "a")
    assert bits(schedule.state_dict()) == bits(scheduler.state_dict())
    assert bits(average.state_dict()) == bits(ema.state_dict())
    scheduler.step()
    schedule.step()
    assert train(again, into) == train(model, optimizer)


class Loader:
    """Gives its own containers, and a tensor that another one may have too."""

    def __init__(self, position, shared):
        self.state = {"position": position, "seen": [position], "inner": {"epoch": position}}
        self.state["weights"] = shared

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        assert state["position"] >= 0
        self.state = dict(state)


def test_extras_are_told_when_all_is_there(tmp_path):
    one, two = Loader(4, torch.ones(2)), Loader(5, torch.full((2,), 2.0))
    extra = {"one": one, "two": shardkeep.PerRank(two)}
    shardkeep.save(AppState(Net(), extra=extra), tmp_path / "a")
    shared = torch.zeros(2)
    mine = Loader(0, shared), Loader(1, shared)
    other = {"one": mine[0], "two": shardkeep.PerRank(mine[1])}
    app = AppState(Net(1), extra=other)
    shardkeep.load(app, tmp_path / "a")
    assert other["one"] is mine[0]
    assert other["two"].value is mine[1]
    for loaded, saved in zip(mine, (one, two), strict=True):
        assert bits(loaded.state) == bits(saved.state)
    assert torch.equal(shared, torch.zeros(2))


def test_extras_are_as_they_were_when_the_load_is_refused(tmp_path):
    model = Net(0)
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": others, "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    train(model, optimizer, 1)
    shardkeep.save(AppState(model, optimizer, extra={"one": Loader(4, torch.ones(2))}), tmp_path)
    again, into = built(OPTIMIZERS["sgd momentum"], 1)
    mine = Loader(0, torch.zeros(2))
    before = bits(mine.state)
    held = mine.state
    with pytest.raises(MismatchError, match="different options"):
        shardkeep.load(AppState(again, into, extra={"one": mine}), tmp_path)
    assert mine.state is held
    assert bits(mine.state) == before


def test_each_ranks_own_among_the_extras(tmp_path):
    def app(model):
        return AppState(model, extra={"rng": shardkeep.torch.rng_state(), "step": 0})

    saved = app(Net())
    saved.extra["step"] = 4
    shardkeep.save(saved, tmp_path / "a")
    expected = torch.rand(3).tolist()
    loaded = app(Net(5))
    shardkeep.load(loaded, tmp_path / "a")
    assert torch.rand(3).tolist() == expected
    assert loaded.extra["step"] == 4


def test_ema_as_tensors(tmp_path):
    ema = {"w": torch.ones(3), "decay": 0.9}
    shardkeep.save(AppState(Net(), ema=ema), tmp_path / "a")
    again = {"w": torch.zeros(3), "decay": 0.0}
    kept = again["w"]
    shardkeep.load(AppState(Net(), ema=again), tmp_path / "a")
    assert again["w"] is kept
    assert bits(again) == bits(ema)


def test_parts_of_a_checkpoint(tmp_path):
    """`keys` and `strict` of a load: what is not asked for stays, also in the optimizer."""
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    shardkeep.save(AppState(model, optimizer), tmp_path / "a")

    again, into = built(OPTIMIZERS["adamw"], seed=9)
    shardkeep.load(AppState(again, into), tmp_path / "a", keys=["model.*"])
    assert bits(dict(again.state_dict())) == bits(dict(model.state_dict()))
    assert not into.state
    train(again, into, 1)
    kept = bits(into.state_dict())
    shardkeep.load(AppState(again), tmp_path / "a")
    shardkeep.load(AppState(again, into), tmp_path / "a", keys=["model.*"])
    assert bits(into.state_dict()) == kept

    class More(Net):
        def __init__(self, seed):
            super().__init__(seed)
            self.more = nn.Parameter(torch.ones(2))

    larger = More(9)
    into = torch.optim.AdamW(larger.parameters())
    larger.more.grad = torch.ones(2)
    into.step()
    kept = bits(into.state[larger.more])
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(AppState(larger, into), tmp_path / "a")
    assert "model.more" in caught.value.missing
    assert "optimizer.param_groups.more.options" in caught.value.missing
    shardkeep.load(AppState(larger, into), tmp_path / "a", strict=False)
    assert bits(larger.first.weight) == bits(model.first.weight)
    assert bits(into.state[larger.first.weight]) == bits(optimizer.state[model.first.weight])
    assert bits(into.state[larger.more]) == kept


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_async_saves(snapshot, tmp_path):
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    app = AppState(model, optimizer, extra={"step": 3})
    before = all_bits(model, optimizer)
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save(app, tmp_path / "a", snapshot=snapshot)
        guard(optimizer, handle)
        app.extra["step"] = 4
        train(model, optimizer)
        handle.result(60)
    again, into = built(OPTIMIZERS["adamw"], seed=9)
    loaded = AppState(again, into, extra={"step": 0})
    shardkeep.load(loaded, tmp_path / "a")
    assert all_bits(again, into) == before
    assert loaded.extra == {"step": 3}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_under_the_driver_of_torch(tmp_path):
    """It loads only into what is there; what it left out is noticed."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=tmp_path / "a")
    again, into = built(OPTIMIZERS["adamw"], seed=9)
    with pytest.raises(Exception, match="initialise_optimizers"):
        dcp.load({"app": AppState(again, into)}, checkpoint_id=tmp_path / "a")
    app = AppState(again, into)
    app.initialise_optimizers()
    into.state.pop(again.unused)  # which nothing is stored of
    dcp.load({"app": app}, checkpoint_id=tmp_path / "a")
    assert all_bits(again, into) == all_bits(model, optimizer)


# --- without AppState ---------------------------------------------------------------------------


def test_modules_and_optimizers_themselves(tmp_path):
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    shardkeep.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    again, into = built(OPTIMIZERS["adamw"], seed=9)
    train(again, into, 1)
    shardkeep.load({"model": again, "optimizer": into}, tmp_path / "a")
    assert all_bits(again, into) == all_bits(model, optimizer)


def test_traps_of_plain_state_dicts_are_explained(tmp_path):
    model, optimizer = built(OPTIMIZERS["adamw"])
    train(model, optimizer)
    shardkeep.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    again, into = built(OPTIMIZERS["adamw"], seed=9)
    with pytest.raises(MismatchError, match=r"optimizer under optimizer has no state.*AppState"):
        shardkeep.load({"model": again, "optimizer": into}, tmp_path / "a")
    for wrap, who in ((wrap_compiled, "torch.compile"), (nn.DataParallel, "Distributed")):
        with pytest.raises(MismatchError, match=rf"{who}.*AppState"):
            shardkeep.load({"model": wrap(again)}, tmp_path / "a")
    shardkeep.save({"model": wrap_compiled(model)}, tmp_path / "b")
    with pytest.raises(MismatchError, match=r"torch.compile.*AppState"):
        shardkeep.load({"model": again.state_dict()}, tmp_path / "b")
    assert not into.state


# --- what is no part of a state


@pytest.mark.parametrize("model", [5, "model", [nn.Linear(1, 1), 5], {"a": 5}], ids=repr)
def test_models_that_are_none(model):
    with pytest.raises(TypeError, match="model"):
        AppState(model)


def test_a_list_of_modules_is_a_module(tmp_path):
    """Its names are those that it has by itself."""
    made = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 1)])
    shardkeep.save(AppState(made), tmp_path)
    with shardkeep.open(tmp_path) as found:
        assert sorted(found) == ["model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight"]
    other = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 1)])
    shardkeep.load(AppState(other), tmp_path)
    assert torch.equal(other[1].weight, made[1].weight)


def test_optimizers_that_are_none():
    with pytest.raises(TypeError, match="optimizers holds a int"):
        AppState(Net(), [5])


def test_optimizers_that_spread_their_state():
    kind = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    model = Net()
    with pytest.raises(UnsupportedValueError, match="spreads its state over the ranks"):
        AppState(model, kind(model.parameters(), lr=0.1))


def test_parts_that_a_state_lacks():
    model = Net()
    app = AppState(model, torch.optim.SGD(model.parameters(), lr=0.1), extra={"step": 1})
    before = bits(model.state_dict())
    with pytest.raises(MismatchError, match="no model, optimizer, extra") as caught:
        app.load_state_dict({})
    assert caught.value.missing == ("model", "optimizer", "extra")
    assert bits(model.state_dict()) == before


def test_a_mapping_of_averages_takes_what_it_is_told():
    ema = {"w": torch.zeros(2)}
    app = AppState(nn.Linear(1, 1), ema=ema)
    told = app.state_dict()
    app.load_state_dict({**told, "ema": {"w": torch.ones(2)}})
    assert ema["w"].tolist() == [1, 1]
    app.load_state_dict({**told, "ema": ema})
    assert ema["w"].tolist() == [1, 1]


def test_options_that_fit_are_put_in_place():
    old = torch.zeros(2)
    assert _in_place(old, torch.ones(2), {}) is old
    assert old.tolist() == [1, 1]
    for other in (torch.ones(3), torch.ones(2, dtype=torch.float64), nn.Parameter(torch.ones(2))):
        assert _in_place(old, other, {}) is other
    new = torch.ones(2)
    assert _in_place(torch.zeros(2, device="meta"), new, {}) is new


def test_named_tuples_are_copied_as_such():
    pair = namedtuple("pair", "a b")
    given = pair(torch.zeros(2), [1])
    made = copied(given, torch.clone)
    assert type(made) is pair
    assert made.a is not given.a
    made.b.append(2)
    assert given.b == [1]


def test_generators_of_another_device_are_refused():
    source = rng_state({"mine": torch.Generator()}, include_global=False).value
    told = copy.deepcopy(source.state_dict())

    def moved(value):
        if not isinstance(value, dict):
            return value
        return {k: "cuda" if k == "device" else moved(v) for k, v in value.items()}

    assert moved(told) != told
    with pytest.raises(MismatchError, match="on cuda was saved, here it is on cpu"):
        source.load_state_dict(moved(told))

"""From our format into every other and back, and what their own libraries make of it."""

import importlib.util
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import shardkeep
from shardkeep.converting.target import TARGETS


def some(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights():
    tied = some(1, 513, 7)
    return {
        **{f"l.{i}.{n}": some(i, 16, 33) for i in range(2) for n in "qkv"},
        "emb": tied.astype(ml_dtypes.bfloat16),
        "bias": some(3, 1),
        "large": some(4, 700, 1000),
        "ids": np.arange(5),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("formats") / "source"
    state = {
        "model": weights(),
        "optimizer": {"state": {"0": {"m": some(9, 9)}}, "lr": 0.1, "betas": [0.9, 0.99]},
        "epoch": 3,
    }
    shardkeep.save(state, path, no_dist=True)
    return path


HAVE = [
    name
    for name, target in TARGETS.items()
    if target is not None and importlib.util.find_spec(target.module)
]
FLAT = ("hf", "mindspore")
"""Have no place for plain values of any kind, nor for nesting."""


@pytest.mark.parametrize("to", HAVE)
def test_there_and_back(source, tmp_path, to):
    pytest.importorskip("torch") if to.startswith("torch") else None
    asked = {"select": ["model"], "rename": [r"^model\.="]} if to in FLAT else {}
    made, back, wanted = tmp_path / "made.ckpt", tmp_path / "back", tmp_path / "wanted"
    result = shardkeep.convert(source, made, to=to, memory_budget=16 << 20, **asked)
    assert result.to == to
    shardkeep.convert(source, wanted, **asked)
    shardkeep.convert(made, back)
    assert shardkeep.verify(back).ok
    for one in (made, back):
        assert list(shardkeep.diff(wanted, one).differences) == []


@pytest.mark.parametrize("to", [to for to in HAVE if TARGETS[to].size])
def test_several_files(source, tmp_path, to):
    asked = {"select": ["model"]} if to in FLAT else {}
    one = shardkeep.convert(source, tmp_path / "one", to=to, **asked)
    many = shardkeep.convert(source, tmp_path / "many", to=to, max_shard_size=1 << 18, **asked)
    assert len(many.files) > len(one.files)
    assert shardkeep.diff(tmp_path / "one", tmp_path / "many").same


def test_torch_loads_what_is_made_for_it(source, tmp_path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    shardkeep.convert(source, tmp_path / "file.pt", to="torch-save", cast=["*.ids:i64=i32"])
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert found["epoch"] == 3
    assert found["model"]["emb"].dtype == torch.bfloat16
    np.testing.assert_array_equal(found["model"]["large"].numpy(), weights()["large"])
    rules = ["fuse *.q, *.k, *.v = *.qkv @ 0"]
    shardkeep.convert(source, tmp_path / "dcp", to="torch-dcp", rules=rules)
    target = {"model": {"l.1.qkv": torch.zeros(48, 33)}}
    dcp.load(target, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    wanted = np.concatenate([weights()[f"l.1.{n}"] for n in "qkv"])
    np.testing.assert_array_equal(target["model"]["l.1.qkv"].numpy(), wanted)


def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    pytest.importorskip("torch")
    state = {"x": np.zeros(3, ml_dtypes.int4), "y": np.ones(2)}
    shardkeep.save(state, tmp_path / "source", no_dist=True)
    with pytest.raises(shardkeep.UnsupportedValueError, match="x"):
        shardkeep.convert(tmp_path / "source", tmp_path / "made", to="torch-dcp")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("to", ["torch-save", "torch-dcp", "hyper-parallel"])
def test_every_process_writes_the_same_files(tmp_path, to):
    """Sets of texts have another order in each; what was killed is gone on with in the next."""
    members = {"a", "bb", "ccc", "dddd", "eeeee"}
    frozen = {} if to == "torch-save" else {"frozen": frozenset(members)}
    shardkeep.save({"w": np.ones(3), "set": members, **frozen}, tmp_path / "source", no_dist=True)
    code = "import sys, shardkeep; shardkeep.convert(sys.argv[1], sys.argv[2], to=sys.argv[3])"
    found = []
    for seed in ("1", "2"):
        made = tmp_path / seed
        subprocess.run(
            [sys.executable, "-c", code, tmp_path / "source", made, to],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            timeout=60,
        )
        files = [made] if made.is_file() else sorted(made.iterdir())
        found.append([(file.relative_to(made), file.read_bytes()) for file in files])
    assert found[0] == found[1]
    assert shardkeep.diff(tmp_path / "source", made).same


def test_a_cut_file_of_another_system_leaves_nothing(source, tmp_path):
    pytest.importorskip("torch")
    made = tmp_path / "file.pt"
    shardkeep.convert(source, made, to="torch-save")
    made.write_bytes(made.read_bytes()[:-100_000])
    with pytest.raises(shardkeep.CheckpointError):
        shardkeep.convert(made, tmp_path / "back")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.pt"]

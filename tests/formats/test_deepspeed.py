"""DeepSpeed's universal checkpoints."""

import argparse
import shutil

import numpy as np
import pytest
import torch
from foreign_files import DATA, arrays_of, without_libraries

import shardkeep
from shardkeep.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
)
from shardkeep.foreign.tables import tables_of
from shardkeep.formats import deepspeed

NAMES = {"module.embed.weight": (6, 4), "module.out.bias": (3,)}


def state(name, key):
    count = int(np.prod(NAMES[name]))
    start = 100 * list(NAMES).index(name) + 10 * ("fp32", "exp_avg", "exp_avg_sq").index(key)
    return torch.arange(start, start + count, dtype=torch.float32).reshape(NAMES[name])


@pytest.fixture
def root(tmp_path):
    """As `ds_to_universal.py` lays it out."""
    root = tmp_path / "universal"
    for name in NAMES:
        folder = root / "zero" / name
        folder.mkdir(parents=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            told = {"cat_dim": 0, "vocab_tensor": True} if "embed" in name else {"cat_dim": 1}
            torch.save({"param": state(name, key), **told}, folder / f"{key}.pt")
        torch.save(torch.tensor(7.0), folder / "step.pt")
    torch.save({"param_groups": [{"lr": 0.1}]}, root / "zero/optimizer_state.pt")
    model = {
        "module": {"embed.weight": state("module.embed.weight", "fp32").bfloat16()},
        "global_steps": 7,
        "args": argparse.Namespace(hidden=4),
        "ds_version": "0.18.0",
    }
    torch.save(model, root / "mp_rank_00_model_states.pt")
    return root


def test_a_real_checkpoint_is_read_bit_for_bit():
    path = DATA / "deepspeed"
    assert deepspeed.recognises(path)
    found = deepspeed.find(path)
    tables_of(found)
    got = arrays_of(found)
    assert set(found.state["zero"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for name in found.state["zero"]:
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            saved = torch.load(path / "zero" / name / f"{key}.pt", weights_only=True)["param"]
            assert got[f"zero.{name}.{key}"].tobytes() == saved.detach().numpy().tobytes()
        assert got[f"zero.{name}.step"].view(np.float32) == 2
    scaler = found.state["optimizer_state"]["loss_scaler"]
    assert scaler["__class__"] == "deepspeed.runtime.fp16.loss_scaler.LossScaler"
    assert found.state["mp_rank_00_model_states"]["global_steps"] == 2
    assert got["mp_rank_00_model_states.module.0.weight"].shape == (3, 4)


def test_everything_is_read_bit_for_bit(root):
    assert deepspeed.recognises(root)
    found = deepspeed.find(root)
    tables_of(found)
    for name in NAMES:
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            tensor = found.state["zero"][name][key]
            assert (tensor.dtype, tensor.shape) == ("float32", NAMES[name])
            got = arrays_of(found)[f"zero.{name}.{key}"]
            assert got.tobytes() == state(name, key).numpy().tobytes()
    assert arrays_of(found)["zero.module.out.bias.step"].view(np.float32) == 7
    assert found.state["optimizer_state"] == {"param_groups": [{"lr": 0.1}]}
    model = found.state["mp_rank_00_model_states"]
    assert (model["global_steps"], model["args"]) == (7, {"hidden": 4})
    assert model["module"]["embed.weight"].dtype == "bfloat16"
    assert found.user_metadata["parameters"] == {
        "module.embed.weight": {"cat_dim": 0, "vocab_tensor": True},
        "module.out.bias": {"cat_dim": 1},
    }


def test_without_torch_and_deepspeed(root):
    code = """
from pathlib import Path
from foreign_files import arrays_of
from shardkeep.formats import deepspeed
print(arrays_of(deepspeed.find(Path(sys.argv[1])))["zero.module.out.bias.exp_avg"].tobytes().hex()
      .join(['"', '"']))
"""
    assert (
        without_libraries(code, root) == state("module.out.bias", "exp_avg").numpy().tobytes().hex()
    )


def test_opened_and_loaded_like_ours(root):
    with shardkeep.open(root) as checkpoint:
        row = checkpoint["zero.module.embed.weight.fp32"][2]
        assert np.array_equal(row, state("module.embed.weight", "fp32")[2].numpy())
    target = {"zero": {"module.out.bias": {"fp32": torch.zeros(3)}}}
    shardkeep.load(target, root, no_dist=True, strict=False)
    assert torch.equal(target["zero"]["module.out.bias"]["fp32"], state("module.out.bias", "fp32"))


def test_what_is_left_out_and_what_lies_beside(root):
    """No optimizer's state, nothing told of how a parameter was put together, other folders."""
    (root / "zero/optimizer_state.pt").unlink()
    bare = root / "zero/module.out.bias"
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save({"param": state(bare.name, key)}, bare / f"{key}.pt")
    found = deepspeed.find(root)
    assert "optimizer_state" not in found.state
    assert list(found.user_metadata["parameters"]) == ["module.embed.weight"]
    assert arrays_of(found)["zero.module.out.bias.fp32"].tolist() == found_bits(bare.name)
    for name in NAMES:
        (root / "zero" / name / "fp32.pt").unlink()
    assert not deepspeed.recognises(root)


def found_bits(name):
    return state(name, "fp32").numpy().view(np.uint32).tolist()


def test_others_are_not_recognised(tmp_path):
    assert not deepspeed.recognises(tmp_path)
    assert not deepspeed.recognises(tmp_path / "gone")
    (tmp_path / "zero").mkdir()
    assert not deepspeed.recognises(tmp_path)


def refused(root, error=(FormatError, CorruptionError, UnsafeCheckpointError), match=None):
    with pytest.raises(error, match=match):
        tables_of(deepspeed.find(root))


FILES = [
    "zero/module.embed.weight/fp32.pt",
    "zero/module.out.bias/exp_avg.pt",
    "zero/optimizer_state.pt",
    "mp_rank_00_model_states.pt",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_cut_files(root, name, part):
    data = (root / name).read_bytes()
    (root / name).write_bytes(data[: int(len(data) * part)])
    refused(root)


def test_missing_files(root):
    (root / "zero/module.out.bias/fp32.pt").unlink()
    refused(root, CorruptionError, r"fp32\.pt")
    shutil.rmtree(root / "zero")
    refused(root, CheckpointError)
    (root / "zero").mkdir()
    refused(root, CorruptionError, "no folders")


class Harm:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("name", FILES)
def test_files_that_would_run_code(root, name, capfd):
    torch.save({"param": Harm()}, root / name)
    refused(root, UnsafeCheckpointError)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    "value",
    [{"param": 3}, {"other": torch.ones(3)}, {}, {"param": torch.ones(7)}],
    ids=range(4),
)
def test_states_that_are_something_else(root, value):
    torch.save(value, root / "zero/module.out.bias/exp_avg.pt")
    refused(root, FormatError)


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"not a zip", b"\x80\x02." * 20], ids=range(4))
def test_files_that_are_no_archives(root, data):
    (root / FILES[0]).write_bytes(data)
    refused(root)


def test_links_out_of_the_checkpoint_are_not_followed(root, tmp_path):
    (root / FILES[0]).rename(tmp_path / "outside.pt")
    (root / FILES[0]).symlink_to(tmp_path / "outside.pt")
    refused(root, UnsafeCheckpointError, "link")


def test_changed_bytes_never_give_another_error(root):
    data = (root / FILES[3]).read_bytes()
    for at in range(0, len(data), 41):
        (root / FILES[3]).write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            tables_of(deepspeed.find(root))
        except CheckpointError:
            continue

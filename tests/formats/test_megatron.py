"""Megatron-Core's torch_dist checkpoints."""

import argparse
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import DATA, arrays_of, without_libraries

import shardkeep
from shardkeep.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
)
from shardkeep.foreign.found import Part, Raw, StoredTensor
from shardkeep.foreign.tables import tables_of
from shardkeep.formats import megatron
from shardkeep.formats.megatron.reading import _reformed

FOLDER = DATA / "megatron"


def want():
    return {
        "decoder.weight": np.arange(48, dtype=np.float32).reshape(8, 6),
        "decoder.bias": torch.arange(6, dtype=torch.bfloat16).view(torch.uint16).numpy(),
        "decoder.layers.k": np.repeat(np.arange(2, dtype=np.float32)[:, None], 3, 1),
        "rng_state/shard_0_2.state": np.arange(4, dtype=np.uint8),
        "rng_state/shard_1_2.state": np.arange(4, dtype=np.uint8) + 1,
    }


def test_a_real_checkpoint_is_read_bit_for_bit():
    assert megatron.recognises(FOLDER)
    found = megatron.find(FOLDER)
    tables_of(found)
    got = arrays_of(found)
    assert set(got) == set(want())
    for name, array in want().items():
        assert (got[name].shape, got[name].tobytes()) == (array.shape, array.tobytes())
    assert found.state["decoder._extra_state/shard_0_1"] == b"fp8 scales"
    common = found.state["common"]
    assert (common["iteration"], common["opt_param_scheduler"]["max_lr"]) == (7, 0.1)
    assert common["args"]["hidden_size"] == 6
    assert common["args"]["model_type"] == {
        "__class__": "megatron.core.enums.ModelType", "__args__": (1,),
    }  # fmt: skip
    assert found.user_metadata["sharded_backend"] == "torch_dist"


def test_without_torch_and_megatron():
    code = """
from pathlib import Path
from foreign_files import arrays_of
from shardkeep.formats import megatron
got = arrays_of(megatron.find(Path(sys.argv[1])))
print(json.dumps({name: array.tobytes().hex() for name, array in got.items()}))
"""
    hexed = {name: array.tobytes().hex() for name, array in want().items()}
    assert without_libraries(code, FOLDER) == hexed


def test_opened_like_ours():
    with shardkeep.open(FOLDER) as checkpoint:
        assert np.array_equal(
            checkpoint["decoder.weight"][3:6, 2], want()["decoder.weight"][3:6, 2]
        )
        assert checkpoint["common.iteration"] == 7


def test_plain_checkpoints_of_torch_are_not_megatrons(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert not megatron.recognises(tmp_path / "a")
    assert not megatron.recognises(tmp_path)
    assert not megatron.recognises(tmp_path / "gone")
    torch.save({}, tmp_path / "a/common.pt")
    assert megatron.recognises(tmp_path / "a")


# --- tensors that Megatron flattened --------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[0, 6], [0, 1, 4, 6], [0, 2, 3, 6]])
def test_flattened_pieces_get_their_shape_back(tmp_path, cuts):
    """(4, 6) in pieces of (2, 3) is stored as (2, 2, 6), its last dimension cut anywhere."""
    array = np.arange(24, dtype=np.int16).reshape(4, 6)
    parts, data = [], bytearray()
    for i in range(2):
        for j in range(2):
            piece = array[2 * i : 2 * i + 2, 3 * j : 3 * j + 3].reshape(-1)
            for low, high in zip(cuts, cuts[1:], strict=False):  # noqa: RUF007
                place = Raw("x", len(data))
                parts.append(Part((i, j, low), (1, 1, high - low), place))
                data += piece[low:high].tobytes()
    (tmp_path / "x").write_bytes(data)
    stored = StoredTensor("int16", (2, 2, 6), tuple(parts))
    told = {"nd_reformulated_orig_global_shape": (4, 6)}
    leaf = _reformed(stored, told, "w")
    assert leaf.shape == (4, 6)
    found = shardkeep.foreign.found.Found("x", tmp_path, {"w": leaf})
    tables_of(found)
    assert np.array_equal(arrays_of(found)["w"].view(np.int16), array)


@pytest.mark.parametrize(
    "shape", [(4, 5), (4, 6, 1), "4", (0, 6), (4.0, 6), (8, 6), None, (-4, -6)], ids=repr
)
def test_shapes_that_cannot_have_been_are_refused(shape):
    stored = StoredTensor("int16", (2, 2, 6), (Part((0, 0, 0), (1, 1, 6), Raw("x", 0)),))
    with pytest.raises(FormatError):
        _reformed(stored, {"nd_reformulated_orig_global_shape": shape}, "w")


@pytest.mark.parametrize(
    "part",
    [
        Part((0, 0, 0), (2, 1, 6), Raw("x", 0)),
        Part((0, 0, 0), (1, 1, 6), Raw("x", 0, (6, 6, 2))),
        Part((0, 0, 0), (1, 1, 6), None),
    ],
    ids=["several", "strided", "made"],
)
def test_pieces_that_cannot_be_put_together(part):
    stored = StoredTensor("int16", (2, 2, 6), (part,))
    with pytest.raises(FormatError, match="w is stored in pieces"):
        _reformed(stored, {"nd_reformulated_orig_global_shape": (4, 6)}, "w")


# --- damage and harm ------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "copy")
    return tmp_path / "copy"


def refused(root, error=(FormatError, CorruptionError, UnsafeCheckpointError), match=None):
    with pytest.raises(error, match=match):
        tables_of(megatron.find(root))


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp", "__1_1.distcp"])
def test_missing_files(root, name):
    (root / name).unlink()
    refused(root)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp", "metadata.json"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 0.98])
def test_cut_files(root, name, part):
    data = (root / name).read_bytes()
    (root / name).write_bytes(data[: int(len(data) * part)])
    refused(root)


@pytest.mark.parametrize(
    "text", ['{"sharded_backend": "zarr"}', '{"sharded_backend": 3}', "[]", "{", "[" * 100_000],
    ids=range(5),
)  # fmt: skip
def test_other_backends_and_broken_configs(root, text):
    (root / "metadata.json").write_text(text)
    refused(root)


def test_a_broken_config_does_not_make_it_a_checkpoint_of_torch(root):
    (root / "metadata.json").write_text("{")
    with pytest.raises(CorruptionError, match=r"metadata\.json is not valid JSON"):
        shardkeep.open(root)


def test_the_backend_that_is_not_read_is_named(root):
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "fsdp_dtensor"}))
    refused(root, FormatError, "fsdp_dtensor")


class Harm:
    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return (self.function, ("echo run",))


@pytest.mark.parametrize("function", [print, eval, __import__, open, pickle.loads])
def test_common_states_that_would_run_code(root, function, capfd):
    torch.save({"iteration": Harm(function)}, root / "common.pt")
    refused(root, UnsafeCheckpointError)
    assert capfd.readouterr().out == ""


def test_objects_are_inert_and_lose_nothing(root):
    space = argparse.Namespace(a=1, inner=argparse.Namespace(b=[torch.ones(2)]))
    torch.save({"args": space, "shape": torch.Size([2]), "set": {1, 2}}, root / "common.pt")
    common = megatron.find(root).state["common"]
    assert common["args"]["a"] == 1
    assert isinstance(common["args"]["inner"]["b"][0], StoredTensor)
    assert common["set"] == {1, 2}


class Key:
    def __init__(self, number):
        self.number = number


def test_objects_as_keys_do_not_take_each_others_places(root):
    table = {Key(1): 10, Key(2): 20, Key(3): torch.ones(2), f"{__name__}.Key()": 40}
    torch.save({"table": table, "args": argparse.Namespace(by=table)}, root / "common.pt")
    common = megatron.find(root).state["common"]
    for found in (common["table"], common["args"]["by"]):
        assert list(found.values())[:2] == [10, 20]
        assert isinstance(list(found.values())[2], StoredTensor)
        assert found[f"{__name__}.Key()"] == 40
        assert len(found) == 4


def test_changed_bytes_never_give_another_error(root):
    for name in (".metadata", "common.pt"):
        data = (root / name).read_bytes()
        for at in range(0, len(data), 37):
            (root / name).write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
            try:
                tables_of(megatron.find(root))
            except CheckpointError:
                continue
        (root / name).write_bytes(data)


def test_links_out_of_the_checkpoint_are_not_followed(root, tmp_path):
    (root / "common.pt").rename(tmp_path / "outside.pt")
    (root / "common.pt").symlink_to(tmp_path / "outside.pt")
    refused(root, UnsafeCheckpointError, "link")


def saved(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_without_a_configuration(tmp_path):
    """As torch alone would write it: what all ranks share may be missing, then."""
    root = saved(tmp_path / "a", {"w": torch.arange(3)})
    found = megatron.find(root)
    assert arrays_of(found)["w"].view(np.int64).tolist() == [0, 1, 2]
    assert set(found.state) == {"w"}
    (root / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert set(megatron.find(root).state) == {"w"}
    (root / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "common_backend": "torch"}'
    )
    refused(root, CorruptionError, r"lacks common\.pt")


def test_something_sharded_that_is_called_common(tmp_path):
    root = saved(tmp_path / "a", {"common": torch.arange(3)})
    torch.save({"iteration": 1}, root / "common.pt")
    refused(root, FormatError, "something sharded is called 'common'")

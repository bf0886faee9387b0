"""Orbax's checkpoints, read through tensorstore."""

import contextlib
import json
import os
import shutil
import time

import ml_dtypes
import numpy as np
import pytest
from foreign_files import DATA, arrays_of, without_libraries
from safetensors.numpy import save_file as np_save

import shardkeep
from shardkeep.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
)
from shardkeep.foreign.tables import tables_of
from shardkeep.formats import orbax
from shardkeep.formats.orbax import items

FOLDER = DATA / "orbax"
KINDS = ["zarr2", "zarr3", "zarr2_ocdbt", "zarr3_ocdbt"]
W = np.arange(48, dtype=np.float32).reshape(8, 6)


def want():
    return {
        "params.w": W,
        "params.b": np.arange(10).astype(ml_dtypes.bfloat16).reshape(2, 5),
        "layers.0.k": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        "layers.1.k": np.arange(3, dtype=np.int8) - 1,
        "pair.0": np.arange(6, dtype=np.int64).reshape(2, 3),
        "pair.1": np.array([True, False]),
        "scalar": np.float32(2.5),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_real_checkpoints_are_recognised(kind):
    assert orbax.recognises(FOLDER / kind)


def test_others_are_not_recognised(tmp_path):
    assert not orbax.recognises(tmp_path)
    assert not orbax.recognises(tmp_path / "gone")
    (tmp_path / "_METADATA").write_bytes(b"PAR1")
    assert not orbax.recognises(tmp_path)
    assert not orbax.recognises(tmp_path / "_METADATA")
    with pytest.raises(CheckpointError):
        orbax.find(tmp_path / "gone")


def test_without_tensorstore_the_error_says_what_to_install():
    code = """
from pathlib import Path
import shardkeep
try:
    shardkeep.open(Path(sys.argv[1]))
except shardkeep.MissingDependencyError as error:
    print(json.dumps(str(error)))
"""
    assert "shardkeep[orbax]" in without_libraries(code, FOLDER / "zarr2")


@pytest.fixture
def needs_tensorstore():
    pytest.importorskip("tensorstore")


reads = pytest.mark.usefixtures("needs_tensorstore")


@reads
@pytest.mark.parametrize("kind", KINDS)
def test_real_checkpoints_are_read_bit_for_bit(kind):
    found = orbax.find(FOLDER / kind)
    tables_of(found)
    got = arrays_of(found)
    for name, array in want().items():
        assert (got[name].shape, got[name].tobytes()) == (array.shape, array.tobytes())
    assert len(found.state["params"]["w"].parts) == 4
    assert found.state["params"]["b"].dtype == "bfloat16"
    assert (found.state["step"], found.state["lr"], found.state["empty"]) == (7, 0.125, {})
    assert found.state["none"] is None
    assert type(found.state["layers"]) is list
    more = {"i4", "key"} if kind == "zarr3_ocdbt" else set()
    assert set(got) == set(want()) | more
    if more:
        assert found.state["text"] == "héllo"
        assert found.state["i4"].dtype == "int4"
        assert got["i4"].view(ml_dtypes.int4).astype(int).tolist() == list(range(-4, 4))


@reads
def test_without_jax_and_orbax():
    code = """
from pathlib import Path
from foreign_files import arrays_of
from shardkeep.formats import orbax
print(json.dumps([arrays_of(orbax.find(Path(path)))["params.w"].tobytes().hex()
                  for path in sys.argv[1:]]))
"""
    got = without_libraries(code, *(FOLDER / k for k in KINDS), allowed=("tensorstore",))
    assert got == [W.tobytes().hex()] * 4


@reads
def test_opened_and_loaded_like_ours():
    with shardkeep.open(FOLDER / "zarr3_ocdbt") as checkpoint:
        assert np.array_equal(checkpoint["params.w"][3:6, 1:5], W[3:6, 1:5])
        assert checkpoint["text"] == "héllo"
    target = {"params": {"w": np.zeros((8, 6), np.float32)}, "step": 0}
    result = shardkeep.load(target, FOLDER / "zarr2", no_dist=True, strict=False)
    assert np.array_equal(target["params"]["w"], W)
    assert result.state_dict["step"] == 7


@reads
def test_items_of_a_manager():
    found = orbax.find(FOLDER / "manager/5")
    assert set(found.state) == {"state", "notes"}
    assert found.state["notes"] == {"a": 1}
    assert found.user_metadata == {"who": "a test"}
    assert arrays_of(found)["state.w"].tobytes() == want()["params.b"].tobytes()
    assert "w" in orbax.find(FOLDER / "manager/5/state").state
    with pytest.raises(FormatError, match=r"manager/5"):
        orbax.find(FOLDER / "manager")


@reads
def test_metrics_of_a_manager_and_steps_of_older_versions(tmp_path):
    shutil.copytree(FOLDER / "manager", tmp_path / "run")
    step = tmp_path / "run/5"
    (step / "metrics").mkdir()
    (step / "metrics/metrics").write_text('{"loss": 0.5}')
    handlers = json.loads((step / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    change(step / "_CHECKPOINT_METADATA", item_handlers=handlers | {"metrics": "a handler"})
    now = orbax.find(step)
    assert now.state["metrics"] == {"loss": 0.5}
    (step / "_CHECKPOINT_METADATA").unlink()
    assert orbax.recognises(step)
    before = orbax.find(step)
    assert set(before.state) == {"metrics", "notes", "state"}
    assert arrays_of(before).keys() == arrays_of(now).keys()
    assert orbax.recognises(tmp_path / "run")
    with pytest.raises(FormatError, match=r"Name a step, as in .*/run/5"):
        orbax.find(tmp_path / "run")
    shutil.copytree(step / "state", step / "more.orbax-checkpoint-tmp-1")
    with pytest.raises(FormatError, match="not finished"):
        orbax.find(step)


def write_tree(folder, text):
    folder.mkdir(parents=True)
    tree = {"tree_metadata": {"a": leaf("a", kind="string")}, "use_ocdbt": False}
    (folder / "_METADATA").write_text(json.dumps(tree))
    (folder / "_strings.json").write_text(json.dumps({"a": text}))


@pytest.mark.parametrize("inner", ["flax", "flax_1", "flax_1/params"])
def test_a_model_with_a_folder_of_orbaxs_is_what_the_rest_of_it_is(tmp_path, inner):
    write_tree(tmp_path / inner, "hi")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".gitattributes").write_text("")
    assert orbax.recognises(tmp_path)
    np_save({"w": W}, tmp_path / "model.safetensors")
    assert not orbax.recognises(tmp_path)
    with shardkeep.open(tmp_path) as checkpoint:
        assert list(checkpoint.state_dict()) == ["w"]
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert not orbax.recognises(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors.index.json")
    assert not orbax.recognises(tmp_path)
    (tmp_path / inner / "_CHECKPOINT_METADATA").write_text("{}")
    assert not orbax.recognises(tmp_path)
    assert orbax.find(tmp_path / inner).state == {"a": "hi"}


BESIDE = ["metrics.csv", "checkpoint", "train.log", "config.py", "events.out.tfevents.17.host.1.0"]


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("beside", BESIDE)
def test_what_a_run_writes_beside_its_steps_and_items_changes_nothing(tmp_path, beside, tells):
    step = tmp_path / "run/5"
    write_tree(step / "params", "hi")
    if tells:
        (step / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"params": "a handler"}}')
    for folder in (step.parent, step):
        (folder / beside).write_text("1, 2")
        assert orbax.recognises(folder)
    assert orbax.find(step).state == {"params": {"a": "hi"}}
    with pytest.raises(FormatError, match=r"Name a step, as in .*/run/5; there are 1"):
        orbax.find(step.parent)


def test_weights_beside_steps_that_tell_what_they_hold_change_nothing_but_what_can_be_read(
    tmp_path,
):
    write_tree(tmp_path / "5/params", "hi")
    (tmp_path / "best.pt").write_text("")
    assert not orbax.recognises(tmp_path)
    (tmp_path / "5/_CHECKPOINT_METADATA").write_text("{}")
    assert orbax.recognises(tmp_path)
    np_save({"w": W}, tmp_path / "model.safetensors")
    with shardkeep.open(tmp_path) as checkpoint:
        assert list(checkpoint.state_dict()) == ["w"]


def test_an_item_whose_name_ends_in_a_digit_is_no_step(tmp_path):
    for name in ("params", "ema_1"):
        write_tree(tmp_path / "run/5" / name, name)
    (tmp_path / "run/5/.ipynb_checkpoints").mkdir()
    (tmp_path / "run/5/.ipynb_checkpoints/x").write_text("")
    (tmp_path / "run/5/empty").mkdir()
    assert orbax.find(tmp_path / "run/5").state == {
        "params": {"a": "params"},
        "ema_1": {"a": "ema_1"},
    }
    with pytest.raises(FormatError, match=r"Name a step, as in .*/run/5; there are 1"):
        orbax.find(tmp_path / "run")
    write_tree(tmp_path / "run/10.orbax-checkpoint-tmp-3/params", "x")
    with pytest.raises(FormatError, match=r"Name a step, as in .*/run/5; there are 1"):
        orbax.find(tmp_path / "run")


# --- damage and harm ------------------------------------------------------------------------------


def copy(tmp_path, kind="zarr3"):
    root = tmp_path / kind
    shutil.copytree(FOLDER / kind, root)
    return root


def change(path, **changes):
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | changes))


def leaf(*keys, kind="jax.Array", key_type=2, skip=False):
    return {
        "key_metadata": [{"key": key, "key_type": key_type} for key in keys],
        "value_metadata": {"value_type": kind, "skip_deserialize": skip},
    }


def everything(root):
    found = orbax.find(root)
    tables_of(found)
    return arrays_of(found)


HUGE = 2**40
TREES = {
    "no tree": None,
    "a tree that is a list": [],
    "rows that are none": {"a": 3},
    "no keys": {"a": {**leaf("scalar"), "key_metadata": []}},
    "a key that is none": {"a": leaf(3)},
    "a key of no type": {"a": leaf("scalar", key_type=9)},
    "a place that is no number": {"a": leaf("scalar", key_type=1)},
    "no type of the value": {"a": {**leaf("scalar"), "value_metadata": {}}},
    "a type that is none": {"a": leaf("scalar", kind=3)},
    "an empty thing of no known type": {"a": leaf("x", kind="Gadget", skip=True)},
    "a path too deep": {"a": leaf(*["a"] * 100)},
    "a name too long": {"a": leaf("x" * 5000)},
    "an array that is missing": {"a": leaf("nowhere")},
    "an array above": {"a": leaf("../zarr2/scalar")},
    "an array elsewhere": {"a": leaf("/etc")},
    "a name with NUL": {"a": leaf("a\0b")},
    "two of one name": {"a": leaf("scalar"), "b": leaf("scalar")},
    "a path through an array": {
        "a": leaf("scalar"), "b": leaf("scalar", "x", skip=True, kind="None"),
    },
    "a list with too many holes": {"a": leaf("999999999", key_type=1, skip=True, kind="None")},
    "a text that is missing": {"a": leaf("a", kind="string")},
}  # fmt: skip


@reads
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_trees_that_lie_are_refused(tmp_path, tree):
    root = copy(tmp_path)
    change(root / "_METADATA", tree_metadata=tree)
    with pytest.raises((FormatError, CorruptionError, UnsafeCheckpointError)):
        everything(root)


@reads
@pytest.mark.parametrize(
    "changes",
    [{"shape": [HUGE, HUGE]}, {"shape": [-8, 6]}, {"shape": "8"}, {"shape": [8]},
     {"shape": [1] * 40}, {"data_type": "float33"}, {"data_type": "json"}, {"zarr_format": 7},
     {"node_type": "group"}, {"codecs": []}, {"shape": [16, 6]},
     {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [HUGE, HUGE]}}}],
    ids=range(12),
)  # fmt: skip
def test_arrays_that_lie_are_refused(tmp_path, changes):
    root = copy(tmp_path)
    change(root / "params.w/zarr.json", **changes)
    with pytest.raises((FormatError, CorruptionError)):
        everything(root)


@reads
def test_a_shape_of_very_many_chunks_is_not_listed(tmp_path):
    root = copy(tmp_path, "zarr2")
    change(root / "params.w/.zarray", shape=[HUGE, 6], chunks=[1, 1])
    found = orbax.find(root)
    assert len(found.state["params"]["w"].parts) == 1


@reads
@pytest.mark.parametrize("kind", KINDS)
def test_missing_and_cut_files_are_refused(tmp_path, kind):
    for number, path in enumerate(sorted((FOLDER / kind).rglob("*"))):
        beside = path.name in ("_sharding", "commit_success.txt", "orbax.checkpoint")
        if not path.is_file() or beside or path.parent.name == "array_metadatas":
            continue
        if path.name == "_CHECKPOINT_METADATA":
            continue  # the tree is enough
        root = tmp_path / str(number)
        shutil.copytree(FOLDER / kind, root)
        target = root / path.relative_to(FOLDER / kind)
        data = target.read_bytes()
        # A copy of the packed index that nothing refers to any more.
        spare = "ocdbt.process_0" in target.parts
        for cut in (b"", data[: len(data) // 2], None):
            target.write_bytes(cut) if cut is not None else target.unlink()
            try:
                got = everything(root)
            except CheckpointError:
                continue
            assert spare, (path, cut)
            for name, array in want().items():
                assert got[name].tobytes() == array.tobytes()


@reads
def test_links_out_of_the_checkpoint_are_not_followed(tmp_path):
    root = copy(tmp_path)
    shutil.rmtree(root / "scalar")
    (root / "scalar").symlink_to(FOLDER / "zarr3/scalar")
    with pytest.raises(UnsafeCheckpointError, match="link"):
        orbax.find(root)


@reads
def test_a_link_to_itself_is_refused(tmp_path):
    root = copy(tmp_path)
    shutil.rmtree(root / "scalar")
    (root / "scalar").symlink_to("scalar")
    with pytest.raises(CorruptionError, match="scalar"):
        orbax.find(root)


PIPED = {
    "zarr2": ("params.w/.zarray", "params.w/0.0", "unused"),
    "zarr2_ocdbt": ("manifest.ocdbt",),
}


@reads
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in PIPED.items() for name in names]
)
def test_a_pipe_is_not_waited_for(tmp_path, kind, name):
    root = copy(tmp_path, kind)
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    with pytest.raises(FormatError, match="not a regular file"):
        orbax.find(root)


@reads
@pytest.mark.parametrize("kind", ["zarr2", "zarr3"])
def test_metadata_that_nests_too_deep_is_refused(tmp_path, kind):
    """tensorstore would need more stack than there is, and the process would end."""
    root = copy(tmp_path, kind)
    path = root / "params.w" / (".zarray" if kind == "zarr2" else "zarr.json")
    text = path.read_text().rstrip().removesuffix("}")
    path.write_text(text + ', "x": ' + '{"a":' * 100_000 + "1" + "}" * 100_001)
    with pytest.raises(FormatError, match="nests"):
        orbax.find(root)
    path.write_text(text + ', "x": "' + "[{" * 100 + '\\""}')  # in a text there is nothing deep
    with contextlib.suppress(CorruptionError):
        orbax.find(root)
    path.write_text("[" * 65 + '"' + '\\"' * 100_000)  # a text without an end takes no time
    begun = time.process_time()
    with pytest.raises(FormatError, match="nests"):
        orbax.find(root)
    assert time.process_time() - begun < 1
    path.write_text(text + " " * (1 << 20) + "}")
    with pytest.raises(FormatError, match="more metadata"):
        orbax.find(root)


@reads
def test_packed_metadata_that_nests_too_deep_is_refused(tmp_path):
    import tensorstore

    root = copy(tmp_path, "zarr2_ocdbt")
    packed = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}}
    ).result()
    packed["params.w/.zarray"] = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    with pytest.raises(FormatError, match="nests"):
        orbax.find(root)


@reads
def test_unfinished_saves_and_odd_items_are_refused(tmp_path):
    root = tmp_path / "5.orbax-checkpoint-tmp"
    shutil.copytree(FOLDER / "manager/5", root)
    with pytest.raises(FormatError, match="not finished"):
        orbax.find(root)
    step = tmp_path / "5"
    root.rename(step)
    (step / "notes/metadata").unlink()
    with pytest.raises(FormatError, match="no tree describes"):
        orbax.find(step)
    change(step / "_CHECKPOINT_METADATA", item_handlers={"../x": "y"})
    with pytest.raises(UnsafeCheckpointError):
        orbax.find(step)
    change(step / "_CHECKPOINT_METADATA", item_handlers={"gone": "y"})
    with pytest.raises(CheckpointError):
        orbax.find(step)


def test_folders_and_json_that_are_none(tmp_path, monkeypatch):
    with pytest.raises(FormatError, match="holds no metadata of Orbax"):
        orbax.find(tmp_path)
    (tmp_path / "_CHECKPOINT_METADATA").write_text("[]")
    with pytest.raises(CorruptionError, match="not valid JSON: it is no object"):
        orbax.find(tmp_path)
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(CorruptionError, match="nothing but metadata"):
        orbax.find(tmp_path)
    monkeypatch.setattr(items, "_MAX_JSON", 1)
    with pytest.raises(FormatError, match="has 2 bytes, more than"):
        orbax.find(tmp_path)


def test_texts_that_are_missing_are_named(tmp_path):
    tree = {"tree_metadata": {"a": leaf("a", kind="string")}, "use_ocdbt": False}
    (tmp_path / "_METADATA").write_text(json.dumps(tree))
    (tmp_path / "_strings.json").write_text('{"a": "hi"}')
    assert orbax.find(tmp_path).state == {"a": "hi"}
    (tmp_path / "_strings.json").write_text('{"a": 3}')
    with pytest.raises(FormatError, match="the text a is not in"):
        orbax.find(tmp_path)

"""Loads with surgery: names and shapes of the checkpoint meet those of another program."""

import ml_dtypes
import numpy as np
import pytest

import shardkeep
from shardkeep import PlanError, ShardedArray, Surgery, ThreadRanks
from shardkeep.formats.native.reader import NativeReader
from shardkeep.surgery.reading import OperatedReader


@pytest.fixture
def saved(tmp_path):
    rng = np.random.default_rng(5)
    state = {
        "net": {f"{i}.{n}": rng.standard_normal((8, 6)) for i in range(3) for n in "qkv"},
        "experts": [rng.standard_normal((4, 2)).astype(np.float32) for _ in range(5)],
        "step": 9,
    }
    shardkeep.save(state, tmp_path / "step", no_dist=True)
    return tmp_path / "step", state


SURGERY = Surgery(
    rename=[r"^net\.=model.", "^step$=at"],
    rules=["fuse model.*.q, model.*.k, model.*.v = model.*.qkv @ 0/2", "stack experts.# = e @ 1"],
    cast=["f32=bf16"],
)


def wanted(state):
    net = state["net"]
    parts = [
        [net[f"{i}.{n}"][half * 4 : half * 4 + 4] for half in (0, 1) for n in "qkv"]
        for i in range(3)
    ]
    return {
        "model": {f"{i}.qkv": np.concatenate(parts[i]) for i in range(3)},
        "e": np.stack(state["experts"], 1).astype(ml_dtypes.bfloat16),
        "at": 9,
    }


def blank(state):
    return {
        "model": {name: np.zeros_like(array) for name, array in state["model"].items()},
        "e": np.zeros_like(state["e"]),
        "at": 0,
    }


def test_a_state_of_other_names_is_filled(saved):
    path, state = saved
    target = blank(wanted(state))
    arrays = dict(target["model"])
    result = shardkeep.load(target, path, no_dist=True, surgery=SURGERY)
    for name, array in wanted(state)["model"].items():
        np.testing.assert_array_equal(arrays[name], array)
    np.testing.assert_array_equal(target["e"], wanted(state)["e"])
    assert target["at"] == 9
    assert result.missing == result.unexpected == ()


def test_what_does_not_fit_is_refused_before_anything_is_read(saved):
    path, state = saved
    target = blank(wanted(state))
    target["model"]["0.qkv"] = np.zeros((9, 9))
    with pytest.raises(shardkeep.MismatchError, match=r"0\.qkv"):
        shardkeep.load(target, path, no_dist=True, surgery=SURGERY)
    with pytest.raises(PlanError, match="no name matches"):
        shardkeep.load(target, path, no_dist=True, surgery=Surgery(select=["no"]))
    assert not target["model"]["1.qkv"].any()


def test_ranks_load_their_parts(saved):
    path, state = saved
    whole = wanted(state)

    def part(ranks):
        rows = slice(ranks.rank * 8, ranks.rank * 8 + 8)
        mine = {n: np.zeros((8, 6)) for n in whole["model"]}
        target = {
            "model": {
                n: ShardedArray.from_local(a, (rows.start, 0), (24, 6)) for n, a in mine.items()
            },
            "e": np.zeros_like(whole["e"]),
            "at": 0,
        }
        shardkeep.load(target, path, process_group=ranks, surgery=SURGERY)
        for name, array in mine.items():
            np.testing.assert_array_equal(array, whole["model"][name][rows])
        np.testing.assert_array_equal(target["e"], whole["e"])

    ThreadRanks(3).run(part)


def test_ranks_must_agree_on_the_surgery(saved):
    path, state = saved

    def part(ranks):
        surgery = SURGERY if ranks.rank else None
        shardkeep.load(blank(wanted(state)), path, process_group=ranks, surgery=surgery)

    with pytest.raises(shardkeep.CheckpointError, match="surgery"):
        ThreadRanks(2).run(part)


def test_torch_tensors_and_ties_are_filled(saved):
    torch = pytest.importorskip("torch")
    path, state = saved
    target = {"model": {f"{i}.qkv": torch.zeros(24, 6, dtype=torch.float64) for i in range(3)}}
    target["e"] = torch.zeros(4, 5, 2, dtype=torch.bfloat16).transpose(0, 1).contiguous()
    target["e"] = target["e"].transpose(0, 1)  # strided memory
    shardkeep.load(target, path, no_dist=True, surgery=SURGERY)
    np.testing.assert_array_equal(target["e"].float().numpy(), wanted(state)["e"].astype("f4"))
    np.testing.assert_array_equal(target["model"]["2.qkv"], wanted(state)["model"]["2.qkv"])
    tied = torch.zeros(8, 6, dtype=torch.float64)
    twice = {"net": {"a": tied, "b": tied}}
    renamed = Surgery(mapping={"net.0.q": "net.a", "net.0.k": "net.b"})
    with pytest.raises(shardkeep.MismatchError, match="shares memory"):
        shardkeep.load(twice, path, no_dist=True, strict=False, surgery=renamed)


def test_ties_of_what_surgery_made(saved):
    """Known to be equal only where all bytes are those of tensors that are."""
    path, state = saved
    shardkeep.save(
        {**state, "same": state["experts"][0].copy()}, path, overwrite=True, no_dist=True
    )
    reader = OperatedReader(
        NativeReader(path),
        Surgery(
            rules=["split net.0.q = q.a, q.b @ 0", "stack net.#.k = k @ 0"], cast=["same:f32=bf16"]
        ),
    )
    try:
        reader.read_metadata()
        assert reader.same_content("k", "k")
        assert not reader.same_content("q.a", "q.b")
        assert not reader.same_content("q.a", "net.1.q")
        assert not reader.same_content("k", "net.1.q")
        assert not reader.same_content("same", "experts.0")
    finally:
        reader.close()
    plain = OperatedReader(NativeReader(path), Surgery(exclude=["step"]))
    try:
        plain.read_metadata()
        assert plain.same_content("same", "experts.0")
        assert not plain.same_content("same", "experts.1")
    finally:
        plain.close()


def test_readers_that_know_no_boxes():
    with pytest.raises(TypeError, match="object cannot be loaded with surgery"):
        OperatedReader(object(), Surgery(select=["a"]))


def test_surgery_that_is_none_is_named(tmp_path):
    shardkeep.save({"a": 1}, tmp_path / "a")
    with pytest.raises(TypeError, match="surgery is a dict; pass"):
        shardkeep.load({"a": 0}, tmp_path / "a", surgery={"rename": ["a=b"]})


def test_a_load_casts_only_what_fits(tmp_path):
    """Surgery does; the target's own type is a cast that the caller asked for."""
    shardkeep.save({"a": {"w": np.array([1, 300])}}, tmp_path / "a", no_dist=True)
    surgery = Surgery(rename=["^a=b"], cast=["i64=i8"])
    target = {"b": {"w": np.zeros(2, np.int8)}}
    with pytest.raises(shardkeep.UnsupportedValueError, match=r"b\.w holds 300"):
        shardkeep.load(target, tmp_path / "a", no_dist=True, surgery=surgery)
    shardkeep.load(
        target, tmp_path / "a", no_dist=True, surgery=Surgery(rename=["^a=b"]), cast=True
    )
    assert target["b"]["w"].tolist() == [1, 44]

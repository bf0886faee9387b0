"""What fits a target and what does not: strictness, keys, casts, ties, abstract targets."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import shardkeep
from shardkeep import MismatchError, PerRank, ShardedArray, ThreadRanks
from shardkeep.default_load_planner import DefaultLoadPlanner


class Sizes(NamedTuple):
    hidden: int
    heads: int


class Mode(Enum):
    TRAIN = "train"
    EVAL = "eval"


def state():
    return {
        "model": {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float32)},
        "optim": {"m": np.full(4, 2.0), "lr": 0.1},
        "step": 5,
    }


@pytest.fixture
def saved(tmp_path):
    shardkeep.save(state(), tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_everything_that_does_not_fit_is_listed_and_nothing_is_read(saved):
    target = {
        "model": {"w": np.zeros((3, 2)), "b": np.zeros(3, np.float64), "new": np.zeros(1), "n2": 1},
        "optim": {"m": 5},
        "step": 0,
    }
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, saved)
    error = caught.value
    assert error.missing == ("model.n2", "model.new")
    assert error.unexpected == ("optim.lr",)
    assert set(error.mismatched) == {"model.w", "model.b", "optim.m"}
    assert "stored shape (2, 3), target shape (3, 2)" in str(error)
    assert "stored dtype float32, target dtype float64" in str(error)
    assert "allow other dtypes with cast=..." in str(error)
    assert target["step"] == 0
    assert not target["model"]["w"].any()


def test_only_what_helps_is_advised(saved):
    target = state()
    target["model"]["w"] = np.zeros((3, 2))
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, saved)
    assert str(caught.value).endswith(
        "\nLoad into a matching target or narrow the request with keys=..."
    )
    with pytest.raises(MismatchError, match=r"pass 'model\.\*' for all that is in model"):
        shardkeep.load(target, saved, keys=["model"])


def test_a_container_that_is_not_asked_for_is_skipped(saved):
    target = {"model": {"w": np.zeros((2, 3)), "b": np.zeros(3, np.float32)}}
    result = shardkeep.load(target, saved)
    assert set(result.skipped) == {"optim.m", "optim.lr", "step"}
    assert "array" not in repr(result)  # it does not print the state
    assert np.array_equal(target["model"]["w"], state()["model"]["w"])


def test_a_flat_target_loads_a_nested_checkpoint(saved):
    target = {"model.w": np.zeros((2, 3)), "model.b": np.zeros(3, np.float32)}
    shardkeep.load(target, saved)
    assert target["model.w"][1, 2] == 5


def test_a_top_level_tensor_the_target_lacks_is_unexpected(tmp_path):
    shardkeep.save({"a": np.zeros(1), "b": np.zeros(1)}, tmp_path)
    with pytest.raises(MismatchError) as caught:
        shardkeep.load({"a": np.zeros(1)}, tmp_path)
    assert caught.value.unexpected == ("b",)


def test_an_empty_container_has_everything_unexpected(saved):
    with pytest.raises(MismatchError) as caught:
        shardkeep.load({"optim": {}}, saved)
    assert caught.value.unexpected == ("optim.m", "optim.lr")


def test_not_strict_reports_instead(saved):
    target = {"model": {"w": np.zeros((2, 3)), "extra": 9}}
    result = shardkeep.load(target, saved, strict=False)
    assert result.missing == ("model.extra",)
    assert result.unexpected == ("model.b",)
    assert target["model"]["extra"] == 9
    with pytest.raises(MismatchError):
        shardkeep.load({"model": {"w": np.zeros(1)}}, saved, strict=False)


@pytest.mark.parametrize("wanted", [(0,), (1, 2), (1, 3), (2,), (3,), (2, 3), (3, 1)])
def test_some_of_the_values(tmp_path, wanted):
    state = {f"v{n}": "x" * (n + 1) * 5 for n in range(4)}
    shardkeep.save(state, tmp_path / "a", no_dist=True)
    with shardkeep.open(tmp_path / "a") as ckpt:
        assert [ckpt[f"v{n}"] for n in wanted] == [state[f"v{n}"] for n in wanted]
    target = {f"v{n}": "" for n in wanted}
    shardkeep.load(target, tmp_path / "a", strict=False, no_dist=True)
    assert target == {name: state[name] for name in target}


def test_keys_narrow_the_request(saved):
    target = {"model": {"w": np.zeros((2, 3)), "b": np.zeros(99)}, "step": -1}
    result = shardkeep.load(target, saved, keys=["*.w"])
    assert target["model"]["w"][0, 1] == 1
    assert target["step"] == -1
    assert "model.b" in result.skipped
    with pytest.raises(MismatchError):
        shardkeep.load({"nothing": np.zeros(1)}, saved, keys=["nothing"])


def test_optional_names_may_be_missing(saved):
    target = state() | {"ema": {"w": np.zeros(1)}}
    result = shardkeep.load(target, saved, optional=["ema.*"])
    assert result.missing == ("ema.w",)


@pytest.mark.parametrize(
    ("stored", "wanted", "cast", "fits"),
    [
        ("float32", "float64", False, False),
        ("float32", "float64", "widen", True),
        ("float64", "float32", "widen", False),
        ("float64", "float32", True, True),
        ("bfloat16", "float32", "widen", True),
        ("float32", "bfloat16", True, True),
        ("int32", "int64", "widen", True),
        ("int64", "int32", True, True),
        ("float32", "int8", True, False),
        ("int8", "float32", True, False),
        ("bool", "uint8", True, False),
        ("float32", "complex64", True, False),
    ],
)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_casts_are_asked_for_and_never_cross_kinds(tmp_path, stored, wanted, cast, fits, library):
    from shardkeep.dtypes import TABLE

    values = np.array([0, 1, 3], TABLE[stored].to_numpy())
    shardkeep.save({"x": values}, tmp_path)
    if library == "torch":
        target = {"x": torch.zeros(3, dtype=getattr(torch, wanted))}
    else:
        target = {"x": np.zeros(3, TABLE[wanted].to_numpy())}
    if not fits:
        with pytest.raises(MismatchError, match=stored):
            shardkeep.load(target, tmp_path, cast=cast)
        return
    shardkeep.load(target, tmp_path, cast=cast)
    assert [float(v) for v in target["x"]] == [0, 1, 3]


def test_every_pair_that_may_be_cast_can_be(tmp_path):
    from shardkeep.dtypes import TABLE, can_cast

    rows = [row for row in TABLE.values() if row.numpy]
    for source in rows:
        values = np.array([0, 1, 1], np.uint8).astype(np.float32).astype(source.to_numpy())
        path = tmp_path / source.name
        shardkeep.save({"x": values}, path)
        for goal in rows:
            if can_cast(source, goal, True):
                target = {"x": np.zeros(3, goal.to_numpy())}
                shardkeep.load(target, path, cast=True)
                if can_cast(source, goal, "widen"):
                    assert complex(target["x"][1]) == complex(values[1]), (source, goal)


def test_named_tuples_and_enums_take_their_class_from_the_target(tmp_path):
    shardkeep.save({"sizes": Sizes(4, 2), "mode": Mode.EVAL}, tmp_path)
    target = {"sizes": Sizes(0, 0), "mode": Mode.TRAIN}
    shardkeep.load(target, tmp_path)
    assert target["sizes"] == Sizes(4, 2)
    assert type(target["sizes"]) is Sizes
    assert target["mode"] is Mode.EVAL
    assert shardkeep.open(tmp_path)["sizes"] == (4, 2)


def test_ties_are_stored_once_and_come_back_as_one(tmp_path):
    w = np.arange(10_000.0)
    result = shardkeep.save({"embed": w, "head": w, "view": w[:5]}, tmp_path)
    assert result.nbytes == w.nbytes + 40
    out = shardkeep.open(tmp_path).state_dict()
    assert out["embed"] is out["head"]
    target = {"embed": np.zeros(10_000), "head": np.zeros(10_000), "view": np.zeros(5)}
    shardkeep.load(target, tmp_path)
    assert np.array_equal(target["head"], w)
    tied = np.zeros(10_000)
    shardkeep.load({"embed": tied, "head": tied, "view": np.zeros(5)}, tmp_path)
    assert np.array_equal(tied, w)


def test_a_tied_target_with_equal_sources_is_filled(tmp_path):
    shardkeep.save({"a": np.arange(5.0), "b": np.arange(5.0)}, tmp_path)
    tied = np.zeros(5)
    shardkeep.load({"a": tied, "b": tied}, tmp_path)
    assert np.array_equal(tied, np.arange(5.0))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_tied_target_with_different_sources_is_refused(tmp_path, library):
    shardkeep.save({"a": np.arange(5.0), "b": np.arange(5.0) + 1}, tmp_path)
    tied = np.zeros(5) if library == "numpy" else torch.zeros(5, dtype=torch.float64)
    with pytest.raises(MismatchError, match="shares memory"):
        shardkeep.load({"a": tied, "b": tied}, tmp_path)
    assert not tied.any()


def test_interleaved_targets_share_no_memory(tmp_path):
    shardkeep.save({"left": np.ones((4, 2)), "right": np.full((4, 2), 2.0)}, tmp_path)
    whole = np.zeros((4, 4))
    shardkeep.load({"left": whole[:, :2], "right": whole[:, 2:]}, tmp_path)
    assert np.array_equal(whole, [[1, 1, 2, 2]] * 4)


def test_overlapping_targets_are_refused(tmp_path):
    shardkeep.save({"a": np.ones(4), "b": np.full(4, 2.0)}, tmp_path)
    whole = np.zeros(6)
    with pytest.raises(MismatchError, match="shares memory"):
        shardkeep.load({"a": whole[:4], "b": whole[2:]}, tmp_path)


def test_a_read_only_target_is_refused(tmp_path):
    shardkeep.save({"a": np.ones(4)}, tmp_path)
    target = np.zeros(4)
    target.flags.writeable = False
    with pytest.raises(shardkeep.UnsupportedValueError, match="read-only"):
        shardkeep.load({"a": target}, tmp_path)


def test_per_rank_values_return_to_their_rank(tmp_path):
    ThreadRanks(3).run(
        lambda c: shardkeep.save(
            {"rng": PerRank({"seed": c.rank, "state": np.full(c.rank + 1, c.rank)})},
            tmp_path,
            process_group=c,
        )
    )
    targets = [{"rng": PerRank({"seed": -1, "state": np.zeros(r + 1, int)})} for r in range(3)]
    results = ThreadRanks(3).run(
        lambda c: shardkeep.load(targets[c.rank], tmp_path, process_group=c)
    )
    for rank, result in enumerate(results):
        assert result.state_dict["rng"].value["seed"] == rank
        assert (result.state_dict["rng"].value["state"] == rank).all()
    assert shardkeep.open(tmp_path).state_dict()["rng"][2]["seed"] == 2


def test_per_rank_values_are_refused_on_another_world_size(tmp_path):
    ThreadRanks(3).run(
        lambda c: shardkeep.save({"rng": PerRank(c.rank), "x": 1}, tmp_path, process_group=c)
    )
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load({"rng": PerRank(0), "x": 0}, tmp_path, process_group=c)
    )
    for outcome in outcomes:
        assert isinstance(outcome, MismatchError)
        assert "saved per rank by 3 ranks, loading on 2" in str(outcome)
    target = {"rng": PerRank(0), "x": 0}
    shardkeep.load(target, tmp_path, keys=["x"])
    assert target["x"] == 1


def test_strictness_is_over_the_union_of_ranks(tmp_path):
    shardkeep.save({"model": {"a": np.ones(2), "b": np.ones(3)}}, tmp_path)
    targets = [{"model": {"a": np.zeros(2)}}, {"model": {"b": np.zeros(3)}}]
    ThreadRanks(2).run(lambda c: shardkeep.load(targets[c.rank], tmp_path, process_group=c))
    assert targets[0]["model"]["a"].all()
    assert targets[1]["model"]["b"].all()


def test_meta_tensors_are_allocated(tmp_path):
    shardkeep.save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path)
    parameter = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
    result = shardkeep.load({"w": parameter}, tmp_path)
    loaded = result.state_dict["w"]
    assert isinstance(loaded, torch.nn.Parameter)
    assert torch.equal(loaded, torch.arange(6.0).reshape(2, 3))


def test_real_arrays_are_filled_never_rebound(tmp_path):
    shardkeep.save({"a": np.ones(3), "b": torch.ones(3)}, tmp_path)
    a, b = np.zeros(3), torch.zeros(3)
    target = {"a": a, "b": b}
    pointer = b.data_ptr()
    shardkeep.load(target, tmp_path)
    assert target["a"] is a
    assert target["b"] is b
    assert b.data_ptr() == pointer
    assert a.all()
    assert b.all()


def test_expect_digest_pins_a_checkpoint(tmp_path):
    digest = shardkeep.save({"a": 1}, tmp_path).digest
    shardkeep.load({"a": 0}, tmp_path, expect_digest=digest)
    shardkeep.save({"a": 2}, tmp_path, overwrite=True)
    with pytest.raises(shardkeep.CorruptionError, match="pinned"):
        shardkeep.load({"a": 0}, tmp_path, expect_digest=digest)


def test_pickles_need_consent_at_both_ends(tmp_path):
    class Odd:
        pass

    with pytest.raises(shardkeep.UnsupportedValueError, match="odd"):
        shardkeep.save({"odd": Odd}, tmp_path / "a")
    shardkeep.save({"odd": os.path.join, "w": np.ones(2)}, tmp_path / "b", allow_pickle=True)
    target = {"odd": None, "w": np.zeros(2)}
    with pytest.raises(shardkeep.UnsafeCheckpointError):
        shardkeep.load(target, tmp_path / "b")
    assert not target["w"].any()
    shardkeep.load(target, tmp_path / "b", allow_pickle=True)
    assert target["odd"] is os.path.join


def test_replaced_while_being_read_is_read_again(tmp_path, monkeypatch):
    from shardkeep.formats.native.reader import NativeReader

    shardkeep.save({"a": np.ones(4)}, tmp_path)
    original = NativeReader.read_data
    turns = []

    def read_data(self, plan, planner):
        if not turns:
            turns.append(1)
            shardkeep.save({"a": np.full(4, 2.0)}, tmp_path, overwrite=True)
        return original(self, plan, planner)

    monkeypatch.setattr(NativeReader, "read_data", read_data)
    target = {"a": np.zeros(4)}
    shardkeep.load(target, tmp_path)
    assert np.array_equal(target["a"], np.full(4, 2.0))


def test_bad_arguments_say_what_to_pass(tmp_path):
    with pytest.raises(ValueError, match="checkpoint_id"):
        shardkeep.load({})
    with pytest.raises(ValueError, match="8388608"):
        shardkeep.load({}, tmp_path, memory_budget=1000)
    with pytest.raises(ValueError, match="cast"):
        shardkeep.load({}, tmp_path, cast="narrow")
    with pytest.raises(TypeError, match="torch's own planner"):
        shardkeep.load({}, tmp_path, planner=object())
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="no such directory"):
        shardkeep.load({}, tmp_path / "nowhere")


# --- planners that are told


def torch_file(folder):
    torch.save({"w": torch.arange(6.0).reshape(2, 3).t(), "x": torch.ones(2)}, folder / "a.pt")
    return folder / "a.pt", {"w": np.zeros((3, 2), np.float32), "x": np.zeros(2, np.float32)}, {}


def split(folder):
    shardkeep.save({"w": np.arange(6.0).reshape(2, 3)}, folder / "a", no_dist=True)
    surgery = shardkeep.Surgery(rules=["split w = q, k @ 0"])
    return folder / "a", {"q": np.zeros((1, 3)), "k": np.zeros((1, 3))}, {"surgery": surgery}


@pytest.mark.parametrize("make", [torch_file, split])
@pytest.mark.parametrize("world", [1, 2])
def test_planners_are_told_what_is_filled_whatever_it_is_read_from(tmp_path, make, world):
    path, _, options = make(tmp_path)

    def load(ranks):
        _, target, _ = make(tmp_path / str(ranks.rank))
        told = []

        class Telling(DefaultLoadPlanner):
            def commit_tensor(self, read_item, tensor):
                told.append((read_item.dest_index.fqn, target[read_item.dest_index.fqn].sum()))

        shardkeep.load(target, path, planner=Telling(), process_group=ranks, **options)
        return told

    for rank in range(world):
        (tmp_path / str(rank)).mkdir()
    want = [("w", 15), ("x", 2)] if make is torch_file else [("k", 12), ("q", 3)]
    assert [sorted(told) for told in ThreadRanks(world).run(load)] == [want] * world


def test_items_say_where_a_region_lies_in_its_chunk_and_in_the_target(tmp_path):
    """Whichever planner asks: both are the same elements of the whole tensor."""
    whole = np.arange(60, dtype=np.float32).reshape(12, 5)

    def rows(low, high):
        return ShardedArray.from_local(whole[low:high].copy(), (low, 0), whole.shape)

    def save(ranks):
        state = {"v": 3, "w": rows(4 * ranks.rank, 4 * ranks.rank + 4)}
        shardkeep.save(state, tmp_path, process_group=ranks)

    ThreadRanks(3).run(save)
    told = []

    class Telling(DefaultLoadPlanner):
        def commit(self, items, sinks):
            told.extend([items.nbytes, *items])

    def load(ranks):
        if ranks.rank == 1:
            target = {"v": 0, "w": rows(2, 9)}
            shardkeep.load(target, tmp_path, planner=Telling(), process_group=ranks)
        else:
            shardkeep.load({}, tmp_path, process_group=ranks)

    ThreadRanks(2).run(load)
    nbytes, *items, value = told
    assert nbytes == 7 * 5 * 4
    assert value.dest_index.fqn == value.storage_index.fqn == "v"
    found = []
    for item in items:
        for index, offsets in (
            (item.dest_index, item.dest_offsets),
            (item.storage_index, item.storage_offsets),
        ):
            found.append((index.offset, tuple(map(sum, zip(index.offset, offsets, strict=True)))))
    assert [item.lengths for item in items] == [(2, 5), (4, 5), (1, 5)]
    assert found == [
        *[((2, 0), (2, 0)), ((0, 0), (2, 0))],
        *[((2, 0), (4, 0)), ((4, 0), (4, 0))],
        *[((2, 0), (8, 0)), ((8, 0), (8, 0))],
    ]


def test_results_and_the_log_tell_what_was_moved(tmp_path, caplog):
    state = {"a": np.ones((3, 5)), "b": {"c": np.ones(2, np.int8)}}
    documented = (Path(__file__).parents[1] / "docs/PERFORMANCE.md").read_text()
    with caplog.at_level("INFO", "shardkeep"):
        results = [
            shardkeep.save(state, tmp_path / "base"),
            shardkeep.save(state, tmp_path / "again", base=tmp_path / "base"),
            shardkeep.async_save(state, tmp_path / "later").result(),
            shardkeep.load(state, tmp_path / "base"),
        ]
    assert len(caplog.messages) >= len(results)
    for result in results:
        assert {"bytes", "bytes_per_s"} <= result.stats.keys()
        assert all(f"`{key}`" in documented for key in result.stats), result.stats
    loaded = results[-1]
    assert loaded.stats["files_read"] == 1
    assert loaded.stats["bytes"] == loaded.nbytes == 122
    (told,) = [text for text in caplog.messages if text.startswith(f"loaded {tmp_path / 'base'}")]
    assert "bytes 122" in told
    assert "files_read 1" in told

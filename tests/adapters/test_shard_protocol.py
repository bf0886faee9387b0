"""Values of any class that carry shard fields."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import shardkeep
from shardkeep import MismatchError, PlanError, ThreadRanks, UnsupportedValueError
from shardkeep.arrays import adapter_of


@dataclass
class Rows:
    """Annotated fields, as a dataclass without defaults has them."""

    local: object
    global_shape: tuple
    global_offsets: tuple
    local_offsets: tuple
    local_sizes: tuple

    def local_tensor(self):
        return self.local


class Computed:
    """Fields as properties."""

    def __init__(self, array, row, rows):
        self.array, self.row, self.rows = array, row, rows

    def local_tensor(self):
        return self.array

    @property
    def global_shape(self):
        return (self.rows, self.array.shape[1])

    @property
    def global_offsets(self):
        return [(self.row, 0)]

    @property
    def local_offsets(self):
        return [(0, 0)]

    @property
    def local_sizes(self):
        return [self.array.shape]


def marked(tensor, shape, there, here, sizes):
    """A plain tensor that carries the fields, as PyTorch's proposal has it."""
    tensor.global_shape = shape
    tensor.global_offsets, tensor.local_offsets, tensor.local_sizes = there, here, sizes
    return tensor


def on_threads(call, states, path, **options):
    return ThreadRanks(len(states)).run(
        lambda ranks: call(states[ranks.rank], path, process_group=ranks, **options)
    )


def interleaved(empty=False):
    """Two ranks, each with two boxes of 16 numbers."""
    states = []
    for rank in range(2):
        low, high = 4 * rank, 8 + 4 * rank
        data = torch.cat([torch.arange(low, low + 4), torch.arange(high, high + 4)]).float()
        data = torch.zeros(8) if empty else data
        boxes = ((low,), (high,)), ((0,), (4,)), ((4,), (4,))
        states.append({"x": marked(data, (16,), *boxes)})
    return states


def test_fields_on_a_plain_tensor(tmp_path):
    on_threads(shardkeep.save, interleaved(), tmp_path)
    assert shardkeep.open(tmp_path)["x"][:].tolist() == list(range(16))
    targets = interleaved(empty=True)
    originals = [target["x"] for target in targets]
    on_threads(shardkeep.load, targets, tmp_path)
    for target, original, expected in zip(targets, originals, interleaved(), strict=True):
        assert target["x"] is original
        assert torch.equal(target["x"], expected["x"])


@pytest.mark.parametrize("zeros", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_fields_of_a_class(tmp_path, zeros):
    whole = np.arange(20, dtype=np.float32).reshape(5, 4)
    states = [{"x": Computed(whole[:3], 0, 5)}, {"x": Computed(whole[3:], 3, 5)}]
    on_threads(shardkeep.save, states, tmp_path)
    local = zeros((4, 4), dtype=(torch if zeros is torch.zeros else np).float32)
    # Two boxes, in another order than in the tensor, and a row that belongs to none.
    target = Rows(local, (5, 4), ((3, 0), (0, 1)), ((0, 0), (2, 0)), ((2, 4), (1, 3)))
    shardkeep.load({"x": target}, tmp_path, no_dist=True)
    assert np.array_equal(np.asarray(local[:2]), whole[3:])
    assert np.array_equal(np.asarray(local[2, :3]), whole[0, 1:])
    assert not np.asarray(local[3]).any()
    assert float(local[2, 3]) == 0


def test_holding_nothing(tmp_path):
    states = [
        {"x": Rows(np.arange(3.0), (3,), ((0,),), ((0,),), ((3,),))},
        {"x": Rows(np.zeros(0), (3,), (), (), ())},
    ]
    on_threads(shardkeep.save, states, tmp_path)
    assert shardkeep.open(tmp_path)["x"][:].tolist() == [0, 1, 2]


def test_equal_boxes_are_compared(tmp_path):
    def states(*numbers):
        return [{"x": Rows(np.full(3, n), (3,), ((0,),), ((0,),), ((3,),))} for n in numbers]

    assert on_threads(shardkeep.save, states(1.0, 1.0), tmp_path / "a")[0].nbytes == 24
    with pytest.raises(PlanError, match="ranks 0, 1"):
        on_threads(shardkeep.save, states(1.0, 2.0), tmp_path / "b")


def test_gaps_are_refused(tmp_path):
    state = {"x": Rows(np.zeros(3), (4,), ((0,),), ((0,),), ((3,),))}
    with pytest.raises(PlanError, match="no rank holds"):
        shardkeep.save(state, tmp_path)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (((4,), ((2,),), ((0,),), ((3,),)), "shape \\(4,\\) of the tensor"),
        (((9,), ((0,),), ((1,),), ((3,),)), "shape \\(3,\\) of the local array"),
        (((9,), ((0,), (3,)), ((0,),), ((3,),)), "shard fields are wrong"),
        (((9,), ((0, 0),), ((0,),), ((3,),)), "shard fields are wrong"),
        (((9,), ((-1,),), ((0,),), ((3,),)), "shard fields are wrong"),
        (((9,), 5, ((0,),), ((3,),)), "shard fields are wrong"),
    ],
)
def test_wrong_fields_are_refused_by_path(tmp_path, fields, text):
    with pytest.raises(UnsupportedValueError, match=text) as caught:
        shardkeep.save({"deep": {"x": Rows(np.zeros(3), *fields)}}, tmp_path)
    assert "deep.x" in str(caught.value)


def test_missing_fields_and_arrays_are_refused(tmp_path):
    tensor = torch.zeros(3)
    tensor.global_shape = (3,)
    with pytest.raises(UnsupportedValueError, match=r"shard fields are wrong.*global_offsets"):
        shardkeep.save({"x": tensor}, tmp_path)
    with pytest.raises(UnsupportedValueError, match=r"local_tensor\(\)"):
        shardkeep.save({"x": Rows([1, 2], (2,), ((0,),), ((0,),), ((2,),))}, tmp_path)


def test_abstract_local_arrays_are_refused(tmp_path):
    on_threads(shardkeep.save, interleaved(), tmp_path)
    target = marked(torch.zeros(8, device="meta"), (16,), ((0,),), ((0,),), ((8,),))
    with pytest.raises(UnsupportedValueError, match="no memory"):
        shardkeep.load({"x": target}, tmp_path, no_dist=True)


def test_shapes_must_fit(tmp_path):
    on_threads(shardkeep.save, interleaved(), tmp_path)
    target = marked(torch.zeros(8), (17,), ((0,),), ((0,),), ((8,),))
    with pytest.raises(MismatchError, match=r"stored shape \(16,\), target shape \(17,\)"):
        shardkeep.load({"x": target}, tmp_path, no_dist=True)


def test_other_classes_are_left_alone():
    class Half:
        global_shape = (3,)
        global_offsets = ()

    assert adapter_of(Half()) is None
    for value in (3, len, lambda: None, Half, object()):
        assert adapter_of(value) is None
    assert adapter_of(torch.zeros(1)) is adapter_of(torch.nn.Parameter(torch.zeros(1)))

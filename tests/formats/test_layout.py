"""Where everything lies: each chunk in one place, apart and aligned, under headers that fit."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.columns import Boxes, starts
from shardkeep.formats.native.header import Entry, chunk_entries, write_header
from shardkeep.formats.native.layout import Limits, decode_rank_layout, plan_layout
from shardkeep.formats.native.names import CONTENT, DIGESTS, VALUES, entry_keys
from shardkeep.metadata import TensorProperties
from shardkeep.tables import ChunkTable, TensorTable, ValueTable

DIGEST = 16
METADATA = {"format": "pt", "shardkeep": "1", "save_id": "0" * 32}


def tables(tensors, chunks, values):
    """Tensors are (name, dtype, shape), chunks (tensor, offsets, sizes, rank), values ranks."""
    names, dtypes, shapes = zip(*tensors, strict=True) if tensors else ((), (), ())
    boxes = Boxes(
        starts(np.array([len(sizes) for _, _, sizes, _ in chunks], np.int64)),
        np.array([n for _, offsets, _, _ in chunks for n in offsets], np.int64),
        np.array([n for _, _, sizes, _ in chunks for n in sizes], np.int64),
    )
    number, rank = (np.array([chunk[at] for chunk in chunks], np.int64) for at in (0, 3))
    return (
        TensorTable.of(names, [TensorProperties(dtype) for dtype in dtypes], shapes),
        ChunkTable(number, boxes, rank, np.arange(len(chunks))),
        ValueTable(
            [f"v{at}" for at in range(len(values))],
            np.array(values, np.int64),
            np.zeros(len(values), np.int64),
        ),
    )


def header_of(plan, rows, tensors, placed, values):
    """As it is written; that it fits its room is checked there."""
    described = []
    for row in rows.tolist():
        box, tensor = placed.boxes[row], int(placed.tensor[row])
        whole = box.sizes == tensors.shape(tensor)
        described.append((tensors.names[tensor], None if whole else box.offsets, tensor, box))
    begin = placed.start[rows] - plan.room
    text = chunk_entries(
        entry_keys((name, at) for name, at, _, _ in described),
        tensors.kinds,
        [int(tensors.kind[tensor]) for _, _, tensor, _ in described],
        [box.sizes for _, _, _, box in described],
        begin.tolist(),
        (begin + placed.nbytes(tensors)[rows]).tolist(),
    )
    end = plan.values + (1 << 40) * values
    entries = {
        CONTENT: Entry("U8", (plan.values - plan.content,), plan.content, plan.values),
        VALUES: Entry("U8", (end - plan.values,), plan.values, end),
        DIGESTS: Entry("U8", (1 << 40,), end, end + (1 << 40)),
    }
    assert len(write_header(entries, METADATA, plan.room, text)) == plan.room
    return sum(map(len, text))


def check(tensors, chunks, values, world, limits, begun=()):
    """Everything that must hold of a layout; returns it."""
    layout = plan_layout(tensors, chunks, values, world, DIGEST, limits, begun)
    placed, nbytes = layout.chunks, chunks.nbytes(tensors)
    assert placed.file.tolist() == [] or placed.file.max() < len(layout.files)
    of_rank = {rank: [p for p in layout.files if p.rank == rank] for rank in range(world)}
    assert [plan.rank for plan in layout.files] == sorted(plan.rank for plan in layout.files)
    for number, plan in enumerate(layout.files):
        rows = np.flatnonzero(placed.file == number)
        rows = rows[np.lexsort((nbytes[rows] > 0, placed.start[rows]))]
        assert len(rows) == plan.count
        assert set(placed.rank[rows].tolist()) <= {plan.rank}
        ends = plan.room + np.cumsum(nbytes[rows])
        assert placed.start[rows].tolist() == (ends - nbytes[rows]).tolist()
        assert plan.content == (ends[-1] if len(rows) else plan.room)
        assert plan.values == plan.content + len(rows) * (8 + DIGEST)
        full = nbytes[rows] > 0
        power = np.minimum(nbytes[rows] & -nbytes[rows], 1 << 16)[full]
        assert not ((placed.start[rows][full] - plan.room) % power).any()
        mine = of_rank[plan.rank]
        assert plan.holds_values == (plan is mine[-1] and plan.rank in values.rank)
        assert plan.count or plan.holds_values
        assert plan.number == mine.index(plan) + (begun[plan.rank] if begun else 0)
        text = header_of(plan, rows, tensors, placed, plan.holds_values)
        most = limits.payload_of(int(nbytes[chunks.rank == plan.rank].sum()))
        assert plan.count <= 1 or plan.content - plan.room <= most
        assert plan.count <= 1 or text <= limits.header
        if plan is not mine[-1] and limits.header >= 1 << 20:  # it was cut for its bytes
            after = np.flatnonzero(placed.file == number + 1)
            first = after[np.argmin(placed.start[after])]
            assert plan.content - plan.room + nbytes[first] > most
    for at, rank in enumerate(values.rank.tolist()):
        plan = layout.files[layout.values.file[at]]
        assert (plan.rank, plan.holds_values) == (rank, True)
    for rank, message in enumerate(layout.messages):
        files, disk_order, start = decode_rank_layout(message)
        mine = np.flatnonzero(chunks.rank == rank)
        assert files == of_rank[rank]
        assert start.tolist() == placed.start[mine].tolist()
        assert sorted(disk_order.tolist()) == list(range(len(mine)))
        for plan in files:
            rows = mine[disk_order[plan.first : plan.first + plan.count]]
            assert set(placed.file[rows].tolist()) <= {layout.files.index(plan)}
            assert (np.diff(placed.start[rows]) >= 0).all()
    return layout


@st.composite
def drawn(draw):
    world = draw(st.integers(1, 3))
    ranks = st.integers(0, world - 1)
    tensors, chunks = [], []
    for number in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 8, 100, 4096]), max_size=3)))
        name = draw(st.sampled_from(["w", "__metadata__", "é\n", "a" * 90])) + str(number)
        dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]))
        tensors.append((name, dtype, shape))
        cuts = sorted(draw(st.sets(st.integers(1, 99), max_size=4))) if shape else []
        edges = [0, *(cut for cut in cuts if cut < shape[0]), shape[0]] if shape else [0, 0]
        for low, high in pairwise(edges):
            box = ((low, *(0 for _ in shape[1:])), (high - low, *shape[1:])) if shape else ((), ())
            chunks.append((number, *box, draw(ranks)))
    values = draw(st.lists(ranks, max_size=3))
    limits = Limits(
        payload=draw(st.sampled_from([1, 5000, 1 << 34])),
        together=draw(st.integers(1, 4)),
        least=draw(st.sampled_from([1, 1000, 1 << 30])),
        header=draw(st.sampled_from([1, 500, 1 << 20])),
    )
    begun = draw(st.sampled_from([(), (2, 0, 1)[:world]]))
    return *tables(tensors, chunks, values), world, limits, begun


@given(drawn())
def test_any_layout(case):
    check(*case)


def test_headers_of_the_longest_numbers_fit():
    """Offsets and shapes take most of a header where names are short."""
    shape = (0, *[10**18] * 5)
    half = (0, *[5 * 10**17] * 5)
    chunks = [(at, half, half, 0) for at in range(200)]
    tensors = [(f"{at}", "uint8", shape) for at in range(200)]
    check(*tables(tensors, chunks, []), 1, Limits())


def test_a_header_of_many_entries_is_cut():
    tensors = [("a" * 1000 + str(at), "uint8", (1,)) for at in range(40)]
    chunks = [(at, (0,), (1,), at % 2) for at in range(40)]
    layout = check(*tables(tensors, chunks, [1]), 2, Limits(header=5000))
    assert [plan.count for plan in layout.files] == [4] * 10


@pytest.mark.parametrize(("nbytes", "files"), [(4 << 30, 4), ((8 << 30) + 1, 8), (1 << 40, 64)])
def test_into_how_many_files_a_rank_writes(nbytes, files):
    """Of chunks of 64 MiB and a rest: as many as are written at the same time, or of 16 GiB."""
    size = 64 << 20
    edges = [*range(0, nbytes, size), nbytes]
    chunks = [(0, (low,), (high - low,), 1) for low, high in pairwise(edges)]
    chunks.append((1, (0,), (1 << 40,), 0))
    tensors = [("w", "uint8", (nbytes,)), ("of another rank", "uint8", (1 << 40,))]
    layout = check(*tables(tensors, chunks, []), 2, Limits())
    assert [plan.rank for plan in layout.files] == [0] + [1] * files

"""Runs of bytes: any part of them brings the same bytes to the same places."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.engine.byte_runs import ByteRuns


@st.composite
def some_runs(draw):
    """Runs with gaps between them, and where each begins in one of two files."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=6))
    to, at = [], draw(st.integers(0, 4))
    for gap, nbytes in lengths:
        to.append(at + gap)
        at += gap + nbytes
    file = [draw(st.integers(0, 1)) for _ in lengths]
    start = [draw(st.integers(0, 50)) for _ in lengths]
    columns = (file, start, [nbytes for _, nbytes in lengths], to, range(len(lengths)))
    return ByteRuns(*(np.array(column, np.int64) for column in columns)), at


def brought(runs, files, out):
    for file, start, nbytes, to, _ in zip(*vars(runs).values(), strict=True):
        out[to : to + nbytes] = files[file][start : start + nbytes]


@given(some_runs(), st.data())
def test_a_part_brings_what_the_whole_does(case, data):
    runs, end = case
    files = [np.arange(60, dtype=np.uint8), np.arange(100, 160, dtype=np.uint8)]
    whole = np.full(end + 3, 255, np.uint8)
    brought(runs, files, whole)
    low = data.draw(st.integers(0, end + 2))
    high = data.draw(st.integers(low + 1, end + 3))
    part = np.full(high - low, 255, np.uint8)
    some = runs.part(low, high)
    brought(some, files, part)
    assert part.tobytes() == whole[low:high].tobytes()
    assert (some.nbytes > 0).all()
    inside = [
        n for n in range(len(runs)) if runs.to[n] < high and runs.to[n] + runs.nbytes[n] > low
    ]
    assert some.owner.tolist() == inside

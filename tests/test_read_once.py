"""What several ranks want is read by one of them, passed on, and checked by each."""

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import CorruptionError, PlanError, ShardedArray, StorageError, ThreadRanks
from shardkeep.engine import passing
from shardkeep.engine import read_once as module
from shardkeep.engine.reading import Reading
from shardkeep.engine.shares import Share, encode_wants, plan_shares
from shardkeep.engine.units import Runs
from shardkeep.engine.windows import Address, Window
from shardkeep.memory import address_of
from shardkeep.stores.reading import ReadFile

BLOCK = 128 << 10


def part(whole, rank, world, dim):
    """A rank's part along a dimension; along none, all of it."""
    if dim is None:
        return whole
    each = -(-whole.shape[dim] // world)
    low = min(rank * each, whole.shape[dim])
    high = min(low + each, whole.shape[dim])
    cut = [slice(None)] * whole.ndim
    cut[dim] = slice(low, high)
    offsets = [0] * whole.ndim
    offsets[dim] = low
    return ShardedArray.from_local(whole[tuple(cut)].copy(), tuple(offsets), whole.shape)


def local(array):
    return array if isinstance(array, np.ndarray) else array.local_shards[0].array


def state_of(arrays, rank, world, dim, empty=False):
    return {
        name: part(np.zeros_like(array) if empty else array, rank, world, dim)
        for name, array in arrays.items()
    }


def save(path, arrays, world, dim):
    ThreadRanks(world).run(
        lambda c: shardkeep.save(state_of(arrays, c.rank, world, dim), path, process_group=c)
    )


def load(path, arrays, world, dim, **options):
    """The results of all ranks, once what they got was found to be right."""
    targets = [state_of(arrays, rank, world, dim, empty=True) for rank in range(world)]
    results = ThreadRanks(world).run(
        lambda c: shardkeep.load(targets[c.rank], path, process_group=c, **options)
    )
    for rank, target in enumerate(targets):
        for name, array in arrays.items():
            expected = local(part(array, rank, world, dim))
            assert local(target[name]).tobytes() == expected.tobytes()
    return results


def total(results, key):
    return sum(result.stats[key] for result in results)


@pytest.fixture
def arrays():
    made = np.random.default_rng(0)
    return {f"w{i}": made.standard_normal((512, 500 + i)) for i in range(6)}


def nbytes(arrays):
    return sum(array.nbytes for array in arrays.values())


@pytest.fixture
def messages(monkeypatch):
    """As between machines: no rank sees another's memory."""
    monkeypatch.setattr(module, "make_window", lambda budget: None)


@pytest.fixture(params=["windows", "messages"])
def both_ways(request):
    if request.param == "messages":
        request.getfixturevalue("messages")


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(("saved", "wanted"), [(0, 1), (None, None), (0, None), (1, 0)])
def test_bytes_are_read_once(tmp_path, arrays, saved, wanted):
    save(tmp_path, arrays, 4, saved)
    once = load(tmp_path, arrays, 4, wanted, read_once=True)
    assert total(once, "bytes_read") <= 1.1 * nbytes(arrays)
    assert total(once, "bytes_received") > 0
    if wanted is None:
        apart = load(tmp_path, arrays, 4, wanted, read_once=False)
        assert total(apart, "bytes_read") > 3.9 * nbytes(arrays)
        assert total(apart, "bytes_received") == 0


@pytest.mark.parametrize("read_some", [True, False], ids=["direct", "refused"])
def test_no_disk_reads_into_memory_that_ranks_share(tmp_path, arrays, monkeypatch, read_some):
    """It has small pages; and what is read again through the page cache is right all the same."""
    monkeypatch.setattr(ReadFile, "is_cold", lambda self, offset, nbytes: True)
    if not read_some:
        monkeypatch.setattr(ReadFile, "_direct_fd", lambda self: -1)
    windows, disk = [], []
    make, read = module.make_window, ReadFile.read_direct

    def seen(self, out, offset, nbytes):
        low = address_of(np.asarray(out))
        disk.append((low, low + len(out)))
        return read(self, out, offset, nbytes)

    def noted(budget):
        windows.append(make(budget))
        return windows[-1]

    monkeypatch.setattr(module, "make_window", noted)
    monkeypatch.setattr(ReadFile, "read_direct", seen)
    save(tmp_path, arrays, 4, 0)
    once = load(tmp_path, arrays, 4, 1, read_once=True)
    assert total(once, "bytes_received") > 0
    rings = [(low := address_of(window.ring), low + len(window.ring)) for window in windows]
    assert disk
    assert not [one for one in disk for low, high in rings if one[0] < high and one[1] > low]


def test_many_small_tensors_are_read_once(tmp_path):
    made = np.random.default_rng(0)
    arrays = {f"t{i}": made.standard_normal(made.integers(1, 2000)) for i in range(3400)}
    save(tmp_path, arrays, 4, None)
    once = load(tmp_path, arrays, 4, None)
    assert total(once, "bytes_read") <= 1.1 * nbytes(arrays)


def test_what_nobody_shares_is_read_as_ever(tmp_path, arrays):
    save(tmp_path, arrays, 2, 0)
    results = load(tmp_path, arrays, 2, 0, read_once=True)
    # Neighbours meet in the blocks where the part of one ends and that of the other begins.
    assert total(results, "bytes_received") <= 2 * len(arrays) * BLOCK


@pytest.mark.usefixtures("messages")
def test_auto_shares_what_must_come_from_a_disk_and_is_worth_it(tmp_path, arrays, monkeypatch):
    save(tmp_path, arrays, 2, 0)
    for cold, dim, shares in ((True, None, True), (False, None, False), (True, 0, False)):
        monkeypatch.setattr(Reading, "is_cold", lambda self, cold=cold: cold)
        results = load(tmp_path, arrays, 2, dim)
        assert bool(total(results, "bytes_received")) == shares


@pytest.mark.parametrize(("dim", "shares"), [(None, True), (0, False)])
def test_auto_shares_on_one_machine_what_is_worth_it(tmp_path, arrays, dim, shares):
    save(tmp_path, arrays, 2, 0)
    assert bool(total(load(tmp_path, arrays, 2, dim), "bytes_received")) == shares


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize("budget", [8 << 20, 64 << 20])
def test_a_small_budget_takes_more_rounds(tmp_path, arrays, monkeypatch, budget):
    save(tmp_path, arrays, 2, 0)
    rounds = []
    real = module._Round.run

    def run(self):
        rounds.append(int((self.share.runs.blocks * BLOCK).sum()))
        real(self)

    monkeypatch.setattr(module._Round, "run", run)
    load(tmp_path, arrays, 2, None, read_once=True, memory_budget=budget)
    assert max(rounds) <= budget // 2
    assert (len(rounds) > 4) == (budget == 8 << 20)


@pytest.mark.usefixtures("both_ways")
def test_damage_is_found_by_whoever_gets_it(tmp_path, arrays):
    save(tmp_path, arrays, 1, None)
    file = next((tmp_path / "data").glob("*-r00000-0*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    outcomes = ThreadRanks(3).outcomes(
        lambda c: shardkeep.load(
            state_of(arrays, c.rank, 3, None, empty=True), tmp_path, process_group=c, read_once=True
        )
    )
    assert all(isinstance(outcome, CorruptionError) for outcome in outcomes)
    assert all("differs from its digest" in str(outcome) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1


@pytest.mark.usefixtures("messages")
def test_damage_on_the_way_is_found(tmp_path, arrays, monkeypatch):
    save(tmp_path, arrays, 1, None)
    real = module._Round._read

    def bent(self):
        parts = real(self)
        if self.coordinator.rank == 1 and len(parts[0]):
            parts[0][len(parts[0]) // 2] ^= 4
        return parts

    monkeypatch.setattr(module._Round, "_read", bent)
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load(
            state_of(arrays, c.rank, 2, None, empty=True), tmp_path, process_group=c, read_once=True
        )
    )
    assert all(isinstance(outcome, CorruptionError) for outcome in outcomes)


@pytest.fixture
def ranked(monkeypatch):
    """Readings that know which rank they are of."""
    begin = Reading.__init__

    def noted(self, *args, **options):
        begin(self, *args, **options)
        self.rank = int(threading.current_thread().name.removeprefix("rank-"))

    monkeypatch.setattr(Reading, "__init__", noted)


@pytest.mark.usefixtures("both_ways", "ranked")
def test_a_rank_that_cannot_read_fails_all(tmp_path, arrays, monkeypatch):
    save(tmp_path, arrays, 1, None)
    real = Reading.bring

    def broken(self, *args):
        if self.rank == 1:
            raise StorageError("the disk is on fire")
        return real(self, *args)

    monkeypatch.setattr(Reading, "bring", broken)
    outcomes = ThreadRanks(3).outcomes(
        lambda c: shardkeep.load(
            state_of(arrays, c.rank, 3, None, empty=True), tmp_path, process_group=c, read_once=True
        )
    )
    assert all(isinstance(outcome, StorageError) for outcome in outcomes)
    assert all("on fire" in str(outcome) for outcome in outcomes)
    assert all("undefined" in "".join(outcome.__notes__) for outcome in outcomes)


def test_ranks_must_agree_on_it(tmp_path, arrays):
    save(tmp_path, arrays, 1, None)
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load(
            state_of(arrays, c.rank, 2, None, empty=True),
            tmp_path,
            process_group=c,
            read_once=c.rank == 0,
        )
    )
    assert all(isinstance(o, PlanError) and "read_once" in str(o) for o in outcomes)


# --- the plan by itself


@st.composite
def wants(draw):
    """Disjoint runs that do not touch, by file."""
    rows = []
    for file in range(draw(st.integers(1, 3))):
        edges = sorted(draw(st.sets(st.integers(0, 60), max_size=10)))
        rows += [(file, a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    return Runs(*(np.array([row[k] for row in rows], np.int64) for k in range(3)))


def blocks_of(runs):
    return {
        (file, block)
        for file, first, stop in zip(
            runs.file.tolist(), runs.first.tolist(), runs.stop.tolist(), strict=True
        )
        for block in range(first, stop)
    }


@given(
    ranks=st.lists(wants(), min_size=1, max_size=20),
    budget=st.sampled_from([8, 64, 1024]),
    seen=st.booleans(),
)
@settings(max_examples=100)
def test_every_block_that_several_want_has_one_reader(ranks, budget, seen):
    windows = [Address("here", at, 3, b"") if seen else None for at in range(len(ranks))]
    told = [
        encode_wants(runs, budget=budget << 20, block=BLOCK, cold=True, window=window)
        for runs, window in zip(ranks, windows, strict=True)
    ]
    shares = [Share.decode(message) for message in plan_shares(told, True)]
    assert len({share.rounds for share in shares}) == 1
    for low in range(0, len(ranks), 16):
        group = shares[low : low + 16]
        wanted = [blocks_of(runs) for runs in ranks[low : low + 16]]
        for member, share in enumerate(group):
            assert (share.member, int(share.ranks[member])) == (member, low + member)
            others = set().union(*(w for at, w in enumerate(wanted) if at != member))
            assert blocks_of(share.runs) == wanted[member] & others
            assert int(share.runs.blocks.sum()) == len(wanted[member] & others)
        # What one reads for another is what the other expects of it, in the same order and round.
        for a in group:
            for b in group:
                of_b = (a.owner == b.member) if a is not b else np.zeros(len(a.owner), bool)
                sent = (b.owner == b.member) & ((b.holders >> a.member) & 1 == 1)
                if a is not b:
                    for key in ("file", "first", "stop"):
                        mine, other = getattr(a.runs, key)[of_b], getattr(b.runs, key)[sent]
                        assert mine.tolist() == other.tolist()
                    assert a.turn[of_b].tolist() == b.turn[sent].tolist()


@given(runs=wants(), data=st.data())
def test_runs_without_others(runs, data):
    held = sorted(blocks_of(runs))
    taken = data.draw(st.sets(st.sampled_from(held))) if held else set()
    others = Runs(
        *(np.array([b[0] for b in sorted(taken)], np.int64),) * 1,
        np.array([b[1] for b in sorted(taken)], np.int64),
        np.array([b[1] + 1 for b in sorted(taken)], np.int64),
    )
    left = runs.without(others)
    assert blocks_of(left) == set(held) - taken
    assert blocks_of(runs.cut(3)) == set(held)
    assert int(runs.cut(3).blocks.max(initial=0)) <= 3


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors")
def test_nothing_is_left_open(tmp_path, arrays):
    save(tmp_path, arrays, 2, 0)
    before = len(os.listdir("/proc/self/fd"))
    load(tmp_path, arrays, 2, None, read_once=True)
    assert len(os.listdir("/proc/self/fd")) == before


# --- through windows


@pytest.mark.usefixtures("ranked")
def test_what_changes_on_the_way_is_read_again(tmp_path, arrays, monkeypatch, caplog):
    save(tmp_path, arrays, 1, None)
    real = Reading.bring

    def bent(self, runs, number, out, *by_way_of):
        real(self, runs, number, out, *by_way_of)
        if self.rank == 1:
            out[1000] ^= 4

    monkeypatch.setattr(Reading, "bring", bent)
    results = load(tmp_path, arrays, 2, None, read_once=True)
    assert "read again" in caplog.text
    assert total(results, "bytes_read") > nbytes(arrays)


def test_small_windows_are_filled_over_again(tmp_path, arrays):
    save(tmp_path, arrays, 3, 0)
    results = load(tmp_path, arrays, 3, 1, read_once=True, memory_budget=8 << 20)
    assert total(results, "bytes_read") <= 1.1 * nbytes(arrays)


def test_a_window_that_cannot_be_seen_is_done_without(tmp_path, arrays, monkeypatch):
    save(tmp_path, arrays, 1, None)
    monkeypatch.setattr(Window, "look_into", classmethod(lambda cls, address: None))
    monkeypatch.setattr(passing, "STALL_S", 0.2)
    results = load(tmp_path, arrays, 3, None, read_once=True)
    assert total(results, "bytes_received") == 0


@pytest.mark.parametrize("what", ["_fill", "_take"])
def test_a_rank_that_is_slow_is_done_without(tmp_path, arrays, monkeypatch, what):
    """Neither what it would read nor what it would take keeps others waiting for ever."""
    save(tmp_path, arrays, 1, None)
    real = getattr(passing._Passing, what)
    begun = time.monotonic()
    ended = {}

    def slow(self, number):
        if self.share.member == 1 and not ended:
            ended[1] = time.sleep(2)
        return real(self, number)

    monkeypatch.setattr(passing, "STALL_S", 0.3)
    monkeypatch.setattr(passing._Passing, what, slow)
    load(tmp_path, arrays, 3, None, read_once=True, memory_budget=8 << 20)
    assert time.monotonic() - begun < 20


def test_a_window_of_who_is_gone_is_not_looked_into():
    window = Window.make(1 << 20, 4)
    assert window is not None
    assert Window.look_into(window.address) is not None
    other = Address(window.address.machine, window.address.pid, window.address.fd, b"x" * 16)
    assert Window.look_into(other) is None
    assert window.address.is_alive()
    window.close()
    assert not window.address.is_alive()
    assert Window.look_into(window.address) is None


def test_machines_share_by_themselves_unless_less_must_be_read():
    runs = Runs(*(np.array([row], np.int64) for row in (0, 0, 40)))
    told = [
        encode_wants(
            runs,
            budget=64 << 20,
            block=BLOCK,
            cold=True,
            window=Address(f"machine {rank % 2}", rank, 3, b""),
        )
        for rank in range(4)
    ]
    # A machine with one rank does not keep the others from sharing.
    third = encode_wants(
        runs, budget=64 << 20, block=BLOCK, cold=True, window=Address("third", 9, 3, b"")
    )
    shares = [
        Share.decode(message)
        for message in plan_shares([*told[:3], told[3], third, told[0]], "auto")
    ]
    assert [len(share.runs) > 0 for share in shares] == [True] * 4 + [False, True]
    for read_once, machines in (("auto", 2), (True, 1)):
        shares = [Share.decode(message) for message in plan_shares(told, read_once)]
        assert {tuple(share.ranks.tolist()) for share in shares} == (
            {(0, 2), (1, 3)} if machines == 2 else {(0, 1, 2, 3)}
        )
        assert all(bool(share.windows) == (machines == 2) for share in shares)
    told[3] = encode_wants(runs, budget=64 << 20, block=BLOCK, cold=True, window=None)
    shares = [Share.decode(message) for message in plan_shares(told, "auto")]
    assert not any(share.windows for share in shares)
    shares = [Share.decode(message) for message in plan_shares(told, "auto", messages=False)]
    assert not any(share.rounds for share in shares)

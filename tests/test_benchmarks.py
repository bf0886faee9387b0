"""The benchmarks, very small: that their code runs, and that each side loads what it saved."""

import json
import sys

import pytest
from benchmarks import converting, raw, rounds, small_tensors, throughput
from benchmarks.caches import cached, evict, warm
from benchmarks.picture import Group, draw
from benchmarks.report import file_system
from benchmarks.sides import SIDES, missing
from benchmarks.states import Memory, training_state
from benchmarks.worker import measured

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd, O_DIRECT, /proc")

SMALL = training_state(1 << 20, layers=1)


def test_the_state_has_the_sizes_it_claims():
    leaves = training_state(1 << 31)
    sizes = [leaf.nbytes for leaf in leaves]
    assert 2000 < len(leaves) == len({leaf.path for leaf in leaves})
    assert min(sizes) == 2
    assert max(sizes) == 1 << 28
    assert sum(sizes) == pytest.approx(1 << 31, rel=0.03)


def test_a_tiny_state_has_all_its_tensors():
    assert len(training_state(1)) == len(training_state(1 << 31))


@pytest.mark.parametrize("option", ["--size=0", "--size=-1", "--size=nan", "--repeat=0"])
def test_sizes_and_counts_that_make_no_sense_are_refused(option, capsys):
    with pytest.raises(SystemExit) as caught:
        throughput.main([option])
    assert caught.value.code == 2
    assert option.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.filterwarnings("default")
def test_a_side_loads_the_bits_it_saved(name, tmp_path):
    if missing(name):
        pytest.skip(f"{missing(name)} is not installed")
    source, target = Memory(SMALL), Memory(SMALL)
    source.fill()
    target.scramble()
    assert source.first_difference(target)
    side = SIDES[name](source, target)
    for number, way in enumerate(side.ways):
        side.save(tmp_path / str(number), **way)
    side.load(tmp_path / "0")
    side.settle()
    assert source.first_difference(target) is None


def test_raw_rates_leave_nothing_behind(tmp_path):
    ways = raw.Raw(raw.Way(2, 1 << 20, True), raw.Way(1, 1 << 20, False), 2)
    rates = {**ways.disk(tmp_path, 3 << 20), **ways.memory(tmp_path, 3 << 20)}
    assert set(rates) == {"write", "read", "tmpfs write", "tmpfs read", "memcpy"}
    assert min(rates.values()) > 0
    assert not list(tmp_path.iterdir())


def test_cold_is_known_from_warm(tmp_path):
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert warm(tmp_path) == cached(tmp_path) == 1
    assert evict(tmp_path) < 1  # how far depends on the file system


def test_the_picture_is_a_picture(tmp_path):
    draw(tmp_path / "x.svg", "<title>", "GB/s", [Group("save", [("a", 1.0), ("b", 2.0)], 3.0)])
    import xml.etree.ElementTree as ElementTree

    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")


@pytest.fixture(autouse=True)
def _one_way(monkeypatch):
    """No sweep: each way costs several fsyncs."""
    monkeypatch.setattr(raw, "SWEEP", [(2, 1 << 20)])


def run(main, tmp_path, capsys, *options):
    """The JSON of a command that must leave nothing else behind."""
    files = ["--json", str(tmp_path / "out.json"), "--picture", str(tmp_path / "out.svg")]
    main([*options, "--repeat", "1", "--dir", str(tmp_path), *files])
    assert "shardkeep" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.svg"]
    return json.loads((tmp_path / "out.json").read_text())["numbers"]


class Here:
    """A worker in this process, which has torch imported already."""

    def __init__(self, side, source, target):
        self.side = SIDES[side](source, target)
        self.settle = self.side.settle

    def run(self, what, path, **options):
        with measured() as measure:
            getattr(self.side, what)(path, **options)
        return measure

    def close(self):
        pass


def test_small_as_a_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rounds, "Worker", Here)
    numbers = run(small_tensors.main, tmp_path, capsys, "--count", "40", "--sides", "shardkeep")
    assert not numbers["failed"]
    assert len(numbers["sides"]["shardkeep"]["load"]) == 1


@pytest.fixture
def disk(tmp_path):
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("files in memory cannot be cold")
    return tmp_path


def test_io_as_a_command(disk, capsys):
    options = ["--size", "0.001", "--layers", "1", "--sides", "shardkeep", "--no-budgets"]
    numbers = run(throughput.main, disk, capsys, *options)
    assert not numbers["failed"]
    for how in ("verify=True", "verify=False"):
        assert f"cold load, {how}" in numbers["sides"]["shardkeep"]
    assert numbers["raw_bytes_per_s"]["write"]


@pytest.mark.filterwarnings("default")
def test_device_without_a_device(disk, capsys):
    from benchmarks import accelerator

    numbers = run(accelerator.main, disk, capsys, "--cpu", "--size", "0.001", "--layers", "1")
    assert set(numbers["sides"]) == {"shardkeep", "torch DCP"}


@pytest.mark.filterwarnings("default")
def test_async_as_a_command(tmp_path, capsys):
    from benchmarks import background_saves

    sides = "shardkeep, save; shardkeep, thread; shardkeep, process; shardkeep, lazy; torch; "
    options = ["--size", "0.001", "--layers", "1", "--steady", "1", "--growth", "2"]
    options += ["--loop", "0.01", "--sides", sides + "torch, kept"]
    numbers = run(background_saves.main, tmp_path, capsys, *options)
    assert not numbers["failed"]
    assert len(numbers["sides"]) == 6
    assert set(numbers["sides"]["shardkeep, lazy"]) == {"first", "prewarm", "prewarmed", "steady"}
    assert len(numbers["resident"]["shardkeep, process"]) == 2
    assert numbers["beside"]["shardkeep, thread"][0]["alone"][0]["per_s"] > 0


def test_a_way_that_saves_what_came_later_is_found(tmp_path):
    import torch
    from benchmarks.background_saves import Run
    from benchmarks.background_sides import Ours, State

    class Late(Ours):
        def begin(self, path):
            self.state.negate()
            begun = super().begin(path)
            self.state.negate()
            return begun

    state = State(SMALL, torch.device("cpu"))
    ways = {"late": Late(state), "ours": Ours(state)}
    run = Run(state, ways, tmp_path)
    run.each(run.check)
    assert "other bits" in run.found.results.failed["late"]
    assert list(ways) == ["ours"]


def test_captures_are_counted_by_what_the_save_was_doing():
    from benchmarks.beside import capture_until

    done = []

    def capture(number):
        done.append(number)
        if number == 1:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    seen = capture_until(capture, lambda: len(done) > 2, lambda: len(done) > 4)
    assert (seen.staging, seen.writing) == (2, 2)
    assert seen.failed == ["operation not permitted when stream is capturing"]


def test_the_copy_of_a_device_is_scaled_to_all_bytes(monkeypatch):
    import torch
    from benchmarks import yardstick

    monkeypatch.setattr(yardstick, "SOME", 1 << 16)
    part = yardstick.DeviceCopy(torch.device("cpu"), 1 << 20)
    assert len(part.target) == 1 << 16
    assert part.seconds() > 0


def test_resharding(disk):
    from benchmarks import resharding, torch_driver
    from benchmarks.sharded_states import Scenario

    from shardkeep.testing.processes import RankServer

    scenario = Scenario("1 to 2", 1, "rows", 2, "columns", ((70, 30), (1, 1), (5, 30)))
    with RankServer(resharding.MODULES) as server:
        seen = resharding.run(server, scenario, 1, disk)
        under = resharding.run(server, scenario, 1, disk, torch_driver.SIDES)
    for side in torch_driver.SIDES:
        assert resharding.row(scenario, side, under, resharding.UNDER_TORCH)
    for side in resharding.SIDES:
        assert len(resharding.row(scenario, side, seen)) == len(resharding.HEADINGS)
        assert len(seen[side]["load"][0]) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_files_for_hugging_face_are_written_and_loaded_by_both(tmp_path, capsys):
    from benchmarks import huggingface

    options = ["--size", "0.1", "--repeat", "1", "--dir", str(tmp_path)]
    huggingface.main([*options, "--json", str(tmp_path / "out.json")])
    assert "shardkeep" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    seen = json.loads((tmp_path / "out.json").read_text())["numbers"]
    assert seen.keys() == {"rows", "columns"}


def test_converting_is_measured(tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["--size", "0.002", "--budget", "16", "--repeat", "1", "--dir", str(tmp_path)]
    converting.main([*arguments, "--json", str(out)])
    (seen,) = json.loads(out.read_text())["numbers"]["rounds"]
    assert seen["nbytes"] / seen["seconds"] > 0
    assert seen["rss"] > 16 << 20
    assert "to the slower" in capsys.readouterr().out

"""The planning benchmark, small: that its code runs; and what opening a large index reads."""

import json
import math
from pathlib import Path

import pytest
from benchmarks import plan
from benchmarks.pipeline import STAGES, Pipeline
from benchmarks.simulated import Model, Shards, even_cut, plan_checkpoint, write_index

import shardkeep
from shardkeep.formats.native.reader import NativeReader

PHASES = [
    "encode local plans",
    "decode local plans",
    "global plan",
    "locations",
    "encode final plans",
    "write index",
    "read index",
    "plan one rank's load",
]


def test_the_benchmark_plans_a_save_and_a_load(tmp_path):
    phases = plan.run(tmp_path, ranks=32, tensors=50, load_ranks=24)
    assert list(phases.phases) == PHASES
    assert phases.chunks > 32 * 50 * 0.9
    assert all(row.seconds > 0 for row in phases.phases.values())


def test_the_same_with_torch(tmp_path):
    pytest.importorskip("torch")
    from benchmarks import torch_plan

    phases = torch_plan.run(tmp_path, ranks=4, tensors=20, load_ranks=3)
    assert list(phases.phases) == PHASES
    assert phases.chunks == plan.run(tmp_path / "ours", 4, 20, 3).chunks


def test_the_benchmark_as_a_command(tmp_path, capsys):
    options = ["--ranks", "8", "--tensors", "20", "--torch-ranks", "0", "--load-ranks", "3"]
    plan.main([*options, "--dir", str(tmp_path), "--json", str(tmp_path / "out.json")])
    assert "plan one rank's load" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in numbers["shardkeep"]["phases"]] == PHASES


def test_the_simulated_model_is_what_a_planner_would_see():
    shards = Shards(Model(60), 5)
    chunks = sum(len(shards.local_plan(rank).items.chunks) for rank in range(5))
    tensors = shards.model.tensors
    assert len({tensor.name for tensor in tensors}) == len(tensors) == 60
    assert any(tensor.replicated for tensor in tensors)
    assert chunks == 60 * 5
    structure = shards.local_plan(0).planner_data
    assert [structure.names[leaf] for leaf in shards.local_plan(0).items.local.tensor_leaf] == [
        tensor.name for tensor in tensors
    ]


def test_the_405b_pipeline_small(tmp_path, capsys):
    options = ["--model", "405b", "--ranks", "256", "--load-ranks", "128"]
    plan.main([*options, "--dir", str(tmp_path), "--json", str(tmp_path / "out.json")])
    assert "3411 tensors" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in numbers["405b"]["phases"]] == PHASES


def test_the_405b_pipeline_has_all_elements_of_the_model():
    job = Pipeline(128 * 128)
    assert job.ranks == 16384
    stages = job.stages
    assert len(stages) == STAGES
    elements = {
        name: math.prod(stage.table.shape(row))
        for stage in stages
        for row, name in enumerate(stage.table.names)
    }
    parameters = sum(n for name, n in elements.items() if name.startswith("model."))
    assert parameters == 405_853_388_800
    assert sum(elements.values()) == 3 * parameters
    # The last data rank has what is left of the embeddings: 16032 rows in parts of 126.
    held, boxes = job.held(127 * 8 + 3)
    row = stages[0].table.names.index("model.embed_tokens.weight")
    box = boxes[held.tolist().index(row)]
    assert box.offsets == (3 * 16032 + 127 * 126, 0)
    assert box.sizes == (30, 16384)


def test_planning_on_real_processes(tmp_path, capsys):
    pytest.importorskip("torch")
    options = ["--processes", "2", "--sharded", "30", "--repeat", "1"]
    plan.main([*options, "--dir", str(tmp_path), "--json", str(tmp_path / "out.json")])
    assert "ratio of medians" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert numbers["tensors"] == 30
    assert all(numbers[side]["median"] > 0 for side in ("torch", "shardkeep"))


# --- what an open reads ---------------------------------------------------------------------------

IO = Path("/proc/self/io")


def bytes_read():
    return int(IO.read_text().split()[1])


@pytest.fixture(scope="module")
def many_chunks(tmp_path_factory):
    """A checkpoint of 2000 tensors of 200 chunks each, but for its data files."""
    directory = tmp_path_factory.mktemp("many_chunks")
    writer, metadata = plan_checkpoint(directory, even_cut(2000, 200))
    index, _ = write_index(directory, writer, metadata)
    writer.settle()
    assert index.size > 16e6
    return directory


@pytest.mark.skipif(not IO.exists(), reason="counts bytes read through /proc")
def test_open_reads_the_tensor_table_only(many_chunks):
    reader = NativeReader(many_chunks)
    before = bytes_read()
    metadata = reader.read_metadata()
    opened = bytes_read()
    chunks = metadata.state_dict_metadata["layer.1234.weight"].chunks
    looked = bytes_read()
    reader.close()
    assert len(chunks) == 200
    assert chunks[7].offsets == (7, 0)
    assert opened - before < 2e6
    assert looked - opened < 2e6


def test_a_checkpoint_without_data_files_opens(many_chunks):
    with shardkeep.open(many_chunks) as checkpoint:
        assert len(checkpoint.metadata.state_dict_metadata) == 2000

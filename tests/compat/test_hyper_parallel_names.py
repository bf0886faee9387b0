"""HyperParallel's names do what ours do."""

from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.arrays import HostSource
from shardkeep.compat import hyper_parallel as hp

DATA = Path(__file__).parents[1] / "data"


def state():
    return {"model": {"w": np.arange(12.0).reshape(3, 4)}, "step": 7}


def empty():
    return {"model": {"w": np.zeros((3, 4))}, "step": 0}


def test_save_and_load(tmp_path):
    metadata = hp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    assert metadata.state_dict_metadata["model.w"].size == (3, 4)
    hp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)  # replaces it
    target = empty()
    hp.load(target, checkpoint_id=tmp_path / "a", no_dist=True)
    assert target["step"] == 7
    assert np.array_equal(target["model"]["w"], state()["model"]["w"])
    assert shardkeep.verify(tmp_path / "a").ok


def test_what_the_target_lacks_is_fine_and_what_it_wants_is_not(tmp_path):
    hp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    hp.load({"model": {}}, checkpoint_id=tmp_path / "a", no_dist=True)
    target = {**empty(), "more": np.ones(2)}
    with pytest.raises(shardkeep.MismatchError, match="allow_partial_load") as caught:
        hp.load(target, checkpoint_id=tmp_path / "a", no_dist=True)
    assert caught.value.missing == ("more",)
    assert target["step"] == 0
    planner = hp.StandardLoadPlanner(allow_partial_load=True)
    hp.load(target, checkpoint_id=tmp_path / "a", planner=planner, no_dist=True)
    assert (target["step"], target["more"].tolist()) == (7, [1.0, 1.0])


def test_what_hyper_parallel_wrote_is_loaded():
    target = {"col.weight": np.zeros((4, 10), np.float32), "epoch": 0}
    hp.load(target, checkpoint_id=DATA / "hyper_parallel_later/r2", no_dist=True)
    want = np.load(DATA / "hyper_parallel_later/expected_r2/col.weight.npy")
    assert target["epoch"] == 3
    assert np.array_equal(target["col.weight"], want)


def test_a_planner_that_overrides_its_verbs_is_heard(tmp_path):
    said = []

    class Save(hp.StandardSavePlanner):
        def build_local_plan(self):
            said.append("build")
            return super().build_local_plan()

        def finalize_plan(self, plan):
            said.append("finalize")
            return super().finalize_plan(plan)

    class Load(hp.StandardLoadPlanner):
        def build_local_plan(self):
            said.append("load")
            return super().build_local_plan()

    hp.save(state(), checkpoint_id=tmp_path / "a", planner=Save(), no_dist=True)
    hp.load(empty(), checkpoint_id=tmp_path / "a", planner=Load(), no_dist=True)
    assert said == ["build", "finalize", "load"]


def test_verbs_that_data_passes_through_are_heard_too(tmp_path):
    class Doubling:
        def get_data(self, item):
            data = super().get_data(item)
            return data if isinstance(data, bytes) else HostSource(2 * data.array.view("f8"))

    class Save(Doubling, hp.StandardSavePlanner):
        pass

    class Load(hp.StandardLoadPlanner):
        def acquire_tensor(self, read_item):
            said.append(f"acquire {read_item.dest_index.fqn}")
            return super().acquire_tensor(read_item)

        def apply_tensor(self, read_item, tensor):
            said.append(f"apply {read_item.dest_index.fqn} {target['model']['w'][2, 3]}")
            super().apply_tensor(read_item, tensor)

        def apply_bytes(self, read_item, value):
            said.append(f"apply {read_item.dest_index.fqn}")
            super().apply_bytes(read_item, value)

    said, target = [], empty()
    hp.save(state(), checkpoint_id=tmp_path / "a", planner=Save(), no_dist=True)
    hp.load(target, checkpoint_id=tmp_path / "a", planner=Load(), no_dist=True)
    assert said == ["apply step", "acquire model.w", "apply model.w 22.0"]
    assert target["step"] == 7


def test_our_own_verbs_win_over_theirs(tmp_path):
    class Save(hp.StandardSavePlanner):
        def resolve_data(self, write_item):
            data = super().resolve_data(write_item)
            return data if isinstance(data, bytes) else HostSource(3 * data.array.view("f8"))

        def get_data(self, item):
            raise AssertionError("not asked")

    target = empty()
    hp.save(state(), checkpoint_id=tmp_path / "a", planner=Save(), no_dist=True)
    hp.load(target, checkpoint_id=tmp_path / "a", no_dist=True)
    assert target["model"]["w"][2, 3] == 33.0


def test_storages(tmp_path):
    hp.save(state(), storage_writer=hp.FileSystemWriter(tmp_path / "a"), no_dist=True)
    target = empty()
    hp.load(target, storage_reader=hp.FileSystemReader(tmp_path / "a"), no_dist=True)
    assert target["step"] == 7
    reader = hp.FileSystemReader(tmp_path / "a")
    assert "model.w" in reader.load_metadata().state_dict_metadata
    reader.close()


def test_storages_and_planners_by_their_verbs(tmp_path):
    writer, planner = hp.FileSystemWriter(tmp_path / "a"), hp.StandardSavePlanner()
    writer.initialize_writer(tmp_path / "b")
    planner.configure_planner(state())
    writer.configure_writer()
    plan = writer.optimize_local_plan(planner.build_local_plan())
    plans, metadata = planner.build_global_plan([plan])
    plans = writer.optimize_global_plan(plans, metadata)
    plan = planner.finalize_plan(plans[0])
    writer.finalize_checkpoint(metadata, [writer.execute_write(plan, planner)])
    writer.settle()
    with shardkeep.open(tmp_path / "b") as checkpoint:
        assert checkpoint["model.w"][2, 3] == 11.0


def test_async_save(tmp_path):
    told = []
    response = hp.async_save(
        state(), checkpoint_id=tmp_path / "a", no_dist=True, callback=lambda: told.append(1)
    )
    assert response.get_result(60).nbytes > 0
    assert response.persist_completion.done()
    assert told == [1]


def test_ranks_that_do_not_speak_are_refused(tmp_path):
    for call in (hp.save, hp.async_save, hp.load):
        with pytest.raises(ValueError, match="use_collectives"):
            call({}, checkpoint_id=tmp_path / "a", use_collectives=False)

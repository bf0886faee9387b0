"""What torch's HuggingFaceStorageWriter writes from real ranks is found, whole and bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from shardkeep.foreign.found import Raw
from shardkeep.formats.huggingface import find


def state(world):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    made = {
        "rows": torch.arange(44, dtype=torch.float32).reshape(11, 4),
        "columns": torch.arange(44, dtype=torch.bfloat16).reshape(4, 11),
        "same": torch.arange(7),
    }
    placements = {"rows": Shard(0), "columns": Shard(1), "same": Replicate()}
    return made, {
        name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in made.items()
    }


def write(rank, root, world, options):
    import torch.distributed.checkpoint as dcp

    _, held = state(world)
    dcp.save(held, storage_writer=dcp.HuggingFaceStorageWriter(root, **options))


def check(root):
    import torch

    from shardkeep.dtypes import lookup

    found = find(root)
    expected = {
        "rows": torch.arange(44, dtype=torch.float32).reshape(11, 4),
        "columns": torch.arange(44, dtype=torch.bfloat16).reshape(4, 11),
        "same": torch.arange(7),
    }
    assert found.state.keys() == expected.keys()
    for name, tensor in expected.items():
        stored = found.state[name]
        assert stored.shape == tuple(tensor.shape)
        bits = lookup(stored.dtype).bits()
        got = np.zeros(stored.shape, bits)
        for part in stored.parts:
            assert isinstance(part.place, Raw)
            data = (found.root / part.place.file).read_bytes()[part.place.start :]
            count = int(np.prod(part.sizes))
            box = tuple(slice(a, a + n) for a, n in zip(part.offsets, part.sizes, strict=True))
            got[box] = np.frombuffer(data, bits, count).reshape(part.sizes)
        assert got.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("world", [2, 3])
def test_files_of_ranks(processes, tmp_path, world):
    mapping = {"rows": 1, "columns": 2, "same": 2}
    for number, more in enumerate(({}, {"fqn_to_index_mapping": mapping})):
        root = tmp_path / str(number)
        processes.run(world, write, str(root), world, {"save_distributed": True, **more})
        assert len(list(root.glob("shard-*"))) >= world
        check(root)

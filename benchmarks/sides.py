"""What is compared: each side saves a state durably and loads it into tensors that exist.

A side is made in a process of its own (`worker.py`). What it does before the first save, such as
making its tree of tensors, is not timed. A side that leaves durability to its caller has its files
synced within the timed save.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.caches import make_durable
from benchmarks.states import Memory, flat, nested, numpy_values, torch_values


class Side:
    """One library, used in one way."""

    needs: tuple[str, ...] = ("torch",)
    """Modules; without one of them the side is left out."""
    note = ""
    """How it is called."""
    ways: tuple[dict[str, Any], ...] = ({},)
    """Options of `save`; where there are several, the fastest is used."""

    def __init__(self, source: Memory, target: Memory) -> None:
        self.source, self.target = source, target

    def save(self, path: Path, **options: Any) -> dict[str, float]:
        """Durably; returns what the library tells of itself."""
        raise NotImplementedError

    def load(self, path: Path, **options: Any) -> dict[str, float]:
        """Into the target."""
        raise NotImplementedError

    def settle(self) -> None:
        """Bring what was loaded elsewhere into the target, for the comparison; not timed."""

    def _trees(self) -> tuple[Any, Any]:
        leaves = self.source.leaves
        return nested(leaves, torch_values(self.source)), nested(leaves, torch_values(self.target))


class Shardkeep(Side):
    note = "save and load, defaults: every digest written and checked"

    def __init__(self, source: Memory, target: Memory) -> None:
        super().__init__(source, target)
        self.have, self.want = self._trees()
        self.library: Any = import_module("shardkeep")

    def save(self, path: Path, **options: Any) -> dict[str, float]:
        return dict(self.library.save(self.have, path, **options).stats)

    def load(self, path: Path, **options: Any) -> dict[str, float]:
        return dict(self.library.load(self.want, path, **options).stats)


class ShardkeepAnew(Shardkeep):
    note = "after shardkeep.flush(): no plan of an earlier save is used again"

    def save(self, path: Path, **options: Any) -> dict[str, float]:
        self.library.flush()
        stats = super().save(path, **options)
        assert not stats.get("plan_reused"), "the plan was used again"
        return stats


class TorchDcp(Side):
    note = "FileSystemWriter as it comes: thread_count=1, sync_files=True"

    def __init__(self, source: Memory, target: Memory) -> None:
        super().__init__(source, target)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self.have, self.want = self._trees()
        self.library: Any = import_module("torch.distributed.checkpoint")

    def save(self, path: Path, **options: Any) -> dict[str, float]:
        writer = self.library.FileSystemWriter(path, **options)
        self.library.save(self.have, storage_writer=writer, no_dist=True)
        return {}

    def load(self, path: Path, **options: Any) -> dict[str, float]:
        reader = self.library.FileSystemReader(path)
        self.library.load(self.want, storage_reader=reader, no_dist=True)
        return {}


class TorchDcpBest(TorchDcp):
    note = "the fastest of four ways, chosen by one save each before the rounds"
    ways = tuple(
        {"thread_count": threads, "single_file_per_rank": single}
        for threads in (2, 4)
        for single in (True, False)
    )


class TorchCheckpointing(Side):
    needs = ("torch", "torch_checkpointing")
    note = "CheckpointManager, synchronous, use_direct_io=False (else EINVAL on ext4); our fsync"

    def __init__(self, source: Memory, target: Memory) -> None:
        super().__init__(source, target)
        self.have, self.want = self._trees()
        library: Any = import_module("torch_checkpointing")
        storage: Any = import_module("torch_checkpointing.storage.filesystem")
        config = library.CheckpointManager.Config(
            save=library.SyncCheckpointSaverConfig(),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self.manager = library.CheckpointManager(config)

    def save(self, path: Path, **options: Any) -> dict[str, float]:
        self.manager.save(str(path), self.have)
        make_durable(path)
        return {}

    def load(self, path: Path, **options: Any) -> dict[str, float]:
        self.manager.load(str(path), into=self.want)
        return {}


class Safetensors(Side):
    needs = ("torch", "safetensors")
    note = "save_file of a flat dict, our fsync; load_file, then copy_"

    def __init__(self, source: Memory, target: Memory) -> None:
        super().__init__(source, target)
        self.have, self.want = (
            flat(source.leaves, torch_values(memory)) for memory in (source, target)
        )
        self.library: Any = import_module("safetensors.torch")

    def save(self, path: Path, **options: Any) -> dict[str, float]:
        path.mkdir()
        self.library.save_file(self.have, path / "state.safetensors")
        make_durable(path)
        return {}

    def load(self, path: Path, **options: Any) -> dict[str, float]:
        loaded = self.library.load_file(path / "state.safetensors")
        for name, tensor in loaded.items():
            self.want[name].copy_(tensor)
        return {}


class TorchSave(Side):
    note = "torch.save, our fsync; torch.load(mmap=False, weights_only=True), then copy_"

    def __init__(self, source: Memory, target: Memory) -> None:
        super().__init__(source, target)
        self.library: Any = import_module("torch")
        self.names = [leaf.path for leaf in source.leaves]
        self.into = torch_values(target)
        self.have = nested(source.leaves, torch_values(source))

    def save(self, path: Path, **options: Any) -> dict[str, float]:
        path.mkdir()
        self.library.save(self.have, path / "state.pt")
        make_durable(path)
        return {}

    def load(self, path: Path, **options: Any) -> dict[str, float]:
        tree = self.library.load(path / "state.pt", mmap=False, weights_only=True)
        for name, into in zip(self.names, self.into, strict=True):
            node = tree
            for key in name:
                node = node[key]
            into.copy_(node)
        return {}


class Orbax(Side):
    needs = ("jax", "orbax.checkpoint")
    note = "StandardCheckpointer, numpy arrays (faster here than jax's); loads make new arrays"

    def __init__(self, source: Memory, target: Memory) -> None:
        super().__init__(source, target)
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax: Any = import_module("jax")
        orbax: Any = import_module("orbax.checkpoint")
        self.into = numpy_values(target)
        self.have = nested(source.leaves, numpy_values(source))
        self.want = jax.tree.map(orbax.utils.to_shape_dtype_struct, self.have)
        self.keeper = orbax.StandardCheckpointer()
        self.loaded: Any = None

    def save(self, path: Path, **options: Any) -> dict[str, float]:
        self.keeper.save(path, self.have)
        self.keeper.wait_until_finished()
        return {}

    def load(self, path: Path, **options: Any) -> dict[str, float]:
        self.loaded = None
        self.loaded = self.keeper.restore(path, self.want)
        return {}

    def settle(self) -> None:
        for leaf, into in zip(self.target.leaves, self.into, strict=True):
            node = self.loaded
            for key in leaf.path:
                node = node[key]
            into[...] = node
        self.loaded = None


class _OfOthers(Side):
    """What another side wrote, loaded by us."""

    def load(self, path: Path, **options: Any) -> dict[str, float]:
        library: Any = import_module("shardkeep")
        return dict(library.load(self.want, path, **options).stats)  # type: ignore[attr-defined]


class ShardkeepOfDcp(_OfOthers, TorchDcp):
    note = "saved by torch DCP as it comes; shardkeep.load of that"


class ShardkeepOfSafetensors(_OfOthers, Safetensors):
    needs = ("torch", "safetensors")
    note = "saved by safetensors; shardkeep.load of that"


class ShardkeepOfTorchSave(_OfOthers, TorchSave):
    note = "saved by torch.save; shardkeep.load of the file"

    def __init__(self, source: Memory, target: Memory) -> None:
        super().__init__(source, target)
        self.want = nested(target.leaves, self.into)

    def load(self, path: Path, **options: Any) -> dict[str, float]:
        return super().load(path / "state.pt", **options)


SIDES: dict[str, type[Side]] = {
    "shardkeep": Shardkeep,
    "shardkeep, planned anew": ShardkeepAnew,
    "torch DCP": TorchDcp,
    "torch DCP, best": TorchDcpBest,
    "torch_checkpointing": TorchCheckpointing,
    "safetensors": Safetensors,
    "torch.save": TorchSave,
    "orbax": Orbax,
    "shardkeep, of torch DCP": ShardkeepOfDcp,
    "shardkeep, of safetensors": ShardkeepOfSafetensors,
    "shardkeep, of torch.save": ShardkeepOfTorchSave,
}

OF_OTHERS = tuple(name for name, side in SIDES.items() if issubclass(side, _OfOthers))
"""Compared with whoever wrote it, where asked for."""


def missing(name: str) -> str | None:
    """The module that a side lacks here."""
    for module in SIDES[name].needs:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return module
    return None

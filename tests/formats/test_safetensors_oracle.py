"""Every file of a checkpoint is a safetensors file that the safetensors library opens."""

import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

import shardkeep
from shardkeep import NativeWriter, ShardedArray, ThreadRanks
from shardkeep.dtypes import TABLE
from shardkeep.formats.native.layout import Limits

OURS = "__shardkeep__."


def files_of(path: Path) -> list[Path]:
    record = json.loads((path / "checkpoint.json").read_bytes())
    return [path / row["name"] for row in record["files"]]


def index_of(path: Path) -> Path:
    return path / json.loads((path / "checkpoint.json").read_bytes())["index"]["name"]


def header_of(file: Path) -> tuple[int, dict]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length, json.loads(data[8 : 8 + length])


def shown(path: Path, framework: str = "pt") -> dict:
    """All tensors of all files as the library shows them, without our own entries."""
    found = {}
    for file in files_of(path):
        with safe_open(file, framework=framework) as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                if not key.startswith(OURS):
                    assert key not in found
                    found[key] = opened.get_tensor(key)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return torch.equal(raw(a), raw(b))


def check_layout(path: Path) -> None:
    """Payload on 4096, entries aligned to their items, end to end, no byte left over."""
    for file in [*files_of(path), index_of(path)]:
        base, table = header_of(file)
        metadata = table.pop("__metadata__")
        assert metadata["format"] == "pt"
        assert base % 4096 == 0
        assert file.stat().st_size % 4096 == 0
        spans = sorted(entry["data_offsets"] for entry in table.values())
        assert spans[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        assert base + spans[-1][1] == file.stat().st_size
        sizes = {"BOOL": 1, "BF16": 2, "C64": 8}
        for key, entry in table.items():
            code = entry["dtype"]
            item = sizes.get(code) or (1 if code.startswith("F8") else int(code[1:]) // 8)
            if not key.startswith(OURS):
                assert entry["data_offsets"][0] % item == 0, (key, entry)


TORCH_EXACT = [
    row.name for row in TABLE.values()
    if row.torch and hasattr(torch, row.torch) and not row.extra_dim and row.safetensors != "U8"
] + ["uint8"]  # fmt: skip


def random_torch(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, name)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", TORCH_EXACT)
def test_every_dtype_the_library_knows(tmp_path, name):
    state = {
        "whole": random_torch(name, (3, 5)),
        "flat": random_torch(name, (17,)),
        "scalar": random_torch(name, ()),
        "one": random_torch(name, (1, 1, 1)),
        "none": random_torch(name, (0, 4)),
    }
    shardkeep.save(state, tmp_path / "c")
    found = shown(tmp_path / "c")
    assert found.keys() == state.keys() - {"none"}  # zero-size boxes are not stored
    for key, tensor in found.items():
        assert same_bits(tensor, state[key]), key
    check_layout(tmp_path / "c")


@pytest.mark.parametrize(
    "name",
    [
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "float32",
        "float64",
    ],
)
def test_numpy_view_of_the_library(tmp_path, name):
    raw = np.random.default_rng(0).integers(0, 2, (4, 7 * 8), np.uint8)
    array = raw.astype(bool) if name == "bool" else raw.view(name)
    shardkeep.save({"x": array, "s": array[0, :1].reshape(())}, tmp_path / "c")
    found = shown(tmp_path / "c", "np")
    assert found["x"].dtype == array.dtype
    assert found["x"].tobytes() == array.tobytes()
    assert found["s"].shape == ()


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_types_the_library_lacks_are_raw(tmp_path):
    rng = np.random.default_rng(1)
    c128 = rng.standard_normal((3, 2)) + 1j * rng.standard_normal((3, 2))
    state = {
        "c128": c128,
        "c128_0d": np.array(2 - 3j),
        "c32": torch.complex(torch.randn(4), torch.randn(4)).to(torch.complex32),
        "int4": np.array([-8, -1, 0, 7], ml_dtypes.int4),
        "uint4": np.array([[0, 15, 3]], ml_dtypes.uint4),
        "f6": np.array([0.5, -1.0], ml_dtypes.float6_e2m3fn),
    }
    shardkeep.save(state, tmp_path / "c")
    found = shown(tmp_path / "c")
    assert found["c128"].dtype == torch.float64
    assert found["c128"].shape == (3, 2, 2)
    assert torch.view_as_complex(found["c128"]).numpy().tobytes() == c128.tobytes()
    assert found["c128_0d"].tolist() == [2.0, -3.0]
    assert found["c32"].dtype == torch.float16
    assert torch.equal(found["c32"], torch.view_as_real(state["c32"]))
    for key in ("int4", "uint4", "f6"):
        assert found[key].dtype == torch.uint8
        assert found[key].shape == state[key].shape
        assert found[key].numpy().tobytes() == state[key].view(np.uint8).tobytes()
    check_layout(tmp_path / "c")
    with shardkeep.open(tmp_path / "c") as ckpt:
        for key in ("c128", "int4", "uint4", "f6"):
            assert ckpt[key][...].dtype == state[key].dtype
            assert ckpt[key][...].tobytes() == state[key].tobytes()


def test_complex64_is_native(tmp_path):
    value = torch.randn(3, 4, dtype=torch.complex64)
    shardkeep.save({"c": value, "conj": value.conj(), "t": value.t()}, tmp_path / "c")
    found = shown(tmp_path / "c")
    assert same_bits(found["c"], value)
    assert same_bits(found["conj"], value.conj().resolve_conj())
    assert same_bits(found["t"], value.t().contiguous())


def test_partial_chunks_are_named_by_their_offsets(tmp_path):
    whole = np.arange(60.0).reshape(6, 10)

    def state(rank: int) -> dict:
        rows = slice(4 * rank, 4 if rank == 0 else 6)
        left = [(whole[rows, :3], (rows.start, 0)), (whole[rows, 3:], (rows.start, 3))]
        return {
            "cut": ShardedArray.from_shards(left, whole.shape),
            "rows": ShardedArray.from_local(whole[rows], (rows.start, 0), whole.shape),
            "mine": {f"r{rank}": np.full(3, rank)},
            "all": whole,
        }

    ThreadRanks(2).run(lambda c: shardkeep.save(state(c.rank), tmp_path / "c", process_group=c))
    found = shown(tmp_path / "c", "np")
    assert found.keys() == {
        "cut@0,0", "cut@0,3", "cut@4,0", "cut@4,3", "rows@0,0", "rows@4,0", "mine.r0", "mine.r1",
        "all",
    }  # fmt: skip
    for key, array in found.items():
        name, _, place = key.partition("@")
        if name in ("cut", "rows"):
            row, column = map(int, place.split(","))
            part = whole[row : row + array.shape[0], column : column + array.shape[1]]
            assert np.array_equal(array, part), key
    check_layout(tmp_path / "c")


NAMES = [
    "__metadata__",
    "__shardkeep__.x",
    "__shardkeep__.values",
    "__shardkeep__.digests",
    "__shardkeep__",
    "~__metadata__",
    "größe.重み.🦉",
    'quo"te',
    "back\\slash",
    "new\nline\ttab\0nul",
    "dots...many.",
    ".",
    "",
    " ",
    "a/b",
    "../../x",
    "\u2028\ufeff",
    "é",
    "e\u0301",
    "x" * 4096,
]


def test_awkward_names(tmp_path):
    state = {name: np.full(3, number) for number, name in enumerate(NAMES)}
    state["plain"] = {"__metadata__": "a value"}
    shardkeep.save(state, tmp_path / "c")
    found = shown(tmp_path / "c", "np")
    assert len(found) == len(NAMES)
    assert sorted(int(a[0]) for a in found.values()) == list(range(len(NAMES)))
    for number, name in enumerate(NAMES):
        if not name.startswith(("__", "~")):
            assert found[name][0] == number
    assert shardkeep.verify(tmp_path / "c").ok
    check_layout(tmp_path / "c")
    with shardkeep.open(tmp_path / "c") as ckpt:
        back = ckpt.state_dict()
    assert list(back) == list(state)
    assert all(np.array_equal(back[name], state[name]) for name in NAMES)


def test_keys_that_clash(tmp_path):
    """A tensor called like another's chunk, and escapes that are taken."""
    whole = np.arange(8.0).reshape(4, 2)

    def state(rank: int) -> dict:
        return {
            "a": ShardedArray.from_local(whole[2 * rank : 2 * rank + 2], (2 * rank, 0), (4, 2)),
            "a@0,0": np.full(4, 1.0),
            "a@2,0": np.full(4, 2.0),
            "a@0,0~2": np.full(4, 3.0),
            "~__metadata__": np.full(4, 4.0),
            "__metadata__": np.full(4, 5.0),
        }

    ThreadRanks(2).run(lambda c: shardkeep.save(state(c.rank), tmp_path / "c", process_group=c))
    values = sorted(
        tuple(tensor.reshape(-1).tolist())
        for file in files_of(tmp_path / "c")
        for tensor in shown_in(file).values()
    )
    expected = [whole[:2], whole[2:], *(np.full(4, float(i)) for i in range(1, 6))]
    assert values == sorted(tuple(e.reshape(-1).tolist()) for e in expected)
    assert shardkeep.verify(tmp_path / "c").ok
    with shardkeep.open(tmp_path / "c") as ckpt:
        back = ckpt.state_dict()
    assert np.array_equal(back["a"], whole)
    assert all(np.array_equal(back[k], v) for k, v in state(0).items() if k != "a")


def shown_in(file: Path) -> dict:
    with safe_open(file, framework="np") as opened:
        keys = [k for k in opened.keys() if not k.startswith(OURS)]  # noqa: SIM118
        return {key: opened.get_tensor(key) for key in keys}


def test_the_index_opens_too(tmp_path):
    state = {"m": {"w": np.zeros((3, 4)), "b": np.zeros(5, np.int8)}, "step": 1}
    shardkeep.save(state, tmp_path / "c")
    with safe_open(index_of(tmp_path / "c"), framework="np") as opened:
        columns = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    assert bytes(columns["tensor.names"]) == b"m.bm.w"
    assert columns["tensor.shapes"].tolist() == [5, 3, 4]
    assert bytes(columns["value.names"]) == b"step"


def test_a_state_without_tensors(tmp_path):
    for number, state in enumerate(({}, {"step": 1}, {"x": np.zeros((0,))}, {"x": {}})):
        path = tmp_path / str(number)
        shardkeep.save(state, path)
        assert shown(path) == {}
        check_layout(path)
        assert shardkeep.verify(path).ok


@pytest.mark.parametrize(
    ("limits", "files"),
    [
        (Limits(payload=1), 12),
        (Limits(payload=4096), 12),
        (Limits(payload=3 * 4096), 4),
        (Limits(payload=12 * 4096 - 1), 2),
        (Limits(header=1), 12),
        (Limits(header=500), None),
        (Limits(), 1),
    ],
)
def test_several_files_of_one_rank(tmp_path, limits, files):
    state = {f"t{i}": np.full(1024, i, np.float32) for i in range(12)} | {"step": 9}
    shardkeep.save(state, tmp_path / "c", storage_writer=NativeWriter(limits=limits))
    made = files_of(tmp_path / "c")
    assert files is None or len(made) == files
    assert files is not None or 1 < len(made) < 12
    assert [f.name.rpartition("-")[2] for f in made] == [
        f"{i}.safetensors" for i in range(len(made))
    ]
    found = shown(tmp_path / "c", "np")
    assert all(np.array_equal(found[f"t{i}"], state[f"t{i}"]) for i in range(12))
    check_layout(tmp_path / "c")
    assert shardkeep.verify(tmp_path / "c").ok
    with shardkeep.open(tmp_path / "c") as ckpt:
        assert ckpt["step"] == 9
        assert all(np.array_equal(ckpt[f"t{i}"][...], state[f"t{i}"]) for i in range(12))


def test_long_names_in_many_files(tmp_path):
    """Header bounds hold for names that JSON makes six times longer."""
    state = {"\0" * 600 + str(i): np.full(2, i) for i in range(20)}
    writer = NativeWriter(limits=Limits(header=8000))
    shardkeep.save(state, tmp_path / "c", storage_writer=writer)
    assert len(files_of(tmp_path / "c")) > 5
    assert len(shown(tmp_path / "c")) == 20
    check_layout(tmp_path / "c")


def test_odd_sizes_pack_without_padding(tmp_path):
    rng = np.random.default_rng(3)
    kinds = [np.uint8, np.int16, np.float32, np.float64, np.complex128, np.bool_]
    state = {
        f"t{i}": rng.integers(0, 2, int(rng.integers(1, 50))).astype(kinds[i % len(kinds)])
        for i in range(60)
    }
    shardkeep.save(state, tmp_path / "c")
    check_layout(tmp_path / "c")
    found = shown(tmp_path / "c", "np")
    for key, array in state.items():
        assert found[key].tobytes() == array.tobytes()

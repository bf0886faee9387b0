"""MindSpore's files: read bit for bit, written so that its own loader reads them."""

import importlib.util
import json
import os
import shutil
import zlib
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from foreign_files import DATA, arrays_of, outline_of, without_libraries, write
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import shardkeep
from shardkeep.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from shardkeep.foreign.crc import combined
from shardkeep.foreign.found import StoredTensor
from shardkeep.foreign.safetensors_header import lay_out_entries
from shardkeep.formats import mindspore
from shardkeep.formats.mindspore import ckpt, tensor_files
from shardkeep.formats.mindspore.checksums import crc_of
from shardkeep.formats.mindspore.wire import Damaged, Field, Stretch, bytes_head, varint

FOLDER = DATA / "mindspore"


def expected():
    table = json.loads((FOLDER / "expected/expected.json").read_text())
    return {name: (row, np.load(FOLDER / f"expected/{name}.npy")) for name, row in table.items()}


@pytest.mark.parametrize("name", ["net.ckpt", "net_crc.ckpt", "net.safetensors"])
def test_real_files_are_read_bit_for_bit(name):
    found = mindspore.find(FOLDER / name)
    assert mindspore.recognises(FOLDER / name)
    got = arrays_of(found)
    assert set(got) == set(expected())
    for key, (row, array) in expected().items():
        tensor = found.state[key]
        assert (tensor.dtype, tensor.shape) == (row["ms_dtype"].lower(), tuple(row["shape"]))
        assert got[key].tobytes() == array.tobytes()


def test_real_files_are_read_without_any_library():
    code = """
from pathlib import Path
from foreign_files import arrays_of
from shardkeep.formats import mindspore
import hashlib
print(json.dumps([{name: hashlib.sha256(a.tobytes()).hexdigest()
                   for name, a in arrays_of(mindspore.find(Path(path))).items()}
                  for path in sys.argv[1:]]))
"""
    want = {name: row["sha256"] for name, (row, _) in expected().items()}
    files = [FOLDER / file for file in ("net.ckpt", "net_crc.ckpt", "net.safetensors")]
    assert without_libraries(code, *files) == [want] * 3


def test_append_dict_gives_scalars_and_texts():
    found = mindspore.find(FOLDER / "append.ckpt")
    assert found.state["note"] == "héllo"
    got = arrays_of(found)
    assert got["epoch"].view("i8") == 3
    assert got["lr"].view("f4") == 0.5
    assert got["flag"] == 1
    assert arrays_of(mindspore.find(FOLDER / "append_crc.safetensors"))["epoch"].view("i8") == 3


@pytest.mark.parametrize("name", ["encrypted_gcm.ckpt", "encrypted_sm4.ckpt"])
def test_encrypted_files_say_so(name):
    assert mindspore.recognises(FOLDER / name)
    with pytest.raises(FormatError, match=r"encrypted .*dec_key"):
        mindspore.find(FOLDER / name)


# --- values made by hand ------------------------------------------------------------------------


def tensor(dims, kind, content):
    out = b"".join(varint(8) + varint(d % 2**64) for d in dims)
    return out + bytes_head(2, len(kind)) + kind.encode() + bytes_head(3, len(content)) + content


def value(tag, dims=(), kind="Int8", content=b"\1"):
    tag = tag if isinstance(tag, bytes) else tag.encode()
    inner = tensor(dims, kind, content)
    body = bytes_head(1, len(tag)) + tag + bytes_head(2, len(inner)) + inner
    return bytes_head(1, len(body)) + body


def parameter(*fields):
    """A value of these fields, each a number and bytes."""
    body = b"".join(bytes_head(number, len(data)) + data for number, data in fields)
    return bytes_head(1, len(body)) + body


def mapped(*tensors):
    """A value that is a map."""
    return parameter((1, b"m"), (3, b"".join(bytes_head(1, len(t)) + t for t in tensors)))


def put(tmp_path, data):
    path = tmp_path / "made.ckpt"
    path.write_bytes(data)
    return path


def test_a_parameter_in_slices_is_joined(tmp_path):
    array = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    data = array.tobytes()
    cut = [0, 14, 40, 42, 120]
    made = value("first", (1,), content=b"\7")
    for low, high in pairwise(cut):
        made += value("w", array.shape, "Int16", data[low:high])
    found = mindspore.find(put(tmp_path, made + value("last", (1,), content=b"\5")))
    assert list(found.state) == ["first", "w", "last"]
    assert len(found.state["w"].parts) > 4
    assert np.array_equal(arrays_of(found)["w"].view(np.int16), array)


def test_scalars_of_old_and_new_versions_and_packed_dims(tmp_path):
    packed = bytes_head(1, 2) + b"\2\1" + bytes_head(2, 4) + b"Int8" + bytes_head(3, 2) + b"\4\5"
    body = bytes_head(1, 1) + b"p" + bytes_head(2, len(packed)) + packed
    made = value("old", (0,)) + value("new", ()) + value("none", (0,), content=b"")
    found = mindspore.find(put(tmp_path, made + bytes_head(1, len(body)) + body))
    shapes = {name: leaf.shape for name, leaf in found.state.items()}
    assert shapes == {"old": (), "new": (), "none": (0,), "p": (2, 1)}
    assert found.state["none"].parts == ()


def test_maps_are_lists_of_their_tensors(tmp_path):
    def part(rows):
        inner = b""
        for each in (tensor((rows,), "int32", b"\1\0\0\0" * rows),
                     tensor((rows, 2), "float32", b"\0\0\x80\x3f" * 2 * rows)):  # fmt: skip
            inner += bytes_head(1, len(each)) + each
        body = bytes_head(1, 1) + b"m" + bytes_head(3, len(inner)) + inner
        return bytes_head(1, len(body)) + body

    found = mindspore.find(put(tmp_path, part(2) + part(3)))
    assert [each.shape for each in found.state["m"]] == [(5,), (5, 2)]
    assert arrays_of(found)["m.1"].view("f4").tolist() == [[1.0, 1.0]] * 5


def test_fields_that_are_not_known_are_passed_over(tmp_path):
    """Of every kind there is, in a value and in a tensor: versions to come may have them."""
    more = b"\x48\5" + b"\x49" + bytes(8) + b"\x4d" + bytes(4) + bytes_head(9, 2) + b"ab"
    inner = more + tensor((2,), "Int8", b"\4\5") + more
    body = more + bytes_head(1, 1) + b"a" + bytes_head(2, len(inner)) + inner + more
    found = mindspore.find(put(tmp_path, bytes_head(1, len(body)) + body))
    assert arrays_of(found)["a"].tolist() == [4, 5]


@pytest.mark.parametrize("kind", ["Int4", "QInt4x2", "Float8E4M3FN", "HiFloat8"])
def test_types_that_are_not_read_are_named(tmp_path, kind):
    path = put(tmp_path, value("w", (2,), kind, b"\1\2"))
    assert mindspore.recognises(path)
    with pytest.raises(FormatError, match=f"w in .* type '{kind}'"):
        mindspore.find(path)


def test_texts_without_end_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "_MAX_TEXT", 12)
    made = value("a", (0,), "str", "abc".encode("utf-32-le"))
    assert mindspore.find(put(tmp_path, made)).state == {"a": "abc"}
    with pytest.raises(FormatError, match="a text of more than"):
        mindspore.find(put(tmp_path, made + value("a", (0,), "str", bytes(4))))


def test_files_that_become_shorter_while_they_are_read(tmp_path):
    path = put(tmp_path, b"1234")
    with pytest.raises(CorruptionError, match="became shorter"):
        crc_of(path, 0, 5)
    with path.open("rb") as file, pytest.raises(Damaged, match="became shorter"):
        Stretch(file, 0, 5).read(Field(1, 2, 0, 0, 5))


HUGE = 2**62
BAD = {
    "empty tag": bytes_head(1, 0),
    "no tensor": bytes_head(1, 3) + bytes_head(1, 1) + b"a",
    "length past the end": bytes_head(1, 2**40) + b"abc",
    "length past 64 bits": b"\x0a" + b"\xff" * 9 + b"\x7f",
    "number without end": b"\x0a" + b"\x80" * 12,
    "a group": b"\x0b\x0c",
    "field zero": b"\x02\x00",
    "another message": bytes_head(7, 2) + b"ab",
    "inner length past the value": bytes_head(1, 6) + bytes_head(1, 1) + b"a\x12\x7f\1",
    "name not UTF-8": value(b"\xff\xfe"),
    "name too long": value("x" * 5000),
    "negative extent": value("a", (-1,)),
    "huge extents": value("a", (HUGE, HUGE), content=b""),
    "huge and empty": value("a", (0, HUGE, HUGE), content=b""),
    "too many dimensions": value("a", (1,) * 33),
    "thousands of dimensions": value("a", (1,) * 2000),
    "too few bytes": value("a", (3,), "Float32", b"\0" * 8),
    "too many bytes": value("a", (3,), "Float32", b"\0" * 16),
    "slices that disagree": value("a", (2,)) + value("a", (3,)),
    "slices of two types": value("a", (2,)) + value("a", (2,), "UInt8"),
    "a slice within an element": value("a", (2,), "Int16", b"1") + value("a", (2,), "Int16", b"2"),
    "slices that end within elements": value("a", (2,), "Int16", b"1")
    + value("a", (2,), "Int16", b"234"),
    "unknown type": value("a", (), "Int4"),
    "type too long": value("a", (), "F" * 100),
    "text that is none": value("a", (0,), "str", b"\0\xd8\0\0"),
    "text cut": value("a", (0,), "str", b"abc"),
    "a tensor without a type": parameter((1, b"a"), (2, bytes_head(3, 1) + b"1")),
    "a tensor without content": parameter((1, b"a"), (2, bytes_head(2, 4) + b"Int8")),
    "extents of eight bytes each": parameter(
        (1, b"a"), (2, b"\x09" + bytes(8) + tensor((), "Int8", b"1"))
    ),
    "thousands of packed extents": parameter(
        (1, b"a"), (2, bytes_head(1, 10241) + b"\1" * 10241 + tensor((), "Int8", b"1"))
    ),
    "a tensor and a map of one name": mapped(tensor((1,), "Int8", b"1"))
    + value("m", (1,), "Int8", b"1"),
    "maps of other numbers of tensors": mapped(tensor((1,), "Int8", b"1"))
    + mapped(*[tensor((1,), "Int8", b"1")] * 2),
    "a map without rows": mapped(tensor((), "Int8", b"1")),
    "a map of rows that differ": mapped(tensor((1, 2), "Int8", b"12"))
    + mapped(tensor((1, 3), "Int8", b"123")),
    "a name twice": value("a") + value("b") + value("a"),
    "wrong checksum": value("a") + b"crc_num" + bytes(10),
    "checksum of too many bytes": value("a") + b"crc_num" + b"\xff" * 10,
    "nothing but a checksum that is wrong": b"crc_num" + b"\1" * 10,
}  # fmt: skip


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_damaged_and_hostile_files_are_refused(tmp_path, data):
    with pytest.raises((FormatError, CorruptionError)):
        mindspore.find(put(tmp_path, data))


@pytest.mark.parametrize("name", ["net_crc.ckpt", "append_crc.safetensors"])
def test_a_changed_bit_is_found_where_there_is_a_checksum(tmp_path, name):
    good = (FOLDER / name).read_bytes()
    path = tmp_path / name
    for byte in range(0, len(good), 5):
        path.write_bytes(good[:byte] + bytes([good[byte] ^ 4]) + good[byte + 1 :])
        try:
            found = mindspore.find(path)
        except CheckpointError:
            continue
        # What remains readable: the mark itself was hit, or a space of the header.
        assert byte >= len(good) - 17 or name.endswith("tensors")
        assert arrays_of(found)


@pytest.mark.parametrize("name", ["append.ckpt", "net_crc.ckpt", "net.safetensors"])
def test_cut_files_are_refused_or_read_whole_parameters(tmp_path, name):
    good = (FOLDER / name).read_bytes()
    whole = mindspore.find(FOLDER / name).state
    path = tmp_path / name
    for size in range(1, len(good), 1 if len(good) < 300 else 5):
        path.write_bytes(good[:size])
        try:
            found = mindspore.find(path)
        except CheckpointError:
            continue
        assert name.endswith(".ckpt")  # which does not say how many values follow
        assert list(found.state) == list(whole)[: len(found.state)]


def test_other_files_are_not_recognised(tmp_path):
    path = tmp_path / "other"
    for data in (b"", b"\n", b"\n\n\n\n\n\n\n\n\n\n", b"PK\3\4" + bytes(100), bytes(64), b"{}" * 9):
        path.write_bytes(data)
        assert not mindspore.recognises(path)
    assert not mindspore.recognises(tmp_path)
    assert not mindspore.recognises(tmp_path / "gone")
    with pytest.raises(FormatError, match="unified_safetensors"):
        mindspore.find(tmp_path)
    with pytest.raises(CheckpointError):
        mindspore.find(tmp_path / "gone")


# --- folders ------------------------------------------------------------------------------------


def folder(tmp_path, table, files=("part0.safetensors",)):
    for name in files:
        shutil.copy(FOLDER / "net.safetensors", tmp_path / name)
    (tmp_path / "param_name_map.json").write_text(json.dumps(table))
    return tmp_path


@pytest.mark.parametrize("wrap", [dict, lambda t: {"weight_map": t}], ids=["bare", "wrapped"])
def test_merged_folders(tmp_path, wrap):
    table = {"half": "part0.safetensors", "idx": "part1.safetensors"}
    root = folder(tmp_path, wrap(table), ["part0.safetensors", "part1.safetensors"])
    assert mindspore.recognises(root)
    got = arrays_of(mindspore.find(root))
    assert set(got) == {"half", "idx"}
    assert got["idx"].tobytes() == expected()["idx"][1].tobytes()
    shutil.copy(FOLDER / "append_crc.safetensors", root / "hyper_param.safetensors")
    assert "epoch" in mindspore.find(root).state


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"half": "../part0.safetensors"}, UnsafeCheckpointError),
        ({"half": "/etc/passwd"}, UnsafeCheckpointError),
        ({"half": "a\0b"}, UnsafeCheckpointError),
        ({"half": "gone.safetensors"}, CorruptionError),
        ({"half": "x" * 5000}, CheckpointError),
        ({"other": "part0.safetensors"}, CorruptionError),
        ({"half": 3}, FormatError),
        ([1], FormatError),
    ],
)
def test_folders_that_lie(tmp_path, table, error):
    with pytest.raises(error):
        mindspore.find(folder(tmp_path, table))


def test_a_map_of_any_size_is_not_read(tmp_path, monkeypatch):
    root = folder(tmp_path, {"half": "part0.safetensors"})
    monkeypatch.setattr(tensor_files, "_MAX_MAP", (root / tensor_files.MAP).stat().st_size)
    assert set(mindspore.find(root).state) == {"half"}
    monkeypatch.setattr(tensor_files, "_MAX_MAP", tensor_files._MAX_MAP - 1)
    with pytest.raises(FormatError, match="more than"):
        mindspore.find(root)


def safetensors_file(path, metadata, **entries):
    header, starts, size = lay_out_entries(
        [(n, d, s) for n, (d, s, _) in entries.items()], metadata
    )
    data = bytearray(header.ljust(size, b"\0"))
    for name, (_, _, content) in entries.items():
        data[starts[name] : starts[name] + len(content)] = content
    path.write_bytes(data)


def test_packed_elements_are_refused(tmp_path):
    entries = {"w": ("uint8", (2,), b"ab"), "v": ("uint8", (1,), b"c")}
    safetensors_file(tmp_path / "x", {"format": "ms", "w": "qint4x2"}, **entries)
    with pytest.raises(FormatError, match=r"w in .* packed type qint4x2"):
        mindspore.find(tmp_path / "x")


@pytest.mark.parametrize("value", [5, -5])
def test_checksums_of_integers_without_dimensions(tmp_path, value):
    """Taken over as many zeros as they say, so that there is none over a negative one."""
    told = zlib.crc32(b"ab", zlib.crc32(b"w", zlib.crc32(bytes(max(value, 0)), zlib.crc32(b"n"))))
    entries = {
        "n": ("int64", (), value.to_bytes(8, "little", signed=True)),
        "w": ("uint8", (2,), b"ab"),
    }
    safetensors_file(tmp_path / "x", {"format": "ms", "crc_num": str(told)}, **entries)
    if value > 0:
        assert arrays_of(mindspore.find(tmp_path / "x"))["w"].tobytes() == b"ab"
        return
    with pytest.raises(CorruptionError, match="its checksum is"):
        mindspore.find(tmp_path / "x")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    root = folder(tmp_path / "outside", {"half": "link.safetensors"})
    (root / "link.safetensors").symlink_to(FOLDER / "net.safetensors")
    with pytest.raises(UnsafeCheckpointError, match="link"):
        mindspore.find(root)


def test_links_that_lead_to_each_other_and_pipes_are_refused(tmp_path):
    root = folder(tmp_path, {"half": "link.safetensors"}, [])
    (root / "link.safetensors").symlink_to(root / "other")
    (root / "other").symlink_to(root / "link.safetensors")
    with pytest.raises(CheckpointError):
        mindspore.find(root)
    (root / "link.safetensors").unlink()
    os.mkfifo(root / "link.safetensors")
    with pytest.raises(FormatError, match="regular"):
        mindspore.find(root)
    assert not mindspore.recognises(root / "link.safetensors")


# --- writing ------------------------------------------------------------------------------------

TYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
         "float16", "bfloat16", "float32", "float64"]  # fmt: skip


@st.composite
def states(draw):
    names = st.text("abcdef.é", min_size=1, max_size=8)
    state = {}
    for name in draw(st.lists(names, max_size=5, unique=True)):
        kind = draw(st.sampled_from(TYPES))
        shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        if shape == (0,):
            shape = (0, 1)
        dtype = np.dtype(getattr(ml_dtypes, kind) if kind == "bfloat16" else kind)
        count = int(np.prod(shape)) * dtype.itemsize
        data = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8)
        if kind == "bool":
            data = data & 1
        state[name] = data.copy().view(dtype).reshape(shape)
    return state


@given(states(), st.booleans(), st.integers(1, 40), st.sampled_from(["ckpt", "safetensors"]))
def test_what_is_written_is_read_back(tmp_path_factory, state, crc, slice_nbytes, form):
    assume(state or form == "safetensors")
    path = tmp_path_factory.mktemp("ms") / "out"
    outline, arrays = outline_of(state)
    if form == "safetensors" and crc:
        state = {
            name: array
            for name, array in state.items()
            if array.shape and array.dtype.name != "bfloat16"
        }
        outline, arrays = outline_of(state)
    write(mindspore.lay_out(outline, format=form, crc=crc, slice_nbytes=slice_nbytes), arrays, path)
    found = mindspore.find(path) if state or form == "safetensors" or crc else None
    if found is None:
        assert path.read_bytes() == b""
        return
    got = arrays_of(found)
    assert set(got) == set(state)
    for name, array in state.items():
        leaf = found.state[name]
        assert (leaf.dtype, leaf.shape) == (array.dtype.name, array.shape)
        assert got[name].tobytes() == array.tobytes()


def test_ties_texts_and_numbers(tmp_path):
    tied = np.arange(6, dtype=np.float32).reshape(2, 3)
    outline, arrays = outline_of(
        {"a": {"w": tied, "v": tied}, "step": 7, "lr": 0.1, "on": True, "text": "ü", "none": ""}
    )
    write(mindspore.lay_out(outline, crc=True), arrays, tmp_path / "x.ckpt")
    found = mindspore.find(tmp_path / "x.ckpt")
    got = arrays_of(found)
    assert got["a.w"].tobytes() == got["a.v"].tobytes() == tied.tobytes()
    assert (got["step"].view("i8"), got["lr"].view("f8"), got["on"]) == (7, 0.1, 1)
    assert (found.state["text"], found.state["none"]) == ("ü", "")


@pytest.mark.parametrize(
    "value",
    [None, b"raw", [1, 2], 2**63, "ends\0", "\ud800", np.zeros(3, np.complex64), np.zeros((0,)),
     np.zeros(2, ml_dtypes.float8_e4m3fn)],
    ids=repr,
)  # fmt: skip
def test_what_it_cannot_hold_is_refused_by_name(value):
    outline, _ = outline_of({"odd one": value})
    with pytest.raises(UnsupportedValueError, match="odd one"):
        mindspore.lay_out(outline)


@pytest.mark.parametrize("value", [3, np.zeros(2, ml_dtypes.bfloat16)], ids=["int", "bfloat16"])
def test_what_its_checksum_does_not_cover(value):
    outline, _ = outline_of({"step": value})
    with pytest.raises(UnsupportedValueError, match="does not cover step"):
        mindspore.lay_out(outline, format="safetensors", crc=True)


def test_numbers_in_safetensors(tmp_path):
    outline, arrays = outline_of({"w": np.arange(3), "step": 7, "lr": 0.1, "on": True})
    write(mindspore.lay_out(outline, format="safetensors"), arrays, tmp_path / "x")
    got = arrays_of(mindspore.find(tmp_path / "x"))
    assert (got["step"].view("i8"), got["lr"].view("f8"), got["on"]) == (7, 0.1, 1)
    assert got["w"].tolist() == [0, 1, 2]


def test_names_and_forms_that_are_refused():
    outline, _ = outline_of({"x" * 4097: np.zeros(2)})
    with pytest.raises(UnsupportedValueError, match="longer than 4096 bytes"):
        mindspore.lay_out(outline)
    with pytest.raises(ValueError, match="not 'mindir'"):
        mindspore.lay_out(outline, format="mindir")


@pytest.mark.parametrize("crc", [False, True])
def test_a_state_of_nothing(tmp_path, crc):
    """No parameters are no bytes, which tell nobody what they are."""
    outline, arrays = outline_of({})
    with pytest.raises(UnsupportedValueError, match="nothing to write"):
        mindspore.lay_out(outline, crc=crc)
    write(mindspore.lay_out(outline, format="safetensors", crc=crc), arrays, tmp_path / "x")
    assert mindspore.find(tmp_path / "x").state == {}


def test_texts_have_no_place_in_safetensors():
    with pytest.raises(UnsupportedValueError, match="note is a str"):
        mindspore.lay_out(outline_of({"note": "hi"})[0], format="safetensors")


@given(st.binary(max_size=300), st.binary(max_size=3000))
def test_checksums_combine(first, second):
    got = combined(zlib.crc32(first), zlib.crc32(second), len(second))
    assert got == zlib.crc32(first + second)


def test_a_tensor_is_a_stored_tensor():
    assert isinstance(mindspore.find(FOLDER / "net.ckpt").state["half"], StoredTensor)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mindspore"), reason="MindSpore is not installed")
@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_mindspore_loads_what_is_written(tmp_path, form):
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    outline, arrays = outline_of({"net": {"w": array}, "half": array.astype(np.float16)})
    path = tmp_path / f"out.{form}"
    files = mindspore.lay_out(outline, format=form, crc=True, slice_nbytes=50)
    write(files, arrays, path)
    code = """
import mindspore
got = mindspore.load_checkpoint(sys.argv[1], format=sys.argv[2], crc_check=True)
print(json.dumps({name: value.asnumpy().tolist() for name, value in got.items()}))
"""
    got = without_libraries(code, path, form, allowed=("mindspore", "safetensors", "torch"))
    assert got == {"net.w": array.tolist(), "half": array.tolist()}


def test_opened_and_loaded_like_ours(tmp_path):
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    outline, arrays = outline_of({"w": array, "note": "hi"})
    write(mindspore.lay_out(outline, slice_nbytes=52), arrays, tmp_path / "x.ckpt")
    with shardkeep.open(tmp_path / "x.ckpt") as checkpoint:
        assert np.array_equal(checkpoint["w"][1:, 2], array[1:, 2])
        assert checkpoint.state_dict()["note"] == "hi"
    target = {"w": np.zeros_like(array), "note": ""}
    assert shardkeep.load(target, tmp_path / "x.ckpt", no_dist=True).state_dict["note"] == "hi"
    assert np.array_equal(target["w"], array)

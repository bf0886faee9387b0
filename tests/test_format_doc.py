"""`docs/FORMAT.md` says what the code does, and is enough to read a checkpoint."""

import importlib.util
import json
import math
import re
import struct
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
import xxhash

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs/FORMAT.md").read_text()


# --- a reader from the document alone: what follows up to the next line does not know shardkeep


H = xxhash.xxh3_128_digest
D = 16
ELEMENTS = {"bool": "?", "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def read_record(folder):
    """Section 5."""
    data = (folder / "checkpoint.json").read_bytes()
    found = re.search(rb'"digest": "xxh3-128:([0-9a-f]+)"\n\}\n\Z', data)
    assert H(data[: found.start(1)]).hex().encode() == found[1]
    record = json.loads(data)
    assert record["format"]["major"] == 1
    assert record["requires"] == []
    assert record["digests"]["algorithm"] == "xxh3-128"
    return record


def read_file(folder, row, block):
    """Section 8: the bytes of a file, every one of them checked."""
    assert re.fullmatch(r"data/[0-9a-f]{32}-[0-9a-z][0-9a-z.-]{0,180}\.safetensors", row["name"])
    data, payload = (folder / row["name"]).read_bytes(), row["payload"]
    blocks = math.ceil(payload / block)
    pages = math.ceil(blocks / 4096)
    size = math.ceil((payload + (blocks + pages) * D) / 4096) * 4096
    assert len(data) == row["size"] == size
    level1 = data[payload : payload + blocks * D]
    tail = data[payload + blocks * D :]
    assert H(tail).hex() == row["root"]
    assert not any(tail[pages * D :])
    for i in range(pages):
        assert H(level1[4096 * i * D : 4096 * (i + 1) * D]) == tail[i * D : (i + 1) * D]
    for i in range(blocks):
        assert H(data[i * block : min((i + 1) * block, payload)]) == level1[i * D : (i + 1) * D]
    return data


def read_header(data):
    """Section 7: entries by key, with their absolute places."""
    (length,) = struct.unpack_from("<Q", data)
    assert (8 + length) % 4096 == 0
    table = json.loads(data[8 : 8 + length])
    metadata = table.pop("__metadata__")
    assert metadata["format"] == "pt"
    at, entries = 8 + length, {}
    for key, entry in table.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        assert start == at
        entries[key] = (entry["dtype"], entry["shape"], start, stop)
        at = stop
    assert at == len(data)
    return entries


def read_columns(data):
    """Section 9.1."""
    dtypes = {"I64": "<i8", "I32": "<i4", "U16": "<u2", "U8": "u1"}
    return {
        key: np.frombuffer(data[start:stop], dtypes[dtype])
        for key, (dtype, _, start, stop) in read_header(data).items()
    }


def cut(blob, start):
    return [bytes(blob[a:b]).decode() for a, b in pairwise(start)]


def decode(data):
    """Section 11, as far as the test needs it."""
    return build(msgspec.msgpack.decode(data))


def build(node):
    if isinstance(node, list):
        return [build(item) for item in node]
    if not isinstance(node, msgspec.msgpack.Ext):
        return node
    raw = bytes(node.data)
    if node.code == 1:
        return int.from_bytes(raw, "big", signed=True)
    if node.code == 2:
        return complex(*struct.unpack(">dd", raw))
    items = [build(item) for item in msgspec.msgpack.decode(raw)]
    if node.code == 4:
        return tuple(items)
    if node.code == 6:
        return dict(zip(items[::2], items[1::2], strict=True))
    assert node.code == 10
    return set(items)


def paths_of(node, path=()):
    """Section 10.1."""
    if isinstance(node, int):
        return [(path, node)]
    _, keys, children, _ = node
    keys = range(len(children)) if keys is None else keys
    return [
        found
        for key, child in zip(keys, children, strict=True)
        for found in paths_of(child, (*path, key))
    ]


def bracketed(path):
    out = ""
    for key in path:
        if isinstance(key, str) and key and not set(key) & set('.[]"'):
            out = f"{out}.{key}" if out else key
        elif isinstance(key, str):
            out += f"[{json.dumps(key, ensure_ascii=False)}]"
        elif type(key) is int:
            out += f"[{key}]"
        else:
            out += f"[{type(key).__name__} {key!r}]"
    return out


def names_of(paths):
    """Section 10.2."""
    names, done = [".".join(map(str, path)) for path in paths], set()
    while True:
        clash = {i for i, name in enumerate(names) if names.count(name) > 1}
        if not clash:
            return names
        assert not clash <= done
        for i in clash:
            names[i] = bracketed(paths[i])
        done |= clash


def rebuild(node, leaves):
    if isinstance(node, int):
        return next(leaves)
    _, keys, children, _ = node
    made = [rebuild(child, leaves) for child in children]
    return dict(zip(keys, made, strict=True)) if keys is not None else tuple(made)


def key_extension(code, data):
    assert code == 1
    return decode(bytes(data))


def read_checkpoint(folder):
    """Section 14: the whole state."""
    record = read_record(folder)
    block = record["digests"]["block"]
    files = [read_file(folder, row, block) for row in record["files"]]
    column = read_columns(read_file(folder, record["index"], block))
    names = cut(column["tensor.names"], column["tensor.name_start"])
    kinds = json.loads(column["kinds"].tobytes())
    contents = [read_contents(row, data) for row, data in zip(record["files"], files, strict=True)]
    leaves, coordinate = {}, 0
    for i, name in enumerate(names):
        a, b = column["tensor.shape_start"][i : i + 2]
        shape = tuple(column["tensor.shapes"][a:b].tolist())
        dtype = kinds[column["tensor.kind"][i]]["dtype"]
        array = np.empty(shape, ELEMENTS.get(dtype, dtype))
        seen = np.zeros(shape, int)
        for chunk in range(*column["tensor.first_chunk"][i : i + 2]):
            part = slice(coordinate, coordinate := coordinate + len(shape))
            sizes = tuple(column["chunk.sizes"][part].tolist())
            offsets = column["chunk.offsets"][part].tolist()
            box = (*(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)), ...)
            file, start = int(column["chunk.file"][chunk]), int(column["chunk.start"][chunk])
            raw = files[file][start : start + math.prod(sizes) * array.itemsize]
            assert contents[file].pop(start) == content_digest(raw)
            array[box] = np.frombuffer(raw, array.dtype).reshape(sizes)
            seen[box] += 1
        if column["tensor.alias_of"][i] < 0:
            assert (seen == 1).all()
            leaves[name] = array
    assert not any(contents)
    for name, alias in zip(names, column["tensor.alias_of"], strict=True):
        if alias >= 0:
            leaves[name] = leaves[names[alias]]
    for i, name in enumerate(cut(column["value.names"], column["value.name_start"])):
        file = int(column["value.file"][i])
        leaves[name] = read_value(record["files"][file], files[file], int(column["value.slot"][i]))
    structure = msgspec.msgpack.decode(column["structure"].tobytes(), ext_hook=key_extension)
    tables = [names, cut(column["value.names"], column["value.name_start"])]
    kinds_of = [kind for _, kind in paths_of(structure)]
    rows = column["leaf.row"].tolist()
    named = [tables[kind][row] for kind, row in zip(kinds_of, rows, strict=True)]
    assert sorted(named) == sorted(leaves)
    assert named == names_of([path for path, _ in paths_of(structure)])
    return rebuild(structure, iter([leaves[name] for name in named])), leaves


def read_contents(row, data):
    """Section 7.3."""
    end = row["payload"] if row["values"] is None else row["values"]
    start = end - row["chunks"] * (8 + D)
    return {
        struct.unpack_from("<Q", data, at)[0]: data[at + 8 : at + 8 + D]
        for at in range(start, end, 8 + D)
    }


def content_digest(raw):
    return H(b"".join(H(raw[at : at + 1048576]) for at in range(0, len(raw), 1048576)))


def read_value(row, data, slot):
    """Section 7.4."""
    (count,) = struct.unpack_from("<Q", data, row["values"])
    ends = struct.unpack_from(f"<{count}Q", data, row["values"] + 8)
    base = row["values"] + 8 + 8 * count
    assert base + ends[-1] == row["payload"]
    return decode(data[base + (ends[slot - 1] if slot else 0) : base + ends[slot]])


# --- what the library wrote


def save_on_ranks(folder, world=3):
    """Sharded by rows and by columns, replicated, per rank, tied, empty, scalar, odd names."""
    import shardkeep
    from shardkeep.formats.native.layout import Limits

    rng = np.random.default_rng(0)
    whole = {
        "rows": rng.standard_normal((7, 5)).astype(np.float32),
        "columns": rng.integers(0, 2**16, (4, 9)).astype(ml_dtypes.bfloat16),
        "large": rng.integers(0, 256, 2_500_000).astype(np.uint8),
    }
    tied = rng.standard_normal(6)
    same = {
        "empty": np.zeros((0, 3), np.int16),
        "scalar": np.array(-5, np.int64),
        "flags": np.array([True, False, True]),
        "small": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
        "complex": np.array([1 + 2j, np.nan]),
        "tied": [tied, {"again": tied}],
        "names": {8: np.arange(2), "8": np.arange(3), "x.y": 1, "x": {"y": 2}, 2.5: 3, True: 4},
        "values": {"big": 2**70, "tuple": (1, None, b"x"), "set": {3, 1}, "z": 1 - 1j, "text": "ü"},
    }

    def part(array, dim, rank):
        pieces = np.array_split(array, world, axis=dim)
        offsets = [0] * array.ndim
        offsets[dim] = sum(piece.shape[dim] for piece in pieces[:rank])
        return shardkeep.ShardedArray.from_local(pieces[rank].copy(), offsets, array.shape)

    def save(ranks):
        state = {
            "rows": part(whole["rows"], 0, ranks.rank),
            "columns": part(whole["columns"], 1, ranks.rank),
            "large": part(whole["large"], 0, ranks.rank),
            "rng": shardkeep.PerRank({"seed": ranks.rank, "state": np.full(3, ranks.rank)}),
            **same,
        }
        # Small files and blocks: several files per rank, and more than one page of digests.
        writer = shardkeep.NativeWriter(folder, block=4096, limits=Limits(payload=700_000))
        shardkeep.save(state, storage_writer=writer, process_group=ranks)

    shardkeep.ThreadRanks(world).run(save)
    return {
        **{name: whole[name] for name in ("rows", "columns", "large")},
        "rng": {rank: {"seed": rank, "state": np.full(3, rank)} for rank in range(world)},
        **same,
    }


def assert_same(found, expected):
    if isinstance(expected, dict):
        assert [(type(k), k) for k in found] == [(type(k), k) for k in expected]
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, list) and any(isinstance(x, np.ndarray) for x in expected):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert type(found) is type(expected)
        assert found == expected


def test_the_document_is_enough_to_read_a_checkpoint_of_many_ranks(tmp_path):
    expected = save_on_ranks(tmp_path / "c")
    state, leaves = read_checkpoint(tmp_path / "c")
    assert_same(state, expected)
    assert leaves["tied.0"] is leaves["tied.1.again"]
    assert {"names[8]", "names.8", 'names["x.y"]', "names.x.y", "names.2.5"} <= leaves.keys()
    assert len(read_record(tmp_path / "c")["files"]) > 3


def test_the_reader_of_this_test_finds_a_flipped_bit(tmp_path):
    save_on_ranks(tmp_path / "c")
    row = read_record(tmp_path / "c")["files"][0]
    path = tmp_path / "c" / row["name"]
    data = bytearray(path.read_bytes())
    data[row["payload"] // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError):
        read_checkpoint(tmp_path / "c")


def test_more_than_one_page_of_digests(tmp_path):
    import shardkeep

    array = np.arange(20 << 20, dtype=np.uint8)
    writer = shardkeep.NativeWriter(tmp_path / "c", block=4096)
    shardkeep.save({"a": array}, storage_writer=writer, no_dist=True)
    assert read_record(tmp_path / "c")["files"][0]["payload"] > 4096 * 4096
    assert (read_checkpoint(tmp_path / "c")[0]["a"] == array).all()


def test_chunks_lie_in_the_order_the_document_gives(tmp_path):
    save_on_ranks(tmp_path / "c")
    record = read_record(tmp_path / "c")
    for row in record["files"]:
        entries = read_header((tmp_path / "c" / row["name"]).read_bytes())
        room = min(start for _, _, start, _ in entries.values())
        powers = []
        for key, (_, _, start, stop) in entries.items():
            if not key.startswith("__shardkeep__"):
                powers.append(min((stop - start) & -(stop - start), 65536))
                assert (start - room) % powers[-1] == 0
        assert powers == sorted(powers, reverse=True)


# --- the document against the code


def load_example():
    path = ROOT / "examples/format_example.py"
    spec = importlib.util.spec_from_file_location("format_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_worked_example_is_what_the_code_writes(tmp_path):
    example = load_example()
    shown = re.search(r"<!-- example -->\n```text\n(.*?)\n```\n", DOCUMENT, re.DOTALL)[1]
    written = "\n".join(example.describe(example.make(tmp_path)))
    assert shown == written, "run examples/format_example.py and put its output into FORMAT.md"
    assert read_checkpoint(tmp_path / "example")[1]["lr"] == 0.5


def table(section):
    """The rows of the tables of one section, cells without their quotes."""
    text = re.search(rf"\n#+ {re.escape(section)}[. ].*?\n(.*?)(?=\n##|\Z)", DOCUMENT, re.DOTALL)[1]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_every_column_is_in_the_document(tmp_path):
    import shardkeep

    shardkeep.save({"a": np.zeros(2), "b": 1}, tmp_path / "c", no_dist=True)
    row = read_record(tmp_path / "c")["index"]
    written = read_header((tmp_path / "c" / row["name"]).read_bytes())
    described = {cells[0]: cells[1] for cells in table("9.1")[2:]}
    assert described == {
        key: dtype for key, (dtype, *_) in written.items() if not key.startswith("__")
    }
    reserved = {cells[0] for cells in table("9.3")[2:]}
    assert reserved == {"tensor.rank", "chunk.codec", "chunk.stored_nbytes", "chunk.content"}
    assert not reserved & written.keys()


def test_every_element_type_is_in_the_document():
    from shardkeep.dtypes import TABLE

    described = [tuple(cells) for cells in table("7.2")[2:]]
    assert described == [
        (d.name, str(d.itemsize), d.safetensors, str(d.extra_dim or "")) for d in TABLE.values()
    ]


def test_every_extension_code_is_in_the_document():
    from shardkeep.values import EXT_CODES

    described = {cells[1]: int(cells[0]) for cells in table("11")[2:]}
    assert described == EXT_CODES


def test_every_container_kind_is_in_the_document():
    from shardkeep.structure import _KINDS

    assert {cells[0].strip('"') for cells in table("10.1")[2:]} == set(_KINDS)


def test_digest_algorithms_are_in_the_document():
    from shardkeep.engine.digests import algorithm
    from shardkeep.errors import MissingDependencyError

    for name, size, _ in table("8")[2:]:
        try:
            assert algorithm(name).size == int(size)
        except MissingDependencyError:
            continue


def test_every_limit_is_in_the_document():
    from shardkeep import holding, structure, values
    from shardkeep.engine import digests
    from shardkeep.formats.native import claiming, commit, header, layout, record

    said = {name: [int(n) for n in re.findall(r"\d+", text)] for name, text, _ in table("16")[2:]}
    limits = layout.Limits()
    in_code = {
        "record": [record.MAX_RECORD >> 20],
        "data files in a record": [record.MAX_FILES],
        "header of a file": [header.MAX_HEADER],
        "header of a data file": [limits.header >> 20],
        "chunks in a data file": [limits.payload >> 30],
        "block": [4096, 1 << 20],
        "alignment of payload and of file ends": [header.ALIGNMENT],
        "largest alignment between entries": [layout.MAX_POWER],
        "digests in a page": [digests.PAGE_DIGESTS],
        "piece of a content digest": [digests.CONTENT_PIECE],
        "name": [structure.MAX_NAME_BYTES],
        "nesting of containers": [structure.MAX_DEPTH],
        "nesting within a plain value": [values.MAX_DEPTH],
        "dimensions of a tensor": [holding.MAX_DIMS],
        "bytes of a tensor": [2, 63],
        "touching the lease": [commit.TOUCH_S],
        "seeing the lease": [claiming.LEASE_SEEN_S],
        "seeing all files before the commit": [commit.VISIBILITY_S],
        "a lease is stale after": [commit.STALE_S],
    }
    said["name"] = said["name"][:1]  # the 8 of UTF-8
    assert said == in_code
    assert header.ALIGNMENT == digests.FILE_ALIGNMENT


def test_block_sizes_outside_the_documented_range_are_refused():
    from shardkeep.engine.digests import DigestLayout
    from shardkeep.errors import FormatError
    from shardkeep.formats.native.record import FileRow, Record, decode_record, encode_record

    def try_block(block):
        size = DigestLayout(5000, block, 16).file_size
        index = FileRow(f"data/{'0' * 32}-index.safetensors", size, 5000, "0" * 32)
        return decode_record(encode_record(Record("0" * 32, index, (), block=block)), "here").block

    assert try_block(4096) == 4096
    assert try_block(1 << 20) == 1 << 20
    for block in (2048, 1 << 21, 5000):
        with pytest.raises(FormatError):
            try_block(block)


def test_names_of_the_document_are_those_of_the_code():
    from shardkeep.structure import unique_names

    paths = [
        ("a", 8), ("a", "8"), ("a", "x.y"), ("a", "x", "y"), ("a", True), ("a", "True"),
        ("a", None), ("a", "None"), ("", "b"), ("[b]",), ('q"', "ü\n"), ('q".ü\n',), ("a[8]",),
        ("plain", "path", 0), ("",), (8, "a"), ("8", "a"),
    ]  # fmt: skip
    assert unique_names(paths) == names_of(paths)


def test_features_are_in_the_document():
    from shardkeep.formats.native.record import FEATURES

    assert sorted(FEATURES) == ["pickle"]
    assert "Version 1.0 knows one: `pickle`." in DOCUMENT


# --- the schema


def conforms(value, schema, root):
    """As much of JSON Schema as ours uses; an unknown keyword is an error."""
    known = (
        "$ref $schema $defs title description type required properties const enum pattern items"
        " minimum maxItems uniqueItems"
    )
    assert schema.keys() <= set(known.split())
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    types = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}
    given = schema.get("type", [])
    given = [given] if isinstance(given, str) else given
    number = type(value) is int
    return (
        (not given or any(type(value) is types[name] for name in given))
        and ("const" not in schema or value == schema["const"])
        and ("enum" not in schema or value in schema["enum"])
        and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
        and (not number or value >= schema.get("minimum", value))
        and all(name in value for name in schema.get("required", ()))
        and all(
            conforms(value[name], part, root)
            for name, part in schema.get("properties", {}).items()
            if name in value
        )
        and (
            not isinstance(value, list)
            or (
                len(value) <= schema.get("maxItems", len(value))
                and all(conforms(item, schema.get("items", {}), root) for item in value)
            )
        )
    )


@pytest.fixture
def schema():
    return json.loads((ROOT / "docs/checkpoint.schema.json").read_text())


def test_real_records_fit_the_schema(tmp_path, schema):
    import shardkeep

    save_on_ranks(tmp_path / "c")
    record = read_record(tmp_path / "c")
    assert conforms(record, schema, schema)
    assert record["format"] == {"major": 1, "minor": 0}
    assert record.keys() == schema["properties"].keys() - {"user"}
    shardkeep.save({"a": 1}, tmp_path / "d", user_metadata={"loss": 0.5})
    record = read_record(tmp_path / "d")
    assert conforms(record, schema, schema)
    assert record["format"] == {"major": 1, "minor": 1}
    assert record.keys() == schema["properties"].keys()
    assert record["index"].keys() == schema["$defs"]["file"]["properties"].keys() - {"kept"}
    described = {cells[0] for cells in table("5")[2:]}
    assert record.keys() | record["index"].keys() <= described


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("format", "major"), 2),
        (("save_id",), "0123"),
        (("digests", "block"), 5000),
        (("digests", "algorithm"), "md5"),
        (("index", "name"), "../../etc/passwd"),
        (("index", "size"), -1),
        (("index", "root"), "xyz"),
        (("files", 0, "values"), "12"),
        (("files",), 5),
        (("digest",), "xxh3-128:ABC"),
    ],
)
def test_what_readers_refuse_does_not_fit_the_schema(tmp_path, schema, place, value):
    from shardkeep.engine.digests import algorithm
    from shardkeep.errors import CheckpointError
    from shardkeep.formats.native.record import decode_record

    record = read_record(load_example().make(tmp_path))
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert not conforms(record, schema, schema)
    digest = record.pop("digest")
    head = json.dumps(record, indent=1).removesuffix("\n}").encode() + b',\n "digest": "xxh3-128:'
    if place != ("digest",):
        digest = algorithm("xxh3-128").digest(head).hex()
    with pytest.raises(CheckpointError):
        decode_record(head + digest.encode() + b'"\n}\n', "here")

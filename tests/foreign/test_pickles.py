"""The closed unpickler: what it reads is what Python's own reads, and nothing else happens."""

import collections
import contextlib
import datetime
import decimal
import fractions
import json
import pathlib
import pickle
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from hostile_pickles import call, colliding_tuples, glob, p4, u
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import CheckpointError, CorruptionError, FormatError, UnsafeCheckpointError
from shardkeep.foreign import pickles
from shardkeep.foreign.numpy_stand_ins import NumpyArray
from shardkeep.foreign.stand_ins import Record, records
from shardkeep.foreign.torch_objects import Finishing
from shardkeep.foreign.torch_stand_ins import TORCH, Storage, TorchDevice, TorchDType, TorchSize
from shardkeep.values import same

HERE = Path(__file__).parent
MARK = Path("/tmp/shardkeep-was-here")


@pytest.fixture(scope="module")
def refusals():
    """What became of each hostile pickle, in a process that may take 200 MB more than Python."""
    done = subprocess.run(
        [sys.executable, HERE / "hostile_pickles.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hostile_pickles_are_refused_at_once_in_little_memory(refusals):
    told = [line for line in refusals if "name" in line]
    assert len(told) > 100
    fine = {"UnsafeCheckpointError", "FormatError", "Cut"}
    assert [line for line in told if line["kind"] not in fine] == []
    assert [line for line in told if "MemoryError" in line["text"]] == []
    assert [line for line in told if line["s"] > 1] == []
    assert all("a test" in line["text"] for line in told)


def test_hostile_pickles_import_nothing_and_leave_no_trace(refusals):
    assert refusals[-1] == {"imported": []}
    assert not MARK.exists()


def test_the_refusal_names_what_a_pickle_needs(refusals):
    texts = {line["name"]: line["text"] for line in refusals if "name" in line}
    for name in ("os.system", "builtins.eval", "subprocess.Popen", "copyreg._reconstructor"):
        assert f"needs {name}," in texts[name]


def test_the_hostile_ones_would_do_harm_elsewhere(tmp_path):
    class Gadget:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harm",))

    data = pickle.dumps(Gadget())
    with pytest.raises(UnsafeCheckpointError, match=r"pathlib\.Path\.touch"):
        pickles.load(data, where="x")
    assert not (tmp_path / "harm").exists()
    pickle.loads(data)
    assert (tmp_path / "harm").exists()


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(codec="utf-8")),
    st.binary(),
    st.binary().map(bytearray),
    st.datetimes(timezones=st.none() | st.just(datetime.UTC)),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9)),
    st.sampled_from([pathlib.Path("/a/b"), pathlib.PurePosixPath("c"), np.float32(1.5)]),
    st.sampled_from([np.int64(-3), np.bool_(True), np.complex64(1j), np.float16(2)]),
)
keys = st.one_of(st.text(st.characters(codec="utf-8")), st.integers(), st.tuples(st.integers()))
states = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner),
        st.dictionaries(keys, inner).map(collections.OrderedDict),
        st.lists(inner).map(lambda x: collections.deque(x, 9)),
        st.frozensets(st.integers() | st.text("abc")),
        st.sets(st.integers()),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=120)
@given(states, st.integers(0, 5))
def test_plain_values_come_back_as_from_pickle_itself(state, protocol):
    data = pickle.dumps(state, protocol)
    assert same(pickles.load(data, where="x"), pickle.loads(data))


@settings(deadline=None, max_examples=150)
@given(states, st.integers(0, 5), st.data())
def test_damage_gives_a_value_or_a_checkpoint_error(state, protocol, data):
    whole = bytearray(pickle.dumps(state, protocol))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        pickles.load(whole[: data.draw(st.integers(0, len(whole)))], where="x")


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_checkpoint_error(data):
    with contextlib.suppress(CheckpointError):
        pickles.load(data, where="x")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "bool", "i8", "c16", "f2", "u1"])
def test_arrays_of_numpy_keep_their_elements(protocol, dtype):
    for array in (
        np.arange(6).reshape(2, 3).astype(dtype),
        np.asfortranarray(np.eye(3, dtype=dtype)),
    ):
        made = pickles.load(pickle.dumps(array, protocol), where="x")
        assert isinstance(made, NumpyArray)
        np.testing.assert_array_equal(made.array(), array)
        assert made.array().dtype == array.dtype.newbyteorder("=")


def test_objects_of_listed_classes_become_records():
    class Point:
        pass

    Point.__module__, Point.__qualname__ = __name__, "Point"
    globals()["Point"] = Point
    point = Point()
    point.x, point.y = 1, [2]
    for protocol in range(2, 6):
        made = pickles.load(
            pickle.dumps(point, protocol), where="x", classes=records(__name__, "Point")
        )
        assert isinstance(made, Record)
        assert (made.get("x"), made.get("y"), made.get("z", 5)) == (1, [2], 5)


def test_several_pickles_in_a_row():
    data = pickle.dumps(1) + pickle.dumps("two") + b"rest"
    first, end = pickles.load_next(data, where="x")
    second, last = pickles.load_next(data, end, where="x")
    assert (first, second, data[last:]) == (1, "two", b"rest")
    with pytest.raises(pickles.Cut):
        pickles.load_next(data[:-8], end, where="x")
    assert issubclass(pickles.Cut, CorruptionError)


def test_limits_can_be_set():
    with pytest.raises(FormatError, match="more than 10 bytes"):
        pickles.load(pickle.dumps("x" * 100), where="x", limits=pickles.Limits(nbytes=10))
    with pytest.raises(FormatError, match="deeper than 3"):
        pickles.load(pickle.dumps([[[[]]]]), where="x", limits=pickles.Limits(depth=3))
    shared = [1]
    state = [shared] * 100
    assert pickles.load(pickle.dumps(state), where="x") == state
    with pytest.raises(UnsafeCheckpointError, match="taken apart"):
        pickles.load(pickle.dumps(state), where="x", limits=pickles.Limits(expanded=10))


def test_what_differs_from_pickle():
    assert type(pickles.load(pickle.dumps(collections.defaultdict(list, a=[1])), where="x")) is dict
    with pytest.raises(UnsafeCheckpointError, match=r"collections\.UserDict"):
        pickles.load(pickle.dumps(collections.UserDict()), where="x")
    assert pickles.load(pickle.dumps(decimal.Decimal("1.50")), where="x") == decimal.Decimal("1.5")
    assert pickles.load(pickle.dumps(fractions.Fraction(1, 3)), where="x") == fractions.Fraction(
        1, 3
    )


# --- what is done in one step is what its opcodes do one by one

SIZE = b"\x8c\x05torch\x8c\x04Size\x93\x94"
"""The name of a class whose calls with numbers are made once for all that are alike."""


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (b")\x85\x94R\x94", ()),
        (b"K\x05\x85\x94\x85\x94R\x94", (5,)),
        (b"J\xff\xff\xff\xffM\x00\x01\x86\x94\x85\x94R\x94", (-1, 256)),
        (b"K\x01K\x02J\x00\x00\x00\x01\x87\x94\x85\x94R\x94", (1, 2, 1 << 24)),
    ],
)
def test_calls_with_numbers_are_what_each_would_be(code, wanted):
    data = b"\x80\x04(" + SIZE + b"0" + (b"h\x00" + code) * 3 + b"t."
    sizes = pickles.load(data, where="a test", classes=TORCH)
    assert [tuple(size) for size in sizes] == [wanted] * 3
    assert all(type(size) is TorchSize for size in sizes)
    # The memo counts on as if nothing had been left out: the last entry is the last size.
    entries = 1 + 3 * (3 if wanted else 2)
    again = pickles.load(data[:-2] + b"h" + bytes([entries - 1]) + b"t.", where="", classes=TORCH)
    assert type(again[-1]) is TorchSize
    with pytest.raises(CheckpointError):
        pickles.load(data[:-2] + b"h" + bytes([entries]) + b"t.", where="a test", classes=TORCH)


def test_numbers_of_which_a_tuple_takes_some_are_not_all_taken():
    data = b"\x80\x04(" + SIZE + b"0h\x00K\x01K\x02\x85\x94\x85\x94R\x94t."
    with pytest.raises(UnsafeCheckpointError, match="calls a int"):
        pickles.load(data, where="a test", classes=TORCH)


def test_many_calls_that_are_alike_count_one_by_one():
    data = b"\x80\x04(" + SIZE + b"0" + b"h\x00)\x85\x94R\x94" * 1000 + b"t."
    few = pickles.Limits(containers=-len(data) // 8 + 500)
    with pytest.raises(UnsafeCheckpointError, match="far more objects"):
        pickles.load(data, where="a test", classes=TORCH, limits=few)


# --- opcodes that nobody writes any more, and calls that nobody would write


@pytest.mark.parametrize(
    "data",
    [
        b"(icollections\nOrderedDict\n.",
        b"(ccollections\nOrderedDict\no.",
        b"\x80\x04" + glob("collections", "OrderedDict") + b")}\x92.",
        b"K\x05(0.",  # a mark is popped as if it were a value
        b"S'it\\'s'\n.",
        b'S"a\\x41"\n.',
        b"(lp0\nI1\naI01\na.",
        b"(dp0\nS'a'\nI1\ns.",
        b"L12L\n.",
    ],
)
def test_rare_opcodes_are_read_as_python_reads_them(data):
    assert same(pickles.load(data, where="x"), pickle.loads(data))


def test_a_text_of_python_2_that_is_none_stays_bytes():
    assert pickles.load(b"U\x01\xff.", where="x") == b"\xff"
    assert pickles.load(b"U\x02\xc3\xa9.", where="x") == "é"


def test_a_class_fetched_by_its_long_number_is_called_the_same_way():
    code = b"K\x05\x85\x94\x85\x94R\x94"
    data = b"\x80\x04(" + SIZE + b"0" + (b"j\x00\x00\x00\x00" + code) * 2 + b"t."
    sizes = pickles.load(data, where="x", classes=TORCH)
    assert [tuple(size) for size in sizes] == [(5,), (5,)]


def torch_call(name, *args):
    module, _, cls = name.rpartition(".")
    return p4(call(module, cls, *args))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"h\x05.", "memo 5 was never put|not valid|list index"),
        (b"S1\n.", "without quotes"),
        (b"S'a\n.", "without quotes"),
        (p4(b"K\x01Q"), "outside of itself"),
        (p4(glob("collections", "OrderedDict") + b"]R"), "arguments are no tuple"),
        (torch_call("torch.device", u("a b")), "a device of another kind"),
        (torch_call("torch.device", u("x" * 41)), "a device of another kind"),
        (torch_call("torch.device", u("cpu"), u("0")), "a device of another number"),
        (torch_call("torch.Size", b"K\x01"), "a size of no numbers"),
        (torch_call("torch.Size", b"(K\x01Nt"), "a size of no numbers"),
        (torch_call("torch.Size", b"(\x88t"), "a size of no numbers"),
        (torch_call("torch._utils._rebuild_parameter", b"N", b"\x88", b"N"), "no tensor"),
        (
            torch_call("torch._tensor._rebuild_from_type_v2", b"N", b"N", b")", b"N"),
            "a tensor of no type",
        ),
        (
            torch_call(
                "torch._tensor._rebuild_from_type_v2",
                glob("torch", "Size"),
                glob("torch", "Tensor"),
                b")",
                b"N",
            ),
            "a tensor made by torch.Size|needs torch",
        ),
    ],
)
def test_calls_that_make_no_sense_are_refused(data, what):
    with pytest.raises((FormatError, UnsafeCheckpointError), match=what):
        pickles.load(data, where="x", classes=TORCH)


def test_what_stands_for_torchs_plain_types_is_compared_with_them():
    import torch

    device = pickles.load(torch_call("torch.device", u("cuda"), b"K\x01"), where="x", classes=TORCH)
    assert (str(device), repr(device)) == ("cuda:1", "device('cuda:1')")
    assert device == torch.device("cuda", 1)
    assert device != torch.device("cuda", 0)
    assert device != "cuda:1"
    assert len({device, TorchDevice("cuda", 1), TorchDevice("cpu")}) == 2
    dtype = TorchDType("float32")
    assert dtype == torch.float32
    assert dtype != torch.float64
    assert dtype != "torch.float32"
    assert (repr(dtype), len({dtype, TorchDType("float32")})) == ("torch.float32", 1)


# --- parts of other systems' pickles


def test_dtypes_named_by_a_class_and_scalars_as_text():
    made = pickles.load(p4(call("numpy", "dtype", glob("numpy", "float32"))), where="x")
    assert made.name == "float32"
    dtype = call("numpy", "dtype", u("i2"))
    text = call("numpy.core.multiarray", "scalar", dtype, b"X\2\0\0\0\5\1")
    assert pickles.load(p4(text), where="x") == 0x105


def test_states_of_classes_with_slots_are_joined():
    known = records("m", "Slotted")
    for state, wanted in (
        (({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
        ((None, {"b": 2}), {"b": 2}),
        (({"a": 1}, 2), ({"a": 1}, 2)),
    ):
        body = glob("m", "Slotted") + b")R" + pickle.dumps(state, 2)[2:-1] + b"b"
        assert pickles.load(p4(body), where="x", classes=known).state == wanted


def test_a_file_is_read_as_its_bytes_are(tmp_path):
    (tmp_path / "a").write_bytes(pickle.dumps([1, 2]))
    with (tmp_path / "a").open("rb") as file:
        assert pickles.load(file, where="x") == [1, 2]
    with (tmp_path / "a").open("rb") as file, pytest.raises(FormatError, match="more than 9 bytes"):
        pickles.load(file, where="x", limits=pickles.Limits(nbytes=9))


def test_memos_that_were_never_put():
    for code in (b"h\1", b"g1\n", b"j\1\0\0\0"):
        with pytest.raises(FormatError):
            pickles.load(b"\x80\4K\1q\0" + code + b".", where="x")


def test_sets_are_made_of_sequences():
    assert pickles.load(p4(call("builtins", "set", b"](K\1K\2e")), where="x") == {1, 2}
    for other in (u("abc"), b"}" + u("k") + b"K\1s", b"K\1"):
        with pytest.raises(FormatError, match=r"no builtins\.set is made from this"):
            pickles.load(p4(call("builtins", "set", other)), where="x")


def test_a_tuple_too_large_for_a_key():
    wide = "(" + "K\1" * 30 + "t"
    nested = wide.encode()
    for _ in range(3):
        nested = b"(" + nested + b"q\0" + b"h\0" * 30 + b"t"
    with pytest.raises(FormatError, match="too large for a key"):
        pickles.load(b"\x80\4}" + nested + b"K\1s.", where="x")


def test_torchs_names_and_classes_of_tensors():
    named = "torch.serialization", "_get_layout"
    assert pickles.load(p4(call(*named, u("torch.strided"))), where="x", classes=TORCH).name
    for wrong in (b"K\1", pickle.dumps("x" * 101, 2)[2:-1]):
        with pytest.raises(FormatError, match="no name"):
            pickles.load(p4(call(*named, wrong)), where="x", classes=TORCH)
    rebuild = glob("torch._utils", "_rebuild_tensor_v2")
    other = call(
        "torch._tensor", "_rebuild_from_type_v2", rebuild, glob("torch", "Size"), b")", b"}"
    )
    with pytest.raises(FormatError, match=r"a tensor of class torch\.Size cannot be read"):
        pickles.load(p4(other), where="x", classes=TORCH)


def test_lazy_bits_are_refused():
    def persistent(given_):
        return Storage("float32", 16)

    def tensor(bits):
        size = b"K\4\x85K\1\x85"
        fields = (b"K\0Q", b"K\0", size, b"\x89", b"N", bits)
        return p4(call("torch._utils", "_rebuild_tensor_v2", *fields))

    made = pickles.load(
        tensor(b"}" + u("conj") + b"\x89s"), where="x", classes=TORCH, persistent=persistent
    )
    assert made.shape == (4,)
    with pytest.raises(FormatError, match="lazy bits"):
        pickles.load(
            tensor(b"}" + u("conj") + b"\x88s"), where="x", classes=TORCH, persistent=persistent
        )


def test_parameters_of_arrays_of_numpy():
    array = pickle.dumps(np.arange(3), 2)[2:-1]

    def device(dtype):
        fields = array, glob("torch", dtype), u("xla"), b"\x89"
        return p4(call("torch._utils", "_rebuild_device_tensor_from_numpy", *fields))

    made = pickles.load(device("int64"), where="x", classes=TORCH)
    assert made.array().tolist() == [0, 1, 2]
    with pytest.raises(FormatError, match="stored as int64"):
        pickles.load(device("int32"), where="x", classes=TORCH)
    with pytest.raises(FormatError, match="a parameter that is no tensor"):
        pickles.load(
            p4(call("torch._utils", "_rebuild_parameter", b"K\1", b"\x88", b"N")),
            where="x",
            classes=TORCH,
        )


def test_an_array_that_is_also_a_tensor_of_bfloat16_stays_what_it_is():
    array = pickle.dumps(np.arange(3, dtype=np.float32), 2)[2:-1]
    fields = b"j\xf0\0\0\0", glob("torch", "bfloat16"), u("xla:0"), b"\x89"
    tensor = call("torch._utils", "_rebuild_device_tensor_from_numpy", *fields)
    data = p4(b"](" + array + b"r\xf0\0\0\0" + tensor + b"e")
    raw, made = pickles.load(data, where="x", classes=TORCH)
    assert [raw.array().dtype, made.array().dtype] == ["float32", "bfloat16"]
    assert made.array().tolist() == raw.array().tolist() == [0, 1, 2]


def colliding(bits: int) -> list[int]:
    """Numbers that Python's dict of `2 ** bits` places keeps, and of which a quarter is looked for
    in as many places as there are, nearly: half of all places are a chain that all others follow.
    """
    mask = (1 << bits) - 1
    place = np.full(1 << bits, -1)
    chain, at = [], 0
    for number in range(1 << bits - 1):
        chain.append(at)
        place[at] = number
        at = (5 * at + 1) & mask
    random, found = np.random.default_rng(0), []
    while len(found) < (1 << bits + 1) // 3 - len(chain) - 10:
        keys = random.integers(1 << bits, 1 << 31, 1 << 20)
        at, rest = keys & mask, keys.copy()
        while len(keys) and rest.any():
            taken = place[at] >= 0
            keys, at, rest = keys[taken], at[taken], rest[taken] >> 5
            at = (5 * at + rest + 1) & mask
        found += keys[(place[at] >= 0) & (place[at] < len(chain) // 8)].tolist()
        found = list(dict.fromkeys(found))
    return chain + found[: (1 << bits + 1) // 3 - len(chain) - 10]


def test_numbers_that_collide_as_keys_are_not_looked_for_for_ever():
    numbers = colliding(17)
    for number in (lambda n: b"J" + struct.pack("<i", n), lambda n: b"G" + struct.pack(">d", n)):
        data = p4(b"}(" + b"".join(number(n) + b"N" for n in numbers) + b"u")
        begun = time.thread_time()
        with pytest.raises(UnsafeCheckpointError, match="far too long to find"):
            pickles.load(data, where="x")
        assert time.thread_time() - begun < 3
    pairs = b"](" + b"".join(b"](J" + struct.pack("<i", n) + b"Ne" for n in numbers) + b"e"
    with pytest.raises(FormatError, match="other arguments"):
        pickles.load(p4(glob("collections", "OrderedDict") + pairs + b"\x85R"), where="x")


def test_tuples_that_collide_are_not_looked_for_for_ever():
    tuples = colliding_tuples(600)
    assert len(set(map(hash, tuples))) == 1
    limits = pickles.Limits(searching=0.02)
    table = dict.fromkeys(tuples)
    for value in (table, collections.Counter(table), set(tuples), frozenset(tuples)):
        for protocol in (2, 4):
            with pytest.raises(UnsafeCheckpointError, match="tuples as keys that take far") as told:
                pickles.load(pickle.dumps(value, protocol), where="x", limits=limits)
            assert "could run code" not in str(told.value)


def test_states_of_tuples_that_collide_are_not_joined_for_ever():
    state = pickle.dumps(dict.fromkeys(colliding_tuples(400)), 2)[2:-1]
    before = b"}" + u("a") + b"Nsr\xf0\1\0\0" + state + b"r\xf1\1\0\0" + glob("m", "S") + b")R"
    body = before + b"j\xf0\1\0\0j\xf1\1\0\0\x86b" * 200
    begun = time.thread_time()
    with pytest.raises(UnsafeCheckpointError, match="far too long to find"):
        pickles.load(p4(body), where="x", classes=records("m", "S"))
    assert time.thread_time() - begun < 3


def test_what_takes_long_to_look_for_is_not_shared_for_ever():
    slow = dict.fromkeys(colliding_tuples(600))
    assert pickles.load(pickle.dumps([slow, slow]), where="x") == [slow, slow]
    for each in (slow, set(slow)):
        with pytest.raises(UnsafeCheckpointError, match="values that share parts"):
            pickles.load(pickle.dumps([each] * 100), where="x")


def test_plain_values_are_not_shared_for_ever_either():
    table, items = {f"key {at}": at for at in range(1000)}, [{}, *range(1000)]
    for each in (table, items, list(range(1000))):
        with pytest.raises(UnsafeCheckpointError, match="values that share parts would be"):
            pickles.load(pickle.dumps([each] * 2000), where="x")
        assert pickles.load(pickle.dumps([each] * 300), where="x") == [each] * 300
    long = list(range(200_000))  # what workers share, say
    assert pickles.load(pickle.dumps([long] * 16), where="x") == [long] * 16


def test_a_tuple_as_a_key_again_and_again_is_not_walked_for_ever():
    numbers, text = b"(" + b"K\1" * 99 + b"tq\0", b"X" + struct.pack("<I", 10**6) + b"x" * 10**6
    longs = b"(" + text + b"2" * 98 + b"tq\0(" + text + b"2" * 98 + b"tq\1"
    for tuples, keys in ((numbers, b"h\0N" * 300_000), (longs, b"h\0Nh\1N" * 10_000)):
        begun = time.thread_time()
        with pytest.raises(UnsafeCheckpointError, match="too large keys"):
            pickles.load(p4(tuples + b"}(" + keys + b"u"), where="x")
        assert time.thread_time() - begun < 3


def test_long_texts_as_keys_again_and_again_are_not_compared_for_ever():
    def text(letters: int) -> bytes:
        return b"X" + struct.pack("<I", letters) + b"x" * letters

    two = b"(" + text(10**6) + b"q\0" + text(10**6) + b"q\1l0"
    pairs = b"](" + b"](h\0Neh\1N\x86" * 2000 + b"e\x85R"
    classes = {**TORCH, "x" * 10**6 + "." + "x" * 10**6: dict}
    for body, what in (
        (b"}(" + b"h\0Nh\1N" * 20_000 + b"u", "too large keys"),
        (b"h\0h\1\x930h\1h\0\x930" * 10_000 + b"N", "too large keys"),
        (glob("collections", "OrderedDict") + pairs, "an odd key"),
    ):
        begun = time.thread_time()
        with pytest.raises(CheckpointError, match=what):
            pickles.load(p4(two + body), where="x", classes=classes)
        assert time.thread_time() - begun < 0.5
    names = {"x" * 300 + str(at): at for at in range(1000)}
    assert pickles.load(pickle.dumps([dict(names) for _ in range(20)]), where="x")[-1] == names


def finished(value: object) -> object:
    return Finishing("", "x").finished(pickles.load(pickle.dumps(value), where="x", classes=TORCH))


def test_many_uuids_that_nobody_chose_are_keys_and_members():
    table = {uuid.UUID(bytes=np.random.default_rng(at).bytes(16)): at for at in range(30_000)}
    state = [table, set(table), frozenset(table), {(key, 1): 0 for key in table}]
    begun = time.thread_time()
    assert finished(state) == state
    assert time.thread_time() - begun < 5


HOLDING = {
    "keys": dict.fromkeys,
    "counted": collections.Counter,
    "members": set,
    "frozen": frozenset,
    "in tuples": lambda made: {((each,), 1): 0 for each in made},
    "in sets": lambda made: {frozenset([*made[:50], each]): 0 for each in made[50:200]},
}


@pytest.mark.parametrize("how", HOLDING)
def test_uuids_that_collide_are_not_looked_for_for_ever(how):
    colliding = [uuid.UUID(int=at * (2**61 - 1) + 5) for at in range(3000)]
    assert len(set(map(hash, colliding))) == 1
    stored = pickle.dumps(HOLDING[how](colliding))
    limits, begun = pickles.Limits(searching=0.1), time.thread_time()
    with pytest.raises(UnsafeCheckpointError, match=r"far too long to find.*nothing of it is read"):
        pickles.load(stored, where="x", limits=limits)
    assert time.thread_time() - begun < 2


def test_uuids_that_take_long_to_look_for_are_not_shared_for_ever():
    slow = {uuid.UUID(int=at * (2**61 - 1)): at for at in range(1000)}
    assert finished([slow, slow]) == [slow, slow]
    with pytest.raises(UnsafeCheckpointError, match="values that share parts"):
        pickles.load(pickle.dumps([slow] * 100), where="x")


def test_a_uuid_without_a_number_is_no_key():
    with pytest.raises(FormatError, match="a UUID without a number"):
        pickles.load(p4(b"}" + glob("uuid", "UUID") + b")\x81Ns"), where="x")


def test_many_tuples_are_keys_and_members():
    merges = {(f"a{at}", "b"): at for at in range(50_000)}
    for protocol in (2, 4):
        state = pickles.load(pickle.dumps([merges, set(merges)], protocol), where="x")
        assert state == [merges, set(merges)]


def test_many_numbers_that_nobody_chose_are_keys_and_members():
    numbers = np.random.default_rng(0).integers(-(2**62), 2**62, 200_000).tolist()
    state = [dict.fromkeys(numbers), set(numbers), frozenset(map(float, numbers))]
    for protocol in (2, 4):
        assert pickles.load(pickle.dumps(state, protocol), where="x") == state

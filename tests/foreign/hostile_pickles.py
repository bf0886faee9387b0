"""Pickles that nobody should read, by name. Run as a script it reads each, and tells what happened.

It prints one JSON line for each: the error, how long it took, and whether it was memory that ended
it. The limits of memory are set before the first.
"""

from __future__ import annotations

import itertools
import json
import pickle
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

M = "/tmp/shardkeep-was-here"  # no gadget gets as far as to make it


def u(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def glob(module: str, name: str) -> bytes:
    return u(module) + u(name) + b"\x93"


def call(module: str, name: str, *args: bytes) -> bytes:
    return glob(module, name) + b"(" + b"".join(args) + b"tR"


def p4(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def colliding_tuples(
    count: int,
    fronts: Iterable[tuple[int, ...]] | None = None,
    low: int = 2 - 2**61,
    high: int = 2**61 - 1,
) -> list[tuple[int, ...]]:
    """Tuples of one hash: the last number of each, of [low, high), takes back what those before it
    changed."""
    size, factor = 2**64, 14029467366897019727
    inverse = pow(factor, -1, size)
    found: list[tuple[int, ...]] = []
    for front in fronts or ((*[300] * 97, number) for number in itertools.count(2)):
        mixed = 2870177450012600261
        for item in front:
            mixed = (mixed + item * factor) % size
            mixed = (mixed << 31 | mixed >> 33) % size * 11400714785074694791 % size
        last = (123456789 - mixed) * inverse % size
        last -= size if last >= 2**63 else 0
        if low <= last < high and last != -1:  # such a number is its own hash
            found.append((*front, last))
        if len(found) == count:
            break
    return found


def gadgets() -> dict[str, bytes]:
    run = u(f"touch {M}")
    code = u(f"open({M!r}, 'w')")
    storage = b"(" + u("storage") + glob("torch", "FloatStorage") + u("0") + u("cpu") + b"K\x04tQ"

    def tensor(*fields: bytes) -> bytes:
        return p4(call("torch._utils", "_rebuild_tensor_v2", storage, *fields, b"\x89", b"N"))

    def ints(*numbers: int) -> bytes:
        return b"(" + b"".join(pickle.dumps(n, 2)[2:-1] for n in numbers) + b"t"

    def two(index: int) -> bytes:
        return b"h" + bytes([index]) + b"h" + bytes([index])

    def pairs(first: int) -> bytes:
        return b"".join(two(i) + b"\x86\x940" for i in range(first, 60))

    array = call(
        "numpy.core.multiarray", "_reconstruct", glob("numpy", "ndarray"), ints(0), b"C\x01b"
    )
    sized = glob("collections", "OrderedDict") + b")R"
    every = {
        # --- code by name
        "os.system": p4(call("os", "system", run)),
        "posix.system": p4(call("posix", "system", run)),
        "nt.system": p4(call("nt", "system", run)),
        "os.system in protocol 0": f"cos\nsystem\n(S'touch {M}'\ntR.".encode(),
        "subprocess.Popen": p4(call("subprocess", "Popen", run)),
        "subprocess.check_output": p4(call("subprocess", "check_output", run)),
        "builtins.eval": p4(call("builtins", "eval", code)),
        "builtins.exec": p4(call("builtins", "exec", code)),
        "builtins.getattr": p4(call("builtins", "getattr", glob("builtins", "dict"), u("get"))),
        "builtins.__import__": p4(call("builtins", "__import__", u("os"))),
        "builtins.open": p4(call("builtins", "open", u(M), u("w"))),
        "builtins.compile": p4(call("builtins", "compile", code, u(""), u("exec"))),
        "builtins.type": p4(call("builtins", "type", u("x"), b")", b"}")),
        "builtins.map": p4(call("builtins", "map", glob("builtins", "dict"), b"]")),
        "__builtin__.apply": f"c__builtin__\napply\n(cos\nsystem\n(S'touch {M}'\ntltR.".encode(),
        "importlib.import_module": p4(call("importlib", "import_module", u("os"))),
        "operator.attrgetter": p4(call("operator", "attrgetter", u("__class__"))),
        "functools.partial": p4(call("functools", "partial", glob("builtins", "dict"))),
        "runpy.run_path": p4(call("runpy", "run_path", u(M))),
        "pickle.loads in a pickle": p4(call("pickle", "loads", b"C\x01.")),
        "_pickle.Unpickler": p4(call("_pickle", "Unpickler", b"N")),
        "torch.load in a pickle": p4(call("torch", "load", u(M))),
        "torch.hub": p4(call("torch.hub", "load", u("x"), u("y"))),
        "torch.jit": p4(call("torch.jit._script", "unpackage_script_module", b"N")),
        "numpy.load": p4(call("numpy", "load", u(M))),
        "numpy.testing runstring": p4(call("numpy.testing._private.utils", "runstring", code)),
        "ctypes.CDLL": p4(call("ctypes", "CDLL", u("libc.so.6"))),
        "copyreg._reconstructor": p4(
            call("copyreg", "_reconstructor", glob("builtins", "dict"), glob("os", "system"), b"N")
        ),
        "copyreg._reconstructor of listed names": p4(
            call("copyreg", "_reconstructor", glob("builtins", "dict"), glob("builtins", "dict"))
        ),
        "our own pickle machine": p4(call("shardkeep.foreign.pickles", "load", b"C\x01.")),
        # --- listed names, bent
        "a dotted name": p4(call("builtins", "dict.fromkeys", b"]")),
        "a dotted module": p4(call("collections.OrderedDict", "fromkeys", b"]")),
        "dunder of a class": p4(call("builtins", "dict.__class__.__subclasses__")),
        "a name with a zero": p4(u("builtins") + b"\x8c\x05set\0x\x93)R"),
        "a call of what a call gave": p4(sized + b")R"),
        "a call of a text": p4(u("os.system") + b"(" + run + b"tR"),
        "a class among the values": p4(b"]" + glob("builtins", "dict") + b"a"),
        "a class as a key": p4(b"}" + glob("builtins", "dict") + b"Ns"),
        "state of a class": p4(glob("builtins", "dict") + b"}" + u("__call__") + b"Nsb"),
        "slots of a class": p4(glob("builtins", "dict") + b"N}" + u("make") + run + b"s\x86b"),
        "state of a list": p4(b"]}" + u("append") + b"Nsb"),
        "slots of a dict": p4(sized + b"N}" + u("__class__") + b"Ns\x86b"),
        "state of a constant": p4(glob("torch", "float32") + b"}" + u("name") + b"Nsb"),
        "state of a scalar type": p4(glob("numpy", "float32") + b"(K\x03U\x01>NNNtb"),
        "items of a text": p4(u("x") + b"Na"),
        "items of a class": p4(glob("builtins", "dict") + u("get") + b"Ns"),
        "members of a dict": p4(b"}(K\x01\x90"),
        "INST": f"(S'touch {M}'\nios\nsystem\n.".encode(),
        "OBJ": f"(cos\nsystem\nS'touch {M}'\no.".encode(),
        "NEWOBJ": p4(glob("os", "system") + b"(" + run + b"t\x81"),
        "NEWOBJ_EX with keywords": p4(glob("builtins", "dict") + b")}" + u("a") + b"Ns\x92"),
        "EXT1": p4(b"\x82\x01)R"),
        "EXT2": p4(b"\x83\x01\0)R"),
        "EXT4": p4(b"\x84\x01\0\0\0)R"),
        "a buffer outside": b"\x80\x05\x97.",
        "a persistent id": p4(run + b"Q"),
        "a persistent id as text": f"Pos.system {M}\n.".encode(),
        "a factory of a defaultdict": p4(call("collections", "defaultdict", glob("os", "system"))),
        "a tensor made by set": p4(
            call("torch._tensor", "_rebuild_from_type_v2", glob("builtins", "set"),
                 glob("torch", "Tensor"), b"(]t", b"N")
        ),
        "a tensor of a class": p4(
            call("torch._tensor", "_rebuild_from_type_v2",
                 glob("torch._utils", "_rebuild_tensor_v2"), glob("os", "system"), b")", b"N")
        ),
        # --- storages, bent (the persistent ids give one of four float32)
        "an offset past the end": tensor(b"K\x05", ints(1), ints(1)),
        "a view past the end": tensor(b"K\x02", ints(3), ints(1)),
        "a stride past the end": tensor(b"K\x00", ints(2), ints(4)),
        "a negative stride": tensor(b"K\x03", ints(4), ints(-1)),
        "a negative offset": tensor(b"J\xff\xff\xff\xff", ints(1), ints(1)),
        "a negative size": tensor(b"K\x00", ints(-1), ints(1)),
        "sizes past 64 bits": tensor(b"K\x00", ints(2**33, 2**33), ints(0, 0)),
        "one element for ever": tensor(b"K\x00", ints(2**40), ints(0)),
        "size and stride that differ": tensor(b"K\x00", ints(2, 2), ints(1)),
        "a size of texts": tensor(b"K\x00", b"(" + u("2") + b"t", ints(1)),
        "a thousand dimensions": tensor(b"K\x00", ints(*[1] * 1000), ints(*[1] * 1000)),
        "a tensor of a text": p4(call("torch._utils", "_rebuild_tensor_v2", u("x"), b"K\x00",
                                      ints(1), ints(1), b"\x89", b"N")),
        "an array of more than there is": p4(
            array + b"(K\x01" + ints(2**40) + call("numpy", "dtype", u("f4"), b"\x89", b"\x88")
            + b"\x89C\x04abcdtb"
        ),
        "an array of objects": p4(
            array + b"(K\x01" + ints(1)
            + call("numpy", "dtype", u("O"), b"\x89", b"\x88") + b"\x89]tb"
        ),
        # --- memory and time
        "BYTEARRAY8 of terabytes": b"\x80\x05\x96" + struct.pack("<Q", 2**42) + b"x.",
        "BINBYTES8 of terabytes": p4(b"\x8e" + struct.pack("<Q", 2**42)),
        "BINUNICODE8 past 64 bits": p4(b"\x8d" + b"\xff" * 8),
        "BINUNICODE of gigabytes": p4(b"X" + struct.pack("<I", 2**32 - 1)),
        "a frame of terabytes": b"\x80\x04\x95" + struct.pack("<Q", 2**42) + b"N.",
        "LONG4 of gigabytes": p4(b"\x8b" + struct.pack("<I", 2**31 - 1)),
        "LONG4, negative": p4(b"\x8b\xff\xff\xff\xff"),
        "a long integer": p4(b"\x8b" + struct.pack("<I", 2**20) + b"\x01" * 2**20),
        "a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
        "memo 4 billion": p4(b"Nr\xff\xff\xff\xff"),
        "memo of a billion digits": b"Np" + b"9" * 4000 + b"\n.",
        "memo never put": p4(b"h\x07"),
        "a negative memo": b"Np-1\n.",
        "bytearray of a number": p4(call("builtins", "bytearray", b"J\x00\x00\x00\x7f")),
        "bytes of a number": p4(call("builtins", "bytes", b"J\x00\x00\x00\x7f")),
        "laughs": p4(b"]\x940" + b"".join(
            b"](" + two(i) + b"e\x940" for i in range(60)) + b"h\x3c"),
        "laughs of tuples": p4(b"]\x940" + pairs(0) + b"h\x3c"),
        "laughs of tuples as a key": p4(b"K\x01\x940" + pairs(0) + b"}h\x3cNs"),
        "laughs of tuples in a set": p4(
            b"K\x01\x940" + pairs(0) + glob("builtins", "set") + b"]h\x3ca\x85R"),
        "laughs of tuples in a frozen set": p4(b"K\x01\x940" + pairs(0) + b"(h\x3c\x91"),
        "laughs of tuples as a name": p4(b"K\x01\x940" + pairs(0) + b"h\x3c" + u("x") + b"\x93"),
        "a deep tuple": p4(b")" + b"\x85" * 300_000),
        "a deep tuple as a key": p4(b"})" + b"\x85" * 300_000 + b"Ns"),
        "a deep list": p4(b"]" * 100_000 + b"a" * 99_999),
        "deep marks": p4(b"(" * 1_000_000),
        "a list that holds itself": p4(b"]\x94h\x00a"),
        "a dict that holds itself": p4(b"}\x94K\x01h\x00s"),
        "a tuple in its own list": p4(b"]\x94h\x00\x85\x94ah\x01"[:-2]),
        "a million sets": p4(b"]" + b"(" + b"\x8f" * 1_000_000 + b"e"),
        "a million dicts": p4(b"]" + b"(" + b"}" * 3_000_000 + b"e"),
        "copies of copies": p4(
            b"B" + struct.pack("<I", 10**6) + b"x" * 10**6 + b"\x94" + glob("builtins", "bytearray")
            + b"\x94](" + b"h\x01h\x00\x85R" * 5000 + b"e"
        ),
        "lists of copies": p4(
            b"](" + b"N" * 10**5 + b"e\x94" + glob("collections", "deque")
            + b"\x94](" + b"h\x01h\x00\x85R" * 5000 + b"e"
        ),
        "sets of one, of long lists": p4(
            b"](" + b"K\x01" * 10**5 + b"e\x94" + glob("builtins", "set")
            + b"\x94](" + b"h\x01h\x00\x85R" * 20_000 + b"e"
        ),
        "long states set again and again": p4(
            array + b"\x940X" + struct.pack("<I", 10**6) + b"x" * 10**6 + b"\x940"
            + call("numpy", "dtype", u("u1")) + b"\x940"
            + (b"h\x00(K\x01" + ints(10**6) + b"h\x02\x89h\x01tb0") * 20_000 + b"N"
        ),
        "fractions of long numbers": p4(
            pickle.dumps(3**300_000, 2)[2:-1] + b"\x94" + glob("fractions", "Fraction")
            + b"\x94](" + b"h\x01h\x00h\x00\x86R" * 20_000 + b"e"
        ),
        "paths of many parts": p4(
            b"(" + u("") * 900 + b"t\x940" + glob("pathlib", "PurePosixPath")
            + b"\x94](" + b"h\x01h\x00R" * 20_000 + b"e"
        ),
        "a long key of a storage": p4(
            b"(" + u("storage") + glob("torch", "FloatStorage") + b"X" + struct.pack("<I", 10**6)
            + b"0" * 10**6 + u("cpu") + b"K\x04tQ"
        ),
        "keys that collide": p4(b"}(" + b"".join(
            pickle.dumps((2**61 - 1) * (2**64 + i), 2)[2:-1] + b"N" for i in range(40_000)) + b"u"),
        "range of long numbers": p4(call("builtins", "range", b"N", b"N", b"N")),
        "a decimal of many digits": p4(call("decimal", "Decimal", b"X" + struct.pack("<I", 10**6)
                                            + b"9" * 10**6)),
        "a fraction with an exponent": p4(call("fractions", "Fraction", u("1e999999999"))),
        # --- no pickles
        "nothing": b"",
        "text": b"hello, world\n",
        "a stop": b".",
        "two values": p4(b"NN"),
        "protocol 9": b"\x80\x09N.",
        "an opcode that is none": p4(b"\xff"),
        "a stack that is empty": p4(b"R"),
        "a tuple of nothing": p4(b"\x87"),
        "a mark that is not there": p4(b"t"),
        "an odd number of items": p4(b"}(K\x01K\x02K\x03u"),
        "bad UTF-8": p4(b"\x8c\x02\xff\xfe"),
        "a list as a key": p4(b"}]Ns"),
        "cut in a text": b"\x80\x04\x8c\x20abc",
        "a line without an end": b"cos",
    }  # fmt: skip
    return every


def read(data: bytes) -> object:
    from shardkeep.foreign import pickles
    from shardkeep.foreign.torch_objects import storage_id
    from shardkeep.foreign.torch_stand_ins import TORCH, Storage

    def persistent(given: object) -> object:
        kind, _, _ = storage_id(given)
        return Storage(kind.dtype, 16)

    return pickles.load(data, where="a test", classes=TORCH, persistent=persistent)


def main() -> None:
    import resource

    every = gadgets()
    with_storage = read(b"\x80\x04N.")
    assert with_storage is None  # all is imported
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + 200 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    before = set(sys.modules)
    for name, data in every.items():
        start = time.process_time()  # others may be busy on the machine
        try:
            text, kind = f"gave {type(read(data))}", "nothing"
        except BaseException as error:
            text, kind = str(error), type(error).__name__
        took = time.process_time() - start
        line = {"name": name, "kind": kind, "text": text, "s": took}
        print(json.dumps(line), flush=True)
    print(json.dumps({"imported": sorted(set(sys.modules) - before)}))


if __name__ == "__main__":
    main()

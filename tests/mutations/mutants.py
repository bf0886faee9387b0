"""Small wrong changes of a module's source: what a slip of the hand would have made of it.

A mutant is named by its place, and made from the syntax tree of the source as it is, so nothing is
ever written to the tree. Left alone: annotations, decorators, what a raise says, asserts, logging
and `strict=`, which say how we think and not what is done; and constants of a module, which are
mostly sizes and times that measurements chose.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import CO_OPTIMIZED as OPTIMIZED
from pathlib import Path
from types import CodeType

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COUNTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGING = {"debug", "info", "warning", "error", "exception"}


@dataclass(frozen=True)
class Mutant:
    """One change, found again by counting nodes."""

    source: Path
    text: str
    """Of the module as it was when this was found."""
    number: int
    """Of the node, in the order of `_nodes`."""
    variant: int
    """Of the changes that this node offers."""
    line: int
    before: str
    after: str

    def code(self):
        """The whole module, with this change."""
        tree = ast.parse(self.text)
        for number, (parent, field, index, node) in enumerate(_nodes(tree)):
            if number == self.number:
                _put(parent, field, index, list(_changes(node))[self.variant])
                break
        tree = ast.fix_missing_locations(tree)
        return compile(tree, str(self.source), "exec", dont_inherit=True)

    def functions(self):
        """What the functions that it changes become, by what they are, or None.

        None where a default, a class or the module changes: only an import can show that.
        """
        before = _compiled(self.source, self.text)
        pairs = list(zip(_codes(before), _codes(self.code()), strict=False))
        if any(_own(was) != _own(now) for was, now in pairs if not was.co_flags & OPTIMIZED):
            return None
        return {was: now for was, now in pairs if was.co_flags & OPTIMIZED and was != now}

    def __str__(self):
        return f"{self.source.name}:{self.line}: `{self.before}` -> `{self.after}`"


@functools.cache
def _compiled(source, text):
    return compile(text, str(source), "exec", dont_inherit=True)


def mutants(source):
    """All of a module, in the order of its lines."""
    found, text = [], source.read_text()
    for number, (_, _, _, node) in enumerate(_nodes(ast.parse(text))):
        for variant, changed in enumerate(_changes(node)):
            before, after = _text(node), _text(changed)
            found.append(Mutant(source, text, number, variant, node.lineno, before, after))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.number, mutant.variant))


def _codes(code):
    """A module's code and that of all classes and functions, outer ones first.

    What is inside of a function comes and goes with it.
    """
    yield code
    if not code.co_flags & OPTIMIZED:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _codes(inner)


def _own(code):
    """A code but for what is defined in it."""
    return code.co_code, code.co_names, [c for c in code.co_consts if not isinstance(c, CodeType)]


def _text(node):
    return " ".join(ast.unparse(node).split())[:90]


def _put(parent, field, index, node):
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _nodes(parent) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Every node that may be changed, with where it hangs."""
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or _left_alone(node):
                continue
            yield parent, field, index, node
            if not isinstance(node, ast.Raise):
                yield from _nodes(node)


def _left_alone(node):
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.keyword(arg="strict"):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name.isupper() or name == "__all__"
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name in LOGGING
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _changes(node) -> Iterator[ast.AST]:
    """The node, changed in each way that fits it."""
    at = {"lineno": getattr(node, "lineno", 1), "col_offset": getattr(node, "col_offset", 0)}
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                changed = copy.deepcopy(node)
                changed.ops[place] = COMPARED[type(operator)]()
                yield changed
        case ast.BinOp() if type(node.op) in COUNTED:
            changed = copy.deepcopy(node)
            changed.op = COUNTED[type(node.op)]()
            yield changed
        case ast.AugAssign():
            changed = copy.deepcopy(node)
            changed.op = COUNTED[type(node.op)]()
            yield changed
            yield ast.Pass(**at)
        case ast.BoolOp():
            changed = copy.deepcopy(node)
            changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value, **at)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1, **at)
            if node.value:
                yield ast.Constant(node.value - 1, **at)
        case ast.Return(value=ast.AST()):
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield ast.Return(ast.Constant(None), **at)
        case ast.Raise() | ast.Delete() | ast.Break() | ast.Continue():
            yield ast.Pass(**at)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield ast.Pass(**at)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield ast.Pass(**at)
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(
            node.test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant
        ):
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            changed = copy.copy(node)
            changed.func = ast.Name(SWAPPED[name], ast.Load())
            yield changed

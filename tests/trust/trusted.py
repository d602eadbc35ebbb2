"""What the trusted part is, how long it is, and small changes of it."""

import ast
import inspect
import random
import textwrap
from dataclasses import dataclass
from pathlib import Path

import privot

HOME = Path(privot.__file__).parent
FILES = [*sorted((HOME / "privacy").glob("*.py")), *sorted((HOME / "data").glob("*.py")), HOME / "release.py"]


def code_lines(path):
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    tree = ast.parse(text := path.read_text())
    words = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            words |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if line.strip() and not line.strip().startswith("#") and number not in words]


COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COUNTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.RShift: ast.LShift, ast.LShift: ast.RShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed node of one function: ``source`` is the whole function with the change."""

    module: str
    path: str
    line: int  # in the module's file
    was: str
    now: str
    source: str

    def __str__(self):
        return f"{self.module}:{self.line} {self.path}: {self.was} -> {self.now}"


def _changes(node):
    """(kind of change, new node) of each small change of a node that could matter."""
    match node:
        case ast.Compare(ops=[one]) if type(one) in COMPARED:
            yield ast.Compare(node.left, [COMPARED[type(one)]()], node.comparators)
        case ast.Compare(ops=[one, other]) if type(one) in COMPARED:  # 0 < a <= b: either side
            yield ast.Compare(node.left, [COMPARED[type(one)](), other], node.comparators)
            yield ast.Compare(node.left, [one, COMPARED.get(type(other), type(other))()], node.comparators)
        case ast.BinOp(op=op) if type(op) in COUNTED:
            yield ast.BinOp(node.left, COUNTED[type(op)](), node.right)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()) | ast.UnaryOp(op=ast.USub()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.IfExp():
            yield ast.IfExp(ast.Constant(True), node.body, node.orelse)
            yield ast.IfExp(ast.Constant(False), node.body, node.orelse)
        case ast.If():
            yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)


class _Places(ast.NodeVisitor):
    """Nodes whose value a run could depend on: no annotations, no docstrings, no words of errors."""

    def __init__(self):
        self.found = []

    def generic_visit(self, node):
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)):
            return
        self.found.append(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, (ast.Call, ast.Lambda)):
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    self.visit(each)


def functions(module):
    """(path, function) of each function and method that is written in a module."""
    for name, thing in vars(module).items():
        if inspect.isclass(thing) and thing.__module__ == module.__name__:
            for part, method in vars(thing).items():
                if _here(method, module, f"{name}.{part}"):
                    yield f"{name}.{part}", _plain(method)
        elif _here(thing, module, name):
            yield name, _plain(thing)


def _here(thing, module, path):
    thing = _plain(thing)
    return inspect.isfunction(thing) and not thing.__closure__ and (thing.__module__, thing.__qualname__) == (module.__name__, path)


def _plain(thing):
    while not inspect.isfunction(thing) and any(hasattr(thing, each) for each in ("__func__", "__wrapped__", "fget")):
        thing = next(getattr(thing, each) for each in ("__func__", "__wrapped__", "fget") if hasattr(thing, each))
    return thing


def mutants(module):
    """Every small change of every function of a module."""
    for path, function in functions(module):
        try:
            text, first = textwrap.dedent(inspect.getsource(function)), function.__code__.co_firstlineno
        except (OSError, TypeError):  # made by a decorator
            continue
        tree = ast.parse(text)
        places = _Places()
        for statement in tree.body[0].body:
            places.visit(statement)
        for node in places.found:
            for new in _changes(node):
                new = ast.fix_missing_locations(ast.copy_location(new, node))
                changed = ast.unparse(_swapped(ast.parse(text), node, new))
                if changed != ast.unparse(tree):
                    yield Mutant(module.__name__, path, first + node.lineno - 1, *(_short(each) for each in (node, new)), changed)


def _swapped(tree, node, new):
    class Swap(ast.NodeTransformer):
        def visit(self, each):
            here = isinstance(each, type(node)) and ast.dump(each, include_attributes=True) == ast.dump(node, include_attributes=True)
            return new if here else self.generic_visit(each)

    return ast.fix_missing_locations(Swap().visit(tree))


def _short(node):
    return ast.unparse(node).split("\n")[0][:60]


def sample(modules, count, seed=0):
    """So many of all of them, the same for a seed."""
    everything = [each for module in modules for each in mutants(module)]
    return random.Random(seed).sample(everything, min(count, len(everything))), len(everything)

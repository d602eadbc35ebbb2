"""What the trusted part is, how long it is, and small changes of it."""

import ast
import collections
import copy
import fnmatch
import inspect
import random
import textwrap
from dataclasses import dataclass
from pathlib import Path

import privot

HOME = Path(privot.__file__).parent
FILES = [
    *sorted((HOME / "privacy").glob("*.py")),
    *sorted((HOME / "data").glob("*.py")),
    HOME / "release/__init__.py",
]


def code_lines(path):
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    tree = ast.parse(text := path.read_text())
    words = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            words |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return [
        number
        for number, line in lines
        if line.strip() and not line.strip().startswith("#") and number not in words
    ]


COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COUNTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.RShift: ast.LShift,
    ast.LShift: ast.RShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


# Changes that no behaviour can show, by the reason: (module:function, a piece of the line, what was there, what is there now, and which
# of several such places on the line, counted from 1).
EQUIVALENT = {
    "where the search for the least noise begins, how far it strides and when it gives up: it ends within its tolerance of the same wall": [
        ("privacy.plan:Plan.calibrated", "if self.cost(roughly=True)", "True", "False"),
        ("privacy.plan:Plan.calibrated", "1 + 1e-10", "1.0", "2.0"),
        ("privacy.plan:Plan.calibrated", "1 + 1e-10", "2.0", "3.0"),
        ("privacy.plan:Plan.calibrated", "near = self._least", "1.0", "2.0"),
        ("privacy.plan:Plan.calibrated", "near = self._least", "2.0", "3.0"),
        ("privacy.plan:Plan.calibrated", "near = self._least", "1.001", "2.001"),
        ("privacy.plan:Plan.calibrated", "near = self._least", "True", "False"),
        ("privacy.plan:Plan.calibrated", "self._least(wall, near", "1.001", "2.001"),
        (
            "privacy.plan:Plan._least",
            "outside = start / stride",
            "start / stride",
            "start * stride",
        ),
        ("privacy.plan:Plan._least", "inside, outside, step = inside * step", "2.0", "3.0"),
        (
            "privacy.plan:Plan._least",
            "inside, outside, step = outside, outside / step",
            "2.0",
            "3.0",
        ),
        (
            "privacy.plan:Plan._least",
            "if inside > 1e12",
            "inside > 1000000000000.0",
            "inside >= 1000000000000.0",
        ),
        ("privacy.plan:Plan._least", "if inside > 1e12", "1000000000000.0", "1000000000001.0"),
        ("privacy.plan:Plan._least", "while outside > 1e-6", "outside > 1e-06", "outside >= 1e-06"),
        (
            "privacy.plan:Plan._least",
            "while inside / outside > within",
            "inside / outside > within",
            "inside / outside >= within",
        ),
    ],
    "a margin five times as wide as the rounding that was seen, and one part in a thousand of it": [
        ("privacy.accounting:cost", "slack = 2.0**-52", "1000", "1001"),
        ("privacy.accounting:cost", "if target > slack", "target > slack", "target >= slack"),
    ],
    "the value is the same on both sides of the change": [
        (
            "privacy.accounting:_added",
            "np.where(eps < 0",
            "eps < 0",
            "eps <= 0",
        ),  # at 0 both say delta(0)
        (
            "privacy.accounting:_added",
            "np.where(eps < 0",
            "0",
            "1",
            2,
        ),  # of np.minimum(eps, 0), which is used below 0 alone
        (
            "privacy.accounting:_poisson",
            "near = np.log1p(np.expm1(np.where(far, 0, eps))",
            "0",
            "1",
        ),  # where far, near is not looked at
        (
            "data.readers:read_idx",
            "data = file.read(count + 1)",
            "1",
            "2",
        ),  # one byte too many is as bad as two
        (
            "data.readers:_member",
            "data = file.read(max(0, min(",
            "0",
            "1",
        ),  # a size under 0 is no file's, and of none a byte is too many
        (
            "privacy.accounting:_grid",
            "if rate < 1 else -np.inf",
            "rate < 1",
            "rate <= 1",
        ),  # log1p(-1) is -inf, with a warning
        (
            "privacy.accounting:_grid",
            "if rate < 1 else -np.inf",
            "np.log1p(-rate) if rate < 1 else -np.inf",
            "np.log1p(-rate) if True *",
        ),
        ("privacy.accounting:_grid", "if rate < 1 else -np.inf", "1", "2"),
        ("privacy.accounting:_grid", "MOST_POINTS", "* < MOST_POINTS", "* <= MOST_POINTS"),
        (
            "privacy.gate:_factor",
            "norms > bound",
            "norms > bound * (1 - 1e-12)",
            "norms >= bound * (1 - 1e-12)",
        ),
        ("privacy.gate:_clip", "torch.where(factor != 0", "0.0", "1.0"),  # times a factor of 0
        (
            "privacy.gate:Gate.privatize",
            "self._mark(ticket, stage, 0, 1)",
            "*",
            "*",
        ),  # such a stage has one step, and none beyond
        (
            "privacy.gate:Gate.__init__",
            "self._many, self._replayed = 0",
            "0",
            "1",
        ),  # read after a split alone
        (
            "privacy.plan:Risk.__post_init__",
            "Budget(1.0, self.delta)",
            "1.0",
            "2.0",
        ),  # it looks at delta
        (
            "privacy.noise:noisy",
            "steps = steps +",
            "steps + *",
            "steps - *",
        ),  # the law of the noise has two equal sides
    ],
    "how fine a table of a density is, where it ends, and a guard against the rounding of a probability": [
        ("privacy.accounting:_grid", "np.linspace(-10", "4001", "4002"),
        ("privacy.accounting:_symmetric", "top = math.ceil", "600", "601"),
        ("privacy.accounting:_symmetric", "np.clip(", "1", "2"),
    ],
    "which of the streams a seed stands for; without a seed there is none": [
        ("privacy.noise:Secret.__init__", "insecure_seed, 0", "0", "1"),
        ("privacy.noise:Secret._bytes", "self._count += 1", "1", "2"),
    ],
    "memory alone: how many are done at a time": [
        ("privacy.gate:Gate.update", "places.split(max(1", "1", "2", 1),
        (
            "privacy.gate:Gate.update",
            "places.split(max(1",
            "self._portion // *",
            "self._portion * *",
        ),
        ("privacy.gate:Gate.deal", "chunk_size=max(1", "1", "2"),
        (
            "privacy.gate:Gate.deal",
            "chunk_size=max(1",
            "self._portion // rows",
            "self._portion * rows",
        ),
        (
            "privacy.gate:Gate.deal",
            "known if some is None",
            "known if some is None *",
            "known if False *",
        ),  # all of them, as a copy
        ("data.readers:read_parquet", "file.iter_batches(", "1024", "1025"),
    ],
}
SILENT = {  # arguments whose value shows in no result
    "strict": "of a zip whose sides are made from one list: it says that a writer erred",
    "non_blocking": "speed alone",
}


@dataclass(frozen=True)
class Mutant:
    """One changed node of one function: ``source`` is the whole function with the change."""

    module: str
    path: str
    line: int  # in the module's file
    was: str
    now: str
    source: str
    turn: int = 1  # which of the changes of this line that read alike

    def __str__(self):
        return f"{self.module}:{self.line} {self.path}: {self.was} -> {self.now}"


def _changes(node):
    """(kind of change, new node) of each small change of a node that could matter."""
    match node:
        case ast.Compare(ops=[one]) if type(one) in COMPARED:
            yield ast.Compare(node.left, [COMPARED[type(one)]()], node.comparators)
        case ast.Compare(ops=[one, other]) if type(one) in COMPARED:  # 0 < a <= b: either side
            yield ast.Compare(node.left, [COMPARED[type(one)](), other], node.comparators)
            yield ast.Compare(
                node.left, [one, COMPARED.get(type(other), type(other))()], node.comparators
            )
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
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)) or (
            isinstance(node, ast.keyword) and node.arg in SILENT
        ):
            return
        self.found.append(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(
                node, (ast.Call, ast.Lambda)
            ):
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
    return (
        inspect.isfunction(thing)
        and not thing.__closure__
        and (thing.__module__, thing.__qualname__) == (module.__name__, path)
    )


def _plain(thing):
    while not inspect.isfunction(thing) and any(
        hasattr(thing, each) for each in ("__func__", "__wrapped__", "fget")
    ):
        thing = next(
            getattr(thing, each)
            for each in ("__func__", "__wrapped__", "fget")
            if hasattr(thing, each)
        )
    return thing


def mutants(module):
    """Every small change of every function of a module."""
    for path, function in functions(module):
        try:
            text = textwrap.dedent(inspect.getsource(function))
            first = function.__code__.co_firstlineno
        except (OSError, TypeError):  # made by a decorator
            continue
        tree = ast.parse(text)
        places = _Places()
        for statement in tree.body[0].body:
            places.visit(statement)
        alike = collections.Counter()
        for node in places.found:
            for new in _changes(node):
                new = ast.fix_missing_locations(ast.copy_location(copy.deepcopy(new), node))
                changed = ast.unparse(_swapped(ast.parse(text), node, new))
                if changed != ast.unparse(tree):
                    line = first + node.lineno - 1
                    words = (_short(node), _short(new))
                    alike[line, words] += 1
                    yield Mutant(module.__name__, path, line, *words, changed, alike[line, words])


def _swapped(tree, node, new):
    class Swap(ast.NodeTransformer):
        def visit(self, each):
            here = isinstance(each, type(node)) and ast.dump(
                each, include_attributes=True
            ) == ast.dump(node, include_attributes=True)
            return new if here else self.generic_visit(each)

    return ast.fix_missing_locations(Swap().visit(tree))


def _short(node):
    return ast.unparse(node).split("\n")[0][:60]


def equivalent(mutant):
    """The entry of `EQUIVALENT` that a mutant is, or None."""
    line = (
        (HOME.parent / f"{mutant.module.replace('.', '/')}.py")
        .read_text()
        .splitlines()[mutant.line - 1]
    )
    for entry in (each for entries in EQUIVALENT.values() for each in entries):
        place, piece, was, now, *turn = entry
        here = place == f"{mutant.module.removeprefix('privot.')}:{mutant.path}" and piece in line
        if (
            here
            and _like(mutant.was, was)
            and _like(mutant.now, now)
            and mutant.turn in (turn or [mutant.turn])
        ):
            return entry
    return None


def _like(text, pattern):
    return text == pattern or (
        "*" in pattern and fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))
    )


def sample(modules, count, seed=0):
    """So many of all of them that could be noticed, the same for a seed."""
    everything = [
        each for module in modules for each in mutants(module) if equivalent(each) is None
    ]
    return random.Random(seed).sample(everything, min(count, len(everything))), len(everything)

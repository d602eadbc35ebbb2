"""What the trusted part is, and how long it is."""

import ast
from pathlib import Path

import privot

HOME = Path(privot.__file__).parent
FILES = sorted(
    (HOME / "privacy").glob("*.py")
)  # all that may touch sensitive records, or prices it
READERS = [*sorted((HOME / "data").glob("*.py")), *sorted((HOME / "release").glob("*.py"))]


def code_lines(path):
    """Return the numbers of the lines that hold code: not blank, no comment, no docstring."""
    tree = ast.parse(text := path.read_text())
    words = set()
    for node in ast.walk(tree):
        has_text = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if has_text and ast.get_docstring(node) is not None:
            words |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return [
        number
        for number, line in lines
        if line.strip() and not line.strip().startswith("#") and number not in words
    ]

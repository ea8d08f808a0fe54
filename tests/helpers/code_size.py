"""Size of Python code in tokens, which no layout changes, and in lines."""

import ast
import functools
import inspect
import io
import tokenize
from pathlib import Path
from types import CodeType

_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def tokens_of(folder: Path) -> int:
    """Return the number of tokens in the Python files below a folder, without comments, docstrings and commas."""
    return sum(sum(token.string != "," for token in _code(path)) for path in folder.rglob("*.py"))


def lines_of_code(code: CodeType) -> set[int]:
    """Return the lines of a function, without blank lines, comments and docstrings."""
    lines, first = inspect.getsourcelines(code)
    numbers = {number for token in _code(Path(code.co_filename)) for number in range(token.start[0], token.end[0] + 1)}
    return numbers & set(range(first, first + len(lines)))


@functools.cache
def _code(path):
    text, docstrings = path.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token for token in tokens if token.type not in _LAYOUT and token.start[0] not in docstrings]

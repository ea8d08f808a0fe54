"""Size of Python code in tokens, which no layout changes."""

import ast
import io
import tokenize
from pathlib import Path

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
    return sum(_tokens(path.read_text()) for path in folder.rglob("*.py"))


def _tokens(text: str) -> int:
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        token.type not in _LAYOUT and token.string != "," and token.start[0] not in docstrings
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )

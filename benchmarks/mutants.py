"""Mutation test of the code that everything else relies on: which of 60 small faults the tests find.

    python benchmarks/mutants.py [--only returns.py ring.py]

A fault exchanges one operator or constant of a line: + and -, < and <=, & and |, a condition and its opposite, 0 and 1,
and so on. They are sampled with a fixed seed, a number for each file, from all that are possible outside annotations,
messages, indices, defaults and keyword arguments. Each is written into a copy of this tree, in which the file's tests
run until one fails. The record has the changed line of every fault and the test that found it. Golden programs, which
notice any change of a compiled program, are not among the tests. Takes half an hour.
"""

import argparse
import ast
import copy
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

ROOT = pathlib.Path(__file__).parents[1]
# Of each file: the number of faults, and the tests of its package that hold its guarantees.
FILES = {
    "algos/returns.py": (10, "algos/test_returns.py algos/test_returns_golden.py"),
    "networks/distributions.py": (9, "networks/test_distributions.py"),
    "buffers/ring.py": (8, "buffers/test_sequences.py buffers/test_replay.py buffers/test_index.py"),
    "buffers/index.py": (9, "buffers/test_index.py buffers/test_replay.py buffers/test_views.py"),
    "parallel/rollout.py": (8, "parallel/test_rollout.py run/test_evaluation.py run/test_rows.py core/test_report.py"),
    "parallel/iteration.py": (
        8,
        "parallel/test_experience.py parallel/test_replay_ratio.py faults/test_numerics.py buffers/test_episodes.py",
    ),
    "run/directory/checkpoint.py": (8, "run/test_checkpoint.py run/test_loading.py"),
}
OPPOSITE: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.And: ast.Or,
}
OPPOSITE |= {there: here for here, there in OPPOSITE.items() if here not in (ast.FloorDiv, ast.Mod)}
LEFT_OUT = {"annotation", "returns", "decorator_list", "type_params", "defaults", "kw_defaults", "slice"}
SECONDS = 1800  # a test that takes longer has found the fault


def changed(node: ast.AST) -> ast.AST | None:
    """Return a copy of an expression with a fault, or None if it has nothing to exchange."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPPOSITE:
            new.op = OPPOSITE[type(op)]()
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            new.ops = [OPPOSITE[type(op)]()]
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub()):
            return new.operand
        case ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value = 1 if new.value == 0 else 2 * new.value
        case _:
            return None
    return new


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions that run when the module's functions are called, without messages."""
    for name, value in ast.iter_fields(node):
        if name in LEFT_OUT:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr | ast.keyword):
                yield child
                yield from expressions(child)


def faults(text: str, count: int) -> list[tuple[str, str, str]]:
    """Return `count` texts with a fault, each with its line before and after."""
    bodies = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    found = [node for body in bodies for node in expressions(body) if isinstance(node, ast.expr)]
    found = [node for node in found if node.lineno == node.end_lineno and changed(node) is not None]
    random.Random(0).shuffle(found)
    texts = []
    for node in list({node.lineno: node for node in found}.values())[:count]:
        line, start, end, lines = node.lineno, node.col_offset, node.end_col_offset, text.split("\n")
        old = lines[line - 1]
        lines[line - 1] = new = f"{old[:start]}({ast.unparse(changed(node))}){old[end:]}"
        texts.append(("\n".join(lines), old.strip(), new.strip()))
    return texts


def finder(tree: pathlib.Path, tests: str) -> str:
    """Return the test that fails in a tree, the quick ones first; "" if all pass."""
    files = [f"tests/{test}" for test in tests.split()]
    env = os.environ | {"PYTHONPATH": str(tree), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    for marks in ("not long", "long and not exact"):
        marks += " and not exhaustive and not learning and not endurance"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", marks, *files]
        try:
            done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"no end after {SECONDS} s"
        if failed := re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE):
            return failed[1]
        if done.returncode not in (0, 5):  # 5: no such tests
            return f"exit code {done.returncode}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(FILES), metavar="FILE")
    only = parser.parse_args().only
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, "HEAD"], cwd=ROOT, check=True)
        try:
            for name in only:
                count, tests = FILES[name]
                path = tree / "jaxrl" / name
                text = path.read_text()
                if failed := finder(tree, tests):
                    sys.exit(f"without a fault, {failed} fails")
                for fault, old, new in faults(text, count):
                    path.write_text(fault)
                    rows.append({"file": name, "line": old, "fault": new, "found by": finder(tree, tests)})
                    print(record.table(rows[-1:]), flush=True)
                path.write_text(text)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    if only == list(FILES):
        print(record.save("mutants", rows, found=sum(bool(row["found by"]) for row in rows), faults=len(rows)))


if __name__ == "__main__":
    main()

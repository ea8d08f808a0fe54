"""Assertions about what is refused: which fields and how many problems, whatever the sentences say."""

import contextlib
import re
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import pytest

import jaxrl
from jaxrl.parallel.program import Program
from jaxrl.sweeps.vectorized import VectorizedRuns

_NAMED = re.compile(
    r"(?<![\w-])--[a-z][\w.-]*"  # a flag
    r"|\b[A-Za-z_][\w.]*(?=(?:\[\d+\])?=)|\b[A-Z]\w*\.[a-z_]+|^\w+(?=: )"  # gamma=, PPO.gamma, seeds:
    r"|'[\w.:-][\w.:/-]*'|\b\w+:[A-Za-z][\w-]*-v\d|there/\w+"  # 'word', suite:Name-v0, a file below `there`
)


def refused(call: Callable[[], object], *fields: str) -> None:
    """Assert that a call raises exactly these problems, before anything is compiled.

    Args:
      fields: what each of the problems must name, in any order: "PPO.gamma=1.5", or "--gamma".
    """
    with nothing_compiled(), pytest.raises(jaxrl.JaxrlError) as raised:
        call()
    left = problems(raised.value)
    assert len(left) == len(fields), left
    for field in fields:
        found = [problem for problem in left if re.search(rf"(?<![\w-]){re.escape(field)}(?![\w-])", problem)]
        assert found, (field, left)
        left.remove(found[0])


def raises(
    error: type[Exception], match: str, call: Callable[..., object], /, *arguments: Any, **settings: Any
) -> None:
    """Assert that `call(*arguments, **settings)` raises this error, and that `match` is found in its message."""
    with pytest.raises(error, match=match):
        call(*arguments, **settings)


@contextlib.contextmanager
def nothing_compiled() -> Generator[None]:
    """Fail where a run's program would be started or compiled within."""
    began = mock.Mock(side_effect=AssertionError("training began"))
    with (
        mock.patch.multiple(Program, start=began, compile_chunk=began),
        mock.patch.object(VectorizedRuns, "start", began),
        mock.patch("jaxrl.sweeps.compile_for.compiled_for", began),
    ):
        yield


def problems(error: Exception) -> list[str]:
    """Return the problems of an error: of one that is no ConfigError the one that it says."""
    return list(getattr(error, "problems", [str(error)]))


def named(problem: str) -> str:
    """Return the flags, fields, environments, quoted names and files in a problem; of several suggestions the first."""
    text = re.sub(r"('[^']*')(?:(?:, | or )'[^']*')+", r"\1", problem)
    names = _NAMED.findall(text)
    return " ".join(sorted({name.strip(".'") for name in names} - {"--help", "--import"}))

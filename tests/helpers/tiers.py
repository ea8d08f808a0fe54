"""Which cases of a parametrized test `make test` runs, and which only `make test-all`."""

import pytest


def one_quick(cases, *quick):
    """Cases for `pytest.mark.parametrize`: all of them `long` but those of `quick`, or but the first."""
    cases = [case if isinstance(case, type(pytest.param())) else _as_param(case) for case in cases]
    kept = [_as_param(case).values for case in quick] or [cases[0].values]
    unknown = [values for values in kept if values not in [case.values for case in cases]]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case.values in kept else _long(case) for case in cases]


def _as_param(case):
    return pytest.param(*case) if isinstance(case, tuple | list) else pytest.param(case)


def _long(case):
    return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.long])

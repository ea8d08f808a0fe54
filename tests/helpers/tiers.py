"""Cases of a parametrized test: `make test` runs some, `make test-rest` those others that are not exhaustive."""

import pytest


def one_quick(cases, *quick):
    """Return cases for `pytest.mark.parametrize`: all are `long` but those of `quick`, or but the first."""
    cases = _as_params(cases)
    kept = _known(cases, quick or [cases[0]])
    return [case if case.values in kept else _long(case) for case in cases]


def _known(cases, asked):
    """Return the values of some cases, each named by its values or its id."""
    by_id = {case.id: case.values for case in cases if case.id is not None}
    found = [by_id[case] if isinstance(case, str) and case in by_id else _as_params([case])[0].values for case in asked]
    unknown = [values for values in found if values not in [case.values for case in cases]]
    assert not unknown, f"no such cases: {unknown}"
    return found


def _as_params(cases):
    """Return each case as an object of `pytest.param`."""
    return [
        case
        if isinstance(case, type(pytest.param()))
        else pytest.param(*(case if isinstance(case, tuple | list) else [case]))
        for case in cases
    ]


def _long(case):
    return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.long])

"""Which cases of a parametrized test `make test` runs, which `make test-rest`, and which only `make exhaustive`."""

import pytest


def one_quick(cases, *quick, rest=None):
    """Cases for `pytest.mark.parametrize`: all of them `long` but those of `quick`, or but the first.

    Of the long ones those beyond `rest`, where it is given, are `exhaustive`.
    """
    cases = _as_params(cases)
    kept = _known(cases, quick or [cases[0]])
    return [case if case.values in kept else _marked(case, pytest.mark.long) for case in _few(cases, rest, kept)]


def few(cases, *rest):
    """Cases for `pytest.mark.parametrize`: all of them `exhaustive` but those of `rest`."""
    return _few(_as_params(cases), rest, [])


def _few(cases, rest, quick):
    if rest is None:
        return cases
    kept = _known(cases, rest) + quick
    return [case if case.values in kept else _marked(case, pytest.mark.exhaustive) for case in cases]


def _known(cases, asked):
    """The values of those asked for, each by its values or its id."""
    by_id = {case.id: case.values for case in cases if case.id is not None}
    found = [by_id[case] if isinstance(case, str) and case in by_id else _as_params([case])[0].values for case in asked]
    unknown = [values for values in found if values not in [case.values for case in cases]]
    assert not unknown, f"no such cases: {unknown}"
    return found


def _as_params(cases):
    """Each as an object of `pytest.param`."""
    return [
        case
        if isinstance(case, type(pytest.param()))
        else pytest.param(*(case if isinstance(case, tuple | list) else [case]))
        for case in cases
    ]


def _marked(case, mark):
    return pytest.param(*case.values, id=case.id, marks=[*case.marks, mark])

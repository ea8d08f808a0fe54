"""Numbers of a column as text: comparable whatever their size."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.sweeps.tables import markdown, significant


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([500.0, 498.26, 20.1], ["500.0", "498.3", "20.1"]),
        ([-0.2814, -0.2791], ["-0.2814", "-0.2791"]),
        ([0.00213, 0.0], ["0.002130", "0.000000"]),
        ([12_345_678.0, 12_345_999.4], ["12345678", "12345999"]),
        ([1000.01, 1000.02], ["1000.010", "1000.020"]),
        ([math.nan, 3.0], ["nan", "3.000"]),
        ([math.nan], ["nan"]),
        ([math.inf, 1.5], ["inf", "1.500"]),
        ([0.0, 0.0], ["0.000", "0.000"]),
        ([3e20, 1.0], ["3.000000e+20", "1.000000e+00"]),
        ([2e-30, 1e-30], ["2.000000e-30", "1.000000e-30"]),
    ],
)
def test_columns(values, texts):
    assert significant(values) == texts


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_numbers_keep_their_order_and_four_digits(values):
    found = [float(text) for text in significant(values)]
    largest = max(map(abs, values))
    np.testing.assert_allclose(np.divide(found, largest or 1), np.divide(values, largest or 1), atol=6e-4)
    for value, text in zip(values, found, strict=True):
        assert all(text <= other for other_value, other in zip(values, found, strict=True) if value < other_value)
    assert len({len(text.partition(".")[2]) for text in significant(values) if "e" not in text}) <= 1
    assert all(len(text) < 30 for text in significant(values))


@given(st.floats(-1e9, 1e9), st.floats(1e-5, 1.0))
def test_what_differs_by_more_than_a_float32_rounds_looks_different(value, part):
    one, other = value, value + part * abs(value)
    if abs(other - one) > 1e-6 * max(abs(one), abs(other), 1e-12):
        texts = significant([one, other])
        assert texts[0] != texts[1]


def test_markdown_escapes_what_ends_a_cell():
    assert markdown([["a", "b|c"], ["1", "2"]]) == "| a | b\\|c |\n| ---: | ---: |\n| 1 | 2 |"

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
        ([500.0, 498.26, 20.1], ["500.00", "498.26", "20.10"]),
        ([-0.2814, -0.2791], ["-0.28140", "-0.27910"]),
        ([12_345_678.0, 12_345_999.4], ["12345678", "12345999"]),
        ([math.nan, 3.0], ["nan", "3.0000"]),
        ([math.nan], ["nan"]),
        ([math.inf, 1.5], ["inf", "1.5000"]),
        ([0.0, 0.0], ["0.0000", "0.0000"]),
        ([3e20, 1.0], ["3.0000e+20", "1.0000e+00"]),
        ([2e-30, 1e-30], ["2.0000e-30", "1.0000e-30"]),
    ],
)
def test_columns(values, texts):
    assert significant(values) == texts


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=9))
def test_numbers_keep_their_order_and_four_digits(values):
    found = [float(text) for text in significant(values)]
    largest = max(map(abs, values))
    np.testing.assert_allclose(np.divide(found, largest or 1), np.divide(values, largest or 1), atol=6e-4)
    for value, text in zip(values, found, strict=True):
        assert all(text <= other for other_value, other in zip(values, found, strict=True) if value < other_value)
    assert len({len(text.partition(".")[2]) for text in significant(values) if "e" not in text}) <= 1
    assert all(len(text) < 30 for text in significant(values))


def test_markdown_escapes_what_ends_a_cell():
    assert markdown([["a", "b|c"], ["1", "2"]]) == "| a | b\\|c |\n| ---: | ---: |\n| 1 | 2 |"

"""Records against the protobuf package: what one writes the other reads, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxrl.data import examples

tf_example = pytest.importorskip("tensorflow_datasets.core.example_parser").tf_example_pb2

INTEGERS = arrays.arrays(np.int64, st.integers(0, 40), elements=st.integers(-(2**63), 2**63 - 1))
SMALL = arrays.arrays(np.int64, st.integers(0, 300), elements=st.integers(0, 300))


def one(kind, payload, name="steps/x"):
    return examples.example([examples.feature(name, kind, payload)])


@given(INTEGERS | SMALL)
def test_integers(x):
    record = one(examples.INTEGERS, examples.packed_integers(x))
    assert list(tf_example.Example.FromString(record).features.feature["steps/x"].int64_list.value) == x.tolist()
    theirs = tf_example.Example()
    theirs.features.feature["steps/x"].int64_list.value.extend(x.tolist())
    for text in (record, theirs.SerializeToString()):
        read = examples.numbers(*examples.parse(text)["steps/x"])
        assert read.dtype == np.int64 and read.tolist() == x.tolist()


@given(arrays.arrays(np.uint32, st.integers(1, 50)))
def test_floats_keep_every_bit(bits):
    x = bits.view(np.float32)
    record = one(examples.FLOATS, x.tobytes())
    assert examples.numbers(*examples.parse(record)["steps/x"]).tobytes() == x.tobytes()
    theirs = np.asarray(tf_example.Example.FromString(record).features.feature["steps/x"].float_list.value, np.float32)
    np.testing.assert_array_equal(theirs, x)


@given(arrays.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 300))))
def test_strings(x):
    record = one(examples.BYTES, examples.byte_strings(x))
    found = tf_example.Example.FromString(record).features.feature["steps/x"].bytes_list.value
    assert list(found) == [row.tobytes() for row in x]
    _, payload = examples.parse(record)["steps/x"]
    np.testing.assert_array_equal(examples.equal_strings(payload, x.shape[1]), x)
    assert [bytes(part) for part in examples.strings(payload)] == [row.tobytes() for row in x]


def test_several_features_and_long_ones():
    values = {f"field/{n}": np.arange(n * 5000) for n in range(1, 5)}
    record = examples.example(
        [examples.feature(name, examples.INTEGERS, examples.packed_integers(x)) for name, x in values.items()]
    )
    theirs = tf_example.Example.FromString(record).features.feature
    assert {name: list(x.int64_list.value) for name, x in theirs.items()} == {n: x.tolist() for n, x in values.items()}
    assert set(examples.parse(record)) == set(values)


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
def test_damaged_records_raise_one_error_and_nothing_else(noise, at, value):
    record = bytearray(one(examples.INTEGERS, examples.packed_integers(np.arange(100, 160)), "a"))
    record[at % len(record)] = value
    for text in (noise, bytes(record), bytes(record)[: at % len(record)]):
        try:
            for kind, payload in examples.parse(text).values():
                examples.strings(payload) if kind == examples.BYTES else examples.numbers(kind, payload)
        except ValueError:  # WireError, and names that are no text
            pass

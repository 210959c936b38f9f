"""Arrays of numbers as JSON, against Python's own encoder."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.runtime.kernels._json_numbers import as_json

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 18).map(lambda power: 5 * 10**power)


@given(st.lists(NUMBERS, max_size=40))
def test_array_is_written_as_python_writes_it(numbers):
    assert (
        bytes(as_json(np.array(numbers, np.int64)))
        == json.dumps(numbers, separators=(",", ":")).encode()
    )


@pytest.mark.parametrize("digits", range(1, 20))
def test_each_length_has_its_digits_at_its_limits(digits):
    numbers = [10 ** (digits - 1), 10**digits - 1, -(10 ** (digits - 1)), 1 - 10**digits]
    numbers = [each for each in numbers if -(2**63) <= each < 2**63]
    assert json.loads(bytes(as_json(np.array(numbers, np.int64)))) == numbers


def test_other_values_have_no_form():
    encoder = msgspec.json.Encoder(enc_hook=as_json)
    with pytest.raises(NotImplementedError, match="object has no form in JSON"):
        encoder.encode({"a": object()})

"""Multipliers and divisors: which come back to the bit, and that every other one is counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_nvfp4.checkpoint import CheckpointError
from torch_nvfp4.checkpoint.scalars import Numbers, check_storable

SHORT = 1 + torch.arange(2**10) * 2.0**-10
"""Every mantissa of fp16, and so every one of bf16."""
POWERS = [2.0**power for power in (-30, -13, -1, 0, 7)]


def there(multipliers: Tensor) -> Numbers:
    return Numbers.read(multipliers, False).turned(True)


def back(divisors: Tensor) -> Numbers:
    return Numbers.read(divisors, True).turned(False)


@pytest.mark.parametrize("power", POWERS)
def test_a_short_divisor_comes_back_and_is_exact(power: float) -> None:
    divisors = SHORT * power
    multipliers = back(divisors)
    assert multipliers.inexact == 0 and torch.equal(multipliers.stored, divisors.reciprocal())
    assert torch.equal(there(multipliers.stored).stored, divisors)


@pytest.mark.parametrize("power", POWERS)
def test_the_multiplier_of_a_short_amax_comes_back(power: float) -> None:
    multipliers = SHORT * power / 2688
    divisors = there(multipliers)
    assert torch.equal(back(divisors.stored).stored, multipliers)
    assert torch.equal(Numbers.read(divisors.stored, True).meant, multipliers) == (divisors.inexact == 0)
    assert 0 < divisors.inexact < 200


def test_every_multiplier_that_is_a_reciprocal_is_exact() -> None:
    """A binade of divisors has 2^23; here every 37th, and what lies between its ends."""
    divisors = (torch.arange(0, 2**23, 37, dtype=torch.int32) | 0x45800000).view(torch.float32)
    multipliers = divisors.reciprocal()
    found = there(multipliers)
    assert found.inexact == 0 and torch.equal(found.stored.reciprocal(), multipliers)


@given(st.floats(2.0**-100, 1, width=32))
def test_what_is_not_exact_is_off_by_a_bit_and_counted(value: float) -> None:
    multiplier = torch.tensor([[value]])
    found = there(multiplier)
    read = found.stored.reciprocal()
    assert found.inexact == int(read != multiplier)
    assert abs(int(read.view(torch.int32)) - int(multiplier.view(torch.int32))) <= 1
    for near in (-2, -1, 1, 2):  # a divisor that were exact would have been taken
        other = (found.stored.view(torch.int32) + near).view(torch.float32)
        assert not found.inexact or other.reciprocal() != multiplier


def test_nothing_stays_nothing() -> None:
    found = there(torch.tensor([[torch.nan, 0.5]]))
    assert found.stored.isnan().tolist() == [[True, False]] and found.inexact == 0
    assert found.turned(False).stored.isnan().tolist() == [[True, False]]
    assert found.turned(True) is found


@pytest.mark.parametrize(
    ("value", "divisor"), [(0.0, False), (1.5, False), (torch.nan, False), (0.5, True), (1e39, True)]
)
def test_what_a_reader_would_not_believe_is_refused(value: float, divisor: bool) -> None:
    with pytest.raises(CheckpointError, match="tensor 'x' would be .*: a (divisor|multiplier) must be "):
        check_storable("x", torch.tensor(value), divisor)

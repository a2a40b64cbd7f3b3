"""The clipping factor: a number or a tensor, off, and when the norm is broken."""

from __future__ import annotations

import math

import pytest
import torch

from hybridlab.optim import clip_coefficient


@pytest.mark.parametrize("norm", [0.0, 0.3, 0.999999, 1.0, 1.000001, 4.0, 1e30])
@pytest.mark.parametrize("limit", [1.0, 0.25, 10.0])
def test_the_factor(norm: float, limit: float) -> None:
    expected = min(1.0, limit / (norm + 1e-6))
    assert clip_coefficient(norm, limit) == expected
    tensor = clip_coefficient(torch.tensor(norm, dtype=torch.float64), limit)
    assert tensor.item() == pytest.approx(expected, rel=1e-15)


def test_it_is_what_torch_applies() -> None:
    weight = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    weight.grad = torch.tensor([3.0, -4.0, 0.0, 12.0, 1.0, 2.0], dtype=torch.float64)
    grad = weight.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([weight], 0.5)
    torch.testing.assert_close(weight.grad, grad * clip_coefficient(norm, 0.5), rtol=1e-15, atol=0)
    assert weight.grad.norm() <= 0.5


@pytest.mark.parametrize("norm", [0.0, 5.0, math.inf, math.nan])
def test_zero_switches_clipping_off(norm: float) -> None:
    assert clip_coefficient(norm, 0.0) == 1.0
    assert clip_coefficient(torch.tensor(norm), 0.0).item() == 1.0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_broken_norm_does_not_pass_for_a_small_step(norm: float) -> None:
    assert math.isnan(clip_coefficient(norm, 1.0))
    assert math.isnan(clip_coefficient(torch.tensor(norm), 1.0).item())


def test_a_negative_limit_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="-1"):
        clip_coefficient(1.0, -1.0)
    with pytest.raises(ValueError, match="nan"):
        clip_coefficient(1.0, math.nan)

"""Optimizers over flat shards against torch.optim on whole parameters, and state allocated before the first step."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hybridlab.config.specs import OptimizerSpec
from hybridlab.errors import UserError
from hybridlab.optim import (
    allocate_state,
    make_optimizer,
    set_learning_rate,
    set_steps_taken,
    state_of,
    state_tensors,
    steps_taken,
)

SPECS = {
    "adamw": OptimizerSpec("AdamW", lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "adam": OptimizerSpec("Adam", lr=1e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    "adam-no-decay": OptimizerSpec("Adam", lr=1e-2),
    "sgd": OptimizerSpec("SGD", lr=1e-1, weight_decay=0.01),
    "momentum": OptimizerSpec("SGD", lr=1e-1, momentum=0.9),
    "nesterov": OptimizerSpec("SGD", lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.01),
}
SHAPES = [(5, 7), (13,), (3, 2, 4)]

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def draw(seed: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in SHAPES]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def torch_own(spec: OptimizerSpec, params: list[Tensor]) -> torch.optim.Optimizer:
    """torch's plain loop, spelt out here so that a wrong argument in ours shows."""
    if spec.type == "SGD":
        return torch.optim.SGD(
            params, spec.lr, spec.momentum, 0.0, spec.weight_decay, spec.nesterov, foreach=False, fused=False
        )
    rule = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[spec.type]
    return rule(params, spec.lr, spec.betas, spec.eps, spec.weight_decay, foreach=False, fused=False)


@every_dtype
@every_spec
def test_shards_step_as_the_whole_parameters_do(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    whole = draw(0, dtype)
    reference = torch_own(spec, whole)
    bounds = [0, 20, 20, 41, 72]  # cuts through tensors; one shard is empty, as on a rank that owns nothing of a bucket
    buffer = flat(draw(0, dtype))
    shards = [buffer[start:end] for start, end in pairwise(bounds)]
    ours = make_optimizer(spec, shards)
    allocate_state(ours)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    for step in range(6):
        rate = spec.lr / (step + 1)
        grads = draw(100 + step, dtype)
        for param, grad in zip(whole, grads):
            param.grad = grad
        for group in reference.param_groups:
            group["lr"] = rate
        flat_grad = flat(grads)
        for shard, start, end in zip(shards, bounds, bounds[1:]):
            shard.grad = flat_grad[start:end].clone()
        set_learning_rate(ours, rate)
        reference.step()
        ours.step()
        torch.testing.assert_close(buffer, flat(whole), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@every_dtype
@every_spec
def test_allocated_state_gives_the_bits_of_a_fresh_optimizer(
    spec: OptimizerSpec, dtype: torch.dtype, device: str
) -> None:
    lazy_params, eager_params = draw(1, dtype, device), draw(1, dtype, device)
    lazy, eager = make_optimizer(spec, lazy_params), make_optimizer(spec, eager_params)
    before = copy.deepcopy(eager_params)
    allocate_state(eager)
    assert all(map(torch.equal, eager_params, before))
    assert steps_taken(eager) == 0
    for step in range(3):
        for params in (lazy_params, eager_params):
            for param, grad in zip(params, draw(200 + step, dtype, device)):
                param.grad = grad
        lazy.step()
        eager.step()
        for one, other in zip(lazy_params, eager_params):
            assert torch.equal(one, other)
            assert lazy.state[one].keys() == eager.state[other].keys()
            for name, value in lazy.state[one].items():
                assert torch.equal(value, eager.state[other][name]), name
                assert value.dtype == eager.state[other][name].dtype, name
                assert value.device == eager.state[other][name].device, name


@pytest.mark.parametrize(
    ("name", "per_element"), [("adamw", 2), ("adam", 2), ("momentum", 1), ("nesterov", 1), ("sgd", 0)]
)
def test_state_is_there_to_be_counted_before_the_first_step(name: str, per_element: int) -> None:
    params = draw(2, torch.float32)
    optimizer = make_optimizer(SPECS[name], params)
    assert list(state_tensors(optimizer)) == []
    allocate_state(optimizer)
    tensors = list(state_tensors(optimizer))
    assert sum(tensor.numel() for tensor in tensors) == per_element * sum(param.numel() for param in params)
    assert all(not tensor.any() for tensor in tensors)
    allocate_state(optimizer)  # once more changes nothing
    assert [tensor.data_ptr() for tensor in state_tensors(optimizer)] == [tensor.data_ptr() for tensor in tensors]


def test_state_has_the_names_that_checkpoints_use() -> None:
    params = draw(3, torch.float32)
    adam, sgd = make_optimizer(SPECS["adamw"], params), make_optimizer(SPECS["momentum"], params)
    allocate_state(adam)
    allocate_state(sgd)
    assert set(state_of(adam, params[0])) == {"exp_avg", "exp_avg_sq"}
    assert set(state_of(sgd, params[0])) == {"momentum_buffer"}
    assert all(value.shape == params[0].shape for value in state_of(adam, params[0]).values())


@every_spec
def test_a_run_goes_on_from_copied_state_and_counter(spec: OptimizerSpec) -> None:
    def step(optimizer: torch.optim.Optimizer, params: list[Tensor], seed: int) -> None:
        for param, grad in zip(params, draw(seed, torch.float32)):
            param.grad = grad
        optimizer.step()

    params = draw(4, torch.float32)
    first = make_optimizer(spec, params)
    allocate_state(first)
    for seed in (300, 301):
        step(first, params, seed)
    resumed_params = [param.detach().clone() for param in params]
    resumed = make_optimizer(spec, resumed_params)
    allocate_state(resumed)
    for old, new in zip(params, resumed_params):
        for name, value in state_of(resumed, new).items():
            value.copy_(state_of(first, old)[name])
    set_steps_taken(resumed, steps_taken(first))
    step(first, params, 302)
    step(resumed, resumed_params, 302)
    assert all(map(torch.equal, params, resumed_params))
    assert steps_taken(resumed) == (0 if spec.type == "SGD" else 3)


# -- reports.md 111 (DeepSpeed#493): one update rule wherever it runs; Adam is not AdamW -------------------------------
def one_weight(spec: OptimizerSpec, weight: float, grads: list[float]) -> float:
    param = torch.tensor([weight], dtype=torch.float64)
    optimizer = make_optimizer(spec, [param])
    allocate_state(optimizer)
    for grad in grads:
        param.grad = torch.tensor([grad], dtype=torch.float64)
        optimizer.step()
    return float(param)


def by_hand(decoupled: bool, weight: float, grads: list[float], lr: float, decay: float) -> float:
    """Adam as in Algorithm 1 of arXiv:1412.6980, weight decay as in Algorithm 2 of arXiv:1711.05101."""
    m = v = 0.0
    for t, grad in enumerate(grads, start=1):
        g = grad if decoupled else grad + decay * weight
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        step = lr * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        weight = weight - step - (lr * decay * weight if decoupled else 0.0)
    return weight


@pytest.mark.parametrize(("kind", "decoupled"), [("AdamW", True), ("Adam", False)])
def test_weight_decay_goes_where_the_name_says(kind: str, decoupled: bool) -> None:
    grads = [0.3, -0.2, 0.05, 0.4]
    spec = OptimizerSpec(kind, lr=0.01, weight_decay=0.1)
    assert one_weight(spec, 2.0, grads) == pytest.approx(by_hand(decoupled, 2.0, grads, 0.01, 0.1), rel=1e-12)
    assert abs(by_hand(decoupled, 2.0, grads, 0.01, 0.1) - by_hand(not decoupled, 2.0, grads, 0.01, 0.1)) > 1e-3


def test_without_weight_decay_adam_and_adamw_are_one() -> None:
    grads = [0.3, -0.2, 0.05]
    assert one_weight(OptimizerSpec("AdamW"), 2.0, grads) == one_weight(OptimizerSpec("Adam"), 2.0, grads)


@every_spec
def test_a_rehearsal_steps_on_fake_tensors(spec: OptimizerSpec) -> None:
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            params = [torch.zeros(11, device=device)]
            optimizer = make_optimizer(spec, params)
            allocate_state(optimizer)
            params[0].grad = torch.ones(11, device=device)
            optimizer.step()
            assert all(isinstance(tensor, FakeTensor) for tensor in state_tensors(optimizer))


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"optimizer\.type: 'Lion'.*AdamW, Adam, SGD"):
        make_optimizer(OptimizerSpec("Lion"), draw(0, torch.float32))

"""AdamW, Adam and SGD over flat shards, with state that exists before the first step.

torch creates an optimizer's state lazily, inside the first step. Here it is allocated when asked, for three reasons:
memory is known before training starts, an out-of-memory comes at start-up rather than after the first backward, and a
checkpoint has tensors to load into. The update rules are torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridlab.config.specs import OPTIMIZERS, OptimizerSpec
from hybridlab.errors import UserError


def make_optimizer(spec: OptimizerSpec, params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """torch's optimizer for ``spec`` over ``params``: 1-D shards (or whole tensors) in fp32 or fp64, on any device.

    "AdamW" subtracts ``lr * weight_decay * w`` from the weight (arXiv:1711.05101); "Adam" adds ``weight_decay * w`` to
    the gradient, where the adaptive denominator sees it (arXiv:1412.6980). They differ as soon as weight_decay > 0.
    The rule is the same on host and device, so that offload changes nothing (DeepSpeed#493).

    Raises:
        UserError: a type that is not one of `OPTIMIZERS`.
    """
    if spec.type == "SGD":
        return torch.optim.SGD(
            params,
            lr=spec.lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            weight_decay=spec.weight_decay,
            foreach=True,
        )
    if spec.type not in ("AdamW", "Adam"):
        raise UserError(
            f"{spec.type!r} is no optimizer this engine knows.",
            key="optimizer.type",
            value=spec.type,
            fix="one of " + ", ".join(OPTIMIZERS),
        )
    rule = torch.optim.AdamW if spec.type == "AdamW" else torch.optim.Adam
    fused = all(_has_fused_kernel(param) for param in params)
    return rule(
        params,
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=fused,
        foreach=not fused,
    )


def _has_fused_kernel(param: Tensor) -> bool:
    # One kernel a tensor: each element is read and written once, and no temporary is allocated.
    return param.is_floating_point() and param.device.type in ("cpu", "cuda", "xpu", "mps")


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, all zeros, without taking a step. Existing state stays.

    The next step gives the same bits as that of an optimizer left alone. (SGD's momentum buffer is copied from the
    first gradient when absent, and ``0 * momentum + gradient`` when zero: the same number.)
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            for name in _state_names(optimizer, group):
                if name not in state:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if isinstance(optimizer, torch.optim.Adam) and "step" not in state:
                # A fused kernel reads the counter on its own device; else the host reads it, which saves a launch.
                where = param.device if group["fused"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=where)


def _state_names(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """What is remembered about each element: in fp32, 8 bytes for Adam, 4 for momentum, none for plain SGD."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one of its kind
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


def state_of(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """The state of one parameter by torch's names, each of the parameter's shape; the step counter left out."""
    return {name: value for name, value in optimizer.state[param].items() if name != "step" and value is not None}


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All of `state_of`, parameter by parameter: what the ledger charges to the category "optimizer"."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield from state_of(optimizer, param).values()


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """How many updates Adam's bias correction has counted. 0 for SGD, which counts none."""
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    return int(counts[0]) if counts else 0


def set_steps_taken(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set Adam's counter on allocated state, when resuming. Nothing to set for SGD."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(steps)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr

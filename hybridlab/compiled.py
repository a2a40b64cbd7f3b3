"""torch.compile of a layer: what lies between its matrix products is fused; products and messages stay as they are.

A layer's linear modules talk to other ranks and write to the ledger, dropout and recomputation mind generators: the
compiler leaves those alone (a graph break each) and fuses the norms, the activation, the rotary turn and the sums with
the residual stream.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from hybridlab.errors import UserError
from hybridlab.models.dropout import Dropout
from hybridlab.parallel.recompute import Recomputed
from hybridlab.parallel.tensor import ParallelLinear


def compiled(piece: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A layer, to be compiled at its first call; layers of the same shapes share what was compiled.

    Raises:
        UserError: on the CPU without a C++ compiler.
    """
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise UserError(
            "torch.compile on the CPU needs a C++ compiler, and there is none.",
            key="hybridlab.compile",
            value=True,
            fix="install g++, or false.",
        )
    _leave_out()
    return torch.compile(piece, dynamic=False)


@cache
def _leave_out() -> None:
    """Once, and for the classes: a method replaced on each instance would be compiled again for each."""
    for kind in (ParallelLinear, Dropout, Recomputed):
        kind.forward = torch.compiler.disable(kind.forward)  # type: ignore[method-assign]

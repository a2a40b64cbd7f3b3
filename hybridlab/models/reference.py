"""The training loop that every layout is compared with: one process, the plain model, torch's own parts.

It shares with the engine what a layout must not change: the model, its first values, dropout's masks. It shares none
of what it judges: no cut layers, buckets, shards, pipelines, loss or clipping of ours.

    loss = Σ cross-entropy over the target tokens of the global batch / their number
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridlab.models import streams
from hybridlab.models.decoder import build_model
from hybridlab.models.init import initialise_model
from hybridlab.shapes import ModelShape

IGNORE = -100
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Step:
    """What one step did.

    Attributes:
        loss: per target token of the global batch, before the update.
        grad_norm: of all gradients, before clipping.
        clip_coefficient: what gradients were multiplied by.
        grads: by parameter name, before clipping.
        tokens: target tokens in the batch.
        lr: the learning rate used.
    """

    loss: float
    grad_norm: float
    clip_coefficient: float
    grads: dict[str, Tensor]
    tokens: int
    lr: float


class Reference:
    """A plain model with its optimizer.

    Args:
        shape: the model.
        seed: of first values and dropout.
        dtype: float64, float32, or bfloat16 and float16 (no loss scale) with fp32 masters and fp32 accumulation of
            gradients.
        optimizer: a class of `torch.optim` by name, "AdamW", "Adam" or "SGD", and its keyword arguments.
        clip: the largest global gradient norm; 0 switches clipping off.
        label_smoothing: ε of `torch.nn.functional.cross_entropy`.
        micro_batch_size: samples that go through the model together; all at once when None. The mathematics is the
            same either way.
        attention: "sdpa" or "eager".
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        optimizer: tuple[str, Mapping[str, Any]] = ("AdamW", {"lr": 1e-3}),
        clip: float = 0.0,
        label_smoothing: float = 0.0,
        micro_batch_size: int | None = None,
        attention: str = "sdpa",
        device: str | torch.device = "cpu",
    ) -> None:
        self.seed, self.clip, self.label_smoothing = seed, clip, label_smoothing
        self.micro_batch_size = micro_batch_size
        precise = torch.float32 if dtype in HALF else dtype
        with torch.device(device):
            self.model = build_model(shape, attention=attention, dtype=precise)
            initialise_model(self.model, shape, seed)
            # In bf16 and fp16 the model computes with rounded copies of these.
            self.masters: nn.Module = self.model
            if dtype in HALF:
                self.model = build_model(shape, attention=attention, dtype=dtype)
        streams.assign_names(self.model)
        self._publish()
        name, arguments = optimizer
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(self.masters.parameters(), **arguments)
        self.step_number = 0

    def weights(self) -> dict[str, Tensor]:
        """Copies of the (master) weights by name."""
        return {name: parameter.detach().clone() for name, parameter in self.masters.named_parameters()}

    def step(self, tokens: Tensor, targets: Tensor, *, lr: float | None = None) -> Step:
        """Train on one global batch.

        Args:
            tokens: [B, s] ids.
            targets: [B, s] ids, `IGNORE` where nothing is to be predicted.
            lr: the learning rate of this step; the optimizer's own when None.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        counted = int((targets != IGNORE).sum())
        self.optimizer.zero_grad()
        loss = self._gradients(tokens, targets, max(1, counted))
        grads = {name: p.grad.detach().clone() for name, p in self.masters.named_parameters() if p.grad is not None}
        squares = torch.stack([grad.double().square().sum() for grad in grads.values()])
        norm = float(squares.sum().sqrt())
        coefficient = min(1.0, self.clip / (norm + 1e-6)) if self.clip > 0 else 1.0
        for parameter in self.masters.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(coefficient)
        self.optimizer.step()
        self._publish()
        self.step_number += 1
        return Step(loss, norm, coefficient, grads, counted, self.optimizer.param_groups[0]["lr"])

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """The loss per target token, without dropout and without learning from it."""
        self.model.eval()
        with torch.no_grad():
            total = self._loss_sum(tokens, targets)
        self.model.train()
        return float(total) / max(1, int((targets != IGNORE).sum()))

    def _gradients(self, tokens: Tensor, targets: Tensor, counted: int) -> float:
        """Accumulate the gradients of the mean loss into the masters; returns the loss."""
        self.model.train()
        size = self.micro_batch_size or len(tokens)
        total = 0.0
        with streams.saved():
            streams.set(seed=self.seed, step=self.step_number)
            streams.sequence_slice(0, tokens.shape[1], tokens.shape[1])
            streams.tensor_rank(0)
            for first in range(0, len(tokens), size):
                streams.micro_batch(first)
                mean = self._loss_sum(tokens[first : first + size], targets[first : first + size]) / counted
                mean.backward()
                total += float(mean.detach())
                self._collect()
        return total

    def _loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens)
        precise = logits.double() if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            precise.flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    @torch.no_grad()
    def _collect(self) -> None:
        """Add the gradients of rounded copies to the masters', in fp32."""
        if self.masters is self.model:
            return
        for master, copy in zip(self.masters.parameters(), self.model.parameters()):
            if copy.grad is not None:
                gradient = copy.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                copy.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters into the copies that the model computes with."""
        if self.masters is self.model:
            return
        for master, copy in zip(self.masters.parameters(), self.model.parameters()):
            copy.copy_(master)

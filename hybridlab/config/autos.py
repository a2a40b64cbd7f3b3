"""What "auto" becomes, key by key. Elsewhere "auto" is refused.

"auto" is a convention of Hugging Face's Trainer and Accelerate: they fill it in before DeepSpeed sees the file. Alone,
DeepSpeed drops it inside sections, taking its own default, and dies of a type error at the top level. Here it becomes
what the Trainer would derive from its default arguments and the model, as far as no trainer is needed; what only a
trainer knows (the batch) needs a number.

Source of the derivations: transformers, integrations/deepspeed.py, and TrainingArguments' defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape


@dataclass(frozen=True)
class Auto:
    """How an "auto" is resolved.

    Attributes:
        text: what it becomes, in words.
        value: (model shape or None) -> (value, why); None when it is settled later, beside the keys it depends on.
    """

    text: str
    value: Callable[[ModelShape | None], tuple[Any, str]] | None = None


def _constant(value: Any, why: str) -> Auto:
    return Auto(f"{value}: {why}", lambda shape: (value, why))


def _from_hidden(text: str, of_hidden: Callable[[int], int], default: int) -> Auto:
    def value(shape: ModelShape | None) -> tuple[int, str]:
        if shape is None:
            return default, f"no model is given, so DeepSpeed's default; with a model, {text} of it"
        return of_hidden(shape.hidden), f"{text}, as the Trainer does; hidden size {shape.hidden}"

    return Auto(f"{text}; without a model {default}", value)


_TRAINER = "the Trainer's default"
_DEEPSPEED = "DeepSpeed's default; the Trainer does not derive it"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

AUTO: dict[str, Auto] = {
    **dict.fromkeys(BATCH, Auto("from the other two, as if it were not given; one of the first two needs a number")),
    "gradient_clipping": _constant(1.0, f"{_TRAINER} (max_grad_norm), and DeepSpeed's"),
    "fp16.enabled": _constant(False, f"{_TRAINER}: off unless asked for"),
    "bf16.enabled": _constant(False, f"{_TRAINER}: off unless asked for"),
    "optimizer.params.lr": _constant(5e-5, f"{_TRAINER} (learning_rate)"),
    "optimizer.params.betas": _constant([0.9, 0.999], _TRAINER),
    "optimizer.params.eps": _constant(1e-8, _TRAINER),
    "optimizer.params.weight_decay": _constant(0.0, _TRAINER),
    "scheduler.params.warmup_min_lr": _constant(0.0, "as the Trainer does"),
    "scheduler.params.warmup_max_lr": Auto("the optimizer's lr, as the Trainer does"),
    "scheduler.params.warmup_num_steps": _constant(
        2, "the shortest warm-up there is; the Trainer's default is none (0), which DeepSpeed refuses"
    ),
    "scheduler.params.total_num_steps": Auto("the number of steps of the run (train --steps)"),
    "zero_optimization.reduce_bucket_size": _from_hidden("hidden size squared", lambda h: h * h, 500_000_000),
    "zero_optimization.allgather_bucket_size": _constant(500_000_000, _DEEPSPEED),
    "zero_optimization.overlap_comm": _constant(True, "our default"),
    "zero_optimization.stage3_prefetch_bucket_size": _from_hidden(
        "0.9 times hidden size squared", lambda h: int(0.9 * h * h), 50_000_000
    ),
    "zero_optimization.stage3_param_persistence_threshold": _from_hidden(
        "10 times the hidden size", lambda h: 10 * h, 100_000
    ),
    "zero_optimization.stage3_max_live_parameters": _constant(1_000_000_000, _DEEPSPEED),
    "zero_optimization.stage3_max_reuse_distance": _constant(1_000_000_000, _DEEPSPEED),
    "pipeline.stages": Auto("pipeline_parallel.pp_size"),
}
"""Dotted path -> how it is derived."""

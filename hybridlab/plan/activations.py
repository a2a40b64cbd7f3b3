"""What a transformer layer keeps between forward and backward, as tables: one row a tensor.

The same layer keeps different things in different programs: eager attention keeps the scores, flash attention does not;
dropout keeps masks; a fused SwiGLU keeps one tensor less. So there is no one formula but named *profiles*, each a table
with the model family it is valid for, and one rule for all of them:

    bytes of a row = tokens · width · bytes of an element, divided by tp when the row is cut: always for rows inside
    attention and MLP ("tensor"), only under sequence parallelism for those between ("sequence").

The profile "megatron-gpt" gives sbh(10 + 24/t + 5as/(ht)) without sequence parallelism, sbh/t·(34 + 5as/h) with it, and
without the core's rows 34sbh/t (Korthikanti et al., arXiv:2205.05198, Eq. 1 to 6). What our own engine keeps is the
profile "hybridlab" (`hybridlab.plan.engine_tensors`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridlab.errors import UserError
from hybridlab.plan.states import PRECISIONS

if TYPE_CHECKING:
    from hybridlab.plan.job import Job
    from hybridlab.shapes import ModelShape


@dataclass(frozen=True)
class Saved:
    """One tensor kept for backward.

    Attributes:
        module: who keeps it. Rows of "core" (the attention proper) are not kept under selective recomputation.
        tensor: what it is.
        width: elements per token: "hidden" h, "query" heads·head_dim, "kv" kv_heads·head_dim, "ffn", "scores"
            heads·s, "heads", or "one".
        cut: "tensor": divided by tp; "sequence": divided by tp under sequence parallelism; "whole": never.
        element: bytes of an element; 0: those of the compute dtype.
        copies: how many such tensors.
    """

    module: str
    tensor: str
    width: str
    cut: str
    element: int = 0
    copies: int = 1


@dataclass(frozen=True)
class Profile:
    """A named account of what a layer keeps.

    Attributes:
        gated: valid for gated MLPs (SwiGLU, True), for plain ones (False), or for both (None).
        rows: per layer.
        full: what is kept of a layer under full recomputation.
        logit_bytes: bytes held for each logit at the moment of the loss.
        source: where it is from, for which programs.
    """

    name: str
    gated: bool | None
    rows: tuple[Saved, ...]
    full: tuple[Saved, ...]
    logit_bytes: float
    source: str


def _widths(shape: ModelShape, sequence: int) -> dict[str, int]:
    return {
        "hidden": shape.hidden,
        "query": shape.heads * shape.head_dim,
        "kv": shape.kv_heads * shape.head_dim,
        "ffn": shape.ffn,
        "scores": shape.heads * sequence,
        "heads": shape.heads,
        "one": 1,
    }


def row_bytes(row: Saved, job: Job) -> float:
    """Bytes of one row for one micro-batch on one rank."""
    tp = job.layout.tp
    per_token = _widths(job.shape, job.sequence_length)[row.width]
    if row.cut == "tensor" and row.width == "kv":  # heads fewer than ranks are held by several of them
        per_token = max(per_token // tp, job.shape.head_dim)
    elif row.cut == "tensor" or (row.cut == "sequence" and job.slices_sequence):
        per_token = per_token / tp  # type: ignore[assignment]
    element = row.element or PRECISIONS[job.precision].weight
    return job.tokens * per_token * element * row.copies


def layer_bytes(job: Job, profile: Profile) -> float:
    """Bytes one layer keeps for one micro-batch, under the job's recomputation.

    Raises:
        UserError: the profile is not valid for this kind of MLP (34sbh, say, does not describe a SwiGLU).
    """
    if profile.gated is not None and profile.gated != job.shape.gated:
        kind, other = ("gated", "plain") if job.shape.gated else ("plain", "gated")
        valid = [p.name for p in PROFILES.values() if p.gated in (None, job.shape.gated)]
        raise UserError(
            f"the activation profile {profile.name} holds for {other} MLPs; {job.shape.name} has a {kind} one.",
            key="profile",
            value=profile.name,
            fix="one of " + ", ".join(valid) + ".",
        )
    if job.recompute == "full":
        return sum(row_bytes(row, job) for row in profile.full) / job.recompute_interval
    return sum(
        row_bytes(row, job) for row in profile.rows if not (job.recompute == "selective" and row.module == "core")
    )


def layer_table(job: Job, profile: Profile) -> list[tuple[Saved, float]]:
    """Each row with its bytes, for showing."""
    rows = profile.full if job.recompute == "full" else profile.rows
    kept = [row for row in rows if not (job.recompute == "selective" and row.module == "core")]
    return [(row, row_bytes(row, job)) for row in kept]


# ---- other people's programs ---------------------------------------------------------------------------------------

_INPUT = (Saved("layer", "input", "hidden", "whole"),)

_QKV = (
    Saved("attention", "q", "query", "tensor"),
    Saved("attention", "k", "kv", "tensor"),
    Saved("attention", "v", "kv", "tensor"),
)
_BETWEEN = (
    Saved("attention norm", "input", "hidden", "sequence"),
    Saved("attention.qkv", "input", "hidden", "sequence"),
    Saved("mlp norm", "input", "hidden", "sequence"),
    Saved("mlp.up", "input", "hidden", "sequence"),
)
_MASKS = (
    Saved("attention dropout", "mask", "hidden", "sequence", element=1),
    Saved("mlp dropout", "mask", "hidden", "sequence", element=1),
)
_GPT_MLP = (
    Saved("mlp.gelu", "input", "ffn", "tensor"),
    Saved("mlp.down", "input", "ffn", "tensor"),
)
_EAGER_CORE = (
    Saved("core", "softmax output", "scores", "tensor"),
    Saved("core", "dropout mask", "scores", "tensor", element=1),
    Saved("core", "dropout output", "scores", "tensor"),
)
_OUT = (Saved("attention.out", "input", "query", "tensor"),)
_SWIGLU = (
    Saved("mlp.gate", "output", "ffn", "tensor"),
    Saved("mlp.up", "output", "ffn", "tensor"),
    Saved("mlp.down", "input", "ffn", "tensor"),
)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "megatron-gpt",
            False,
            _BETWEEN + _MASKS + _QKV + _EAGER_CORE + _OUT + _GPT_MLP,
            _INPUT,
            4,
            "arXiv:2205.05198 §4: GPT, eager attention, dropout, 16-bit activations, fp32 loss",
        ),
        Profile(
            "megatron-gpt-flash",
            False,
            _BETWEEN + _MASKS + _QKV + _OUT + _GPT_MLP,
            _INPUT,
            4,
            "34sbh: the same with attention that keeps no scores",
        ),
        Profile(
            "megatron-swiglu",
            True,
            (
                *_BETWEEN,
                *_MASKS,
                *_QKV,
                Saved("attention", "flash output", "query", "tensor"),
                *_OUT,
                *_SWIGLU,
                Saved("mlp.silu", "output", "ffn", "tensor"),
            ),
            _INPUT,
            6,
            "sb(10h + (10h + 8f)/t): Llama in Megatron-LM, flash attention, dropout masks, unfused SwiGLU",
        ),
        Profile(
            "lean-swiglu",
            True,
            _BETWEEN + _QKV + _OUT + _SWIGLU,
            _INPUT,
            6,
            "sb(8h + (8h + 6f)/t): Llama without dropout, fused SwiGLU, flash attention",
        ),
    )
}

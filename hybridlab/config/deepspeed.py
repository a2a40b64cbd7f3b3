"""What DeepSpeed 0.19.8 itself does with the same file where it differs from us. For people who run both.

Read in its source (config classes, pipe/engine.py, runtime/engine.py) and, where a row of the tests says so, measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridlab.config.draft import Draft
from hybridlab.config.parallel import AUTOTP, STAGES, TP_TP
from hybridlab.config.resolved import Resolved
from hybridlab.config.zero import OPTIMIZER_DEVICE, PARAM_DEVICE
from hybridlab.plan.legality import PP, STAGE, TP

VERSION = "0.19.8"

_OURS = ("data_parallel", "fp64", "hybridlab")
_REMOVED = {
    "nebula": "Nebula checkpointing",
    "compression_training": "compression",
    "amp": "Apex amp",
    "quantize_training": "quantised training",
    "sparse_gradients": "sparse embedding gradients",
    "eigenvalue": "eigenvalue-steered quantisation",
    "sparse_attention": "sparse attention",
    "elasticity": "elastic training",
    "graph_harvesting": "graph harvesting",
    "curriculum_learning": "the old curriculum section",
    "progressive_layer_drop": "progressive layer drop",
    "zero_optimization.mics_shard_size": "MiCS",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS",
    "zero_optimization.zeropp_loco_param": "LoCo",
}
_STRICT = ("zero_optimization", "fp16", "bf16", "tensor_parallel", "compile", "hybrid_engine")
"""Sections whose unknown keys DeepSpeed refuses. Elsewhere it ignores them."""
_EXTENSIONS = {
    "zero_optimization.gradient_policy": "refuses this key: it has one behaviour, and none with pipelines",
    "tensor_parallel.sequence_parallel": "refuses this key: its AutoTP keeps activations whole",
    "tensor_parallel.vocab_multiple": "refuses this key",
    "activation_checkpointing.policy": "ignores this key: there the model's own code decides what is recomputed",
    "activation_checkpointing.interval": "ignores this key: there the model's own code decides what is recomputed",
}


def notes(draft: Draft, unknown: Sequence[str], resolved: Resolved | None) -> None:
    """Add what DeepSpeed does differently to the draft."""
    _keys(draft, unknown)
    _values(draft)
    if resolved is not None:
        _compositions(draft, resolved)


def _keys(draft: Draft, unknown: Sequence[str]) -> None:
    entries = draft.account.entries
    for path in unknown:
        section = path.partition(".")[0]
        if "." not in path:
            draft.differs(path, "ignores unknown keys at the top level: the key silently does nothing")
        elif section in _STRICT:
            draft.differs(path, "refuses it too: ValidationError, extra inputs are not permitted")
        elif path.startswith("optimizer.params."):
            draft.differs(path, "passes it to the optimizer, which raises a TypeError")
        else:
            draft.differs(path, "ignores unknown keys of this section")
    for path, feature in _REMOVED.items():
        if path in entries:
            draft.differs(path, f"stops with an error whatever its value: {feature} was removed")
    for path, says in _EXTENSIONS.items():
        if path in draft.origin:
            draft.differs(draft.spelled(path), says)
    for path in _OURS:
        if path in entries:
            draft.differs(path, "ignores this section (unknown keys at the top level are not an error there)")
    if TP in draft.origin:
        draft.differs(TP, "rejects tensor_parallel.tp_size; its spelling is tensor_parallel.autotp_size")
    if TP_TP in draft.origin and AUTOTP not in draft.origin:
        draft.differs(TP_TP, "accepts it, but shards only when tensor_parallel.autotp_size is given")
    if "pipeline_parallel" in entries:
        draft.differs(
            "pipeline_parallel", "ignores this section: stages come from PipelineModule(num_stages=) in the program"
        )
    if STAGES in draft.origin:
        draft.differs(draft.spelled(STAGES), "does not read it: stages come from PipelineModule(num_stages=)")


def _values(draft: Draft) -> None:
    clipping = "gradient_clipping"
    if clipping not in draft.origin:
        draft.differs(clipping, "clips at 1.0 too when it is absent; before 0.19 it did not clip")
    minimum = draft.config.fp16.min_loss_scale
    if draft.given("fp16.min_loss_scale") and not minimum.is_integer():
        draft.differs("fp16.min_loss_scale", "refuses it: there it must be a whole number")
    section = draft.config.optimizer
    if draft.given("optimizer.type") and section.type == "Adam" and not draft.given("optimizer.params.adam_w_mode"):
        draft.differs(
            "optimizer.type",
            'runs "Adam" as AdamW (decoupled weight decay) unless adam_w_mode is false; '
            'here it is Adam, and adam_w_mode true or type "AdamW" gives the other',
        )
    if "optimizer.type" not in draft.origin:
        draft.differs("optimizer", "trains with the optimizer that the program passes to deepspeed.initialize")
    stage = draft.config.zero_optimization.stage
    if draft.given(PARAM_DEVICE) and draft.value(PARAM_DEVICE) == "cpu" and stage < 3:
        draft.differs(draft.spelled(PARAM_DEVICE), f"accepts it at stage {stage} and offloads no parameter")
    if draft.given(OPTIMIZER_DEVICE) and draft.value(OPTIMIZER_DEVICE) == "cpu" and stage == 0:
        draft.differs(draft.spelled(OPTIMIZER_DEVICE), "accepts it at stage 0 and offloads nothing")
    inside = [path for path in sorted(draft.autos | draft.filled) if "." in path]
    if inside:
        draft.differs(
            draft.spelled(inside[0]),
            '"auto" is filled in by Hugging Face\'s Trainer; without it DeepSpeed takes its own default inside '
            "zero_optimization, fp16 and bf16, and fails or ignores it elsewhere",
        )


def _compositions(draft: Draft, resolved: Resolved) -> None:
    grid, zero = resolved.layout, resolved.zero
    if grid.pp > 1 and zero.stage >= 2:
        draft.differs(
            STAGE,
            f"refuses ZeRO-{zero.stage} with pipeline parallelism: its gradients (and at stage 3 its weights) would be "
            "exchanged for every micro-batch, while a pipeline wants to accumulate them; here both gradient "
            "policies are available and priced",
        )
    if grid.pp > 1 and grid.tp > 1:
        draft.differs(
            PP,
            "wires AutoTP with PipelineModule wrongly, without an error (the data-parallel group of its pipe grid "
            "is the tensor-parallel group); its 3D needs Megatron's layers",
        )
    if grid.pp > 1 and resolved.schedule != "1f1b":
        draft.differs("pipeline_parallel.schedule", "has 1F1B only")
    if resolved.precision == "fp64":
        draft.differs("fp64.enabled", "trains in fp32")
    overlap = "zero_optimization.overlap_comm"
    if overlap not in draft.origin and grid.dp > 1 and zero.stage < 3:
        draft.differs(overlap, "overlaps by default at stage 3 only")

"""Ranks that torchrun has started, on one machine or many: recognise them and join their process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridlab.errors import UserError
from hybridlab.launch import context, rendezvous
from hybridlab.launch.context import Context

_GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Has torchrun (or what sets the same variables) started this process as a rank?"""
    return not context.in_cluster() and all(os.environ.get(name) for name in _GIVEN)


def torchrun_world() -> int:
    """WORLD_SIZE. Raises UserError where it is no number."""
    return _number("WORLD_SIZE")


def join_torchrun(timeout: float = 120.0, backend: str | None = None) -> Context:
    """Enter the default process group that torchrun's variables describe, unless this process has done so already.

    NCCL when this machine has a GPU for each of its ranks, else gloo. ``timeout``: seconds that joining, and any
    collective after it, may take. Raises UserError for missing or malformed variables.
    """
    rank, world, local = _number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK")
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    chosen = rendezvous.choose_backend(here, backend)
    device = torch.device("cuda", local) if chosen == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if here == world:
        rendezvous.use_loopback()
    if not dist.is_initialized():
        dist.init_process_group(
            chosen,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=min(timeout, 30 * 86400.0)),
            device_id=device if chosen == "nccl" else None,
        )
    return Context(rank, world, local, device)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"torchrun sets {name} to a whole number; it is {text!r}." if text else f"{name} is not set.",
            key=name,
            value=text,
            fix="start with `torchrun --nproc-per-node N …`.",
        )
    return int(text)

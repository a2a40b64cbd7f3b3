"""How ranks find each other on one machine: which backend, which store, which network interface."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridlab.errors import UserError

# The driver ends a silent call at its own deadline and can say who is silent. The group's own timeout is only the
# second net, for a rank whose driver is itself stopped.
GROUP_TIMEOUT = timedelta(minutes=30)


def choose_backend(ranks: int, backend: str | None) -> str:
    """ "nccl" when each rank can have a GPU of its own, else "gloo".

    Raises UserError for an unknown backend and for "nccl" with fewer GPUs than ranks.
    """
    if backend not in (None, "nccl", "gloo"):
        raise UserError(
            "a backend is nccl or gloo.", key="backend", value=backend, fix="leave it out to let it be chosen."
        )
    if backend == "gloo":
        return "gloo"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= ranks and dist.is_nccl_available()
    if backend == "nccl" and not enough:
        raise UserError(
            f"NCCL gives each rank a GPU of its own; {ranks} ranks were asked for and {gpus} GPUs are usable here.",
            key="backend",
            value=backend,
            fix=f"ranks={gpus}, or backend='gloo' to run on the CPU." if gpus else "backend='gloo' to run on the CPU.",
        )
    return "nccl" if enough else "gloo"


def open_store() -> dist.TCPStore:
    """The driver's store. The system picks the port while we hold it, so no other program can take it in between, and
    only this machine can reach it (left to itself the store would listen on every interface)."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def use_loopback() -> None:
    """Keep gloo on the loopback interface: by default it looks up the host name, which may not resolve, or may resolve
    to an address that a firewall guards."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def join(backend: str, rank: int, world: int, port: int, prefix: str, device: torch.device) -> None:
    """Enter the default process group. Each start of the ranks has its own prefix, so that it reads no stale key."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=world,
        timeout=GROUP_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )

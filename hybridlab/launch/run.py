"""One worker function, on ranks of our own or on torchrun's."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NoReturn

import torch.distributed as dist

from hybridlab.errors import UserError
from hybridlab.launch import context
from hybridlab.launch.answers import OnReport
from hybridlab.launch.cluster import Cluster
from hybridlab.launch.failure import Failure, RemoteError, failed
from hybridlab.launch.output import Mode
from hybridlab.launch.torchrun import join_torchrun, torchrun_world, under_torchrun
from hybridlab.launch.worker import last_coords

DEFAULT_RANKS = 8
_PATIENCE = 3.0  # seconds that a rank with a consequence leaves to the rank with the cause, to be heard first


def launch(
    fn: Any,
    *args: Any,
    ranks: int | None = None,
    timeout: float = 120.0,
    backend: str | None = None,
    output: Mode = "live",
    threads: int = 1,
    on_report: OnReport | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank: on ``ranks`` (default 8) ranks of a `Cluster`, or, under torchrun, in
    this process as the rank that it is.

    Returns the results by rank; under torchrun a list with this rank's own. There, an exception ends this process at
    once with exit code 1, so that torchrun ends the other ranks.

    Raises UserError when ``ranks`` and torchrun's WORLD_SIZE differ; otherwise as `Cluster.run`.
    """
    if not under_torchrun():
        if not context.in_cluster() and os.environ.get("TORCHELASTIC_RUN_ID"):
            join_torchrun(timeout, backend)  # says which variable is missing
        with Cluster(
            DEFAULT_RANKS if ranks is None else ranks, backend=backend, timeout=timeout, output=output, threads=threads
        ) as cluster:
            return cluster.run(fn, *args, on_report=on_report, **kwargs)
    world = torchrun_world()
    if ranks is not None and ranks != world:
        raise UserError(
            f"{ranks} ranks were asked for, and torchrun has started {world}.",
            key="ranks",
            value=ranks,
            fix=f"leave it out, or start torchrun with {ranks} processes in all.",
        )
    try:
        here = join_torchrun(timeout, backend)
        context.enter(here, lambda value: on_report and on_report(here.rank, value), of_cluster=False)
        return [fn(*args, **kwargs)]
    except UserError:
        if int(os.environ["RANK"]) > 0:
            time.sleep(_PATIENCE)  # all ranks meet the same mistake: let the first one tell it
        raise
    except Exception as error:
        _leave(error)


def gather(value: Any) -> list[Any] | None:
    """Under torchrun, every rank's ``value`` on rank 0, by rank; None on the others. Every rank must call it."""
    world = torchrun_world()
    found: list[Any] | None = [None] * world if int(os.environ["RANK"]) == 0 else None
    dist.gather_object(value, found)
    return found


def _leave(error: Exception) -> NoReturn:
    """Tell of an error and end this process. Its destructors would wait for peers that wait for it."""
    rank = int(os.environ["RANK"])
    remote = RemoteError.read(error, last_coords())
    if remote.consequence:
        time.sleep(_PATIENCE)  # torchrun ends us meanwhile, if another rank has failed
    message = failed([Failure(rank, remote.when, remote.when, remote)], {}, {})
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(1)

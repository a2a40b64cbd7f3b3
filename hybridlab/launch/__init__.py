"""Ranks: started on this machine by `Cluster`, or by torchrun; one worker function serves both.

=============  =====================================================================
file           what is in it
=============  =====================================================================
cluster        `Cluster`: ranks of this machine, kept between calls
run            `launch`: a function on a Cluster, or under torchrun as the rank we are
torchrun       recognise torchrun's ranks and join their group
context        inside a rank: its number, its device, what it keeps, its reports
failure        `RankError`: which error is the cause, and how it is told
answers        wait for the ranks' answers: deadlines, interrupts, verdicts
team           one generation of processes, and what comes out of them
worker         what runs in a rank
channel        messages between driver and rank
shipping       functions and results by value; naming what cannot travel
output         what ranks print
stacks         what a rank is doing right now
frames         a traceback's lines: whose they are, how they are shown
processes      forkserver or spawn
preload        what the forkserver imports once
rendezvous     backend, store, interface
machine        what this machine is and has, for `hybridlab doctor`
=============  =====================================================================
"""

from __future__ import annotations

from hybridlab.launch.cluster import Cluster
from hybridlab.launch.context import Context, current, device, report, state
from hybridlab.launch.failure import RankError
from hybridlab.launch.processes import warm_up
from hybridlab.launch.run import gather, launch
from hybridlab.launch.torchrun import join_torchrun, under_torchrun

__all__ = [
    "Cluster",
    "Context",
    "RankError",
    "current",
    "device",
    "gather",
    "join_torchrun",
    "launch",
    "report",
    "state",
    "under_torchrun",
    "warm_up",
]

"""Pipeline schedules as data: make one, check it, see what it holds in flight, play it in time.

Standard library only: it also runs in a browser's Python.
"""

from __future__ import annotations

from hybridlab.schedule.actions import OPS, PLACEMENTS, Action, Schedule, parse_action, read_schedule
from hybridlab.schedule.check import Problem, check
from hybridlab.schedule.formulas import ClosedForm, closed_form
from hybridlab.schedule.library import SCHEDULES, is_file, make_schedule, require_sizes, warmup_forwards
from hybridlab.schedule.memory import InFlight, in_flight
from hybridlab.schedule.messages import Message, messages
from hybridlab.schedule.simulate import Simulation, simulate
from hybridlab.schedule.steady import Steady, steady_state

__all__ = [
    "OPS",
    "PLACEMENTS",
    "SCHEDULES",
    "Action",
    "ClosedForm",
    "InFlight",
    "Message",
    "Problem",
    "Schedule",
    "Simulation",
    "Steady",
    "check",
    "closed_form",
    "in_flight",
    "is_file",
    "make_schedule",
    "messages",
    "parse_action",
    "read_schedule",
    "require_sizes",
    "simulate",
    "steady_state",
    "warmup_forwards",
]

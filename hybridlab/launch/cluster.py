"""Cluster: some ranks on this machine, and one call at a time on all of them."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from hybridlab.errors import UserError
from hybridlab.launch import channel as messages
from hybridlab.launch import context, rendezvous, shipping
from hybridlab.launch.answers import Answers, OnReport
from hybridlab.launch.failure import Failure, failed
from hybridlab.launch.output import Mode, Printer, check_mode
from hybridlab.launch.processes import check_room, start_method
from hybridlab.launch.team import Died, Printed, Team
from hybridlab.launch.torchrun import under_torchrun

MOST_RANKS = 128  # on one machine: each is a process, and gloo joins each pair by a socket
START_SECONDS = 120.0  # to start the ranks, whatever a call's own timeout
GRACE = 0.5  # seconds that ranks have to go when the Cluster is closed


class Cluster:
    """Ranks on this machine, in one process group, kept between calls.

    ::

        with Cluster(ranks=4) as cluster:
            cluster.run(lambda: dist.get_rank() ** 2)  # [0, 1, 4, 9]

    The ranks start with the first ``run`` (0.1 to 0.2 s for eight, once the forkserver is up) in the current directory,
    with the environment and ``sys.path`` of that moment. They end with ``close``, with this process, however that ends,
    and when the Cluster is forgotten. One call runs at a time; several Clusters can run side by side from their own
    threads.

    Args:
        ranks: how many, 1 to 128.
        backend: "nccl", "gloo", or None: NCCL when each rank can have its own GPU, else gloo on the CPU.
        timeout: seconds without an answer (or a `report`) after which a call is given up; `math.inf` for never.
        output: what ranks print is shown "live" as ``[rank] line``, "ordered" (at the end of a call, all of rank 0
            first), or not at all ("quiet").
        threads: of each rank, for torch on the CPU.

    Raises UserError for arguments out of range, for NCCL without enough GPUs, inside a rank and under torchrun.
    """

    def __init__(
        self,
        ranks: int,
        *,
        backend: str | None = None,
        timeout: float = 120.0,
        output: Mode = "live",
        threads: int = 1,
    ) -> None:
        _check_place()
        _check_count("ranks", ranks, MOST_RANKS)
        _check_count("threads", threads, 1024)
        check_mode(output)
        self._timeout = _checked_timeout(timeout)
        self._ranks = ranks
        self._backend = rendezvous.choose_backend(ranks, backend)
        self._threads = threads
        self._quiet = output == "quiet"
        self._printer = Printer(output, ranks)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._generation = itertools.count()
        self._store: Any = None
        self._team: Team | None = None
        self._regroup = False  # an interrupted call may have left messages under way: no later call must read them
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._closed = False

    @property
    def ranks(self) -> int:
        return self._ranks

    @property
    def backend(self) -> str:
        """ "nccl" or "gloo"."""
        return self._backend

    @property
    def device(self) -> torch.device:
        """The kind of device that ranks compute on; inside a rank, `hybridlab.launch.device()` has its number too."""
        return torch.device("cuda" if self._backend == "nccl" else "cpu")

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while none are running."""
        team = self._team
        return team.pids if team is not None and not team.ended else []

    @property
    def preload(self) -> dict[str, Any]:
        """What the running ranks found loaded: ``preloaded`` (on all of them), ``preload_failures`` {module: error}."""
        hellos = list(self._team.hello.values()) if self._team is not None else []
        return {
            "preloaded": bool(hellos) and all(hello["preloaded"] for hello in hellos),
            "preload_failures": hellos[0]["preload_failures"] if hellos else {},
        }

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise UserError("a Cluster belongs to the process that made it.")

    def start(self) -> None:
        """Start the ranks now rather than with the first call. Raises as `run` does."""
        self._take_turn()
        try:
            self._ready_team()
        finally:
            self._lock.release()

    def run(
        self,
        fn: Any,
        *args: Any,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        timeout: float | None = None,
        on_report: OnReport | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, *per_rank[rank], **kwargs)`` on each rank and return the results by rank.

        Function, arguments and results travel by value: functions of a cell, a script or a test module too, with copies
        of the globals they read (to keep something on a rank, put it into `hybridlab.launch.state`). Tensors come back
        detached and on the CPU.

        Args:
            per_rank: one tuple of further arguments for each rank.
            timeout: seconds of silence for this call, in place of the Cluster's.
            on_report: called in this thread with ``(rank, value)`` for each `hybridlab.launch.report(value)`.

        Raises:
            RankError: a rank raised, died or is stuck. All ranks have been ended; the next call starts fresh ones.
            UserError: raised in a rank, or: the call cannot be sent, the Cluster is busy or closed.
            KeyboardInterrupt: the ranks are idle again, or have been ended if they did not come back in half a second.
        """
        if not callable(fn):
            raise UserError(
                "run() takes a function and its arguments.", value=fn, fix="run(fn, *args), not run(fn(*args))."
            )
        seconds = self._timeout if timeout is None else _checked_timeout(timeout)
        self._take_turn()
        try:
            own = self._own_arguments(per_rank)
            call = shipping.dump_call(fn, args, kwargs)
            team = self._ready_team()
            team.busy = True
            for rank in range(self._ranks):
                team.send(rank, messages.CALL, len(call).to_bytes(8, "big"), call, own[rank])
            answers = Answers(team, self._printer, messages.RESULT, seconds, quiet=self._quiet, on_report=on_report)
            try:
                return [shipping.loads(answer) for answer in answers.collect()]
            except KeyboardInterrupt:
                self._regroup = True
                raise
        finally:
            try:
                self._printer.finish()
            finally:
                self._lock.release()

    def interrupt(self) -> None:
        """End the running call as Ctrl-C would, from another thread: its ``run`` raises KeyboardInterrupt."""
        team = self._team
        if team is not None and self._lock.locked():
            team.wake()

    def close(self) -> None:
        """End the ranks and give back all descriptors. A closed Cluster stays closed; closing twice is fine.

        Raises UserError while a call is running in another thread: `interrupt` it first.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._take_turn()
        try:
            self._closed = True
            if self._team is not None:
                self._team.end(GRACE)
            self._forget_team()
            self._store = None
        finally:
            self._lock.release()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        if os.getpid() != self._owner:
            raise UserError("this Cluster belongs to the process that made it.", fix="make one in this process.")
        if not self._lock.acquire(blocking=False):
            raise UserError(
                "this Cluster is busy with another call.", fix="wait for it, interrupt() it, or use a second Cluster."
            )
        if self._closed:
            self._lock.release()
            raise UserError("this Cluster is closed.", fix="make a new one.")

    def _own_arguments(self, per_rank: Sequence[tuple[Any, ...]] | None) -> list[bytes]:
        if per_rank is None:
            return [shipping.dump_arguments((), 0)] * self._ranks
        if len(per_rank) != self._ranks:
            raise UserError(
                f"per_rank has {len(per_rank)} entries for {self._ranks} ranks.",
                key="per_rank",
                fix="one tuple of arguments for each rank.",
            )
        return [shipping.dump_arguments(tuple(values), rank) for rank, values in enumerate(per_rank)]

    def _ready_team(self) -> Team:
        """Ranks that are idle and in a fresh enough group: those of the last call, or new ones."""
        team = self._team
        if team is not None and not team.ended and not team.busy:  # busy: an interrupt came between two steps of a call
            self._look_after(team)
            if not self._regroup:
                return team
            if self._regrouped(team):
                self._regroup = False
                return team
            warnings.warn("the interrupted ranks had to be replaced; what they kept is gone.", stacklevel=4)
        self._forget_team()
        return self._new_team()

    def _look_after(self, team: Team) -> None:
        """What happened since the last call: output is shown, a death is an error."""
        deaths = []
        for event in team.wait(0.0):
            if isinstance(event, Printed):
                self._printer.feed(event.rank, event.data)
            elif isinstance(event, Died):
                now = time.monotonic()
                deaths.append(Failure(event.rank, now, now, exit_code=event.exit_code))
        if deaths:
            team.end()
            raise failed(deaths, {}, team.coords, "between two calls")

    def _regrouped(self, team: Team) -> bool:
        prefix = self._prefix().encode()
        team.busy = True
        for rank in range(self._ranks):
            team.send(rank, messages.REGROUP, prefix)
        try:
            Answers(team, self._printer, messages.READY, 10.0).collect()
        except Exception:
            return False
        return True

    def _new_team(self) -> Team:
        check_room(self._ranks)
        if self._store is None:
            self._store = rendezvous.open_store()
        shared = {
            "backend": self._backend,
            "threads": self._threads,
            "port": self._store.port,
            "prefix": self._prefix(),
        }
        team = self._team = Team(self._ranks, shared)
        self._finalizer = weakref.finalize(self, team.end)  # also at exit
        self._regroup = False
        self._printer.restart()
        try:
            team.start()
        except BaseException as error:
            team.end()
            if isinstance(error, OSError | EOFError) and (explained := _explain(error)) is not None:
                raise explained from error
            raise
        Answers(
            team, self._printer, messages.READY, START_SECONDS, during="while starting", quiet=self._quiet
        ).collect()
        _warn_if_slow(self.preload["preloaded"])
        return team

    def _prefix(self) -> str:
        return f"generation {next(self._generation)}"

    def _forget_team(self) -> None:
        if self._team is not None:
            self._team.end()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._team, self._finalizer = None, None


def _check_place() -> None:
    if context.in_cluster():
        raise UserError(
            "this is a rank already, and a rank cannot start ranks of its own.",
            fix="make the Cluster outside the function that ranks run.",
        )
    if under_torchrun():
        raise UserError(
            "torchrun has started the ranks already.", fix="use hybridlab.launch.launch(), which joins them."
        )


def _check_count(key: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UserError(f"{key} must be a whole number from 1 to {most}, not {value!r}.", key=key, value=value)


def _checked_timeout(seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UserError(
            f"timeout must be a number of seconds above 0, not {seconds!r}.",
            key="timeout",
            value=seconds,
            fix="math.inf for no deadline.",
        )
    return float(seconds)


def _explain(error: BaseException) -> UserError | None:
    """A refusal of the system to start processes, in words."""
    if isinstance(error, EOFError | ConnectionError):
        return UserError(
            "the server process that ranks are forked from did not come up.",
            fix="`hybridlab doctor` shows why; HYBRIDLAB_START_METHOD=spawn does without it.",
        )
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EMFILE, errno.ENFILE):
        return UserError(
            "the ranks need more open files than the system allows.", fix="raise `ulimit -n`, or use fewer ranks."
        )
    if code in (errno.EAGAIN, errno.ENOMEM):
        return UserError("the system refuses to start more processes (memory, or `ulimit -u`).", fix="use fewer ranks.")
    if isinstance(error, FileNotFoundError):
        return UserError("the current directory no longer exists.", fix="change to one that does.")
    return None


_warned = False


def _warn_if_slow(preloaded: bool) -> None:
    """The forkserver says nothing when it could not preload: only the ranks can tell (see `preload`)."""
    global _warned
    if _warned or preloaded or start_method() != "forkserver":
        return
    _warned = True
    warnings.warn(
        "ranks start slowly: the server they are forked from has not loaded torch. Either hybridlab is not installed "
        "in this Python (pip install -e .), or other code had started multiprocessing's forkserver first.",
        stacklevel=5,
    )

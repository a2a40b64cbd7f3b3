"""One generation of ranks: their processes and pipes, and the events that come out of them.

A Team carries no policy. It starts ranks, sends to them, tells what they said, printed, or died of, and ends them; the
Cluster decides. All of it runs on the thread that calls: the driver has no threads and no signal handlers of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import selectors
import signal
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hybridlab.launch import channel as messages
from hybridlab.launch import worker
from hybridlab.launch.channel import Inbox, Outbox
from hybridlab.launch.processes import start_method, starting
from hybridlab.launch.stacks import Doing, parse

_PIPE_READ = 1 << 16


@dataclass(frozen=True)
class Printed:
    """Some bytes of a rank's standard output or error."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Said:
    """A message from a rank; kinds are in `channel`."""

    rank: int
    kind: bytes
    payload: bytearray


@dataclass(frozen=True)
class Died:
    """A rank's process has ended; negative: by that signal."""

    rank: int
    exit_code: int


@dataclass(frozen=True)
class Woken:
    """Another thread called `wake`."""


Event = Printed | Said | Died | Woken


class _Link:
    """The driver's ends of one rank's pipes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.inbox = Inbox()
        self.outbox = Outbox()
        self.messages, self.rank_messages = multiprocessing.Pipe(duplex=True)
        self.rank_lifeline, self.lifeline = multiprocessing.Pipe(duplex=False)
        self.output, self.rank_output = multiprocessing.Pipe(duplex=False)
        self.stacks, self.rank_stacks = multiprocessing.Pipe(duplex=False)
        self.process: Any = None
        self.pid = 0
        self.main_thread = 0  # 0 until the rank has said hello: before that it would die of the stack signal
        for end in (self.messages, self.output, self.stacks):
            os.set_blocking(end.fileno(), False)

    def hand_over(self) -> None:
        """The rank has its own copies now; ours must go, or its pipes would never come to an end."""
        for end in (self.rank_messages, self.rank_lifeline, self.rank_output, self.rank_stacks):
            end.close()

    def ends(self) -> tuple[Connection, ...]:
        return (
            *(self.messages, self.lifeline, self.output, self.stacks),
            *(self.rank_messages, self.rank_lifeline, self.rank_output, self.rank_stacks),
        )


class Team:
    """Some ranks, started together and ended together.

    Args:
        seats: keyword arguments of `worker.Seat` that all ranks share.
        size: how many ranks.
    """

    def __init__(self, size: int, seats: dict[str, Any]) -> None:
        self.size = size
        self._seats = seats
        self._owner = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._links: list[_Link] = []
        self._wake_in, self._wake_out = self._wakers = list(os.pipe())
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._woken = False
        self.ended = False
        self._released = False
        self.busy = True  # until every rank has answered what it was sent, and is idle
        self.coords: dict[int, dict[str, int]] = {}
        self.hello: dict[int, dict[str, Any]] = {}
        _teams.add(self)

    @property
    def pids(self) -> list[int]:
        return [link.pid for link in self._links if link.pid]

    def start(self) -> None:
        """Start the processes; they say HELLO and then READY. Raises OSError when the system refuses more of them."""
        environment = dict(os.environ)
        context: Any = multiprocessing.get_context(start_method())
        with starting():
            for rank in range(self.size):
                link = _Link(rank)
                self._links.append(link)
                seat = worker.Seat(
                    rank=rank,
                    world=self.size,
                    environment=environment,
                    messages=link.rank_messages,
                    lifeline=link.rank_lifeline,
                    output=link.rank_output,
                    stacks=link.rank_stacks,
                    **self._seats,
                )
                link.process = context.Process(target=worker.main, args=(seat,), name=f"rank {rank}")
                link.process.start()
                link.pid = link.process.pid
                link.hand_over()
                self._selector.register(link.messages.fileno(), selectors.EVENT_READ, link)
                self._selector.register(link.output.fileno(), selectors.EVENT_READ, link)
                self._selector.register(link.process.sentinel, selectors.EVENT_READ, link)

    def send(self, rank: int, kind: bytes, *payload: bytes) -> None:
        """Queue a message; `wait` writes it as the rank takes it."""
        link = self._links[rank]
        link.outbox.push(kind, *payload)
        self._flush(link)

    def sent(self, rank: int) -> bool:
        """Has the rank taken all that it was sent?"""
        return not self._links[rank].outbox

    def wait(self, seconds: float) -> Iterator[Event]:
        """What happened, waiting at most so long for something to happen. Output comes before the message after it."""
        links: dict[int, _Link] = {}
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                os.read(self._wake_in, _PIPE_READ)
                self._woken = False
                yield Woken()
            else:
                links[key.data.rank] = key.data
        for link in links.values():
            self._flush(link)
            died = link.process.exitcode is not None  # asked first: what it said before it died is then in the pipe
            said = list(self._said(link))
            yield from self._printed(link)
            yield from said
            if not died and not self._listening(link):
                link.process.join(1.0)  # its end is closed: the system is about to say how it ended
                died = link.process.exitcode is not None
            if died:
                self._forget(link)
                yield Died(link.rank, link.process.exitcode)

    def wake(self) -> None:
        """Make `wait` return a `Woken`, from another thread."""
        if not self._woken and not self.ended:
            self._woken = True
            with contextlib.suppress(OSError):  # ended meanwhile
                os.write(self._wake_out, b"!")

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Send these ranks the keyboard's signal."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._links[rank].pid, signal.SIGINT)

    def doing(self, ranks: Iterable[int], seconds: float = 0.4) -> dict[int, Doing | str]:
        """What these ranks are doing now. Those that do not answer within the time are told of in words."""
        asked = [self._links[rank] for rank in ranks]
        dumps = {link.rank: b"" for link in asked}
        pending = {link.stacks.fileno(): link for link in asked if link.main_thread and self._signal(link)}
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for fd, link in pending.items():
                selector.register(fd, selectors.EVENT_READ, link)
            while pending and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    dumps[key.data.rank] += _drain(key.fd)[0]
                if all(dumps[link.rank] for link in pending.values()):
                    # Dumps are written in pieces: they are whole when nothing more comes for a moment.
                    until = min(until, time.monotonic() + 0.05)
        found: dict[int, Doing | str] = {}
        for link in asked:
            doing = parse(dumps[link.rank].decode("utf-8", "replace"), link.main_thread)
            found[link.rank] = doing or (_state(link.pid) if link.main_thread else "still starting")
        return found

    def last_stack(self, rank: int) -> Doing | None:
        """Where a rank that crashed was, as its own handler wrote it."""
        link = self._links[rank]
        return parse(_drain(link.stacks.fileno())[0].decode("utf-8", "replace"), link.main_thread)

    def end(self, grace: float = 0.0) -> None:
        """End all ranks and all processes they started, and give every descriptor back.

        With ``grace`` they are first told to go and given that many seconds. Interrupted, it can be called again.
        """
        if self._released or os.getpid() != self._owner:
            return
        self.ended = True
        _teams.discard(self)
        try:
            if grace:
                for link in self._links:
                    link.messages.close()
                self._join(grace)
        finally:
            for link in self._links:
                link.lifeline.close()  # the kernel, or the rank's own thread, kills it and its children
                if link.pid and link.process is not None:
                    _kill(link.pid, group_only=link.process.exitcode is not None)
            self._join(5.0)
            self._release()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _flush(self, link: _Link) -> None:
        if not self._listening(link):
            return
        link.outbox.flush(link.messages.fileno())
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0)
        self._selector.modify(link.messages.fileno(), events, link)

    def _listening(self, link: _Link) -> bool:
        return link.messages.fileno() in self._selector.get_map()

    def _said(self, link: _Link) -> Iterator[Event]:
        fd = link.messages.fileno()
        if not self._listening(link):
            return
        try:
            for kind, payload in link.inbox.read(fd):
                if kind == messages.HELLO:
                    self.hello[link.rank] = pickle.loads(payload)
                    link.main_thread = self.hello[link.rank]["main_thread"]
                elif kind == messages.COORDS:
                    self.coords[link.rank] = pickle.loads(payload)
                else:
                    yield Said(link.rank, kind, payload)
        except EOFError:
            self._selector.unregister(fd)

    def _printed(self, link: _Link) -> Iterator[Event]:
        fd = link.output.fileno()
        if fd in self._selector.get_map():
            data, closed = _drain(fd)
            if data:
                yield Printed(link.rank, data)
            if closed:
                self._selector.unregister(fd)

    def _forget(self, link: _Link) -> None:
        for fd in (link.messages.fileno(), link.output.fileno(), link.process.sentinel):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)

    def _signal(self, link: _Link) -> bool:
        _drain(link.stacks.fileno())
        try:
            os.kill(link.pid, worker.STACK_SIGNAL)
        except ProcessLookupError:
            return False
        return True

    def _join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for link in self._links:
            if link.pid and link.process is not None:
                link.process.join(max(0.0, until - time.monotonic()))

    def _release(self) -> None:
        """Give the descriptors back. Whatever interrupts it, it can be done again."""
        for link in self._links:
            for end in link.ends():
                end.close()
            if link.process is not None and link.process.exitcode is not None:
                link.process.close()
                link.process = None
        self._selector.close()
        while self._wakers:
            os.close(self._wakers.pop())
        self._released = True


def _kill(pid: int, group_only: bool = False) -> None:
    """SIGKILL a rank and the processes of its session. Before it has made its session there is only itself."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        if not group_only:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _drain(fd: int) -> tuple[bytes, bool]:
    """All that is in a non-blocking pipe now, and whether its other end is closed."""
    data = b""
    while True:
        try:
            piece = os.read(fd, _PIPE_READ)
        except BlockingIOError:
            return data, False
        if not piece:
            return data, True
        data += piece


def _state(pid: int) -> str:
    """In words, why a process does not answer a signal."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "not answering"
    return {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "blocked in the kernel"}.get(
        letter, "not answering"
    )


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A process forked from the driver must not hold the ranks' lifelines: they would outlive the driver."""
    for team in list(_teams):
        for link in team._links:
            link.lifeline.close()
            link.messages.close()
    _teams.clear()


os.register_at_fork(after_in_child=_let_go_in_child)

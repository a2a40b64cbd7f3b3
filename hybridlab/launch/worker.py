"""What runs in a rank: tie its life to the driver's, take its output, join the group, serve calls until told to go.

The driver kills a rank without asking: that is cheap (a fresh one takes 0.1 s) and always works. So nothing here tries
to recover from a failed call; only an interrupt of plain Python code leaves the rank alive, with what it keeps.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hybridlab.errors import UserError
from hybridlab.launch import channel as messages
from hybridlab.launch import context, rendezvous, shipping
from hybridlab.launch.channel import Channel
from hybridlab.launch.failure import RemoteError

STACK_SIGNAL = signal.SIGUSR1  # the driver asks with it: where are you?
_COORDS_EVERY = 0.1  # seconds


@dataclass(frozen=True)
class Seat:
    """All that a rank is given when it starts."""

    rank: int
    world: int
    backend: str
    threads: int
    port: int  # of the driver's store, on 127.0.0.1
    prefix: str  # of this generation's keys in it
    environment: dict[str, str]  # the forkserver's own dates from when it was started
    messages: Connection
    lifeline: Connection  # nothing is ever written to it; its end is the driver's end
    output: Connection
    stacks: Connection


def main(seat: Seat) -> None:
    """The target of the rank's process. Never returns."""
    preloaded = sys.modules.get("hybridlab.launch.preload")
    with contextlib.suppress(PermissionError):  # it may lead a session already
        os.setsid()  # Jupyter and terminals interrupt a whole process group: the driver decides what ranks see
    channel = Channel(seat.messages.fileno())
    _hold_lifeline(seat.lifeline.fileno(), channel)
    _take_output(seat.output.fileno())
    faulthandler.enable(seat.stacks.fileno(), all_threads=False)  # where a segmentation fault happened
    faulthandler.register(STACK_SIGNAL, seat.stacks.fileno(), all_threads=True, chain=False)
    calls = _Interruptible()
    signal.signal(signal.SIGINT, calls.on_signal)
    facts = {
        "main_thread": threading.main_thread().ident,
        "preloaded": preloaded is not None,
        "preload_failures": getattr(preloaded, "failures", {}),
    }
    channel.send(messages.HELLO, pickle.dumps(facts))
    try:
        _prepare(seat, channel, calls)
        channel.send(messages.READY)
        while (message := channel.receive()) is not None:
            _serve(*message, seat, channel, calls)
    except BaseException as error:
        channel.send(messages.FAILED, pickle.dumps(RemoteError.read(error, last_coords())))
        channel.receive()  # until the driver ends us
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # no destructors: they would wait for peers that are gone


def _prepare(seat: Seat, channel: Channel, calls: _Interruptible) -> None:
    os.environ.clear()
    os.environ.update(seat.environment)
    # What torchrun would set, for code that reads it.
    os.environ.update(RANK=str(seat.rank), WORLD_SIZE=str(seat.world), LOCAL_RANK=str(seat.rank))
    rendezvous.use_loopback()
    torch.set_num_threads(seat.threads)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # forked ranks would all draw the forkserver's numbers
    device = torch.device("cuda", seat.rank) if seat.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rendezvous.join(seat.backend, seat.rank, seat.world, seat.port, seat.prefix, device)

    def report(value: Any) -> None:
        payload = shipping.dump_result(value, seat.rank)
        with calls.held_back():
            channel.send(messages.REPORT, payload)

    context.enter(context.Context(seat.rank, seat.world, seat.rank, device), report, of_cluster=True)


def _serve(kind: bytes, payload: bytearray, seat: Seat, channel: Channel, calls: _Interruptible) -> None:
    if kind == messages.REGROUP:
        if dist.is_initialized():
            dist.destroy_process_group()
        rendezvous.join(seat.backend, seat.rank, seat.world, seat.port, payload.decode(), context.device())
        channel.send(messages.READY)
        return
    try:
        with calls.allowed():
            reply = _call(payload, seat.rank)
        answer: tuple[bytes, bytes] = (messages.RESULT, reply)
    except BaseException as error:
        kind = messages.INTERRUPTED if isinstance(error, KeyboardInterrupt) else messages.FAILED
        answer = (kind, pickle.dumps(RemoteError.read(error, last_coords())))
    _send_coords(channel)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # the function closed it
            stream.flush()
    channel.send(*answer)  # after the output: the driver reads what is in the pipe before it returns


def _call(payload: bytearray, rank: int) -> bytes:
    if not dist.is_initialized():
        raise UserError(
            "an earlier call destroyed the default process group, which belongs to the Cluster.",
            fix="destroy only groups that you made.",
        )
    with memoryview(payload) as stream:
        size = int.from_bytes(stream[:8], "big")
        fn, args, kwargs = shipping.loads(stream[8 : 8 + size])
        own = shipping.loads(stream[8 + size :])
    payload.clear()  # large arguments need not be here twice while the function runs
    return shipping.dump_result(fn(*args, *own, **kwargs), rank)


class _Interruptible:
    """SIGINT counts only while a call runs, and never in the middle of a message to the driver."""

    def __init__(self) -> None:
        self._allowed = False
        self._pending = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt
        self._pending = True

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        self._pending = False
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        before, self._allowed = self._allowed, False
        try:
            yield
        finally:
            self._allowed = before
        if before and self._pending:
            raise KeyboardInterrupt


def _hold_lifeline(fd: int, channel: Channel) -> None:
    """End with the driver, whatever this process is doing, and with it all processes that it started.

    On Linux the kernel does it, on the signal that a pipe gives when its last writer is gone: that reaches a process
    that holds the interpreter lock in C code, and one that is stopped. Elsewhere, and as a second net, a thread does;
    it runs while gloo blocks, since the wait gives the lock away. (PR_SET_PDEATHSIG is no help: the parent is the
    forkserver.)
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp() if os.getpgrp() == os.getpid() else os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_watch, args=(fd, channel), name="lifeline", daemon=True).start()


def _watch(fd: int, channel: Channel) -> None:
    ready = select.poll()
    ready.register(fd, select.POLLIN | select.POLLHUP)
    while not ready.poll(1000 * _COORDS_EVERY):
        with contextlib.suppress(OSError):
            _send_coords(channel)
    os.killpg(os.getpgrp(), signal.SIGKILL)


_sent_coords: dict[str, int] | None = None


def last_coords() -> dict[str, int] | None:
    """This rank's (pp, dp, tp), once it has built a mesh."""
    mesh = sys.modules.get("hybridlab.mesh")
    return mesh.last_coords() if mesh is not None else None


def _send_coords(channel: Channel) -> None:
    """Tell the driver where this rank sits, once it has a mesh: a rank that dies or is stuck cannot say it any more."""
    global _sent_coords
    coords = last_coords()
    if coords is not None and coords != _sent_coords:
        _sent_coords = coords
        channel.send(messages.COORDS, pickle.dumps(dict(coords)))


def _take_output(fd: int) -> None:
    """Standard output and error into one pipe, at the level of descriptors: what C++ prints comes along."""
    for target in (1, 2):
        os.dup2(fd, target)
    os.set_inheritable(1, True)
    os.set_inheritable(2, True)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(target, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
        for target in (1, 2)
    )

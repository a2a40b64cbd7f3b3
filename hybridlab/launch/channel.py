"""Messages between the driver and a rank: a kind, a length and the payload, over a socket pair.

The rank's end blocks. The driver's end never does: one event loop reads from all ranks at once, so that eight results
of a gigabyte arrive side by side and a rank that stopped reading holds nobody else up.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Iterator

_HEADER = struct.Struct("!cQ")
_CHUNK = 1 << 20

# From a rank.
HELLO = b"h"  # the process is up; payload: a pickled dict of facts
READY = b"y"  # in the process group and idle
RESULT = b"r"  # the call returned; payload: the result, pickled
FAILED = b"e"  # the call raised; payload: a pickled RemoteError
INTERRUPTED = b"i"  # the call was interrupted, the rank is idle again
REPORT = b"p"  # in the middle of a call: a pickled value for `on_report`
COORDS = b"c"  # where the rank sits in the mesh it built; payload: a pickled dict
# To a rank.
CALL = b"C"  # payload: two pickles, (fn, args, kwargs) and the rank's own arguments
REGROUP = b"G"  # payload: a prefix; leave the process group and join a new one under it


class Channel:
    """A rank's end. Sends may come from any thread; only the main thread receives."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, kind: bytes, payload: bytes | bytearray = b"") -> None:
        with self._lock:
            for part in (_HEADER.pack(kind, len(payload)), payload):
                view = memoryview(part)
                while view:
                    view = view[os.write(self._fd, view[:_CHUNK]) :]

    def receive(self) -> tuple[bytes, bytearray] | None:
        """The next message, or None when the driver has closed its end."""
        header = self._exactly(_HEADER.size)
        if header is None:
            return None
        kind, length = _HEADER.unpack(header)
        payload = self._exactly(length)
        return None if payload is None else (kind, payload)

    def _exactly(self, count: int) -> bytearray | None:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            try:
                got = os.readv(self._fd, [view[:_CHUNK]])
            except ConnectionResetError:
                return None
            if not got:
                return None
            view = view[got:]
        return buffer


class Inbox:
    """The driver's reading half: feeds on a non-blocking descriptor, yields whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray(_HEADER.size)
        self._filled = 0
        self._kind: bytes | None = None  # set while the payload is being read

    def read(self, fd: int) -> Iterator[tuple[bytes, bytearray]]:
        """All messages that are complete by now. Raises EOFError once the rank's end is closed."""
        while True:
            while self._filled < len(self._buffer):
                try:
                    got = os.readv(fd, [memoryview(self._buffer)[self._filled :]])
                except BlockingIOError:
                    return
                except ConnectionResetError:
                    got = 0
                if not got:
                    raise EOFError
                self._filled += got
            whole, kind = self._buffer, self._kind
            self._filled = 0
            if kind is None:
                self._kind, length = _HEADER.unpack(whole)
                self._buffer = bytearray(length)
            else:
                self._kind, self._buffer = None, bytearray(_HEADER.size)
                yield kind, whole


class Outbox:
    """The driver's writing half: what the rank has not taken yet. Payloads are shared between ranks, not copied."""

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def push(self, kind: bytes, *payload: bytes | bytearray) -> None:
        """Queue a message of one kind; its payload is not copied."""
        length = sum(len(part) for part in payload)
        self._parts.append(memoryview(_HEADER.pack(kind, length)))
        self._parts.extend(memoryview(part) for part in payload if len(part))

    def flush(self, fd: int) -> None:
        """Write what fits now. A rank that is gone takes nothing more: its death is reported by its sentinel."""
        while self._parts:
            try:
                sent = os.write(fd, self._parts[0][:_CHUNK])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._parts.clear()
                return
            if sent == len(self._parts[0]):
                self._parts.popleft()
            else:
                self._parts[0] = self._parts[0][sent:]

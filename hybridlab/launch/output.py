"""What ranks print: each line labelled with its rank, as it comes or held and shown rank by rank."""

from __future__ import annotations

import sys
from collections import deque
from typing import Literal, get_args

from hybridlab.errors import UserError

Mode = Literal["live", "ordered", "quiet"]

_LONGEST_LINE = 1 << 16  # bytes; a rank that never ends its line is cut here
_MOST_HELD = 10_000  # lines per rank and call that "ordered" keeps


def check_mode(mode: str) -> None:
    """Raises UserError for anything but live, ordered or quiet."""
    if mode not in get_args(Mode):
        raise UserError("output is live, ordered or quiet.", key="output", value=mode, fix="output='live'.")


class Lines:
    """Bytes of one rank's standard output and error, cut into lines."""

    def __init__(self) -> None:
        self._open = b""

    def feed(self, data: bytes) -> list[str]:
        """Take bytes as they come; returns the lines that are whole now."""
        *lines, self._open = (self._open + data).split(b"\n")
        if len(self._open) > _LONGEST_LINE:
            lines, self._open = [*lines, self._open], b""
        return [_text(line) for line in lines]

    def rest(self) -> list[str]:
        """The last line, if it was left open."""
        line, self._open = self._open, b""
        return [_text(line)] if line else []


def _text(line: bytes) -> str:
    """As a terminal would leave it: a progress bar redraws its line after each carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Printer:
    """Shows the ranks' lines on the driver's standard output, from the thread that called ``run``: notebooks put output
    under the cell whose thread printed it.

    Args:
        mode: "live" as lines come; "ordered" at the end of the call, all of rank 0 first; "quiet" not at all.
        ranks: how many.
    """

    def __init__(self, mode: Mode, ranks: int) -> None:
        self._mode = mode
        self._lines = [Lines() for _ in range(ranks)]
        self._held: list[list[str]] = [[] for _ in range(ranks)]
        self._left_out = [0] * ranks
        self.last: list[deque[str]] = [deque(maxlen=5) for _ in range(ranks)]  # for the message when a rank dies

    def restart(self) -> None:
        """Other ranks have taken the place of those that printed so far."""
        self.finish()
        for last in self.last:
            last.clear()

    def feed(self, rank: int, data: bytes) -> None:
        self._take(rank, self._lines[rank].feed(data))

    def finish(self) -> None:
        """The call is over: show what is held, and what had no newline yet."""
        for rank, lines in enumerate(self._lines):
            self._take(rank, lines.rest())
            self._show(rank, self._held[rank])
            if self._left_out[rank]:
                self._show(rank, [f"… {self._left_out[rank]} more lines left out"])
            self._held[rank], self._left_out[rank] = [], 0

    def _take(self, rank: int, lines: list[str]) -> None:
        self.last[rank].extend(lines)
        if self._mode == "live":
            self._show(rank, lines)
        elif self._mode == "ordered":
            room = _MOST_HELD - len(self._held[rank])
            self._held[rank].extend(lines[:room])
            self._left_out[rank] += max(0, len(lines) - room)

    def _show(self, rank: int, lines: list[str]) -> None:
        if lines:
            sys.stdout.write("".join(f"[{rank}] {line}\n" for line in lines))
            sys.stdout.flush()

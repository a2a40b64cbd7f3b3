"""Which of several errors is the cause, and how it is told: one rank, its coordinates, its lines, where others were."""

from __future__ import annotations

import pickle
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import cloudpickle

from hybridlab.errors import UserError
from hybridlab.launch.frames import Frame, show
from hybridlab.launch.stacks import Doing

Kind = Literal["exception", "died", "stuck"]

# What a rank meets when *another* one has failed: gloo's, NCCL's and the store's words for a peer that is gone. "Timed
# out" counts: the late rank is the cause, not the one that waited for it.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by (remote )?peer|reset by peer|Broken pipe|pair closure|Connection refused"
    r"|Timed out waiting \d+ms|wait timeout after \d+ms|Timed out after \d+ seconds waiting for clients|Socket Timeout"
    r"|ncclRemoteError|remote process exited|communicator was aborted|NCCL communicator|Watchdog caught collective",
    re.IGNORECASE,
)

_HINTS = (
    (
        r"default process group twice",
        "the default process group is already up in a rank: leave init_process_group out.",
    ),
    (
        r"No module named",
        "a rank looks for modules where this process did (sys.path) when the ranks were started; install the module, "
        "or put its folder on sys.path before the first run().",
    ),
    (
        r"name '\w+' is not defined",
        "import what the function needs inside it, or define it in this process before run().",
    ),
    (
        r"CUDA out of memory",
        "`hybridlab rehearse` shows what each rank will hold, before a run.",
    ),
)


class RankError(Exception):
    """A call on the ranks failed. The message holds all there is to tell; the ranks have been ended.

    Attributes:
        rank: the rank that caused it.
        coords: where it sits in the mesh, ``{pp, dp, tp}``, or None when it had built none.
        kind: "exception" (it raised), "died" (its process ended), "stuck" (no answer by the deadline).
        traceback: the rank's own traceback as text, "" when there is none.
        others: what each other rank was doing, by rank.
        also: ranks that failed in the same way.
    """

    def __init__(
        self,
        headline: str,
        *,
        rank: int,
        kind: Kind,
        coords: Mapping[str, int] | None = None,
        traceback: str = "",
        others: Mapping[int, str] | None = None,
        also: Sequence[int] = (),
        hint: str = "",
    ) -> None:
        self.headline = headline
        self.rank = rank
        self.kind = kind
        self.coords = dict(coords) if coords else None
        self.traceback = traceback
        self.others = dict(others or {})
        self.also = tuple(also)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.headline]
        if self.traceback:
            parts.append(self.traceback)
        if self.also:
            parts.append(f"{_ranks(self.also)} failed in the same way.")
        if self.others:
            parts.append("Meanwhile: " + "; ".join(grouped(self.others)) + ".")
        if self.hint:
            parts.append(f"Hint: {self.hint}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError._rebuild, (self.headline, self.__dict__)

    @staticmethod
    def _rebuild(headline: str, fields: dict[str, Any]) -> RankError:
        names = ("rank", "kind", "coords", "traceback", "others", "also", "hint")
        return RankError(headline, **{name: fields[name] for name in names})

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of a traceback: the driver's own frames say nothing about a rank's error."""
        return [f"RankError: {self}"]


@dataclass(frozen=True)
class Link:
    """One exception of a chain, as text and frames."""

    relation: str  # how it led to the next one, "" for the last
    text: str  # "ValueError: …", notes included
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class RemoteError:
    """An exception as it travels from a rank: read there, shown here. ``when`` is on the clock all processes share."""

    type: str
    message: str
    chain: tuple[Link, ...]  # the cause first, the exception itself last
    consequence: bool
    when: float
    coords: dict[str, int] | None
    pickled: bytes = field(repr=False, default=b"")

    @classmethod
    def read(cls, error: BaseException, coords: dict[str, int] | None) -> RemoteError:
        """In the rank, while the exception is being handled."""
        chain = _chain(error)
        try:
            bare = error.with_traceback(None)
            pickled = cloudpickle.dumps(bare)
            pickle.loads(pickled)  # some exceptions pickle well and cannot be made again
        except Exception:
            pickled = b""
        return cls(
            type=type(error).__name__,
            message=str(error),
            chain=tuple(link for link, _ in chain),
            consequence=any(
                isinstance(item, RuntimeError | OSError) and _CONSEQUENCE.search(str(item)) for _, item in chain
            ),
            when=time.monotonic(),
            coords=coords,
            pickled=pickled,
        )

    def original(self) -> BaseException | None:
        """The exception itself, where it could travel."""
        try:
            return pickle.loads(self.pickled) if self.pickled else None
        except Exception:
            return None

    def summary(self) -> str:
        """ "ValueError: boom", in one line."""
        text = self.chain[-1].text.partition("\n")[0]
        return text if len(text) <= 300 else text[:300] + "…"

    def traceback(self) -> str:
        """All links of the chain; the last one's text only where the summary does not say it all."""
        lines: list[str] = []
        for link in self.chain:
            lines += show(link.frames)
            if link.relation:
                lines += [link.text, f"{link.relation}:"]
            elif link.text != self.summary():
                lines.append(link.text)
        return "\n".join(lines)


def _chain(error: BaseException, depth: int = 3) -> list[tuple[Link, BaseException]]:
    text = "".join(traceback.format_exception_only(type(error), error)).rstrip()
    frames = tuple(
        Frame(entry.filename, entry.lineno or 0, entry.name, (entry.line or "").strip())
        for entry in traceback.extract_tb(error.__traceback__)
    )
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is None or depth == 0:
        return [(Link("", text, frames), error)]
    relation = "which caused" if error.__cause__ else "while handling it"
    earlier = _chain(before, depth - 1)
    last, item = earlier[-1]
    return [*earlier[:-1], (Link(relation, last.text, last.frames), item), (Link("", text, frames), error)]


@dataclass(frozen=True)
class Failure:
    """One rank's end of a failed call: what it raised, or the exit code it left with (negative: a signal)."""

    rank: int
    when: float  # it happened, on the rank's side
    heard: float  # the driver learnt of it
    error: RemoteError | None = None
    exit_code: int | None = None
    last_words: str = ""

    @property
    def consequence(self) -> bool:
        return self.error is not None and self.error.consequence

    def in_passing(self) -> str:
        """What to say of it beside another failure."""
        if self.error is None:
            return f"died: {exit_reason(self.exit_code)}"
        return "lost the connection" if self.consequence else f"raised {self.error.summary()}"

    def same_as(self, other: Failure) -> bool:
        """Whether both ranks failed in the same way: the same exception, or the same way to die."""
        if self.error is None or other.error is None:
            return self.exit_code == other.exit_code and self.error is other.error
        return (self.error.type, self.error.message) == (other.error.type, other.error.message)


def root_cause(failures: Sequence[Failure]) -> tuple[Failure, list[Failure]]:
    """The failure that the others follow from, and those that are the same as it.

    Errors that only say that a peer is gone are consequences; the earliest of the rest is the cause. A process that
    ended by itself comes before a consequence too: its peers notice faster than the operating system reports it.
    """
    causes = [failure for failure in failures if not failure.consequence] or list(failures)
    first = min(causes, key=lambda failure: failure.when)
    return first, [failure for failure in causes if failure is not first and failure.same_as(first)]


def rank_label(rank: int, coords: Mapping[str, int] | None) -> str:
    """ "rank 5 (pp 1, dp 0, tp 1)", or "rank 5" before there is a mesh."""
    where = f" ({', '.join(f'{axis} {coords[axis]}' for axis in ('pp', 'dp', 'tp'))})" if coords else ""
    return f"rank {rank}{where}"


def failed(
    failures: Sequence[Failure], others: Mapping[int, str], coords: Mapping[int, Mapping[str, int]], during: str = ""
) -> RankError | UserError:
    """The exception to raise for these failures. A UserError comes out as it went in."""
    first, same = root_cause(failures)
    when = f" {during}" if during else ""
    where = coords.get(first.rank)
    also = sorted(failure.rank for failure in same)
    others = dict(others)
    for failure in failures:
        if failure is not first and failure not in same:
            others[failure.rank] = failure.in_passing()
    if first.error is None:
        headline = f"{rank_label(first.rank, where)} died{when}: {exit_reason(first.exit_code)}"
        return RankError(
            headline, rank=first.rank, kind="died", coords=where, traceback=first.last_words, others=others, also=also
        )
    original = first.error.original()
    if isinstance(original, UserError):
        return original
    where = first.error.coords or where
    error = RankError(
        f"{rank_label(first.rank, where)} raised {first.error.summary()}{when}",
        rank=first.rank,
        kind="exception",
        coords=where,
        traceback=first.error.traceback(),
        others=others,
        also=also,
        hint=next((hint for pattern, hint in _HINTS if re.search(pattern, first.error.message)), ""),
    )
    error.__cause__ = original
    return error


def stuck(
    waiting: Mapping[int, Doing | str],
    finished: Sequence[int],
    seconds: float,
    coords: Mapping[int, Mapping[str, int]],
    during: str = "",
) -> RankError:
    """The error at the deadline. ``waiting``: what each silent rank is doing, in words where its stack is unknown.

    Named is the rank for which the others wait: one outside any collective; else one that has finished its call while
    others wait for it; else, when all are in collectives, one of those in the rarer place: the collectives differ.
    """
    silent = [rank for rank, doing in waiting.items() if isinstance(doing, str)]
    outside = [
        *silent,
        *(rank for rank, doing in waiting.items() if isinstance(doing, Doing) and doing.collective is None),
    ]
    places = [(doing.collective, doing.where) for doing in waiting.values() if isinstance(doing, Doing)]
    if outside:
        rank, what = outside[0], f"gave no answer within {seconds:g} s: it is {waiting[outside[0]]}"
    elif finished:
        rank, what = finished[0], f"has finished its call; after {seconds:g} s others still wait for it"
    else:
        rank = min(waiting, key=lambda r: (places.count((waiting[r].collective, waiting[r].where)), r))  # type: ignore[union-attr]
        what = f"gave no answer within {seconds:g} s: all ranks wait in collectives, it {waiting[rank]}"
    others = {other: str(doing) for other, doing in waiting.items() if other != rank}
    others |= {other: "finished" for other in finished if other != rank}
    when = f" {during}" if during else ""
    return RankError(
        f"{rank_label(rank, coords.get(rank))} {what}{when}",
        rank=rank,
        kind="stuck",
        coords=coords.get(rank),
        others=others,
        also=outside[1:] if places and len(places) > len(outside) else (),
    )


def exit_reason(code: int | None) -> str:
    """In words: "exit code 3", "killed by SIGKILL (…)"."""
    if code is None or code >= 0:
        return f"exit code {code}" + (" (or its forkserver was killed)" if code == 255 else "")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    remarks = {
        "SIGKILL": " (kill -9, or the system ran out of memory)",
        "SIGSEGV": " (segmentation fault)",
        "SIGABRT": " (abort, from C++ code)",
    }
    return f"killed by {name}{remarks.get(name, '')}"


def grouped(others: Mapping[int, str]) -> list[str]:
    """Ranks with the same occupation together: "ranks 0, 2, 3 in all_reduce at …"."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(others):
        by_text.setdefault(others[rank], []).append(rank)
    return [f"{_ranks(ranks)} {text}" for text, ranks in by_text.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

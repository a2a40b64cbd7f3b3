"""A pipeline schedule is data: for each rank, the list of what it computes, in order.

An action is one pass over one model chunk for one micro-batch:

=====  =============================================================================================================
F      forward
B      whole backward: the gradients of input and weights (B = I + W)
I      the gradient of the input only, which the stage before waits for
W      the weight gradients that I left, which nobody waits for
=====  =============================================================================================================

The letters, and the text form ``2F0`` (stage 2, forward, micro-batch 0), are those of torch.distributed.pipelining.
Nothing here says *when* an action runs: it runs after the one before it on its rank, once its input is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hybridlab.errors import UserError

OPS = ("F", "B", "I", "W")
PLACEMENTS = ("loop", "v")

_TEXT = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_KEYS = ("name", "stages", "micro_batches", "chunks", "placement", "ranks")


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One pass of a rank.

    Attributes:
        op: "F", "B", "I" or "W".
        micro_batch: from 0.
        chunk: which of the model chunks *on this rank*, from 0.
    """

    op: str
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline computes, in order. It may be illegal: `hybridlab.schedule.check` tells.

    Attributes:
        name: of the function that made it, or any other.
        stages: P, the ranks of the pipeline.
        micro_batches: m.
        chunks: v, model chunks per rank; the model is cut into P·v virtual stages.
        placement: where they lie. "loop": round and round, virtual stage k on rank k mod P. "v" (two chunks): there
            and back, so that rank r holds r and 2P-1-r, and the first and the last are neighbours.
        ranks: for each rank its actions.

    Raises:
        UserError: the sizes do not fit together.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    placement: str
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for key in ("stages", "micro_batches", "chunks"):
            whole_number(key, getattr(self, key))
        if self.placement not in PLACEMENTS:
            raise UserError(
                f"chunks lie on ranks as {' or '.join(map(repr, PLACEMENTS))}, not {self.placement!r}.",
                key="placement",
                value=self.placement,
                fix="'loop', or 'v' for two chunks per rank.",
            )
        if self.placement == "v" and self.chunks != 2:
            raise UserError(
                f"placement 'v' is for two chunks per rank, there and back; this schedule has {self.chunks}.",
                key="chunks",
                value=self.chunks,
                fix="2 chunks, or placement 'loop'.",
            )
        if len(self.ranks) != self.stages:
            raise UserError(
                f"a pipeline of {self.stages} stages has {self.stages} lists of actions, not {len(self.ranks)}.",
                key="ranks",
                value=len(self.ranks),
                fix="one list per rank.",
            )

    @property
    def num_stages(self) -> int:
        """Virtual stages, P·v."""
        return self.stages * self.chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """The virtual stage 0..P·v-1 that a rank's chunk is."""
        if self.placement == "v":
            return rank if chunk == 0 else self.num_stages - 1 - rank
        return chunk * self.stages + rank

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a virtual stage."""
        if self.placement == "v":
            return (stage, 0) if stage < self.stages else (self.num_stages - 1 - stage, 1)
        return stage % self.stages, stage // self.stages

    def label(self, rank: int, action: Action) -> str:
        """An action of a rank in text form, ``2F0``."""
        return f"{self.stage_of(rank, action.chunk)}{action.op}{action.micro_batch}"

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; actions in text form."""
        return {
            "name": self.name,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "chunks": self.chunks,
            "placement": self.placement,
            "ranks": [[self.label(rank, action) for action in actions] for rank, actions in enumerate(self.ranks)],
        }

    @staticmethod
    def from_json(data: Any) -> Schedule:
        """The inverse of `to_json`. Only ``micro_batches`` and ``ranks`` must be there; then each rank has one chunk.

        Raises:
            UserError: a key is unknown or missing, an action cannot be read, or it stands on a rank that does not hold
                its stage.
        """
        if not isinstance(data, Mapping):
            raise UserError("a schedule is a JSON object with micro_batches and ranks.", key="schedule", fix=_EXAMPLE)
        for key in data:
            if key not in _KEYS:
                near = get_close_matches(str(key), _KEYS, 1)
                fix = f"{near[0]}." if near else f"one of {', '.join(_KEYS)}."
                raise UserError(f"a schedule has no key {key!r}.", key=str(key), value=data[key], fix=fix)
        for key in ("micro_batches", "ranks"):
            if key not in data:
                raise UserError(f"a schedule gives its {key}.", key=key, fix=_EXAMPLE)
        rows = data["ranks"]
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise UserError("ranks is a list of lists of actions, one list per rank.", key="ranks", fix=_EXAMPLE)
        name = data.get("name", "custom")
        if not isinstance(name, str):
            raise UserError("the name is a string.", key="name", value=name, fix='"custom".')
        stages, chunks = data.get("stages", len(rows)), data.get("chunks", 1)
        frame = Schedule(name, stages, data["micro_batches"], chunks, data.get("placement", "loop"), ((),) * len(rows))
        ranks = tuple(tuple(_place(frame, rank, text) for text in row) for rank, row in enumerate(rows))
        return Schedule(name, frame.stages, frame.micro_batches, frame.chunks, frame.placement, ranks)


_EXAMPLE = '{"micro_batches": 1, "ranks": [["0F0", "0B0"], ["1F0", "1B0"]]}.'


def parse_action(text: Any) -> tuple[int, str, int]:
    """``2F0`` as (stage, op, micro-batch).

    Raises:
        UserError: it is anything else.
    """
    found = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        idle = "; leave idle slots out: waiting follows from what an action needs" if text in (None, "") else ""
        raise UserError(
            f"{json.dumps(text, default=str)} is not an action.",
            key="ranks",
            value=text,
            fix=f"stage, one of F B I W, micro-batch, as in 2F0{idle}.",
        )
    return int(found[1]), found[2], int(found[3])


def read_schedule(path: str | Path) -> Schedule:
    """A schedule from a JSON file, as `Schedule.to_json` writes it. It may still be illegal.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{path} cannot be read: {why}.", key="schedule", value=str(path)) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.", key="schedule", value=str(path), fix=_EXAMPLE) from None
    return Schedule.from_json(data)


def whole_number(key: str, value: Any) -> int:
    """``value``, if it is a whole number of at least 1.

    Raises:
        UserError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        rule = f"{key.replace('_', '-')} is a whole number of at least 1, not {json.dumps(value, default=str)}."
        raise UserError(rule, key=key, value=value, fix="1 or more.")
    return value


def actions_of(op: str, micro_batches: int, chunk: int = 0) -> Sequence[Action]:
    """One pass for each micro-batch, in order. Ranks share these objects: a schedule of 300,000 has few."""
    return tuple(Action(op, micro_batch, chunk) for micro_batch in range(micro_batches))


def _place(frame: Schedule, rank: int, text: Any) -> Action:
    stage, op, micro_batch = parse_action(text)
    if stage >= frame.num_stages:
        raise UserError(
            f"rank {rank} lists {text}, but the last of {frame.num_stages} stages is {frame.num_stages - 1}.",
            key="ranks",
            value=text,
            fix="stages count from 0; give chunks when a rank holds several.",
        )
    home, chunk = frame.place(stage)
    if home != rank:
        raise UserError(
            f"rank {rank} lists {text}, but stage {stage} lives on rank {home} under placement {frame.placement!r}.",
            key="ranks",
            value=text,
            fix=f"move it to rank {home}.",
        )
    return Action(op, micro_batch, chunk)

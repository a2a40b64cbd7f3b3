"""A training run: every rank trains, rank 0 tells how it goes, and all of them bring back what they held and sent.

The worker `train_rank` is the same on the ranks of a `Cluster` and under torchrun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from hybridlab import launch
from hybridlab.config import Resolved
from hybridlab.data import Batches, load_corpus
from hybridlab.engine import Engine, StepResult
from hybridlab.launch import context
from hybridlab.ledger import rank_traffic
from hybridlab.report import MemoryReport, RankMemory, RankTraffic, Span, StepReport, Timeline, TrafficReport
from hybridlab.schedule import make_schedule
from hybridlab.shapes import ModelShape

WATCHED = 0  # the step whose memory is watched: seeing every operator slows it down, so its time does not count
OnStep = Callable[["Progress"], None]


@dataclass(frozen=True)
class Job:
    """What is to be trained.

    Attributes:
        steps: optimizer steps.
        data: a file or folder of text; None: the Python standard library's source.
    """

    config: Resolved
    shape: ModelShape
    steps: int
    data: str | None = None


@dataclass(frozen=True)
class Progress:
    """One step done. ``seconds``: on rank 0, from reading the batch to the published weights."""

    step: int
    result: StepResult
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What one rank brings back.

    Attributes:
        traffic: of the last step; every step sends the same.
        spans: the last step's actions, in seconds of this machine's clock.
    """

    memory: RankMemory
    traffic: RankTraffic
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        steps: one entry a step.
        report: what every rank held and sent, measured; None on torchrun's ranks other than 0.
    """

    steps: tuple[Progress, ...]
    report: StepReport | None

    def tokens_per_second(self, config: Resolved) -> float | None:
        """Tokens of the global batch per second, over the steps whose time counts; None when there is none."""
        timed = [done.seconds for done in self.steps if done.step != WATCHED]
        tokens = config.train_batch_size * config.sequence_length
        return tokens * len(timed) / sum(timed) if timed else None


def batches_of(job: Job) -> Batches:
    """The job's data.

    Raises:
        UserError: ``data`` cannot be read, or is too short.
    """
    config = job.config
    return Batches(
        load_corpus(job.data), config.seed, config.sequence_length, config.train_batch_size, vocab=job.shape.vocab
    )


def train(job: Job, *, ranks: int | None = None, on_step: OnStep | None = None, timeout: float = 600.0) -> Trained:
    """Run a job on ranks of this machine, or, under torchrun, as the rank that this process is.

    Args:
        ranks: how many to start; None under torchrun.
        on_step: called in this process as steps end (under torchrun: on rank 0).
        timeout: seconds that may pass without a step.

    Raises:
        RankError: a rank failed; it names the rank and the cause.
        UserError: ``data`` cannot be read, or is too short; the gradients stay broken.
    """
    batches_of(job)  # a mistake in the data is told before any rank starts
    steps: list[Progress] = []

    def heard(rank: int, progress: Progress) -> None:
        steps.append(progress)
        if on_step is not None:
            on_step(progress)

    own = launch.launch(train_rank, job, ranks=ranks, timeout=timeout, on_report=heard)
    outcomes = launch.gather(own[0]) if launch.under_torchrun() else own
    return Trained(tuple(steps), _report(outcomes) if outcomes else None)


def train_rank(job: Job) -> Outcome:
    """The worker: train, as this rank."""
    here = context.current()
    assert here is not None, "train_rank runs on a rank"
    engine = Engine(job.config, job.shape, device_type=here.device.type)
    batches = batches_of(job)
    memory = None
    for step in range(job.steps):
        start = time.perf_counter()
        with engine.ledger.watch_memory() if step == WATCHED else nullcontext() as watch:
            result = engine.train_batch(batches)
        seconds = time.perf_counter() - start
        if watch is not None:
            memory = watch.report(here.rank, engine.mesh.coords, engine.parameters)
        if here.rank == 0:
            launch.report(Progress(step, result, seconds))
    assert memory is not None, "a run has at least one step"
    outcome = Outcome(
        memory, rank_traffic(engine.ledger, here.rank, engine.mesh.coords), tuple(engine.ledger.spans_by_the_clock())
    )
    engine.close()
    return outcome


def _report(outcomes: Sequence[Outcome]) -> StepReport:
    """The ranks' memory and traffic, and the timeline of the pipeline that rank 0 belongs to."""
    chain = [o for o in outcomes if o.memory.coords["dp"] == 0 and o.memory.coords["tp"] == 0]
    begin = min((span.start for o in chain for span in o.spans), default=0.0)
    rows = tuple(
        tuple(Span(s.op, s.micro_batch, s.stage, s.start - begin, s.end - begin) for s in o.spans) for o in chain
    )
    return StepReport(
        MemoryReport("measured", tuple(outcome.memory for outcome in outcomes)),
        TrafficReport("measured", tuple(outcome.traffic for outcome in outcomes)),
        Timeline("measured", rows),
    )


def layers_by_place(config: Resolved, shape: ModelShape) -> dict[int, str]:
    """Which pieces of the model lie at each pipeline place, in words: ``{0: "embedding, layers 0–19"}``."""
    schedule = make_schedule(config.schedule, config.layout.pp, config.micro_batches, chunks=config.virtual_stages)
    found = {}
    for place in range(schedule.stages):
        pieces = []
        for chunk in range(schedule.chunks):
            stage = schedule.stage_of(place, chunk)
            begin = sum(config.split[:stage])
            end = begin + config.split[stage]
            pieces += ["embedding"] if stage == 0 else []
            pieces += [f"{begin}–{end - 1}" if end - begin > 1 else str(begin)] if end > begin else []
            pieces += ["head"] if stage == schedule.num_stages - 1 else []
        found[place] = ", ".join(pieces)
    return found

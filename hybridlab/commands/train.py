"""`hybridlab train`: the forecast, the run, and what was predicted beside what was measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridlab.commands.options import CHAPTER_MODEL, AsJson, Assign, ConfigFile, Data, Ranks, settle, world_size
from hybridlab.errors import UserError
from hybridlab.plan.cluster import Headroom
from hybridlab.report import StepReport, gib

if TYPE_CHECKING:
    from hybridlab.config import Resolved
    from hybridlab.shapes import ModelShape
    from hybridlab.train import Progress, Trained


def train(
    config: ConfigFile,
    model: Annotated[str, typer.Option(help="A preset or a Hugging Face style config.json.")] = CHAPTER_MODEL,
    data: Data = None,
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 100,
    out: Annotated[
        Path | None, typer.Option(help="Write report.html and report.json into this folder.", metavar="DIR")
    ] = None,
    assign: Assign = None,
    force: Annotated[bool, typer.Option("--force", help="Start even where the forecast says it cannot fit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train with CONFIG on ranks of this machine, or, under torchrun, on the ranks it started.

    Ends with what every rank held and sent, forecast beside measured.

    Example: hybridlab train labs/chapter/ds_config.json --ranks 8 --steps 25 --out out

    On several machines: torchrun --nnodes 2 --nproc-per-node 8 … -m hybridlab train CONFIG --model llama-2-13b
    """
    if out is not None:
        _require_folder(out)
    resolved, shape = settle(config, model, ranks, assign, steps)
    from hybridlab import launch
    from hybridlab import train as training

    job = training.Job(resolved.with_steps(steps), shape, steps, data)
    training.batches_of(job)  # a mistake in the data is told before anything starts

    speaks = not launch.under_torchrun() or _is_first()
    screen = _Screen(resolved, shape, steps, quiet=as_json or not speaks)
    reports = _forecasts(resolved, shape, force) if speaks else []
    screen.before(reports)
    asked = None if launch.under_torchrun() else world_size(ranks)
    trained = training.train(job, ranks=asked, on_step=screen.step)
    if trained.report is None:
        return
    screen.after(trained, [*reports, trained.report])
    found = _as_json(resolved, shape, trained, [*reports, trained.report])
    if out is not None:
        screen.write(out, found)
    if as_json:
        print(json.dumps(found))


def _is_first() -> bool:
    return os.environ.get("RANK") == "0"


def _require_folder(out: Path) -> None:
    """Find out now, not after the run, whether the report can be written.

    Raises:
        UserError: ``out`` is not a folder, or cannot be made or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"the report cannot be written there: {error.strerror}.", key="--out", value=str(out), fix="another folder."
        ) from None


def _forecasts(config: Resolved, shape: ModelShape, force: bool) -> list[StepReport]:
    """The rehearsal, before anything is allocated.

    Raises:
        UserError: it does not fit, and is not forced.
    """
    from hybridlab.launch import machine
    from hybridlab.rehearse import rehearse

    card = machine.card_bytes()
    report = rehearse(config, shape, usable_bytes=None if card is None else Headroom().usable(card))
    if card is not None:
        short, need, have = report.memory.fits is False, report.memory.peak.peak_bytes, report.memory.usable_bytes
        where = f"rank {report.memory.peak.rank} peaks at"
    else:  # ranks on the CPU share this machine's memory
        need = sum(rank.peak_bytes + rank.host_peak_bytes for rank in report.memory.ranks)
        have = machine.free_bytes()
        short, where = need > have, "all ranks together peak at"
    if short and not force:
        raise UserError(
            f"the forecast says it cannot fit: {where} {gib(need)}, and {gib(have or 0)} can be had.",
            key="--model",
            value=shape.name,
            fix="`hybridlab plan` names a layout that fits; --force starts all the same.",
        )
    return [report]


class _Screen:
    """What people see of a run."""

    def __init__(self, config: Resolved, shape: ModelShape, steps: int, *, quiet: bool) -> None:
        from hybridlab.show import text

        self.config, self.shape, self.steps = config, shape, steps
        # With --json stdout is for the object; what the page holds is recorded all the same.
        self.console = text.page(record=True, quiet=quiet)

    def before(self, forecasts: list[StepReport]) -> None:
        """What will be trained, and the forecast."""
        c, z = self.config, self.config.zero
        host = " + ".join(["optimizer"] * z.offload_optimizer + ["parameters"] * z.offload_param)
        say = self.console.print
        say(f"[bold]{self.shape.name}[/] on {c.layout}: ZeRO-{z.stage}" + (f", {host} on the host" if host else ""))
        pipeline = f", pipeline {c.schedule}" if c.layout.pp > 1 else ""
        say(
            f"batch {c.train_batch_size} = micro {c.micro_batch_size} × {c.micro_batches} micro-batches × dp "
            f"{c.layout.dp}, {c.sequence_length} tokens each, {c.precision}{pipeline}"
        )
        for report in forecasts:
            peak = report.memory.peak
            say(
                f"Forecast ({report.source}): rank {peak.rank} peaks highest, {gib(peak.peak_bytes)} on the device and "
                f"{gib(peak.host_peak_bytes)} on the host.\n"
            )

    def step(self, progress: Progress) -> None:
        """A line a step."""
        result = progress.result
        width = len(str(self.steps))
        rate = self.config.train_batch_size * self.config.sequence_length / progress.seconds
        if result.skipped:
            what = f"gradients not finite at loss scale {result.loss_scale:g}: [yellow]skipped[/]"
        else:
            what = f"loss {result.loss:7.4f}  grad norm {result.grad_norm:8.4f}  lr {result.lr:.2e}"
        slow = "  [dim](memory watched)[/]" if progress.step == 0 else ""
        self.console.print(f"step {progress.step + 1:>{width}}/{self.steps}  {what}  {rate:9,.0f} tokens/s{slow}")

    def after(self, trained: Trained, reports: list[StepReport]) -> None:
        """The closing tables."""
        from hybridlab.show import text
        from hybridlab.train import layers_by_place

        measured = reports[-1]
        say = self.console.print
        say()
        say(text.holdings(measured, layers_by_place(self.config, self.shape)))
        say(text.sendings(measured))
        say(text.comparison(reports))
        say(text.agreement(reports))
        losses = [done.result.loss for done in trained.steps]
        rate = trained.tokens_per_second(self.config)
        speed = f"; {rate:,.0f} tokens/s without the first step" if rate else ""
        say(f"Loss {losses[0]:.4f} → {losses[-1]:.4f} in {len(losses)} steps{speed}.")

    def write(self, out: Path, found: dict[str, Any]) -> None:
        """The page and the numbers."""
        (out / "report.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        page = self.console.export_html(inline_styles=True)
        (out / "report.html").write_text(page, encoding="utf-8")
        self.console.print(f"Written: {out / 'report.html'}, {out / 'report.json'}")


def _as_json(config: Resolved, shape: ModelShape, trained: Trained, reports: list[StepReport]) -> dict[str, Any]:
    """The closing report, its forecasts beside it, and every step."""
    return reports[-1].to_json() | {
        "model": shape.name,
        "resolved": config.to_json(),
        "steps": [{"step": done.step, "seconds": done.seconds, **vars(done.result)} for done in trained.steps],
        "tokens_per_second": trained.tokens_per_second(config),
        "forecasts": [report.to_json() for report in reports[:-1]],
    }

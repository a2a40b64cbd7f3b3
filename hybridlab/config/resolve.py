"""From a file to `Resolved`, with all the mistakes told at once.

Order of the steps: read, sift (comments, keys without effect, unknown keys, "auto"), merge what the command line says,
fill in "auto", check types, then the rules that join several keys: layout, batch, pipeline, widths, ZeRO, precision,
optimizer, schedule. A step whose inputs are wrong is left out, so that one mistake makes one message.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hybridlab.config import parallel, training
from hybridlab.config.account import Account
from hybridlab.config.autos import AUTO
from hybridlab.config.deepspeed import notes
from hybridlab.config.draft import Draft
from hybridlab.config.moot import moot
from hybridlab.config.names import suggest
from hybridlab.config.read import Source, read, show
from hybridlab.config.resolved import Resolved
from hybridlab.config.schema import Config, sections
from hybridlab.config.sift import Sifted, same, sift
from hybridlab.config.zero import zero
from hybridlab.errors import UserError, UserErrors

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape

COMMAND_LINE = "the command line"
_SECTIONS = sections()


def resolve(
    config: Mapping[str, Any] | str | Path,
    *,
    world: int | None,
    shape: ModelShape | None = None,
    overrides: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> Resolved:
    """Settle and check a configuration.

    Args:
        config: a mapping, the path of a JSON file, or JSON text.
        world: the number of ranks. It is never guessed: a config is legal for a world, not as such.
        shape: the model; without it what depends on its widths is not checked and ``split`` is empty.
        overrides: values from the command line, dotted key -> value. They fill in keys that the file leaves out or
            calls "auto"; a file that says something else is an error that names both.
        steps: optimizer steps of the run, for ``total_num_steps: "auto"``; see `Resolved.with_steps`.

    Raises:
        UserErrors: everything that is wrong with the config.
        UserError: the file cannot be read, or ``world`` is missing.
    """
    draft, resolved = work(read(config), world=world, shape=shape, overrides=overrides, steps=steps)
    if draft.account.errors:
        raise UserErrors(draft.account.errors)
    assert resolved is not None  # no errors: every step came to an end
    return resolved


def work(
    source: Source,
    *,
    world: int | None,
    shape: ModelShape | None = None,
    overrides: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> tuple[Draft, Resolved | None]:
    """As `resolve`, but mistakes stay in the draft's account; the second is None when there are any.

    Raises:
        UserError: ``world`` is missing.
    """
    if world is None:
        raise UserError(
            "the number of ranks is missing: what a config means depends on it.",
            key="world",
            fix="--ranks N, or run under torchrun.",
        )
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        raise UserError(f"there cannot be {show(world)} ranks.", key="world", value=world, fix="1 or more.")
    account = Account(source.data)
    for path in source.duplicates:
        account.refuse(UserError("the key stands twice in one object.", key=path, fix="keep one of them."))
    sifted = sift(source.data, account)
    draft = _typed(sifted, account, world, shape, steps, overrides or {})
    resolved = _settle(draft)
    notes(draft, sifted.unknown, resolved)
    if resolved is not None:
        moot(draft, resolved)
    if account.errors:
        resolved = None
    assert not account.unaccounted(), account.unaccounted()
    return draft, resolved


def _typed(
    sifted: Sifted,
    account: Account,
    world: int,
    shape: ModelShape | None,
    steps: int | None,
    overrides: Mapping[str, Any],
) -> Draft:
    """Merge the command line, fill in "auto", and check every value by the schema; wrong ones are left out."""
    bad = _merge(sifted, account, overrides)
    chosen: list[tuple[str, Any, str]] = []
    filled = set()
    for path in sorted(sifted.autos):
        derive = AUTO[path].value
        if derive is not None:
            value, why = derive(shape)
            sifted.put(path, value)
            chosen.append((path, value, f'"auto": {why}'))
            filled.add(path)
    while True:
        try:
            config = Config.model_validate(sifted.tree)
            break
        except ValidationError as error:
            for path, rule, fix in _mistakes(error):
                value = sifted.get(path)
                key = sifted.origin.get(path, path)
                place = f"{COMMAND_LINE} says: " if key == COMMAND_LINE else ""
                key = path if key == COMMAND_LINE else key
                account.refuse(UserError(place + rule, key=key, value=value, fix=fix))
                _remove(sifted.tree, path)
                bad.add(path)
    origin = {path: path if key == COMMAND_LINE else key for path, key in sifted.origin.items()}
    draft = Draft(
        config, account, world, shape, steps, origin=origin, autos=sifted.autos - filled, filled=filled, bad=bad
    )
    for path, value, why in chosen:
        draft.choose(draft.spelled(path), value, why)
        account.used(draft.spelled(path), f"{show(value)}, {why}")
    return draft


def _merge(sifted: Sifted, account: Account, overrides: Mapping[str, Any]) -> set[str]:
    """Values of the command line: fill in what the file leaves open, compare with what it says; where they differ."""
    differ: set[str] = set()
    for path, value in overrides.items():
        if value is None:
            continue
        section, _, name = path.rpartition(".")
        model = _SECTIONS.get(section)
        if model is None or name not in model.model_fields or path in _SECTIONS:
            account.refuse(
                UserError(f"{COMMAND_LINE} sets an unknown key.", key=path, value=value, fix=suggest(section, name))
            )
        elif path in sifted.origin and path not in sifted.autos:
            before, key = sifted.get(path), sifted.origin[path]
            if isinstance(before, str) == isinstance(value, str) and not same(before, value):
                differ.add(path)
                account.refuse(
                    UserError(
                        f"the file says {show(before)}, {COMMAND_LINE} says {show(value)}.",
                        key=key,
                        value=before,
                        fix="the same value in both, or leave one out.",
                    )
                )
        else:
            sifted.put(path, value)
            spelled = sifted.origin.get(path)
            if spelled is not None:
                account.used(spelled, f"auto: {show(value)} from {COMMAND_LINE}")
            else:
                sifted.origin[path] = COMMAND_LINE
            sifted.autos.discard(path)
    return differ


def _mistakes(error: ValidationError) -> list[tuple[str, str, str]]:
    """(path, rule, fix) of each wrong value."""
    found = []
    for detail in error.errors(include_url=False):
        path = ".".join(str(part) for part in detail["loc"])
        context = detail.get("ctx", {})
        rule, fix = context.get("rule", f"{detail['msg']}."), context.get("fix", "see `hybridlab schema`.")
        found.append((path, rule, fix))
    return found


def _remove(tree: dict[str, Any], path: str) -> None:
    *names, last = path.split(".")
    for name in names:
        tree = tree[name]
    del tree[last]


def _settle(draft: Draft) -> Resolved | None:
    """The rules that join several keys. None when one of them left a gap."""
    grid = parallel.layout(draft)
    triple = parallel.triple(draft, grid) if grid is not None else None
    accumulation = triple.accumulation if triple is not None else None
    length = parallel.sequence_length(draft)
    pipe = parallel.pipe(draft, grid, accumulation) if grid is not None else None
    if grid is not None:
        parallel.widths(draft, grid, length)
    sharding = zero(draft, grid, accumulation)
    precision = training.precision(draft)
    scale = training.loss_scale(draft)
    optimizer = training.optimizer(draft)
    scheduler = training.scheduler(draft, optimizer.lr if optimizer is not None else None)
    recompute, interval = training.recomputation(draft)
    if "gradient_clipping" not in draft.origin:
        draft.choose("gradient_clipping", 1.0, "not given: DeepSpeed's default since 0.19")
    if grid is None or triple is None or pipe is None or sharding is None or precision is None or optimizer is None:
        return None
    config = draft.config
    return Resolved(
        layout=grid,
        train_batch_size=triple.train,
        micro_batch_size=triple.micro,
        micro_batches=triple.accumulation,
        sequence_length=length,
        seed=config.hybridlab.seed,
        precision=precision,
        zero=sharding,
        schedule=pipe.schedule,
        virtual_stages=pipe.virtual_stages,
        split=pipe.split,
        sequence_parallel=config.tensor_parallel.sequence_parallel and grid.tp > 1,
        recompute=recompute,
        recompute_interval=interval,
        optimizer=optimizer,
        scheduler=scheduler,
        gradient_clipping=config.gradient_clipping,
        loss_scale=scale,
        label_smoothing=config.hybridlab.label_smoothing,
        vocab_multiple=config.tensor_parallel.vocab_multiple,
        attention=config.hybridlab.attention,
        compile=config.hybridlab.compile,
    )

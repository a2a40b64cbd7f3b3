"""``hybridlab``: one subcommand a file in `hybridlab.commands`.

Exit codes: 0, done or yes; 1, the answer is no or the run failed; 2, the input is wrong; 130, interrupted. A mistake in
what the user gave is told in a line or two, never by a traceback; with ``--json`` it is one object, too.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from hybridlab.commands.doctor import doctor
from hybridlab.commands.explain import explain
from hybridlab.commands.rehearse import rehearse
from hybridlab.commands.schema import schema
from hybridlab.commands.timeline import timeline
from hybridlab.commands.train import train
from hybridlab.commands.verify import verify
from hybridlab.errors import UserError, UserErrors

app = typer.Typer(
    name="hybridlab",
    help="Hybrid-parallel training to predict, run and compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


class Interrupted(Exception):
    """A KeyboardInterrupt that the parser does not swallow, with what it says of the ranks."""


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def called(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as error:
            raise Interrupted(str(error)) from None

    return called


for command in (train, explain, verify, rehearse, timeline, doctor, schema):
    app.command()(_interruptible(command))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    try:
        code = typer.main.get_command(app).main(args=list(arguments), prog_name="hybridlab", standalone_mode=False)
    except UserError as error:
        return _tell(error, as_json="--json" in arguments)
    except (Interrupted, KeyboardInterrupt, typer.Abort) as error:
        print(f"Interrupted. {error}".rstrip(), file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has gone: `hybridlab … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # the parser's own: an unknown option, say
            error.show()
            return int(error.exit_code)
        if type(error).__name__ == "RankError":  # by name: torch is not imported for commands that start no rank
            print(error, file=sys.stderr)
            return 1
        raise
    return code if isinstance(code, int) else 0


def _tell(error: UserError, *, as_json: bool) -> int:
    mistakes = error.errors if isinstance(error, UserErrors) else (error,)
    if as_json:
        print(json.dumps({"ok": False, "errors": [one.to_json() for one in mistakes]}, default=str))
    else:
        for one in mistakes:
            print(one, file=sys.stderr)
    return 2

"""`hybridlab schema`: the JSON Schema of a config, for editors and as the list of every key."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hybridlab.config.json_schema import json_schema


def schema(
    as_json: Annotated[bool, typer.Option("--json", help="Print it on one line.")] = False,
) -> None:
    """Print the JSON Schema of a config (draft 2020-12): every key, what it does, its default, what "auto" becomes.

    Example: hybridlab schema > ds_config.schema.json
    """
    print(json.dumps(json_schema(), ensure_ascii=False, indent=None if as_json else 2))

"""The JSON Schema of a config (draft 2020-12): for editors, and as the list of every key there is.

Each key has a description, its default, and ``x-status``: "used", "no_effect" (with the why as description) or
"conditional" (harmless values are accepted without effect, others refused). ``x-auto`` says what "auto" becomes.

The schema states types, words and bounds. It cannot state what joins several keys (the batch, the layout, divisibility)
and knows no case rule for words: `hybridlab explain` is the judge.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from hybridlab.config.autos import AUTO
from hybridlab.config.idle import COMMENTS, Idle
from hybridlab.config.keys import IDLE
from hybridlab.config.names import OLD_OFFLOAD, SYNONYMS
from hybridlab.config.read import join
from hybridlab.config.schema import Config

METASCHEMA = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema as a JSON object without references."""
    raw = Config.model_json_schema()
    definitions = raw.pop("$defs", {})
    schema = _section(raw, "", definitions)
    return {
        "$schema": METASCHEMA,
        "title": "hybridlab config",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def _section(raw: dict[str, Any], path: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """One section: its used keys, its keys without effect, its other spellings, and remarks."""
    properties: dict[str, Any] = {}
    for key, info in raw["properties"].items():
        properties[key] = _key(info, join(path, key), definitions)
    for key, idle in IDLE.get(path, {}).items():
        properties[key] = _idle(idle, join(path, key))
    for other, key in SYNONYMS.get(path, {}).items():
        properties[other] = {**deepcopy(properties[key]), "description": f"another spelling of {key}"}
    if path == "zero_optimization":
        for old, new in OLD_OFFLOAD.items():
            properties[old] = {
                "type": ["boolean", "null"],
                "description": f'the old form of {new} {{"device": "cpu"}}',
                "deprecated": True,
                "x-status": "used",
            }
    remarks = {name: {"description": "a comment", "x-status": "no_effect"} for name in (*COMMENTS, "$schema")}
    return {
        "type": "object",
        "description": " ".join(raw.get("description", "").split()),
        "properties": properties | remarks,
        "patternProperties": {"^(_comment|//)": {"description": "a comment", "x-status": "no_effect"}},
        "additionalProperties": False,
    }


def _key(info: dict[str, Any], path: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """A key with an effect; null is as good as not given, everywhere."""
    about = {key: value for key, value in info.items() if key in ("description", "default")}
    about["x-status"] = "used"
    reference = info.get("$ref") or next(
        (part["$ref"] for part in info.get("allOf", info.get("anyOf", [])) if "$ref" in part), None
    )
    if reference is not None:
        section = _section(definitions[reference.rpartition("/")[2]], path, definitions)
        choices: list[dict[str, Any]] = [section, {"type": "null"}]
        if path == "zero_optimization":
            choices.append(
                {"type": "boolean", "description": "the old form of stage 1 (true) or 0", "deprecated": True}
            )
        about.pop("default", None)
        return {"anyOf": choices, **about}
    values = [part for part in info.get("anyOf", [_type(info)]) if part.get("type") != "null"]
    values.append({"type": "null"})
    if path in AUTO:
        values.append({"const": "auto"})
        about["x-auto"] = AUTO[path].text
    return {"anyOf": values, **about}


def _type(info: dict[str, Any]) -> dict[str, Any]:
    """What a key's schema says of the value, without what it says of the key."""
    return {key: value for key, value in info.items() if key not in ("description", "default", "title")}


def _idle(idle: Idle, path: str) -> dict[str, Any]:
    """A key without effect. What it holds is not read, so any value is valid here; `explain` refuses some."""
    inner = IDLE.get(path)
    if idle.inside and inner is not None:
        section = _section({"properties": {}, "description": idle.why}, path, {})
        return {"anyOf": [section, {"type": "null"}], "description": idle.why, "x-status": "no_effect"}
    if idle.rule:
        return {
            "description": f"{idle.why + '; refused otherwise: ' if idle.why else ''}{idle.rule}",
            "x-status": "conditional" if idle.why else "refused",
        }
    return {"description": idle.why, "x-status": "no_effect"}

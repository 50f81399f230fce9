"""The JSON of a report and its JSON schema: `python -m dcpbench.syncs.schema > docs/syncs.schema.json`."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from dcpbench.syncs.model import SCHEMA_VERSION, Report

TITLE = "Report of dcpbench syncs"


def encode(report: Report) -> str:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of what `--format json` writes, where every field is always present."""
    made = msgspec.json.schema(Report)
    definitions = made["$defs"]
    for definition in definitions.values():
        definition["required"] = list(definition["properties"])
        for field in definition["properties"].values():
            field.pop("default", None)
    definitions["Report"]["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": TITLE}
    return {**head, "$ref": made["$ref"], "$defs": dict(sorted(definitions.items()))}


def text() -> str:
    """The file in docs/."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())

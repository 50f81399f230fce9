"""Declare the formats of request files: the columns by which each is recognised, its time unit and its block of hash ids.

| format   | source                                                                                                          |
|----------|-----------------------------------------------------------------------------------------------------------------|
| mooncake | kvcache-ai/Mooncake, FAST25-release/README.md: times in ms, hash ids of 512 tokens                              |
| qwen     | alibaba-edu/qwen-bailian-usagetraces-anon, README.md: times in s, hash ids of 16 tokens                         |
| aiperf   | ai-dynamo/aiperf, src/aiperf/dataset/loader/models.py (`MooncakeTrace`): times and `delay` in ms, sessions      |
| burstgpt | HPMLL/BurstGPT, README.md: times in s; a request that failed has no response tokens                             |
| azure    | Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024: times are dates                             |
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from typing import TYPE_CHECKING

from dcpbench.points.structured_options import RequestFile

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dcpbench.points.point import Load

ARRIVAL, INPUT, OUTPUT, HASHES = "arrival", "input_tokens", "output_tokens", "hash_ids"
GROUP, PROMPT, SESSION, DELAY = "prefix_group", "prompt", "session", "delay"
COLUMNS = (ARRIVAL, INPUT, OUTPUT, HASHES, GROUP, PROMPT, SESSION, DELAY)  # DELAY: from an answer to the next turn
DATE = "date"
UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}  # parts of a second by the name of a time unit
TIME_UNITS = (*UNITS, DATE)
OWN, MOONCAKE, QWEN, AIPERF, BURSTGPT, AZURE = FORMATS = ("own", "mooncake", "qwen", "aiperf", "burstgpt", "azure")
TABLE = "columns"  # format of a file of which the columns are named by the user
NS = UNITS["ns"]
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)?\s*(Z|UTC|[+-]\d\d:?\d\d)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceFormat:
    """Describe a format of request files."""

    columns: Mapping[str, str]  # names in the file, by ours
    marks: frozenset[str]  # names that identify it
    needs_all: bool = True  # True if all of the marks identify it, False if any of them does
    unit: str = "s"
    block_size: int = 0  # tokens of a hash id; 0 without hash ids
    whole_times: bool = False  # True if times are whole numbers, so that others may have another unit
    keeps_failures: bool = False  # True if a request without output tokens is one that failed
    known_only: bool = False  # True if other columns are an error
    refused: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # what is wrong with a column that cannot be read


_LENGTHS = {ARRIVAL: "timestamp", INPUT: "input_length", OUTPUT: "output_length", HASHES: "hash_ids"}
_TEXT = (
    "holds text, of which the tokens are known to the model's tokenizer alone; give each turn as a line with "
    "'session_id', 'input_length' and 'output_length'"
)
DECLARED: Mapping[str, TraceFormat] = {  # formats in the order in which a file is compared with them
    QWEN: TraceFormat(columns=_LENGTHS, marks=frozenset({"chat_id"}), block_size=16),
    AIPERF: TraceFormat(
        columns={**_LENGTHS, SESSION: "session_id", DELAY: "delay"},
        marks=frozenset({"session_id", "delay", "text_input", "turns", "messages", "payload"}),
        needs_all=False,
        unit="ms",
        block_size=512,
        refused={
            **dict.fromkeys(("turns", "text_input", "messages", "payload"), _TEXT),
            "context_mode": "is a way to build prompts other than from the turns before; leave it out, or write whole "
            "prompts as requests without 'session_id'",
        },
    ),
    MOONCAKE: TraceFormat(
        columns=_LENGTHS,
        marks=frozenset({"input_length"}),
        unit="ms",
        block_size=512,
        whole_times=True,
        refused={
            **dict.fromkeys(("session_id", "delay"), "is a column of AIPerf, with sessions; add format=aiperf"),
            "chat_id": "is a column of Qwen, with times in s; add format=qwen",
        },
    ),
    BURSTGPT: TraceFormat(
        columns={ARRIVAL: "Timestamp", INPUT: "Request tokens", OUTPUT: "Response tokens"},
        marks=frozenset({"Timestamp", "Request tokens", "Response tokens"}),
        keeps_failures=True,
    ),
    AZURE: TraceFormat(
        columns={ARRIVAL: "TIMESTAMP", INPUT: "ContextTokens", OUTPUT: "GeneratedTokens"},
        marks=frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
        unit=DATE,
        keeps_failures=True,
    ),
    OWN: TraceFormat(
        columns={**{name: name for name in COLUMNS}, ARRIVAL: "arrival_s", DELAY: "delay_s"},
        marks=frozenset({"arrival_s", "delay_s", INPUT, OUTPUT, GROUP, PROMPT, SESSION}),
        needs_all=False,
        block_size=512,
        known_only=True,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Hold how a file of requests is read; empty fields are determined from the file."""

    format: str = ""
    columns: str = ""  # names in the file by ours, as typed: `arrival:ts/input_tokens:prompt`
    unit: str = ""
    block_size: int = 0

    @classmethod
    def of_load(cls, load: Load) -> Reading:
        """Return how the file of a load was read; empty for one of a record without that."""
        if not load.trace_reading:
            return cls()
        found = RequestFile.parse(load.trace_reading)
        return cls(
            format=found.format or "",
            columns=found.columns or "",
            unit=found.time_unit or "",
            block_size=found.block_size or 0,
        )

    def __str__(self) -> str:
        """Return it as keys of --requests: `format=mooncake,time-unit=ms,block-size=512`."""
        keys = {"format": self.format, "columns": self.columns, "time-unit": self.unit, "block-size": self.block_size}
        return ",".join(f"{key}={value}" for key, value in keys.items() if value)


def find_format(names: Collection[str]) -> str:
    """Return the format that has these columns; empty if none is known by them."""
    for name, declared in DECLARED.items():
        found = declared.marks & set(names)
        if found == declared.marks or (found and not declared.needs_all):
            return name
    return ""


def parse_date(text: object) -> int | None:
    """Return the nanoseconds of a date such as `2024-05-10 00:00:00.009930+00:00` since 1970; None for other values.

    A date without an offset counts as UTC.
    """
    found = _DATE.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        return None
    day, clock, fraction, offset = found.groups()
    zone = "+00:00" if offset in (None, "Z", "UTC") else offset
    try:
        moment = dt.datetime.fromisoformat(f"{day}T{clock}{zone}")
    except ValueError:
        return None
    seconds = (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(seconds=1)
    return seconds * NS + int((fraction or "").ljust(9, "0"))

"""Declare the structured options: one option with several keys, as `--sessions turns=4,think=2`. No torch.

A structured option is a class whose fields are its keys. The option's help, its parser, its errors and its form in a
configuration file follow from the class. A key that sets a field of a spec names that field, and is handed on under its
name: `--sessions think=2` as `think_time`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.counts import parse_count, suggest_counts
from dcpbench.points.gpus import GPUS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

SWITCH = {"yes": True, "no": False, "true": True, "false": False}
MAX_SHOWN_CHARS = 80  # of a value in an error
LIST = "/"  # separates the values of a key


@dataclasses.dataclass(frozen=True)
class Key:
    """Describe one key of a structured option."""

    value: str  # placeholder of its value in the help, which names the unit
    text: str
    default: str = ""  # default as the help prints it; empty if the text states it
    field: str = ""  # field of a spec that it sets; empty if the command reads the key itself

    def format_help(self) -> str:
        """Return its text with its default."""
        return f"{self.text} Default: {self.default}." if self.default else self.text


class StructuredOption(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the values of a structured option; None means not given."""

    option: ClassVar[str]
    text: ClassVar[str]  # what the option is for
    bare: ClassVar[str] = ""  # key whose name may be left out in front, as in `--timeout 300`

    @classmethod
    def list_keys(cls) -> dict[str, Key]:
        """Return the keys by the names that a user types."""
        return {name.replace("_", "-"): key for name, (key, _) in _read_fields(cls).items()}

    @classmethod
    def parse(cls, value: object, keys: Collection[str] = ()) -> Self:
        """Parse `turns=4,think=2`, or a table or a bare value of a configuration file. Raise UsageError.

        `keys` limits the keys to those that a command has; empty means all of them.
        """
        if isinstance(value, cls):
            return value
        known = [name for name in cls.list_keys() if not keys or name in keys]
        form = f"{cls.option} {cls.format_form(known)}"
        reader = _Reader(cls.option, form, cls.bare if cls.bare in known else "")
        found: dict[str, object] = {}
        for typed, given in reader.split_pairs(value):
            name = typed.replace("_", "-")
            if name not in known:
                raise UsageError(f"{cls.option} has no key {name[:MAX_SHOWN_CHARS]!r}; {cls.format_keys(keys)}.")
            attribute = name.replace("-", "_")
            if attribute in found:
                raise UsageError(f"{cls.option} has {name} twice; give it once.")
            _, kind = _read_fields(cls)[attribute]
            found[attribute] = reader.convert(name, given, kind)
        return cls(**found)

    @classmethod
    def format_keys(cls, keys: Collection[str] = ()) -> str:
        """Return the keys with placeholders of their values, for an error: `its keys are turns=LEN, think=S`."""
        shown = [f"{name}={key.value}" for name, key in cls.list_keys().items() if not keys or name in keys]
        return f"its keys are {', '.join(shown)}" if len(shown) > 1 else f"its key is {shown[0]}"

    @classmethod
    def format_form(cls, keys: Collection[str] = ()) -> str:
        """Return what a user can write, for an error: `[turns=]LEN,think=S`."""
        parts = {name: key for name, key in cls.list_keys().items() if not keys or name in keys}
        names = {name: f"[{name}=]" if name == cls.bare else f"{name}=" for name in parts}
        return ",".join(names[name] + key.value for name, key in parts.items())

    @classmethod
    def format_help(cls, keys: Collection[str] = (), texts: Mapping[str, str] = types.MappingProxyType({})) -> str:
        """Return the help of the option: what it is for, then a paragraph for each key.

        `texts` replaces the texts of keys, and by "" that of the option.
        """
        found = [texts.get("", cls.text)]
        for name, key in cls.list_keys().items():
            if not keys or name in keys:
                short = f", or {key.value}" if name == cls.bare else ""
                found.append(f"{name}={key.value}{short}: {texts.get(name, key.format_help())}")
        return "\n\n".join(found)

    def collect_fields(self) -> dict[str, object]:
        """Return the values that were given, by the fields of a spec that they set."""
        values = {key.field: getattr(self, name) for name, (key, _) in _read_fields(type(self)).items() if key.field}
        return {field: value for field, value in values.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Read the text of one structured option."""

    option: str
    form: str  # what a user can write
    bare: str

    def split_pairs(self, value: object) -> Iterable[tuple[str, object]]:
        """Return the keys and their values, not yet converted."""
        if isinstance(value, dict):
            pairs = [(_format_value(name), given) for name, given in value.items()]
        elif isinstance(value, str):
            pairs = [self._split_pair(part.strip(), first=i == 0) for i, part in enumerate(value.split(","))]
        else:
            pairs = [(self.bare, value)] if self.bare else []
        if not pairs:
            raise UsageError(f"{self.option} has no value; write {self.form}.")
        return pairs

    def convert(self, name: str, value: object, kind: object) -> object:
        """Return a value of the key's type."""
        if typing.get_origin(kind) is tuple:
            values = value.split(LIST) if isinstance(value, str) else value
            items = values if isinstance(values, list | tuple) else [values]
            return tuple(dict.fromkeys(self.convert(name, item, typing.get_args(kind)[0]) for item in items))
        text = _format_value(value).strip()
        if not text:
            raise UsageError(f"{self.option} {name}= has no value; write {self.form}.")
        convert, wanted = _CONVERT[kind]
        found = convert(text, value)
        if found is None:
            why = (suggest_counts(text) if kind is int else "") or f"not {wanted}"
            raise UsageError(f"{self.option} {name}={text[:MAX_SHOWN_CHARS]}: {why}; write {self.form}.")
        return found

    def _split_pair(self, part: str, *, first: bool) -> tuple[str, str]:
        name, equals, text = part.partition("=")
        if equals:
            return name.strip(), text
        if first and self.bare and part:
            return self.bare, part
        raise UsageError(f"{self.option} {part[:MAX_SHOWN_CHARS] or '(empty)'}: not KEY=VALUE; write {self.form}.")


def _format_value(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # more digits than Python prints
        return "(a number that is too long)"


def _convert_number(text: str, value: object) -> float | None:
    try:
        return None if isinstance(value, bool) else float(text)
    except ValueError:
        return None


_CONVERT: dict[object, tuple[Callable[[str, object], object], str]] = {
    str: (lambda text, value: None if isinstance(value, bool | dict | list) else text, "text"),
    int: (lambda text, value: None if isinstance(value, bool) else parse_count(text), "a whole number"),
    float: (_convert_number, "a number"),
    bool: (lambda text, value: value if isinstance(value, bool) else SWITCH.get(text), "yes or no"),
}
"""Conversion of a value to each type, and what the type is called in an error."""


@functools.cache
def _read_fields(cls: type[StructuredOption]) -> dict[str, tuple[Key, object]]:
    """Return the key and the type of each field."""
    found = {}
    for name, annotation in typing.get_type_hints(cls, include_extras=True).items():
        if typing.get_origin(annotation) is not Annotated:
            continue
        kind, key = typing.get_args(annotation)
        plain = [part for part in typing.get_args(kind) if part is not type(None)] if _is_union(kind) else [kind]
        found[name] = (key, plain[0])
    return found


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


class Sessions(StructuredOption, frozen=True, kw_only=True):
    """Requests that are turns of sessions."""

    option = "--sessions"
    text = (
        "Requests are turns of sessions: each prompt begins with the whole conversation so far, so that the prefix cache can "
        "hold it. --concurrency and --request-rate then count sessions, --num-requests counts their turns."
    )
    bare = "turns"

    turns: Annotated[
        str | None,
        Key("LEN", "turns of a session, in the notation of lengths.", "1, requests are independent", "turns"),
    ] = None
    tokens: Annotated[
        str | None,
        Key("LEN", "tokens that each turn after the first adds to the prompt.", "as --input-tokens", "turn_tokens"),
    ] = None
    think: Annotated[float | None, Key("S", "seconds from an answer to the next turn.", "0", "think_time")] = None


class PrefixShare(StructuredOption, frozen=True, kw_only=True):
    """Common beginnings of prompts."""

    option = "--prefix-share"
    text = "Prompts that begin alike."
    bare = "share"

    share: Annotated[
        float | None,
        Key(
            "S",
            "share of each prompt, from 0 to less than 1, that begins like the prompts of its group.",
            "0",
            "prefix_share",
        ),
    ] = None
    groups: Annotated[int | None, Key("N", "groups, which take requests in turn.", "1", "prefix_groups")] = None


class Disaggregate(StructuredOption, frozen=True, kw_only=True):
    """Several instances of a layout, and the transfers between them."""

    option = "--disaggregate"
    text = "With --mode replay: several instances of the layout, each on tp GPUs of its own. Values separated by / are points of their own."
    bare = "instances"

    instances: Annotated[
        tuple[str, ...] | None,
        Key(
            "P:D/…",
            "P instances that only prefill and D that only decode, also written 1P2D: disaggregated prefill of vLLM, PD "
            "disaggregation of SGLang. A number such as 3: as many that do both, which a P:D has as its baseline.",
            "one instance that does both",
            "disaggregate",
        ),
    ] = None
    gb_s: Annotated[
        tuple[str, ...] | None,
        Key(
            "RATE/…",
            "rate at which a GPU sends KV, in 10⁹ bytes per second, such as 50 for 400 Gb/s; each GPU sends what it holds of a "
            "request to the one in its place, requests one after another.",
            "",
            "transfer_gb_s",
        ),
    ] = None
    ms: Annotated[float | None, Key("MS", "fixed latency of each request's transfer, in ms.", "0", "transfer_ms")] = (
        None
    )


class Prefill(StructuredOption, frozen=True, kw_only=True):
    """How prompts are prefilled."""

    option = "--prefill"
    text = "How prompts are prefilled."
    bare = "attention"

    attention: Annotated[
        str | None,
        Key(
            "NAME",
            "sdpa (torch) or flashinfer, about three times as fast.",
            "flashinfer on GPUs where it is installed; else sdpa",
            "prefill",
        ),
    ] = None
    prefix_cache: Annotated[
        bool | None,
        Key(
            "yes|no",
            "keep the KV of finished prompts for prompts with the same prefix, while memory allows.",
            "yes",
            "prefix_cache",
        ),
    ] = None


class PageSize(StructuredOption, frozen=True, kw_only=True):
    """Pages of the KV cache."""

    option = "--page-size"
    text = "Pages of the KV cache."
    bare = "rows"

    rows: Annotated[
        int | None,
        Key("ROWS", "KV rows in a page of one rank: vLLM's --block-size.", "64 on GPUs; 1 on the CPU", "page_size"),
    ] = None
    interleave: Annotated[
        int | None,
        Key(
            "TOKENS",
            "neighbouring tokens that stay on one dcp rank, vLLM's --cp-kv-cache-interleave-size; divides the page size.",
            "1",
            "interleave",
        ),
    ] = None


class Collectives(StructuredOption, frozen=True, kw_only=True):
    """Variants of the communication of a layer."""

    option = "--collectives"
    text = "Communication of a layer, next to --exchange. Values separated by / are points of their own."

    all_reduce: Annotated[
        tuple[str, ...] | None,
        Key(
            "NAME/…",
            "how the partial sums of tp are reduced: nccl, or symm through symmetric memory.",
            "nccl",
            "all_reduce",
        ),
    ] = None
    q_replicate: Annotated[
        tuple[bool, ...] | None,
        Key(
            "yes|no",
            "every dcp rank computes all heads' queries, from more weights, and none are gathered.",
            "no",
            "q_replicate",
        ),
    ] = None
    project_first: Annotated[
        tuple[bool, ...] | None,
        Key(
            "yes|no",
            "project partial outputs to values, with more weights, before they are exchanged: fewer bytes.",
            "no",
            "project_first",
        ),
    ] = None


class Timeout(StructuredOption, frozen=True, kw_only=True):
    """Time limits, in seconds."""

    option = "--timeout"
    text = "Time limits in seconds."
    bare = "stall"

    stall: Annotated[
        float | None,
        Key(
            "S",
            "a point without progress for this long is treated as hung: stacks of all ranks are saved, its job is ended, and the "
            "other points go on. Startup, build and warm-up are always allowed 300 s.",
            "300",
        ),
    ] = None
    point: Annotated[
        float | None,
        Key("S", "a point that takes longer than this, including its build, is treated as hung.", "none"),
    ] = None
    load: Annotated[
        float | None,
        Key(
            "S",
            "a load ends after this long, and requests that have not finished are counted as cancelled.",
            "none",
            "limit_seconds",
        ),
    ] = None
    start: Annotated[
        float | None, Key("S", "a server that is started and accepts no requests for this long has failed.", "1800")
    ] = None


class Nodes(StructuredOption, frozen=True, kw_only=True):
    """Several machines, as torchrun's --nnodes, --node-rank and --rdzv-endpoint."""

    option = "--nodes"
    text = (
        "Several machines: start the same command on each, with the same secret in DCPBENCH_SECRET. tp counts the GPUs of all "
        "of them."
    )
    bare = "count"

    count: Annotated[int, Key("N", "machines.", "1")] = 1
    rank: Annotated[int, Key("N", "this machine's number; 0 keeps the records.", "0")] = 0
    endpoint: Annotated[
        str,
        Key(
            "HOST:PORT",
            "address of node 0 with a free port, the same on every machine. Node 0 listens at this address alone: one of a "
            "network that you trust.",
        ),
    ] = ""


_GPUS = " or ".join(", ".join(gpu.name for gpu in GPUS).rsplit(", ", 1))


class Gpu(StructuredOption, frozen=True, kw_only=True):
    """GPUs of a machine that is not this one."""

    option = "--gpu"
    text = "With --dry-run: plan for a machine with other GPUs than this one has."
    bare = "name"

    name: Annotated[str | None, Key("NAME", f"{_GPUS}, all SXM.", "this machine's")] = None
    count: Annotated[int | None, Key("N", "GPUs of a machine.", "8")] = None


class Client(StructuredOption, frozen=True, kw_only=True):
    """The client that sends requests to a server."""

    option = "--client"
    text = "The client that sends the requests."

    warm_up: Annotated[int, Key("N", "requests before the clock starts, with short answers.", "8")] = 8
    retries: Annotated[
        int,
        Key(
            "N",
            "how often a request is sent again while the server is busy (429, 503, connection refused), also the short ones before "
            "the load. Each is counted, and the wait is in its latency.",
            "0",
        ),
    ] = 0
    processes: Annotated[
        int | None,
        Key(
            "N",
            "processes that send the load, with an event loop each.",
            "one for each 8,000 chunks a second that are expected, as far as there are cores",
        ),
    ] = None
    realtime: Annotated[
        bool,
        Key(
            "yes|no",
            "run before everything else on its cores (SCHED_RR) while a load is sent, where the kernel allows it: to root, "
            "CAP_SYS_NICE or an RLIMIT_RTPRIO. The record says whether it did.",
            "yes",
        ),
    ] = True


STRUCTURED = (Sessions, PrefixShare, Disaggregate, Prefill, PageSize, Collectives, Timeout, Nodes, Gpu, Client)
"""All structured options."""
BY_NAME = {declared.option: declared for declared in STRUCTURED}
KEYS = {
    key.field: (declared, name) for declared in STRUCTURED for name, key in declared.list_keys().items() if key.field
}
"""Option and key of each field of a spec that a structured option sets."""


def expand_structured(given: Mapping[str, object]) -> dict[str, object]:
    """Return options as given, with the fields of a spec that structured options set in place of these options."""
    found: dict[str, object] = {}
    for name, value in given.items():
        found |= value.collect_fields() if isinstance(value, StructuredOption) else {name: value}
    return found

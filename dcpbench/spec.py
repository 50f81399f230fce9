"""What a sweep or a verification was asked to run: options of the command line and of a TOML or YAML file. No torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.budget import ITEMSIZE
from dcpbench.choices import ALL_REDUCES, AUTO, BACKENDS, EXCHANGES, OPTIONS, flag
from dcpbench.errors import CapacityError, MissingPackageError, ModelError, UsageError
from dcpbench.jobs import Settings
from dcpbench.shapes import check_checkpoint, load_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.jobs import Probe
    from dcpbench.shapes import ModelShape

SYNTHETIC = "synthetic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """The axes of a grid and what is the same for all of its points. Raises UsageError for values that cannot work."""

    model: tuple[str, ...]
    tp: tuple[int, ...]
    dp: tuple[int, ...] = (1,)
    dcp: tuple[int, ...] = ()
    """Empty: the largest of each tp and dp, which is tp / dp."""
    concurrency: tuple[int, ...]
    context: tuple[int, ...]
    exchange: tuple[str, ...] = EXCHANGES[:1]
    """Used where dcp > 1, as the three options after it; points with dcp 1 exchange nothing and say `none`."""
    q_replicate: tuple[bool, ...] = (False,)
    project_first: tuple[bool, ...] = (False,)
    overlap: tuple[bool, ...] = (False,)
    all_reduce: tuple[str, ...] = ALL_REDUCES[:1]
    backend: tuple[str, ...]
    dtype: str
    page_size: int
    interleave: int = 1
    weights: str = SYNTHETIC
    repeats: int = 1
    baseline: bool = True
    """Whether each layout is added without dcp, and tp alone for dp without dcp, for each model, backend and load."""
    settings: Settings = Settings()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        for name in ("model", "tp", "dp", "concurrency", "context", "exchange", "backend", "all_reduce", *OPTIONS):
            if not getattr(self, name):
                raise UsageError(f"{flag(name)} is empty; give at least one value or leave the option out.")
        for name in ("tp", "dp", "dcp", "concurrency", "context"):
            for value in getattr(self, name):
                _positive(name, value)
        for name in ("page_size", "interleave", "repeats"):
            _positive(name, getattr(self, name))
        for name, values, known in (
            ("exchange", self.exchange, (*EXCHANGES, AUTO)),
            ("all_reduce", self.all_reduce, ALL_REDUCES),
            ("backend", self.backend, (*BACKENDS, AUTO)),
            ("dtype", (self.dtype,), ITEMSIZE),
        ):
            for value in values:
                _known(name, value, tuple(known))
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.page_size % self.interleave:
            valid = [str(i) for i in range(1, self.page_size + 1) if self.page_size % i == 0]
            raise UsageError(
                f"--interleave {self.interleave} does not divide --page-size {self.page_size}; these do: "
                f"{', '.join(valid)}. A stripe must not cross a page."
            )
        check_seconds("--seconds", self.settings.seconds, 10)
        if self.weights != SYNTHETIC:
            check_checkpoint(Path(self.weights), "--weights")


def check_seconds(option: str, value: float, example: int) -> None:
    """Raise UsageError unless `value` is a time that can pass."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {value:g} is not a positive number of seconds; try {option} {example}.")


def check_same_sizes(spec: SweepSpec, shapes: Mapping[str, ModelShape]) -> None:
    """Raise ModelError unless every model is the one whose weights are read."""
    if spec.weights == SYNTHETIC:
        return
    own = dataclasses.asdict(load_shape(spec.weights))
    for model, shape in shapes.items():
        differ = [f"{k} {v} and {own[k]}" for k, v in dataclasses.asdict(shape).items() if k != "name" and v != own[k]]
        if differ:
            raise ModelError(
                f"--model {model} is not the model of the checkpoint {spec.weights}: {', '.join(differ[:3])}. "
                "Leave --model out; the checkpoint's config.json says what it is."
            )


def make_spec(given: Mapping[str, object], probe: Probe) -> SweepSpec:
    """Options as typed (None = not typed; comma strings, numbers or lists) and the device's defaults for the rest."""
    options = {name: PARSERS[name](name, value) for name, value in given.items() if value is not None}
    if "weights" in options and options["weights"] != SYNTHETIC:
        options.setdefault("model", (options["weights"],))
    for name, value in defaults(probe).items():
        options.setdefault(name, value)
    settings = {s: options.pop(o) for o, s in _SETTINGS.items() if o in options}
    return SweepSpec(**options, settings=Settings(**settings))  # type: ignore[arg-type]


def defaults(probe: Probe) -> dict[str, object]:
    """What an option means when it was not typed, by device; `dcpbench sweep --help` prints the same."""
    if probe.device == "cpu":
        return {
            "model": ("tiny",), "tp": (8,), "concurrency": (2, 8), "context": (100,), "backend": ("reference",),
            "dtype": "fp32", "page_size": 1,
        }  # fmt: skip
    return {
        "model": ("deepseek-v3",), "tp": (probe.count,), "concurrency": (8, 32, 48), "context": (4000,),
        "backend": ("flashinfer" if probe.packages.get("flashinfer") else "triton",), "dtype": "bf16", "page_size": 64,
    }  # fmt: skip


def read_options(path: Path) -> dict[str, object]:
    """Options from a .toml, .yaml or .yml file: the command line's names, with `_` or `-`, without the dashes."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--config {path} cannot be read: {e}.") from e
    found = _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no options; write lines such as `tp = [4, 8]` (TOML) or `tp: [4, 8]` (YAML).")
    options: dict[str, object] = {}
    for typed, value in found.items():
        name = str(typed).replace("-", "_")
        if name in ("no_baseline", "no_profile") and isinstance(value, bool):
            options[name.removeprefix("no_")] = not value
            continue
        if name not in PARSERS:
            known = [n.replace("_", "-") for n in PARSERS]
            raise UsageError(f"{path}: unknown option '{typed}'{_did_you_mean(name.replace('_', '-'), known)}")
        if value is None:
            raise UsageError(f"{path}: '{typed}' has no value; give one, or leave the line out.")
        options[name] = value
    return options


def effective(probe: Probe, device: str) -> Probe:
    """The machine as --device auto, cuda or cpu wants it seen."""
    _known("device", device, ("auto", "cuda", "cpu"))
    if device == "cuda" and probe.device != "cuda":
        raise CapacityError(
            "--device cuda, but no GPU is visible; `dcpbench env` says why. "
            "Without one, type `dcpbench sweep --device cpu` for a functional run."
        )
    if device == "cpu" and probe.device != "cpu":
        return msgspec.structs.replace(probe, device="cpu", count=0, name="CPU", memory_bytes=None, l2_bytes=None)
    return probe


def parse_bytes(name: str, value: object) -> int:
    """`100GiB`, `40GB` or `512 MiB`."""
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", str(value)):
        raise UsageError(f"{flag(name)} {value} has no unit; write for example {flag(name)} 100GiB or 40GB.")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(value), re.IGNORECASE)
    if not match or isinstance(value, bool):
        raise UsageError(f"{flag(name)} {value}: not a size; write for example {flag(name)} 100GiB or 40GB.")
    number, unit, binary = match.groups()
    size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if size < 1:
        raise UsageError(f"{flag(name)} {value}: must be more than 0 bytes; write for example {flag(name)} 100GiB.")
    return size


def _parse_toml(path: Path, text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"{path} is not valid TOML: {e}.") from e


def _parse_yaml(path: Path, text: str) -> object:
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--config {path}: give a file that ends in .toml, .yaml or .yml.")
    try:
        import yaml
    except ImportError as e:
        raise MissingPackageError("YAML files need PyYAML: pip install pyyaml, or write the file as TOML.") from e
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(e).split())}.") from e


def _items(name: str, value: object) -> list[object]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    items = value if isinstance(value, list | tuple) else [value]
    if not items or items == [""]:
        raise UsageError(f"{flag(name)} is empty; write for example {_example(name)}, or leave it out.")
    if "" in items:
        raise UsageError(f"{flag(name)} {value!r} has an empty entry; write a comma list such as {_example(name)}.")
    return list(items)


def _example(name: str) -> str:
    examples = {
        "model": "deepseek-v3,kimi-k2", "backend": ",".join(BACKENDS), "exchange": EXCHANGES[0], "dtype": "bf16",
        "weights": SYNTHETIC, "all_reduce": ALL_REDUCES[0],
        "tp": "4,8", "dcp": "1,4", "concurrency": "8,32", "context": "4000,32000",
    }  # fmt: skip
    return f"{flag(name)} {examples.get(name, '1')}"


def _ints(name: str, value: object) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_int(name, item) for item in _items(name, value)))


def _int(name: str, value: object) -> int:
    digits = re.fullmatch(r"[+-]?\d+", value.strip()) if isinstance(value, str) else None
    if digits or (isinstance(value, int) and not isinstance(value, bool)):
        return int(value)  # type: ignore[call-overload, no-any-return]
    raise UsageError(f"{flag(name)} {value}: not a whole number; write for example {_example(name)}.")


def _names(name: str, value: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_name(name, item) for item in _items(name, value)))


def _name(name: str, value: object) -> str:
    if value == "":
        raise UsageError(f"{flag(name)} is empty; write for example {_example(name)}, or leave it out.")
    if not isinstance(value, str):
        raise UsageError(f"{flag(name)} {value!r}: not a name; write for example {_example(name)}.")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise UsageError(f"{flag(name)} {value!r}: not a number; write for example {flag(name)} 10.")


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; write true or false.")
    return value


def _bools(name: str, value: object) -> tuple[bool, ...]:
    """`true`, or `[false, true]` for an axis of both."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(_bool(name, item) for item in values))


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{flag(name)} {value} is not positive; try {_example(name)}.")


def _known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{flag(name)} {value} is unknown{_did_you_mean(value, known)}")


def _did_you_mean(value: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    return (f"; did you mean {near[0]}?" if near else ".") + f" Known: {', '.join(known)}."


PARSERS: dict[str, Callable[[str, object], object]] = {
    "model": _names,
    "tp": _ints,
    "dp": _ints,
    "dcp": _ints,
    "concurrency": _ints,
    "context": _ints,
    "exchange": _names,
    "q_replicate": _bools,
    "project_first": _bools,
    "overlap": _bools,
    "all_reduce": _names,
    "backend": _names,
    "dtype": _name,
    "page_size": _int,
    "interleave": _int,
    "weights": _name,
    "kv_memory": parse_bytes,
    "seconds": _number,
    "repeats": _int,
    "baseline": _bool,
    "profile": _bool,
}
"""Every name that a configuration file may hold, and how its value is read."""

_SETTINGS = {"kv_memory": "kv_memory_bytes", "seconds": "seconds", "profile": "profile"}

"""Convert the options of a sweep or a verification, from the command line and a TOML or YAML file, to a SweepSpec. No
torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from dcpbench.errors import CapacityError, MissingPackageError, ModelError, UsageError
from dcpbench.models import load_shape
from dcpbench.models.checkpoint_folder import check_checkpoint
from dcpbench.plan import option_parsers as read
from dcpbench.plan.option_parsers import check_known, check_positive, check_seconds, suggest_known
from dcpbench.plan.used_options import list_changed_options
from dcpbench.plan.yaml_text import load_yaml
from dcpbench.points.device_probe import HOPPER, Probe
from dcpbench.points.gpus import GPUS
from dcpbench.points.layout import DEGREES, OUTER_DEGREES
from dcpbench.points.names import (
    AS_PUBLISHED,
    COMPUTED,
    DTYPES,
    FP8,
    LIBRARIES,
    MOE_TP,
    PRECISIONS,
    STORED,
    SYNTHETIC,
    WEIGHT_FORMATS,
    format_flag,
)
from dcpbench.points.point import HOW
from dcpbench.points.settings import Settings
from dcpbench.points.speculation import check_acceptance, check_draft_tokens, parse_acceptance, require_acceptance
from dcpbench.points.structured_options import BY_NAME, KEYS
from dcpbench.show.text import fit_line, format_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.axes import Value
    from dcpbench.points.key_values import StructuredOption
    from dcpbench.points.point import Load


MAX_GPUS = 72  # maximum number of GPUs of a machine: an NVL72, the largest NVLink domain on sale
MAX_FILE_BYTES = 1 << 16  # maximum bytes of a file of options
MAX_LISTED_STRIPE = 4096  # largest stripe that an error about interleave names


@dataclasses.dataclass(frozen=True)
class PointLoad:
    """Hold the fields of a point that define its load."""

    concurrency: int
    context: int
    load: Load | None = None  # load of `serve`; None for `decode`
    deployed: Mapping[str, Value] = dataclasses.field(default_factory=dict)  # fields that define the instances


class Served(Protocol):
    """Define the interface of the loads of `serve`, for each model and layout; see serve_spec.py."""

    def make_loads(self, dp: int, shape: ModelShape) -> list[PointLoad]:
        """Return the loads in the given order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """Describe the axes of a grid and what is equal for all of its points; raise UsageError for values that cannot
    work.
    """

    model: tuple[str, ...]
    tp: tuple[int, ...]
    dp: tuple[int, ...] = (1,)
    dcp: tuple[int, ...] = ()  # values of dcp; if empty, the largest for each tp and dp, which is tp / dp
    pp: tuple[int, ...] = (1,)
    pcp: tuple[int, ...] = (1,)  # values of the degrees of --stages, which are planned and not run
    concurrency: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    serve: Served | None = None  # loads of `serve`, which replace concurrency and context
    how: Mapping[str, tuple[Value, ...]]  # values of each axis of point.HOW; those of an exchange are used if dcp > 1
    acceptance: str = ""  # probability that each draft is accepted, for points with drafts; empty if not stated
    repeats: int = 1
    baseline: bool = True  # True if each layout is added without dcp, and tp alone for dp, under the same conditions
    settings: Settings = Settings()  # noqa: RUF009 -- frozen
    typed: frozenset[str] = frozenset()  # given options of how points are computed, with other values than the defaults

    def __post_init__(self) -> None:
        loads = () if self.serve else ("concurrency", "context")
        needed = {name: getattr(self, name) for name in ("model", "tp", "dp", *loads)}
        for name, values in (needed | dict(self.how)).items():
            if not values:
                raise UsageError(f"{format_flag(name)} is empty; give at least one value or leave the option out.")
        for name in (*DEGREES, *OUTER_DEGREES, "concurrency", "context"):
            for value in getattr(self, name):
                check_positive(name, value)
        for axis in HOW:
            for value in self.how[axis.name]:
                if axis.values:
                    check_known(axis.name, str(value), axis.values)
                elif axis.kind is int and value != axis.default:
                    check_positive(axis.name, cast("int", value))
        self._check_precisions()
        self._check_acceptance()
        check_positive("repeats", self.repeats)
        self._check_sizes()

    @property
    def weights(self) -> str:
        """Return the folder of a checkpoint, or SYNTHETIC."""
        return str(self.how["weights"][0])

    def make_loads(self, dp: int, shape: ModelShape) -> list[PointLoad]:
        """Return the loads of a model's points in `dp` replicas."""
        if self.serve:
            return self.serve.make_loads(dp, shape)
        return [PointLoad(*pair) for pair in itertools.product(self.concurrency, self.context)]

    def _check_acceptance(self) -> None:
        drafts = cast("tuple[int, ...]", self.how["mtp"])
        check_acceptance(drafts, self.acceptance)
        require_acceptance(drafts, self.acceptance)

    def _check_precisions(self) -> None:
        for name in STORED:
            for value in self.how[name]:
                if value != AS_PUBLISHED:
                    check_known(name, str(value), PRECISIONS if name == "kv_dtype" else (*DTYPES, *WEIGHT_FORMATS))
        for weights, kv in itertools.product(*(self.how[name] for name in STORED)):
            resolve_compute_dtype(str(weights), str(kv), "")

    def _check_sizes(self) -> None:
        page, stripe = (cast("int", self.how[name][0]) for name in ("page_size", "interleave"))
        if page % stripe:
            valid = [str(i) for i in range(1, min(page, MAX_LISTED_STRIPE) + 1) if page % i == 0]
            raise UsageError(
                f"--page-size interleave={stripe} does not divide its {page} rows; these do: "
                f"{', '.join(valid)}. A stripe must not cross a page."
            )
        check_seconds("--seconds", self.settings.seconds, 10)
        if self.weights != SYNTHETIC:
            check_checkpoint(Path(self.weights), "--weights")


def check_same_sizes(spec: SweepSpec, shapes: Mapping[str, ModelShape]) -> None:
    """Raise ModelError unless every model has the sizes of the checkpoint."""
    if spec.weights == SYNTHETIC:
        return
    own = dataclasses.asdict(load_shape(spec.weights))
    for model, shape in shapes.items():
        differ = [
            f"{k} {v} and {own[k]}"
            for k, v in dataclasses.asdict(shape).items()
            if k not in UNSIZED_FIELDS and v != own[k]
        ]
        if differ:
            raise ModelError(
                f"--model {model} is not the model of the checkpoint {spec.weights}: {', '.join(differ[:3])}. "
                "Leave --model out; the checkpoint's config.json says what it is."
            )


def make_spec(given: Mapping[str, object], probe: Probe) -> SweepSpec:
    """Build a SweepSpec from options as given (None = not given; comma-separated strings, numbers or lists) and the
    device's defaults.
    """
    options = {name: SPEC_PARSERS[name](name, value) for name, value in given.items() if value is not None}
    return build_spec(options, get_defaults(probe), {}, list_changed_options(options))


def build_spec(
    options: Mapping[str, object],
    base: Mapping[str, object],
    settings: Mapping[str, object],
    typed: frozenset[str] = frozenset(),
) -> SweepSpec:
    """Build a SweepSpec from parsed options, defaults in `base`, fields of jobs.Settings that are not options, and SweepSpec.typed."""
    checkpoint = options.get("weights", SYNTHETIC)
    found = {**base, **({} if checkpoint == SYNTHETIC else {"model": (checkpoint,)}), **options}
    more = {field: found.pop(name) for name, field in _SETTINGS.items() if name in found}
    found |= _resolve_precisions(options, base)
    found.pop(OVER_FP8, None)
    how = {axis.name: found.pop(axis.name, axis.values[0] if axis.values else axis.default) for axis in HOW}
    how = {name: values if isinstance(values, tuple) else (values,) for name, values in how.items()}
    return SweepSpec(**found, how=how, settings=Settings(**settings, **more), typed=typed)  # type: ignore[arg-type]


OVER_FP8 = "backend over fp8"  # key of the default backend for an fp8 KV cache and for drafts; it is no option's name
UNSIZED_FIELDS = ("name", "published")  # fields of a model that are not sizes


def _resolve_precisions(options: Mapping[str, object], base: Mapping[str, object]) -> dict[str, object]:
    """Return the values of `dtype`, `weights_dtype` and `kv_dtype`.

    A dtype other than fp8 that one of the two options gives is the default of the other, and that of the computation.
    """
    typed = {cast("tuple[str, ...]", options[name]) for name in STORED if name in options}
    named = [dtype for values in typed for dtype in values if dtype in DTYPES]
    dtype = str(options.get(COMPUTED, named[0] if len(set(named)) == 1 else base[COMPUTED]))
    check_known(COMPUTED, dtype, PRECISIONS)
    usual = dtype if dtype in DTYPES else base[COMPUTED]
    weights = base["weights_dtype"] if base["weights_dtype"] == AS_PUBLISHED and COMPUTED not in options else dtype
    found: dict[str, object] = {
        COMPUTED: usual,
        "weights_dtype": options.get("weights_dtype", (weights,)),
        "kv_dtype": options.get("kv_dtype", (dtype if COMPUTED in options else usual,)),
    }
    over_fp8, drafts = (
        FP8 in cast("tuple[str, ...]", found["kv_dtype"]),
        any(cast("tuple[int, ...]", options.get("mtp", ()))),
    )
    if (over_fp8 or drafts) and "backend" not in options:
        found["backend"] = base.get(OVER_FP8, base["backend"])
    return found


def resolve_compute_dtype(weights: str, kv: str, usual: str) -> str:
    """Return the dtype of activations: that of weights or KV if they are not quantised; raise UsageError if those differ."""
    found = {name for name in (weights, kv) if name not in (*WEIGHT_FORMATS, AS_PUBLISHED)}
    if len(found) > 1:
        raise UsageError(
            f"--weights-dtype {weights} with --kv-dtype {kv}: values other than fp8 must be one dtype; use "
            f"--kv-dtype {weights}, or fp8 for one of them."
        )
    return found.pop() if found else usual


def get_defaults(probe: Probe) -> dict[str, object]:
    """Return the defaults of all options, by device; `dcpbench sweep --help` prints the same."""
    if probe.device == "cpu":
        return {
            "model": ("tiny",),
            "tp": (8,),
            "concurrency": (2, 8),
            "context": (100,),
            "backend": ("reference",),
            "dtype": "fp32",
            "weights_dtype": "fp32",
            "page_size": 1,
            "ep": MOE_TP,
        }
    return {
        "model": ("deepseek-v3",),
        "tp": (probe.count,),
        "concurrency": (8, 32, 48),
        "context": (4000,),
        "backend": ("flashinfer" if probe.packages.get("flashinfer") and probe.capability != HOPPER else "triton",),
        OVER_FP8: ("triton",),
        "dtype": "bf16",
        "weights_dtype": AS_PUBLISHED,
        "page_size": 64,
        "ep": MOE_TP,
    }


def read_options(path: Path, known: Iterable[str] | None = None) -> dict[str, object]:
    """Read options from a .toml, .yaml or .yml file: the command line's names, with `_` or `-`, without the dashes.

    `known` are the names that the command takes; None means those of `sweep`.
    """
    taken = list(PARSERS if known is None else known)
    names = list_file_names(taken)
    try:
        size, text = path.stat().st_size, path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not text"
        raise UsageError(f"--config {path} cannot be read ({why}); name a TOML or YAML file of options.") from e
    if size > MAX_FILE_BYTES:
        raise UsageError(
            f"--config {path} has {size:,} bytes, and options fit into {MAX_FILE_BYTES:,}; name another file."
        )
    found = _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no options; write lines such as `tp = [4, 8]` (TOML) or `tp: [4, 8]` (YAML).")
    options: dict[str, object] = {}
    for typed, value in found.items():
        typed = read.format_value(typed)  # noqa: PLW2901 - a file may call anything an option
        name = typed.replace("-", "_")
        off = name.removeprefix("no_")
        if off in SWITCHED_OFF and off in names and name != off and isinstance(value, bool):
            options[off] = not value
            continue
        if name not in names:
            near = suggest_known(name.replace("_", "-"), [n.replace("_", "-") for n in names])
            raise UsageError(f"{path}: unknown option '{typed}'{near}")
        if value is None:
            raise UsageError(f"{path}: '{typed}' has no value; give one, or leave the line out.")
        declared = BY_NAME.get(f"--{name.replace('_', '-')}")
        keys = [key for field in taken if (key := get_key(field, declared))]
        options |= declared.parse(value, keys).collect_fields() if declared and keys else {name: value}
    return options


def list_file_names(known: Iterable[str]) -> list[str]:
    """Return the options that a file may contain, in place of the fields of specs that they set."""
    options = (KEYS[name][0].option[2:].replace("-", "_") if name in KEYS else name for name in known)
    return list(dict.fromkeys(options))


def get_key(field: str, declared: type[StructuredOption] | None) -> str | None:
    """Return the key of a structured option that sets a field of a spec; None if it has no such key."""
    option, key = KEYS.get(field, (None, ""))
    return key if declared is not None and option is declared else None


DEVICES = ("auto", "cuda", "cpu")  # values of --device


def select_device(probe: Probe, device: str) -> Probe:
    """Return the machine as --device auto, cuda or cpu selects it."""
    check_known("device", device, DEVICES)
    if device == "cuda" and probe.device != "cuda":
        raise CapacityError(
            "--device cuda, but no GPU is visible; `dcpbench doctor` says why. "
            "Without one, --device cpu makes a functional run."
        )
    if device == "cpu" and probe.device != "cpu":
        return msgspec.structs.replace(probe, device="cpu", count=0, name="CPU", memory_bytes=None, l2_bytes=None)
    return probe


def make_planned_probe(name: str, count: int) -> Probe:
    """Return a machine with `count` GPUs of points/gpus.py, with the packages of a GPU run; raise UsageError."""
    if count < 1:
        raise UsageError(f"--gpu count={read.format_value(count)} is not positive; try count=8.")
    names = [gpu.name for gpu in GPUS]
    if not name.strip():
        raise UsageError(f"--gpu is empty; type one of {format_list(names, 'or')}, as in --gpu H200.")
    if count > MAX_GPUS:
        raise UsageError(
            f"--gpu count={read.format_value(count)} is more than the {MAX_GPUS} of the largest machine; for several, add --nodes, as in "
            "--gpu H200,count=8 --nodes 4."
        )
    by_name = {called.lower(): gpu for gpu in GPUS for called in (gpu.name, f"NVIDIA {gpu.name}", gpu.device)}
    found = by_name.get(name.strip().lower())
    if found is None:
        raise UsageError(f"--gpu {read.format_value(name)} is unknown{suggest_known(name, names)}")
    return Probe(
        device="cuda",
        count=count,
        name=found.device,
        memory_bytes=found.memory_bytes,
        l2_bytes=found.l2_bytes,
        capability=found.capability,
        packages=dict.fromkeys(LIBRARIES.values(), "planned") if found.cuda else {},
        gpu=found,
    )


def _parse_toml(path: Path, text: str) -> object:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is not valid TOML: {_format_error(e)}.") from e


def _parse_yaml(path: Path, text: str) -> object:
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--config {path}: give a file that ends in .toml, .yaml or .yml.")
    try:
        return load_yaml(text, str(path), "options")
    except ImportError as e:
        raise MissingPackageError("YAML files need PyYAML: pip install pyyaml, or write the file as TOML.") from e


def _format_error(error: Exception) -> str:
    return "it is nested too deep" if isinstance(error, RecursionError) else fit_line(str(error)).rstrip(".")


PARSERS: dict[str, Callable[[str, object], object]] = {  # fields of a spec that options set, with their parsers
    "model": read.parse_names,
    **dict.fromkeys((*DEGREES, *OUTER_DEGREES, "concurrency", "context"), read.parse_ints),
    **{axis.name: read.get_parser(axis) for axis in HOW if axis.name != COMPUTED},
    "ep": read.parse_degrees,
    "routing": read.parse_routings,
    "mtp": lambda name, value: tuple(map(check_draft_tokens, read.parse_ints(name, value))),
    "acceptance": lambda name, value: parse_acceptance(read.parse_name(name, value)),
    "kv_memory": read.parse_bytes,
    "seconds": read.parse_number,
    "repeats": read.parse_int,
    "baseline": read.parse_bool,
    "profile": read.parse_bool,
}
SPEC_PARSERS = PARSERS | {COMPUTED: read.parse_name}  # with dtype, which two options imply unless step times state it
SWITCHED_OFF = ("baseline", "profile")  # on by default; files may negate them, as in `no-baseline`

_SETTINGS = {
    "kv_memory": "kv_memory_bytes",
    "seconds": "seconds",
    "profile": "profile",
    "micro_batches": "micro_batches",
}

"""Test the reading of options: comma-separated lists, sizes, TOML and YAML files, and invalid input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import CapacityError, DcpbenchError, ModelError, UsageError
from dcpbench.plan.option_parsers import parse_bytes
from dcpbench.plan.spec import SPEC_PARSERS, SweepSpec, make_spec, read_options, select_device
from dcpbench.points.device_probe import Probe
from dcpbench.points.point import HOW
from tests.unit.probes import CPU

if TYPE_CHECKING:
    from pathlib import Path

GPU = Probe(device="cuda", count=4, name="NVIDIA H200", memory_bytes=139 << 30, l2_bytes=60 << 20)


def test_comma_lists_lists_and_numbers_are_equivalent() -> None:
    """The values come from a list or a number of a file, and from a string of the command line."""
    assert make_spec({"tp": "4, 8"}, CPU).tp == make_spec({"tp": [4, 8]}, CPU).tp == (4, 8)
    assert make_spec({"tp": 4}, CPU).tp == make_spec({"tp": "4"}, CPU).tp == (4,)


def test_repeated_value_counts_once() -> None:
    """The option --tp 4,4 is one axis value."""
    assert make_spec({"tp": "4,4,2"}, CPU).tp == (4, 2)


def test_toml_and_yaml_files_with_equal_options_give_equal_specs(tmp_path: Path) -> None:
    """Names are those of the command line, with - or _."""
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text('tp = [2, 4]\nkv-memory = "1GiB"\nbaseline = false\nmodel = "tiny"\nseconds = 3\n')
    yaml.write_text("tp: [2, 4]\nkv_memory: 1GiB\nno-baseline: true\nmodel: tiny\nseconds: 3.0\n")
    spec = make_spec(read_options(toml), CPU)
    assert spec == make_spec(read_options(yaml), CPU)
    assert (spec.tp, spec.baseline, spec.settings.kv_memory_bytes, spec.settings.seconds) == ((2, 4), False, 1 << 30, 3)


def test_unknown_option_of_a_file_error_suggests_the_nearest_one(tmp_path: Path) -> None:
    """If a typo were ignored, the sweep would measure something else."""
    path = tmp_path / "a.toml"
    path.write_text("concurency = [8]\n")
    with pytest.raises(UsageError, match="unknown option 'concurency'; did you mean concurrency"):
        read_options(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "tp = [4"),
        ("a.toml", "tp = {a = 1}"),
        ("a.yaml", "tp: [4"),
        ("a.yaml", "- tp\n- 4\n"),
        ("a.yaml", ""),
        ("a.yaml", "tp: true"),
        ("a.yaml", "tp:"),
        ("a.yaml", "tp: 4.5"),
        ("a.yaml", "tp: []"),
        ("a.yaml", "tp:\n  - [4]\n"),
        ("a.yaml", "model: 3"),
        ("a.yaml", "baseline: maybe"),
        ("a.yaml", "1: 2"),
        ("a.json", "{}"),
        ("a.toml", "seconds = 'x'"),
    ],
)
def test_invalid_file_content_is_a_usage_error(tmp_path: Path, name: str, text: str) -> None:
    """The result is never a traceback of the parser or of Python."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError):
        make_spec(read_options(path), CPU)


LAUGHS = "tp: [&a [8,8,8,8,8,8,8,8,8], " + ", ".join(
    f"&{name} [{','.join([f'*{last}'] * 9)}]" for last, name in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", f"model: tiny\n{LAUGHS}]\n", r"a\.yaml, line 2: options are read without aliases, and \*a is one"),
        ("a.yaml", "one: &one {tp: 4}\n<<: *one\n", "line 2: options are read without aliases"),
        ("a.yaml", "tp: &a 4\n", ""),
        ("a.yaml", "model: tiny\ntp: 4\ntp: 8\n", r"a\.yaml, line 3: 'tp' is there twice; give it once"),
        ("a.yaml", "tp: " + "[" * 9_000, "is not valid YAML: it is nested too deep"),
        ("a.toml", "tp = " + "[" * 9_000, "is not valid TOML: it is nested too deep"),
        ("a.yaml", "tp: " + "9" * 10_000, "is not valid YAML: Exceeds the limit"),
        ("a.toml", "tp = " + "9" * 10_000, "is not valid TOML: Exceeds the limit"),
        ("a.yaml", "tp: 1:59", "--tp 1:59: not a whole number"),
        ("a.toml", "tp = 0x" + "f" * 9_000, r"--tp \(a number of 36,000 bits\) is above 1e\+15"),
        ("a.toml", "seconds = " + "9" * 400, r"--seconds \(a number of [\d,]+ bits\) is above 1e\+15"),
        ("a.toml", "seconds = 1e300", r"--seconds 1e\+300 is above 1e\+15"),
        ("a.toml", f"kv_memory = '{'9' * 70}GiB'", r"--kv-memory 9+GiB is above 1e\+15"),
        ("a.toml", "kv_memory = " + "9" * 400, r"--kv-memory \(a number of [\d,]+ bits\): not a size"),
        ("a.yaml", "tp: 2026-99-99", "is not valid YAML: month must be in"),
        ("a.yaml", "model: " + "x" * 9_000, r"--model x+… has 9,000 characters"),
        ("a.yaml", "tp: 4\n" + "#" * 70_000, "options fit into 65,536"),
    ],
    ids=[
        "aliases",
        "merge-key",
        "anchor-alone",
        "repeated-key",
        "deep-yaml",
        "deep-toml",
        "digits-yaml",
        "digits-toml",
        "base-60",
        "hexadecimal",
        "seconds-integer",
        "seconds-float",
        "bytes",
        "bytes-integer",
        "date",
        "long-name",
        "long-file",
    ],
)
def test_too_many_yaml_aliases_are_refused_at_once(tmp_path: Path, name: str, text: str, words: str) -> None:
    """In 600 bytes, aliases expand to 9¹¹ numbers; an anchor without an alias is harmless."""
    path = tmp_path / name
    path.write_text(text)
    if not words:
        assert make_spec(read_options(path), CPU).tp == (4,)
        return
    with pytest.raises(UsageError, match=words):
        make_spec(read_options(path), CPU)


def test_missing_or_binary_file_is_a_usage_error(tmp_path: Path) -> None:
    """Both errors name the file."""
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("none.toml", "b.toml"):
        with pytest.raises(UsageError, match=name):
            read_options(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": "four"}, "--tp four: not a whole number"),
        ({"tp": "0"}, "--tp 0 is not positive"),
        ({"tp": "-4"}, "--tp -4 is not positive"),
        ({"tp": "4,,8"}, "empty entry"),
        ({"tp": ""}, "--tp is empty; write for example --tp 4,8"),
        ({"concurrency": "8;32"}, "--concurrency 8;32: not a whole number"),
        ({"context": "0"}, "--context 0 is not positive"),
        ({"exchange": "ag-rs"}, "did you mean ag_rs"),
        ({"exchange": "none"}, "--exchange none is unknown"),
        ({"all_reduce": "ncl"}, "did you mean nccl"),
        ({"q_replicate": "yes"}, "q_replicate is 'yes'; write true or false"),
        ({"project_first": []}, "--collectives project-first is empty"),
        ({"backend": "tritn"}, "did you mean triton"),
        ({"dtype": "bfloat16"}, "did you mean bf16"),
        ({"page_size": 64, "interleave": 3}, "--page-size interleave=3 does not divide its 64 rows; these do: 1, 2, 4"),
        ({"page_size": 10**9, "interleave": 3}, "these do: 1, 2, 4, 5, 8"),
        ({"page_size": 0}, "--page-size 0 is not positive"),
        ({"seconds": -1.0}, "--seconds -1 is not a positive number of seconds; try --seconds 10"),
        ({"seconds": 0.0}, "try --seconds 10"),
        ({"seconds": float("nan")}, "--seconds nan is not"),
        ({"seconds": float("inf")}, "--seconds inf is not"),
        ({"repeats": 0}, "--repeats 0 is not positive"),
        ({"kv_memory": "lots"}, "write for example --kv-memory 100GiB"),
        ({"kv_memory": "0GiB"}, "more than 0 bytes"),
        ({"weights": "/no/such/folder"}, "no such folder"),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_invalid_option_error_has_the_option_and_a_remedy(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_spec(options, CPU)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("100GiB", 100 << 30), ("40GB", 40 * 10**9), ("1.5 MiB", 3 << 19), ("2k", 2000), ("7B", 7)],
)
def test_sizes_are_binary_with_i_and_decimal_without(text: str, size: int) -> None:
    """The size 1 GiB is 2^30 bytes, and 1 GB is 10^9."""
    assert parse_bytes("kv_memory", text) == size


def test_checkpoint_folder_is_its_own_model(tmp_path: Path) -> None:
    """The option --weights FOLDER alone reads FOLDER/config.json; a sweep compares it with --model if both are given."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert make_spec({"weights": str(tmp_path)}, CPU).model == (str(tmp_path),)
    assert make_spec({"weights": str(tmp_path), "model": "tiny"}, CPU).model == ("tiny",)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "has no config.json"),
        (["config.json"], "has neither model.safetensors nor model.safetensors.index.json"),
        (["config.json", "pytorch_model.bin"], "has neither model.safetensors"),
        (["model.safetensors"], "has no config.json"),
    ],
    ids=str,
)
def test_folder_without_a_checkpoint_is_refused_before_any_job(tmp_path: Path, files: list[str], words: str) -> None:
    """Otherwise, every rank of every point would fail."""
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=f"--weights .* {words}"):
        make_spec({"weights": str(tmp_path)}, CPU)


def test_device_cpu_hides_the_gpus_and_device_cuda_needs_one() -> None:
    """The defaults follow the device that is used."""
    assert select_device(GPU, "auto") is GPU
    assert make_spec({}, select_device(GPU, "cpu")).model == ("tiny",)
    with pytest.raises(CapacityError, match="--device cpu"):
        select_device(CPU, "cuda")
    with pytest.raises(UsageError, match="did you mean cuda"):
        select_device(GPU, "cudaa")


def test_every_option_of_a_file_sets_a_field_of_spec_or_settings() -> None:
    """No name is accepted and then ignored."""
    fields = set(SweepSpec.__dataclass_fields__) | {"kv_memory", "seconds", "profile"}
    assert set(SPEC_PARSERS) == fields - {"settings", "serve", "how", "typed"} | {axis.name for axis in HOW}


def test_spec_created_in_python_is_validated() -> None:
    """Validation is part of the spec, not of the parser."""
    with pytest.raises(DcpbenchError, match="--tp is empty"):
        SweepSpec(model=("tiny",), tp=(), concurrency=(1,), context=(1,), how={})

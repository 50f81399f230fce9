"""Test structured options: one option with several keys, such as `--sessions turns=4,think=2`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench import cli
from dcpbench.commands.command import collect_typed, load_command
from dcpbench.errors import UsageError
from dcpbench.models import load_shape
from dcpbench.plan.serve_spec import SERVE_PARSERS, make_serve_spec
from dcpbench.plan.spec import PARSERS, SPEC_PARSERS, list_file_names, make_spec, read_options
from dcpbench.points.names import format_flag, format_setting
from dcpbench.points.structured_options import (
    BY_NAME,
    KEYS,
    STRUCTURED,
    Client,
    Collectives,
    Disaggregate,
    Gpu,
    Nodes,
    PageSize,
    Prefill,
    PrefixShare,
    Sessions,
    Timeout,
)
from tests.unit.probes import CPU

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.key_values import StructuredOption

SERVE_FIELDS = {*SERVE_PARSERS, *SPEC_PARSERS}


@pytest.mark.parametrize(
    ("declared", "typed", "wanted"),
    [
        (Sessions, "turns=4,think=2", Sessions(turns="4", think="2")),
        (Sessions, "uniform:2-8, tokens = 500", Sessions(turns="uniform:2-8", tokens="500")),
        (PrefixShare, "0.5,groups=4", PrefixShare(share=0.5, groups=4)),
        (
            Disaggregate,
            "1:1/1P2D/3,gb-s=25/50,ms=2",
            Disaggregate(instances=("1:1", "1P2D", "3"), gb_s=("25", "50"), ms=2.0),
        ),
        (Disaggregate, "1:1,gb_s=50", Disaggregate(instances=("1:1",), gb_s=("50",))),
        (Prefill, "sdpa,prefix-cache=no", Prefill(attention="sdpa", prefix_cache=False)),
        (PageSize, "64,interleave=8", PageSize(rows=64, interleave=8)),
        (Collectives, "q-replicate=no/yes", Collectives(q_replicate=(False, True))),
        (Collectives, "all-reduce=nccl/symm/nccl", Collectives(all_reduce=("nccl", "symm"))),
        (Timeout, "300", Timeout(stall=300.0)),
        (Timeout, "point=0.5,300", None),
        (Nodes, "2,rank=1,endpoint=[::1]:29500", Nodes(count=2, rank=1, endpoint="[::1]:29500")),
        (Gpu, "H200,count=8", Gpu(name="H200", count=8)),
        (Client, "warm-up=1k,realtime=no", Client(warm_up=1000, realtime=False)),
        (Client, {"warm-up": 0, "retries": 3, "realtime": True}, Client(warm_up=0, retries=3)),
        (Disaggregate, {"instances": ["1:1", 3]}, Disaggregate(instances=("1:1", "3"))),
        (Timeout, 60, Timeout(stall=60.0)),
    ],
    ids=str,
)
def test_structured_option_is_parsed_by_its_declaration(
    declared: type[StructuredOption], typed: object, wanted: StructuredOption | None
) -> None:
    """The value is text of a command line, or a table or one value of a file. A bare value comes first."""
    if wanted is None:
        with pytest.raises(UsageError, match="not KEY=VALUE"):
            declared.parse(typed)
    else:
        assert declared.parse(typed) == wanted


SESSIONS = "--sessions [turns=]LEN,tokens=LEN,think=S,system=N,branch=P,subagents=N,preset=NAME"


@pytest.mark.parametrize(
    ("declared", "typed", "message"),
    [
        (
            Sessions,
            "turn=4",
            "--sessions has no key 'turn'; its keys are turns=LEN, tokens=LEN, think=S, system=N, branch=P, subagents=N, preset=NAME.",
        ),
        (Sessions, "branch=soon", f"--sessions branch=soon: not a number; write {SESSIONS}."),
        (Sessions, "4,think=", f"--sessions think= has no value; write {SESSIONS}."),
        (Sessions, "4,5", f"--sessions 5: not KEY=VALUE; write {SESSIONS}."),
        (Sessions, "", f"--sessions (empty): not KEY=VALUE; write {SESSIONS}."),
        (Sessions, {}, f"--sessions has no value; write {SESSIONS}."),
        (Sessions, "4,turns=5", "--sessions has turns twice; give it once."),
        (Sessions, {"turns": True}, f"--sessions turns=True: not text; write {SESSIONS}."),
        (
            PageSize,
            "64.5",
            "--page-size rows=64.5: not a whole number; write --page-size [rows=]ROWS,interleave=TOKENS.",
        ),
        (
            PageSize,
            "64K",
            "--page-size rows=64K: K is 1,000 in some tools and 1,024 in others; write 64000 (or 64k), or 65536; ",
        ),
        (
            Prefill,
            "prefix-cache=maybe",
            "--prefill prefix-cache=maybe: not yes or no; write --prefill [attention=]NAME,prefix",
        ),
        (
            Collectives,
            "symm",
            "--collectives symm: not KEY=VALUE; write --collectives all-reduce=NAME/…,q-replicate=yes|no,",
        ),
        (Collectives, 3, "--collectives has no value; write --collectives all-reduce="),
    ],
    ids=str,
)
def test_unknown_key_error_names_the_valid_keys(declared: type[StructuredOption], typed: object, message: str) -> None:
    with pytest.raises(UsageError) as e:
        declared.parse(typed)
    assert str(e.value).startswith(message)


def test_number_with_too_many_digits_for_python_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--page-size rows=\(a number that is too long\): not a whole number"):
        PageSize.parse({"rows": 1 << 40_000})


def test_unknown_key_error_names_only_the_keys_of_the_command() -> None:
    assert Timeout.parse("start=9", ["start"]) == Timeout(start=9.0)
    with pytest.raises(UsageError, match=r"^--timeout has no key 'point'; its key is start=S\.$"):
        Timeout.parse("point=9", ["start"])
    with pytest.raises(UsageError, match=r"^--timeout 9: not KEY=VALUE; write --timeout start=S\.$"):
        Timeout.parse("9", ["start"])


@pytest.mark.parametrize("declared", STRUCTURED, ids=lambda declared: declared.option)
def test_help_of_an_option_has_each_key_with_unit_and_default(declared: type[StructuredOption]) -> None:
    about, *lines = declared.format_help().split("\n\n")
    assert about == declared.text
    assert [line.partition("=")[0] for line in lines] == [*declared.list_keys()]
    for line, key in zip(lines, declared.list_keys().values(), strict=True):
        assert key.value in line
        assert key.default in line


def test_every_field_that_a_key_sets_is_a_field_of_a_spec() -> None:
    assert KEYS.keys() <= SERVE_FIELDS
    assert {declared for declared, _ in KEYS.values()} <= {*BY_NAME.values()}


def test_field_names_equal_their_keys_unless_declared() -> None:
    """A field with the name of its option needs no key."""
    names = ["kv_dtype", "page_size", "interleave", "turns", "prefix_cache"]
    assert [format_flag(name) for name in names] == [
        "--kv-dtype", "--page-size", "--page-size interleave", "--sessions turns", "--prefill prefix-cache",
    ]  # fmt: skip
    assert [format_setting(name, 4) for name in names[:4]] == [
        "--kv-dtype 4", "--page-size 4", "--page-size interleave=4", "--sessions turns=4",
    ]  # fmt: skip


class TestRecords:
    """Test that records do not depend on the grouping of options on the command line."""

    def parse(self, command: str, *words: str) -> dict[str, Any]:
        """Return the options of a command line by the fields of a spec."""
        from types import SimpleNamespace

        with load_command(command).make_context(command, list(words)) as context:
            return collect_typed(SimpleNamespace(**context.params))

    def test_load_has_the_fields_of_its_keys(self) -> None:
        given = self.parse(
            "serve",
            "--sessions",
            "4,tokens=7,think=2",
            "--prefix-share",
            "0.5,groups=3",
            "--prefill",
            "prefix-cache=no",
        )
        spec = make_serve_spec(
            {name: value for name, value in given.items() if name in SERVE_PARSERS and name != "exchange"}, CPU
        )
        (found,) = spec.make_loads(1, load_shape("tiny"))
        assert found.load is not None
        recorded = msgspec.to_builtins(found.load)
        wanted = {"turns": "4", "turn_tokens": "7", "think_time": 2.0, "prefix_share": 0.5, "prefix_groups": 3}
        assert {name: recorded[name] for name in wanted} == wanted
        assert recorded["prefix_cache"] is False

    def test_instances_and_links_are_axes(self) -> None:
        given = self.parse("serve", "--mode", "replay", "--disaggregate", "1:1/3,gb-s=25/50,ms=2")
        spec = make_serve_spec({name: given[name] for name in SERVE_PARSERS if name in given}, CPU)
        deployed = [dict(load.deployed) for load in spec.make_loads(1, load_shape("tiny"))]
        sent = [{"disaggregate": "1:1", "transfer_gb_s": rate, "transfer_ms": 2.0} for rate in (25.0, 50.0)]
        assert deployed == [*sent, {"disaggregate": "3"}]

    def test_sweep_has_the_fields_of_its_keys(self) -> None:
        given = self.parse(
            "sweep", "--page-size", "8,interleave=2", "--collectives", "q-replicate=no/yes,all-reduce=symm"
        )
        spec = make_spec({name: given[name] for name in PARSERS if name in given}, CPU)
        how = {
            name: spec.how[name] for name in ("page_size", "interleave", "q_replicate", "project_first", "all_reduce")
        }
        assert how == {
            "page_size": (8,),
            "interleave": (2,),
            "q_replicate": (False, True),
            "project_first": (False,),
            "all_reduce": ("symm",),
        }


class TestFiles:
    """Test structured options of a configuration file."""

    def read(self, folder: Path, text: str) -> dict[str, object]:
        path = folder / "serve.toml"
        path.write_text(text)
        return read_options(path, SERVE_PARSERS)

    @pytest.mark.parametrize(
        "text",
        ['sessions = "turns=4,think=2"', "sessions = {turns = 4, think = 2}", "[sessions]\nturns = 4\nthink = 2"],
    )
    def test_structured_option_of_a_file_is_text_or_a_table(self, text: str, tmp_path: Path) -> None:
        assert self.read(tmp_path, text) == {"turns": "4", "think_time": "2"}

    def test_key_without_its_option_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="unknown option 'turns'"):
            self.read(tmp_path, "turns = 4")

    def test_file_refuses_keys_that_describe_no_grid(self, tmp_path: Path) -> None:
        """Options on how a command runs belong on the command line: --timeout 60 in a file would be lost."""
        assert self.read(tmp_path, "timeout = {load = 60}") == {"limit_seconds": 60.0}
        for text in ("timeout = 60", 'timeout = "60"', "timeout = {point = 60}"):
            with pytest.raises(UsageError, match=r"--timeout .*load=S"):
                self.read(tmp_path, text)

    def test_options_of_a_file_equal_those_of_the_command_line(self) -> None:
        assert {"sessions", "prefix_share", "disaggregate", "prefill", "page_size", "collectives"} <= {
            *list_file_names(SERVE_PARSERS)
        }


class TestCommandLine:
    """Test structured options that are given several times, as by `ab --both … --a …`."""

    def test_keys_of_repeated_options_are_merged(self) -> None:
        words = ["--timeout", "load=60", "--tp", "2", "--timeout=300", "--timeout", "point=900"]
        with load_command("serve").make_context("serve", words) as context:
            assert context.params["timeout"] == Timeout(stall=300.0, point=900.0, load=60.0)
            assert context.params["tp"] == "2"

    def test_other_arguments_are_kept(self, capsys: pytest.CaptureFixture[str]) -> None:
        """An unknown argument is an error at any position."""
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", "--timeout", "3", "unknown", "--timeout", "load=4"])
        assert ended.value.code == 2
        assert "unknown" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--timeout", "3", "--timeout", "4"), "--timeout is given 2 times; give it once."),
            (("--timeout", "load=3", "--timeout", "load=4"), "--timeout has load twice; give it once."),
            (
                ("--timeout", "start=3"),
                "--timeout has no key 'start'; its keys are stall=S, point=S, retries=N, load=S.",
            ),
        ],
    )
    def test_repeated_key_is_refused(
        self, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", *words])
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"error: {message}\n"

"""Help is documentation, and fast: nothing heavy is imported for it."""

from __future__ import annotations

import itertools
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest
from typer.models import OptionInfo

from dcpbench import cli
from dcpbench.commands import catalogue, recommend
from dcpbench.compare.effects import MIN_LAUNCHES
from dcpbench.plan.serve_spec import SERVE_PARSERS
from dcpbench.plan.server_spec import SERVER_PARSERS
from dcpbench.plan.spec import PARSERS, list_file_names
from dcpbench.serving.load_words import ANSWERS, CPU_ANSWERS
from tests.cli.helped import help_of

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_OPTIONS = 45  # of a command; --x/--no-x is one, --help is not counted
ROOT = Path(cli.__file__).parents[1]
HEAVY = ("torch", "triton", "pandas", "matplotlib", "numpy", "jinja2", "dcpbench.reports", "rich.progress")
SWEEP_OPTIONS = {
    "--stages",
    "--engine",
    "--engine-args",
    "--traces",
    "--rates",
    "--tp",
    "--dp",
    "--dcp",
    "--ep",
    "--model",
    "--concurrency",
    "--context",
    "--weights",
    "--backend",
    "--exchange",
    "--weights-dtype",
    "--kv-dtype",
    "--routing",
    "--emulate",
    "--page-size",
    "--collectives",
    "--mtp",
    "--kv-memory",
    "--seconds",
    "--repeats",
    "--baseline",
    "--no-baseline",
    "--profile",
    "--no-profile",
    "--timeout",
    "--config",
    "-o",
    "--output",
    "--resume",
    "--force",
    "--dry-run",
    "--json",
    "--device",
    "--gpu",
    "--nodes",
    "-h",
    "--help",
}


SERVE_OPTIONS = {
    "--find",
    "--tp",
    "--dp",
    "--dcp",
    "--ep",
    "--model",
    "--weights",
    "--concurrency",
    "--request-rate",
    "--burstiness",
    "--requests",
    "--num-requests",
    "--input-tokens",
    "--output-tokens",
    "--prefix-share",
    "--sessions",
    "--mtp",
    "--prefill",
    "--disaggregate",
    "--stages",
    "--kv-memory",
    "--backend",
    "--exchange",
    "--emulate",
    "--weights-dtype",
    "--kv-dtype",
    "--routing",
    "--page-size",
    "--collectives",
    "--mode",
    "--step-times",
    "--slo",
    "--repeats",
    "--baseline",
    "--no-baseline",
    "--profile",
    "--no-profile",
    "--timeout",
    "--config",
    "-o",
    "--output",
    "--resume",
    "--force",
    "--dry-run",
    "--json",
    "--device",
    "--gpu",
    "--nodes",
    "-h",
    "--help",
}


SERVER_OPTIONS = {
    "--find",
    "--mode",
    "--step-times",
    "--prefill",
    "--token-budget",
    "--tp",
    "--dp",
    "--dcp",
    "--ep",
    "--exchange",
    "--model",
    "--dtype",
    "--weights",
    "--engine-args",
    "--concurrency",
    "--request-rate",
    "--burstiness",
    "--requests",
    "--num-requests",
    "--input-tokens",
    "--output-tokens",
    "--prefix-share",
    "--sessions",
    "--url",
    "--engine",
    "--serve-cmd",
    "--endpoint",
    "--extra-body",
    "--header",
    "--api-key-env",
    "--tokenizer",
    "--client",
    "--timeout",
    "--traces",
    "--slo",
    "--repeats",
    "--config",
    "-o",
    "--output",
    "--resume",
    "--force",
    "--dry-run",
    "--json",
    "--device",
    "--gpu",
    "-h",
    "--help",
}


def python(code: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    "args", [["--help"], ["sweep", "--help"], ["verify", "--help"], ["serve", "--help"], ["--version"]], ids=" ".join
)
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    """torch alone takes seconds; a help text must not."""
    loaded = python(
        "import sys\nfrom dcpbench import cli\n"
        f"try:\n    cli.main({args})\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [m for m in {HEAVY} if m in sys.modules])"
    )
    assert "LOADED []" in loaded


@pytest.mark.parametrize(
    ("args", "imported"),
    [(["--help"], []), (["--version"], []), (["records", "check", "--help"], ["records"])],
    ids=str,
)
def test_help_imports_only_the_command_it_is_about(args: list[str], imported: list[str]) -> None:
    names = {entry.function for entry in catalogue.ENTRIES}
    loaded = python(
        "import sys\nfrom dcpbench import cli\n"
        f"try:\n    cli.main({args})\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [n for n in {sorted(names)} if f'dcpbench.commands.{{n}}' in sys.modules])"
    )
    assert loaded.splitlines()[-1] == f"LOADED {imported}"


def test_the_list_of_commands_has_the_first_paragraph_of_each_command() -> None:
    """The list of `dcpbench --help` is made without importing the commands."""
    import typer

    commands = typer.main.get_command(cli.app).commands
    own = [
        (name, command.rich_help_panel, " ".join((command.help or "").split("\n\n")[0].split()))
        for name, command in commands.items()
    ]
    assert own == [(entry.name, entry.panel, entry.summary) for entry in catalogue.ENTRIES]


def test_the_list_of_commands_is_the_help_with_all_commands_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for app in (cli.app, cli.choose_app(["--help"])):
        with pytest.raises(SystemExit):
            app(args=["--help"], prog_name="dcpbench")
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "sweep" in printed[0]


@pytest.mark.parametrize("args", [["machines"], ["--", "machines"]], ids=" ".join)
def test_a_command_runs_however_the_line_begins(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*args, "--json"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("{")


def processor_s(code: str) -> float:
    """That a program takes, its start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_answers_in_half_a_second() -> None:
    """The promise of the project, in processor seconds: wall time would also count who else uses the machine. Where others
    slow the processor down, too, five times what typer alone takes in the same moments.
    """
    told = "from dcpbench import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass"
    pairs = [(processor_s(told), processor_s("import typer.main")) for _ in range(3)]
    (ours, typer_alone) = map(min, zip(*pairs, strict=True))
    assert ours < max(0.5, 5 * typer_alone)


@pytest.mark.parametrize(
    ("command", "options"), [("sweep", SWEEP_OPTIONS), ("serve", SERVE_OPTIONS), ("server", SERVER_OPTIONS)]
)
def test_the_options_of_a_command_are_these(command: str, options: set[str]) -> None:
    """Scripts rely on them: a new or a lost one must be noticed."""
    import typer

    found = {o for p in typer.main.get_command(cli.app).commands[command].params for o in [*p.opts, *p.secondary_opts]}
    assert found | {"-h", "--help"} == options


def test_no_command_has_more_options_than_a_reader_can_survey() -> None:
    """Rarely used options become keys of a structured option: docs/adding-a-kernel.md."""
    import typer

    def count(command: Any, path: str) -> Iterator[tuple[str, int]]:
        for name, part in getattr(command, "commands", {}).items():
            yield from count(part, f"{path} {name}")
        options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
        yield path, len(options)

    counts = dict(count(typer.main.get_command(cli.app), "dcpbench"))
    assert {"dcpbench serve", "dcpbench bench attention", "dcpbench submit slurm"} <= counts.keys()
    assert {name: number for name, number in counts.items() if number > MAX_OPTIONS} == {}


COMMANDS = ("sweep", "serve", "server", "ab", "compare", "verify", "report", "show", "machines")
VALUES = {
    "--new-tokens": "8",
    "--seconds": "3",
    "--collectives": "all-reduce=nccl",
    "--client": "retries=1",
    "--prefill": "policy=vllm",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_in_the_help_is_parsed(name: str) -> None:
    """What is printed can be typed: with a value where the help shows the name of one."""
    import typer

    command = typer.main.get_command(cli.app).commands[name]
    arguments = {"report": ["run"], "show": ["run"], "compare": ["run", "other"]}.get(name, [])
    words = re.sub(r"\[.*?\]|`.*?`", " ", help_of(name)).partition(" Options ")[2]
    printed = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", words)) - {"-h", "--help"}
    for option in command.params:
        if option.param_type_name == "argument":
            continue
        for typed in (*option.opts, *option.secondary_opts):
            assert typed in printed, "an option that no help shows"
            value = [] if option.is_flag else [VALUES.get(typed, "1")]
            with command.make_context(name, [typed, *value, *arguments]) as context:
                assert context.params[option.name] is not None


def lists() -> Iterator[tuple[tuple[str, ...], str]]:
    """Every option of every command that takes a comma list, by its longest name."""
    import typer

    def below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        for name, part in getattr(command, "commands", {}).items():
            yield from below(part, (*path, name))
        if not hasattr(command, "commands"):
            yield from ((path, max(p.opts, key=len)) for p in command.params if "…" in (p.metavar or ""))

    return below(typer.main.get_command(cli.app), ())


@pytest.mark.parametrize(
    ("command", "option"), [*lists()], ids=lambda value: value if type(value) is str else value[-1]
)
def test_a_list_that_is_given_twice_is_refused_with_what_to_type(
    command: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Click takes the last one, and the first is dropped without a word."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, option, "2", f"{option}=4"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {option} is given 2 times; write one list: {option} 2,4\n"


@pytest.mark.parametrize(
    "words", [("import", "x.json", "--from", "vllm", "--tp"), ("sweep", "--seconds"), ("verify", "--timeout")]
)
def test_an_option_with_one_value_is_given_once(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Of two the last would win, and nothing would say so; what may be repeated, and switches, may."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "4", f"{words[-1]}=8"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {words[-1]} is given 2 times; give it once.\n"


def test_there_are_lists_in_many_commands() -> None:
    found = {" ".join(command) for command, _ in lists()}
    assert {"sweep", "serve", "verify", "compare", "report", "show", "bench attention"} <= found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_the_name_that_is_written_beside_it(name: str) -> None:
    """Names that Typer makes up of a variable's have been lost by one of its versions."""
    (command,) = (c.callback for c in cli.app.registered_commands if c.callback.__name__ == name)
    options = [
        note
        for kind in get_type_hints(command, include_extras=True).values()
        for note in getattr(kind, "__metadata__", ())
        if isinstance(note, OptionInfo)
    ]
    named = [str(next(iter([*note.param_decls, note.default]))) for note in options]  # Typer keeps the first as default
    assert [name for name in named if not name.startswith("-")] == []


def test_every_name_of_a_configuration_file_is_an_option_of_sweep() -> None:
    """The same names in both, as --config promises; so it is for serve."""
    for known, options in ((PARSERS, SWEEP_OPTIONS), (SERVE_PARSERS, SERVE_OPTIONS), (SERVER_PARSERS, SERVER_OPTIONS)):
        assert {"--" + name.replace("_", "-") for name in list_file_names(known)} <= options


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str) -> None:
    """An example says more than a synopsis."""
    assert f"dcpbench {command}" in help_of(command).partition("Usage:")[2].partition("dcpbench")[2]


def test_help_states_groups_units_and_defaults() -> None:
    """What a reader looks for first."""
    text = help_of("sweep")
    for words in ("Layouts (comma lists)", "100GiB or 40GB", "Default: 8,32,48 on GPUs; 2,8 on the CPU.", "SECONDS"):
        assert words in text


def test_the_help_of_served_loads_has_the_lengths_that_are_taken() -> None:
    """Those of GPUs in both commands, on the CPU others in serve."""
    assert f"Default: {ANSWERS} on GPUs; {CPU_ANSWERS} on the CPU." in help_of("serve")
    assert f"Default: {recommend.ANSWERS}." in help_of("recommend")


def test_the_help_says_what_vllm_and_sglang_call_an_option() -> None:
    """Who comes from either knows what --tp counts, and what bounds a step."""
    text = help_of("serve")
    for words in (
        "SGLang's --tp-size",
        "--data-parallel-size × --tensor-parallel-size",
        "--enable-dp-attention",
        "--enable-expert-parallel",
        "--ep-size",
        "--decode-context-parallel-size",
        "--dcp 1 measures plain TP alone",
        "--chunked-prefill-size",
        "--max-num-batched-tokens",
        "--max-concurrency",
        "--num-prompts",
    ):
        assert words in text


def test_the_help_of_gpu_names_every_gpu_of_the_table() -> None:
    from dcpbench.points.gpus import GPUS

    text = help_of("sweep")
    assert [gpu.name for gpu in GPUS if not re.search(rf"\b{gpu.name}\b", text)] == []


def test_the_entry_point_without_a_command_shows_help() -> None:
    """`dcpbench` alone is a question."""
    done = subprocess.run([sys.executable, "-m", "dcpbench.cli"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "sweep" in done.stdout + done.stderr
    assert done.returncode in (0, 2)


@pytest.mark.parametrize(
    ("command", "usage"),
    [("report", "RUN"), ("show", "RUN"), ("top", "RUN"), ("import", "FILE|FOLDER")],
)
def test_the_usage_line_says_each_argument_once_and_in_capitals(
    command: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions of Typer put different brackets around an argument, and only some add dots to a repeated one."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "Usage:" in line)
    assert line.split("[OPTIONS] ")[1].strip().removesuffix("...").strip("[]{}") == usage


@pytest.mark.parametrize("command", [["ab"], ["sweep"], ["syncs", "scan"], ["compare"]], ids=" ".join)
def test_paragraphs_use_the_width_there_is(command: list[str], monkeypatch, capsys) -> None:
    """No line of a paragraph but its last leaves room for the first word of the next line."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    head = capsys.readouterr().out.split("╭─")[0].split("Usage:")[1]
    paragraphs = [p.strip("\n").split("\n") for p in re.split(r"\n\s*\n", head)[1:]]
    broken = [
        (line, after)
        for lines in paragraphs
        for line, after in itertools.pairwise(lines)
        if len(line.rstrip()) + 1 + len(after.split()[0]) < 98
    ]
    assert not broken
    assert sum(len(lines) > 1 for lines in paragraphs) >= 1


def test_only_a_dry_run_promises_the_line_that_waits() -> None:
    """torch.profiler records the first line of a function only."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "dry-run reports the exact line." in help_of("syncs")
    assert "`dcpbench syncs dry-run -- python serve.py` prints the line that waits" in readme
    for command in ("scan", "run", "serve"):
        assert not re.search(r"(which|the) lines? that wait", help_of("syncs", command))


def test_help_of_scan_explains_sites_at_which_no_call_waited() -> None:
    text = help_of("syncs", "scan")
    assert '"0 of 1 waited" means that there was nothing to wait for this time.' in text
    assert "did wait" not in text


def test_examples_of_a_gate_in_ci_use_at_least_four_launches_of_each_side() -> None:
    """A gate of 2 % cannot be judged with fewer launches (docs/statistics.md)."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [line] = [line for line in readme.splitlines() if line.startswith("dcpbench compare") and "--fail-on" in line]
    assert "use at least four launches on each side" in line
    workflow = (ROOT / "examples" / "compare.yml").read_text(encoding="utf-8")
    [rounds] = re.findall(r"for round in ([\d ]+);", workflow)
    assert len(rounds.split()) >= MIN_LAUNCHES

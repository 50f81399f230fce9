"""Test that help texts are complete documentation, and that they are printed without heavy imports."""

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
from tests.cli.helped import get_help

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_OPTIONS = 45  # per command; --x/--no-x counts once, --help does not count
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


def run_python(code: str) -> str:
    """Return the output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    "args", [["--help"], ["sweep", "--help"], ["verify", "--help"], ["serve", "--help"], ["--version"]], ids=" ".join
)
def test_help_imports_no_heavy_package(args: list[str]) -> None:
    """Importing torch alone takes seconds."""
    loaded = run_python(
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
def test_help_imports_only_its_own_command(args: list[str], imported: list[str]) -> None:
    names = {entry.function for entry in catalogue.ENTRIES}
    loaded = run_python(
        "import sys\nfrom dcpbench import cli\n"
        f"try:\n    cli.main({args})\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [n for n in {sorted(names)} if f'dcpbench.commands.{{n}}' in sys.modules])"
    )
    assert loaded.splitlines()[-1] == f"LOADED {imported}"


def test_list_of_commands_has_the_first_paragraph_of_each_command() -> None:
    """The list of `dcpbench --help` is created without importing the commands."""
    import typer

    commands = typer.main.get_command(cli.app).commands
    own = [
        (name, command.rich_help_panel, " ".join((command.help or "").split("\n\n")[0].split()))
        for name, command in commands.items()
    ]
    assert own == [(entry.name, entry.panel, entry.summary) for entry in catalogue.ENTRIES]


def test_list_of_commands_equals_help_with_all_commands_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for app in (cli.app, cli.choose_app(["--help"])):
        with pytest.raises(SystemExit):
            app(args=["--help"], prog_name="dcpbench")
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "sweep" in printed[0]


@pytest.mark.parametrize("args", [["machines"], ["--", "machines"]], ids=" ".join)
def test_command_runs_with_and_without_double_dash(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*args, "--json"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("{")


def measure_processor_s(code: str) -> float:
    """Return the processor time of a program including its start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_half_a_second_of_processor_time() -> None:
    """Processor time is measured because wall time depends on other processes.

    On a slowed-down processor the limit is five times the time that importing Typer takes at the same moment.
    """
    program = "from dcpbench import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass"
    pairs = [(measure_processor_s(program), measure_processor_s("import typer.main")) for _ in range(3)]
    (ours, typer_alone) = map(min, zip(*pairs, strict=True))
    assert ours < max(0.5, 5 * typer_alone)


@pytest.mark.parametrize(
    ("command", "options"), [("sweep", SWEEP_OPTIONS), ("serve", SERVE_OPTIONS), ("server", SERVER_OPTIONS)]
)
def test_options_of_each_command(command: str, options: set[str]) -> None:
    """Scripts rely on options, so that a new or a lost one must be noticed."""
    import typer

    found = {o for p in typer.main.get_command(cli.app).commands[command].params for o in [*p.opts, *p.secondary_opts]}
    assert found | {"-h", "--help"} == options


def test_no_command_exceeds_the_maximum_number_of_options() -> None:
    """Rarely used options become keys of a structured option, as docs/adding-a-kernel.md explains."""
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
def test_every_option_in_the_help_can_be_parsed(name: str) -> None:
    """An option gets a value if its help shows a metavariable."""
    import typer

    command = typer.main.get_command(cli.app).commands[name]
    arguments = {"report": ["run"], "show": ["run"], "compare": ["run", "other"]}.get(name, [])
    words = re.sub(r"\[.*?\]|`.*?`", " ", get_help(name)).partition(" Options ")[2]
    printed = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", words)) - {"-h", "--help"}
    for option in command.params:
        if option.param_type_name == "argument":
            continue
        for typed in (*option.opts, *option.secondary_opts):
            assert typed in printed, "the option is in no help text"
            value = [] if option.is_flag else [VALUES.get(typed, "1")]
            with command.make_context(name, [typed, *value, *arguments]) as context:
                assert context.params[option.name] is not None


def list_comma_options() -> Iterator[tuple[tuple[str, ...], str]]:
    """Return every option of every command that takes a comma-separated list, by its longest name."""
    import typer

    def below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        for name, part in getattr(command, "commands", {}).items():
            yield from below(part, (*path, name))
        if not hasattr(command, "commands"):
            yield from ((path, max(p.opts, key=len)) for p in command.params if "…" in (p.metavar or ""))

    return below(typer.main.get_command(cli.app), ())


@pytest.mark.parametrize(
    ("command", "option"), [*list_comma_options()], ids=lambda value: value if type(value) is str else value[-1]
)
def test_list_option_given_twice_is_refused_with_a_suggestion(
    command: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Click would use the last value and drop the first one silently."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, option, "2", f"{option}=4"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {option} is given 2 times; write one list: {option} 2,4\n"


@pytest.mark.parametrize(
    "words", [("import", "x.json", "--from", "vllm", "--tp"), ("sweep", "--seconds"), ("verify", "--timeout")]
)
def test_single_value_option_given_twice_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The last value would win silently; repeatable options and switches may be given several times."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "4", f"{words[-1]}=8"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {words[-1]} is given 2 times; give it once.\n"


def test_many_commands_have_list_options() -> None:
    found = {" ".join(command) for command, _ in list_comma_options()}
    assert {"sweep", "serve", "verify", "compare", "report", "show", "bench attention"} <= found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_its_declared_name(name: str) -> None:
    """One version of Typer lost names that it derives from variables."""
    (command,) = (c.callback for c in cli.app.registered_commands if c.callback.__name__ == name)
    options = [
        note
        for kind in get_type_hints(command, include_extras=True).values()
        for note in getattr(kind, "__metadata__", ())
        if isinstance(note, OptionInfo)
    ]
    named = [
        str(next(iter([*note.param_decls, note.default]))) for note in options
    ]  # Typer stores the first name as default
    assert [name for name in named if not name.startswith("-")] == []


def test_every_key_of_a_config_file_is_an_option_of_sweep() -> None:
    """The help of --config promises the same names, also for serve."""
    for known, options in ((PARSERS, SWEEP_OPTIONS), (SERVE_PARSERS, SERVE_OPTIONS), (SERVER_PARSERS, SERVER_OPTIONS)):
        assert {"--" + name.replace("_", "-") for name in list_file_names(known)} <= options


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str) -> None:
    assert f"dcpbench {command}" in get_help(command).partition("Usage:")[2].partition("dcpbench")[2]


def test_help_states_groups_units_and_defaults() -> None:
    text = get_help("sweep")
    for words in (
        "Layouts (comma-separated lists)",
        "100GiB or 40GB",
        "Default: 8,32,48 on GPUs; 2,8 on the CPU.",
        "SECONDS",
    ):
        assert words in text


def test_help_of_serve_and_server_states_default_lengths() -> None:
    """Both commands have the same defaults for GPUs; serve has other ones for the CPU."""
    assert f"Default: {ANSWERS} on GPUs; {CPU_ANSWERS} on the CPU." in get_help("serve")
    assert f"Default: {recommend.ANSWERS}." in get_help("recommend")


def test_help_names_the_options_of_vllm_and_sglang() -> None:
    """Users of either engine learn what --tp counts and which option limits a step."""
    text = get_help("serve")
    for words in (
        "SGLang's --tp-size",
        "--data-parallel-size × --tensor-parallel-size",
        "--enable-dp-attention",
        "--enable-expert-parallel",
        "--ep-size",
        "--decode-context-parallel-size",
        "--dcp 1 measures only layouts without DCP",
        "--chunked-prefill-size",
        "--max-num-batched-tokens",
        "--max-concurrency",
        "--num-prompts",
    ):
        assert words in text


def test_help_of_gpu_option_names_every_known_gpu() -> None:
    from dcpbench.points.gpus import GPUS

    text = get_help("sweep")
    assert [gpu.name for gpu in GPUS if not re.search(rf"\b{gpu.name}\b", text)] == []


def test_dcpbench_without_a_command_prints_help() -> None:
    done = subprocess.run([sys.executable, "-m", "dcpbench.cli"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "sweep" in done.stdout + done.stderr
    assert done.returncode in (0, 2)


@pytest.mark.parametrize(
    ("command", "usage"),
    [("report", "RUN"), ("show", "RUN"), ("top", "RUN"), ("import", "FILE|FOLDER")],
)
def test_usage_line_has_each_argument_once_in_capitals(
    command: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions of Typer use different brackets for an argument, and only some add dots to a repeated one."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "Usage:" in line)
    assert line.split("[OPTIONS] ")[1].strip().removesuffix("...").strip("[]{}") == usage


@pytest.mark.parametrize("command", [["ab"], ["sweep"], ["syncs", "scan"], ["compare"]], ids=" ".join)
def test_paragraphs_use_the_full_width(command: list[str], monkeypatch, capsys) -> None:
    """Each line of a paragraph except its last is too full for the first word of the next line."""
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


def test_only_help_of_dry_run_promises_the_waiting_line() -> None:
    """torch.profiler records only the first line of a function."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "dry-run reports the exact line." in get_help("syncs")
    assert re.search(r"`dcpbench syncs dry-run -- [^`]+`[^.]* prints lines that would wait", readme)
    for command in ("scan", "run", "serve"):
        assert not re.search(r"(which|the) lines? that wait", get_help("syncs", command))


def test_help_of_scan_explains_sites_without_a_waiting_call() -> None:
    text = get_help("syncs", "scan")
    assert '"0 of 1 waited" means that there was nothing to wait for this time.' in text
    assert "did wait" not in text


def test_ci_gate_examples_use_at_least_four_launches_per_side() -> None:
    """Fewer launches cannot decide a gate of 2 % (docs/statistics.md)."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [line] = [line for line in readme.splitlines() if line.startswith("dcpbench compare") and "--fail-on" in line]
    assert "at least four runs" in line
    workflow = (ROOT / "examples" / "compare.yml").read_text(encoding="utf-8")
    [rounds] = re.findall(r"for round in ([\d ]+);", workflow)
    assert len(rounds.split()) >= MIN_LAUNCHES

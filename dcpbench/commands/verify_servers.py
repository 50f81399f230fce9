"""Compare servers that run already, or settings of engines that are started here: `dcpbench verify --url` and `--engine`."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.commands import point_runner
from dcpbench.commands.started_servers import check_options, check_programs, check_server_limits, get_start_s
from dcpbench.errors import ExitCode, UsageError
from dcpbench.launch import folders
from dcpbench.plan import option_parsers as read
from dcpbench.plan.spec import DEVICES
from dcpbench.points.redaction import format_command_line
from dcpbench.servers.answer_collector import Questions
from dcpbench.servers.answer_verdict import DIFFER, UNDECIDED, check_decides, check_rounds
from dcpbench.servers.answer_verdict_text import format_report, make_table
from dcpbench.servers.client import Target, load_api_key
from dcpbench.servers.edge_lengths import BATCHES, DOUBLED, MAX_CONTEXT
from dcpbench.servers.engine_settings import ENGINE_OPTIONS, list_all_settings, parse_grid, parse_layouts
from dcpbench.servers.presets import resolve_engine
from dcpbench.servers.prompt_format import ENDPOINTS
from dcpbench.servers.request_options import parse_extra_body, parse_headers
from dcpbench.servers.server_comparison import FAILED, EngineCheck, EngineComparison, compare_running
from dcpbench.show.terminal import ProgressLine, make_console, print_stderr
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.commands.verify import Load, Run, ServerOptions
    from dcpbench.servers.engine_settings import Setting
    from dcpbench.servers.server_comparison import Report

ANSWERS_FILE = "answers.json"
URL_OPTIONS = ("model", "concurrency", "context", "new_tokens")  # options that --url takes as well
NEW_TOKENS = 16  # of an answer: later tokens of synthetic models are seldom compared, as answers have parted
URL_TOKENS = 32
MIN_PROMPTS, URL_PROMPTS = 4, 8  # defaults of --num-prompts with --engine and with --url
URL_BATCHES = (1, 8)  # default of --concurrency with --url
EXIT_CODES = {DIFFER: ExitCode.WRONG, FAILED: ExitCode.WRONG, UNDECIDED: ExitCode.NO_ANSWER}


def compare_servers(remote: ServerOptions, given: dict[str, object], load: Load, run: Run) -> int:
    """Compare servers that run already, print the verdicts, and return the exit code."""
    urls = remote.url or []
    check_options(given, URL_OPTIONS, "--url")
    if len(urls) > 2:  # noqa: PLR2004 - A and B
        raise UsageError(f"--url is given {len(urls)} times; give it once, or twice to compare two servers.")
    plans = {"--gpu": run.gpu is not None, "--dry-run": run.dry_run}
    if wrong := [name for name, is_given in plans.items() if is_given]:
        raise UsageError(
            f"{wrong[0]} plans points, and --url measures a server that runs already; leave one of them out."
        )
    prompts = remote.num_prompts or URL_PROMPTS
    questions = dataclasses.replace(
        _make_questions(remote, load, run, URL_BATCHES, prompts, URL_TOKENS), model=load.model
    )
    check_decides(prompts, questions.lengths or DOUBLED, questions.batches, len(urls))
    targets = [_make_target(url, remote, run) for url in urls]
    if len({target.url for target in targets}) < len(targets):
        raise UsageError(
            f"--url names {targets[0].url} twice; give it once to compare this server with itself, or name another one."
        )
    if run.caller.elsewhere is not None:
        return 0
    _check_output(run.output, force=run.force)
    with ProgressLine() as line:
        report = compare_running(targets, questions, remote.tolerance, line)
    _show_report(report, run.output, run)
    return EXIT_CODES.get(report.verdict, ExitCode.OK)


def _check_output(folder: Path | None, *, force: bool) -> None:
    """Raise UsageError for a folder that holds the answers of another comparison."""
    if folder is not None and (folder / ANSWERS_FILE).exists() and not force:
        raise UsageError(
            f"{folder} already holds answers; add --force to replace them, or give another folder with -o."
        )


def compare_engines(remote: ServerOptions, given: dict[str, object], load: Load, run: Run) -> int:
    """Start the settings, compare their answers, print the verdicts, and return the exit code."""
    check = _make_check(remote, given, load, run)
    if run.caller.elsewhere is not None:
        return 0
    commands = [format_command_line(setting.make_command(check.model, 0)) for setting in check.settings]
    if run.dry_run:
        _print_plan(check.settings, commands, run)
        return 0
    for setting in check.settings:
        check_programs(setting.engine, [setting.make_command(check.model, 0)])
    _check_output(check.folder, force=run.force)
    folders.make_folder(check.folder)
    stopped: KeyboardInterrupt | None = None
    with ProgressLine() as line, folders.convert_write_errors(check.folder):
        comparison = EngineComparison(check, line)
        try:
            comparison.run()
        except KeyboardInterrupt as e:
            stopped = e
    report = comparison.make_report()
    if report.results:
        _show_report(report, check.folder, run)
    if stopped is not None:
        raise stopped
    return EXIT_CODES.get(report.verdict, ExitCode.OK)


def _make_questions(
    remote: ServerOptions, load: Load, run: Run, batches: Sequence[int], prompts: int, tokens: int
) -> Questions:
    """Return the questions that the options describe, with defaults. Raise UsageError for invalid ones."""
    read.check_known("device", run.device, DEVICES)
    read.check_known("endpoint", remote.endpoint, ENDPOINTS)
    check_rounds(remote.repeats)
    return Questions(
        lengths=None if load.context is None else sorted(read.parse_positive_ints("context", load.context)),
        batches=batches
        if load.concurrency is None
        else sorted(read.parse_positive_ints("concurrency", load.concurrency)),
        prompts=prompts,
        tokens=load.new_tokens or tokens,
        rounds=remote.repeats,
        seed=secrets.randbits(32) if remote.seed is None else remote.seed,
        endpoint=remote.endpoint,
        extra_body=parse_extra_body(remote.extra_body, greedy=True),
    )


def _make_target(url: str, remote: ServerOptions, run: Run) -> Target:
    key, headers = load_api_key(remote.api_key_env), parse_headers(remote.header or ())
    return Target.from_url(url, key=key, headers=headers, timeout_s=run.stall_s)


def _make_check(remote: ServerOptions, given: dict[str, object], load: Load, run: Run) -> EngineCheck:
    """Return the comparison that the options describe. Raise UsageError for invalid ones."""
    check_server_limits(run.limits)
    if run.gpu is not None:
        raise UsageError("--gpu plans for dcpbench's own engine; leave it out with --engine.")
    if remote.url:
        raise UsageError("--engine starts servers, and --url compares servers that run already; leave one of them out.")
    check_options(given, (*ENGINE_OPTIONS, "new_tokens"), "--engine")
    if not load.model:
        raise UsageError("--engine needs --model: a folder, or a name that the engine knows.")
    questions = _make_questions(remote, load, run, BATCHES, remote.num_prompts or MIN_PROMPTS, NEW_TOKENS)
    max_context = MAX_CONTEXT if remote.max_context is None else remote.max_context
    if remote.max_context is not None and load.context is not None:
        raise UsageError("--max-context and --context contradict each other; leave one of them out.")
    if max_context <= questions.tokens:
        raise UsageError(
            f"--max-context {max_context} has no place for a prompt and {questions.tokens} new tokens; use {questions.tokens + 1} "
            "or more."
        )
    names = remote.engine or []
    if remote.engine_args is not None and len(names) > 1:
        raise UsageError(
            "--engine-args belongs to one engine; write the arguments into the command of each engine's file."
        )
    engines = [resolve_engine(name, None, remote.engine_args) for name in names]
    layouts = parse_layouts(given)
    degrees = tuple(dict.fromkeys(layout.tp for layout in layouts))
    return EngineCheck(
        settings=list_all_settings(
            engines, parse_grid({**given, "weights": remote.weights}, load.model, layouts), remote.variant or ()
        ),
        model=load.model,
        questions=questions,
        target=_make_target("http://127.0.0.1:1", remote, run),
        max_context=max_context,
        tolerance=remote.tolerance,
        start_timeout_s=get_start_s(run.limits),
        folder=run.output or folders.choose_folder(f"verify-{'-'.join(x.name for x in engines)}", degrees),
    )


def _print_plan(settings: Sequence[Setting], commands: Sequence[str], run: Run) -> None:
    """Print the command of each setting, without starting any."""
    if run.as_json:
        point_runner.print_json(
            {"settings": [{"name": s.name, "command": c} for s, c in zip(settings, commands, strict=True)]}
        )
        return
    for setting, command in zip(settings, commands, strict=True):
        print_stderr(f"{setting.name}: {command}")


def _show_report(report: Report, folder: Path | None, run: Run) -> None:
    """Write the facts into the output folder, and print them as JSON or as a table with the verdicts."""
    facts: dict[str, Any] = {"verdict": report.verdict, **msgspec.to_builtins(report)}
    for row, result in zip(facts["results"], report.results, strict=True):
        row["verdict"] = result.verdict
    if folder is not None:
        folders.make_folder(folder)
        write_file(folder / ANSWERS_FILE, msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
    sentences = format_report(report)
    if run.as_json:
        point_runner.print_json(facts | {"text": sentences} | ({"folder": str(folder)} if folder else {}))
        return
    terminal = make_console()
    terminal.print(make_table(report))
    for sentence in sentences:
        terminal.print(sentence, soft_wrap=True, markup=False, highlight=False)
    print_stderr(f"{report.verdict}.{f' Output: {folder}' if folder else ''}")

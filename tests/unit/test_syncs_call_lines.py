"""Test which lines of a function can make a blocking call: on the corpus, by kinds of syntax, and in a report."""

from __future__ import annotations

import ast
import collections
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from dcpbench.commands.syncs import app
from dcpbench.errors import UsageError
from dcpbench.syncs.call_lines import SourceText, add_call_lines, find_call_lines, find_function, read_source
from dcpbench.syncs.dry_run import dry_run
from dcpbench.syncs.scan import scan_traces
from tests.unit import syncs_builder as build
from tests.unit.trace_builder import Trace
from tools.syncs.corpus.inputs import make_inputs
from tools.syncs.corpus.programs import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.syncs.sync_report import Site
    from tools.syncs.corpus.programs import Program

TRACES = sorted((Path(__file__).parents[1] / "data" / "corpus").glob("*stacks.json.gz"))


class Located(NamedTuple):
    """Represent a site of a recorded program: its waiting lines in a dry run, and those that its source allows."""

    name: str
    true: set[int]
    found: list[int]


def find_true_lines(program: Program) -> dict[str, set[int]]:
    """Return the lines of a program at which a dry run waits, by rule."""
    lines, begin = inspect.getsourcelines(program.run)
    found: dict[str, set[int]] = collections.defaultdict(set)
    with dry_run() as seen:
        inputs = make_inputs(torch.device("cuda"))
        before = len(seen.syncs)
        program.run(inputs)
        syncs = seen.syncs[before:]
    for sync in syncs:
        # Frames of torch follow; a comprehension is a separate function before Python 3.12.
        if sync.file == inspect.getsourcefile(program.run) and begin <= (sync.line or 0) < begin + len(lines):
            found[sync.rule].add(sync.line or 0)
    return found


def iter_located() -> Iterator[Located]:
    """Yield the sites of the corpus on an H200 in programs that also wait in a dry run."""
    programs = {program.name: program for program in PROGRAMS}
    for trace in TRACES:
        for site in scan_traces([trace], root=Path.cwd()).sites:
            program = programs.get(site.function)
            if program is None or site.own:
                continue
            by_rule = find_true_lines(program)
            begin, old = inspect.getsourcelines(program.run)[1], site.line
            site.stack = [
                frame.replace(f"({old}): {site.function}", f"({begin}): {site.function}") for frame in site.stack
            ]
            site.line, site.file = begin, str(inspect.getsourcefile(program.run))
            add_call_lines(build.make_report(site), [])
            # A dry run may give a wait another kind than the trace: the copy of a histogram is a read there.
            true = by_rule.get(site.rule) or {line for lines in by_rule.values() for line in lines}
            yield Located(site.function, true, [line.line for line in site.call_lines])


def test_lines_of_the_corpus_are_among_the_candidates() -> None:
    """The true line is among the candidates of 98 % of the sites, and in 85 % it is the only one."""
    located = list(iter_located())
    assert len(located) > 100
    missed = [one for one in located if not one.true & set(one.found)]
    alone = [one for one in located if one.true >= set(one.found) and len(one.found) == 1]
    assert len(missed) <= 0.02 * len(located), missed
    assert len(alone) >= 0.85 * len(located), [one for one in located if one not in alone]


def locate(
    body: str, *, ops: str = "", below: str = "", call: str = "", direction: str = "", name: str = "f"
) -> list[str]:
    """Return the candidate lines of a site in a function with this body, `ops` outermost first."""
    text = f"def {name}(t, m, x, y):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    path = Path("engine.py")
    stack = [f"{path}(1): {name}", *([below] if below else [])]
    site = build.make_site(
        function=name, file=str(path), line=1, stack=stack, op_chain=ops.split(), call=call, direction=direction
    )
    source = SourceText(text.splitlines(), ast.parse(text))
    function = find_function(source, name, 1)
    assert function is not None
    return [line.text for line in find_call_lines(source, function, site)]


ITEM = "aten::item aten::_local_scalar_dense"
NONZERO = "aten::is_nonzero aten::item aten::_local_scalar_dense"
COPY = "aten::to aten::_to_copy aten::copy_"


@pytest.mark.parametrize(
    ("body", "arguments", "lines"),
    [
        ("a = t.item()\nb = m.cpu()", {"ops": ITEM, "below": "<built-in method item of Tensor object>"}, ["a = t.item()"]),
        ("a = x[m]\nb = x[0]\nc = x[:3, None]", {"ops": "aten::index aten::nonzero"}, ["a = x[m]"]),
        ("x[m] = y\na = x[m]", {"ops": "aten::index_put_ aten::nonzero"}, ["x[m] = y"]),
        ("x[3] = 1.0\na = x[m]", {"ops": "aten::copy_", "direction": "HtoD"}, ["x[3] = 1.0"]),
        ("a = x[[1, 2]]\nb = x[m]", {"ops": COPY, "direction": "HtoD"}, ["a = x[[1, 2]]"]),
        ("if x is None:\n    return\nif t > 3:\n    y.add_(1)", {"ops": NONZERO}, ["if t > 3:"]),
        ("assert isinstance(x, int)\nassert t", {"ops": NONZERO}, ["assert t"]),
        ("while not t.all():\n    pass", {"ops": NONZERO}, ["while not t.all():"]),
        ("a = bool(t)\nb = int(3)", {"ops": NONZERO}, ["a = bool(t)"]),
        ("a = int(t)\nb = len(x)", {"ops": ITEM}, ["a = int(t)"]),
        ("for i in range(t):\n    pass", {"ops": ITEM}, ["for i in range(t):"]),
        ("a = x[:t]\nb = x[:3]", {"ops": ITEM}, ["a = x[:t]"]),
        ("a = f'{t}'\nb = f'x'", {"ops": ITEM, "below": "torch/_tensor.py(1): __format__"}, ["a = f'{t}'"]),
        ("print(t)\nlen(t)", {"ops": ITEM, "below": "<built-in function print>"}, ["print(t)"]),
        ("a = t in x\nb = t == x", {"ops": NONZERO, "below": "torch/_tensor.py(1): __contains__"}, ["a = t in x"]),
        ("a, b = (e for e in t)", {"ops": "aten::unbind", "below": "torch/_tensor.py(1): __iter__"}, ["a, b = (e for e in t)"]),
        (
            "a = t.to('cuda')\nb = t.to('cpu')",
            {"ops": COPY, "below": "<built-in method to of Tensor object>", "direction": "DtoH pageable"},
            ["b = t.to('cpu')"],
        ),
        (
            "a = t.to('cuda')\nb = t.to('cpu')",
            {"ops": COPY, "below": "<built-in method to of Tensor object>", "direction": "HtoD pageable"},
            ["a = t.to('cuda')"],
        ),
        ("a = torch.unique(t)", {"ops": "aten::_unique2 aten::item", "below": "torch/_jit.py(6): fn"}, ["a = torch.unique(t)"]),
        ("a = torch.linalg.inv(t)", {"ops": "aten::linalg_inv", "below": "<built-in function linalg_inv>"}, ["a = torch.linalg.inv(t)"]),
        ("a = x - t\nb = x + t", {"ops": "aten::sub aten::item"}, ["a = x - t"]),
        ("stream.synchronize()", {"call": "cudaStreamSynchronize"}, ["stream.synchronize()"]),
        ("def g():\n    t.item()\na = m.item()", {"ops": ITEM}, ["a = m.item()"]),
        ("a = t.item()\nb = m.item()", {"ops": ITEM, "below": "<built-in method item of Tensor object>"}, ["a = t.item()", "b = m.item()"]),
        ("a = (\n    t.max()\n    .item()\n)", {"ops": ITEM, "below": "<built-in method item of Tensor object>"}, [".item()"]),
        ("pass", {"ops": ITEM}, []),
    ],
)  # fmt: skip
def test_candidate_lines_for_each_kind_of_syntax(body: str, arguments: dict[str, str], lines: list[str]) -> None:
    assert locate(body, **arguments) == lines


SOURCE = """import torch


@decorated
def sample(logits):
    best = logits.argmax(-1)
    return best.item()


def twice(a, b):
    return a.item() + 1, b.item()
"""


def record(folder: Path, *, line: int = 4) -> Path:
    """Write a trace in which `sample` waits, as for a decorated function."""
    trace = Trace().work()
    for step in range(4):
        begin = 10_000 * (step + 1)
        trace.range(f"ProfilerStep#{step}", begin, begin + 9_000)
        trace.frame(f"engine/sampler.py({line}): sample", begin + 100, begin + 900)
        trace.frame("<built-in method item of Tensor object at 0x7f>", begin + 102, begin + 800)
        trace.item(begin + 110, begin + 700)
    path = folder / "trace.json"
    path.write_text(trace.text())
    return path


def write_source(folder: Path, text: str = SOURCE, name: str = "engine/sampler.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


def scan(*words: object) -> object:
    return CliRunner().invoke(app, ["scan", *map(str, words)])


@pytest.mark.parametrize("form", ["table", "markdown", "github", "sarif", "json"])
def test_every_format_shows_the_candidate_line(form: str, tmp_path: Path) -> None:
    root = write_source(tmp_path / "repository")
    result = scan(record(tmp_path), "--root", root, "--format", form)
    text = result.stdout
    if form == "json":
        (site,) = json.loads(text)["sites"]
        assert (site["line"], site["call_lines"]) == (4, [{"line": 7, "text": "return best.item()"}])
    elif form == "sarif":
        location = json.loads(text)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
        assert location["region"]["startLine"] == 7
    elif form == "github":
        assert "line=7" in text
    else:
        assert "return best.item()" in text


def test_source_folder_can_be_another_one(tmp_path: Path) -> None:
    """The folder can also be the one that contains the package."""
    for name in ("engine/sampler.py", "sampler.py"):
        elsewhere = write_source(tmp_path / name.replace("/", "_"), name=name)
        (tmp_path / "empty").mkdir(exist_ok=True)
        result = scan(record(tmp_path), "--root", tmp_path / "empty", "--source", elsewhere, "--format", "json")
        assert [line["line"] for line in json.loads(result.stdout)["sites"][0]["call_lines"]] == [7]


def test_source_of_another_version_is_named_and_not_used(tmp_path: Path) -> None:
    root = write_source(tmp_path / "repository", "import os\n" + SOURCE)
    result = scan(record(tmp_path), "--root", root, "--format", "json")
    assert json.loads(result.stdout)["sites"][0]["call_lines"] == []
    assert "engine/sampler.py is of another version" in result.stderr


@pytest.mark.parametrize("text", ["def sample(:\n", "\x00", "x = 1\n"])
def test_unusable_source_leaves_the_function_without_a_line(text: str, tmp_path: Path) -> None:
    root = write_source(tmp_path / "repository", text)
    result = scan(record(tmp_path), "--root", root, "--format", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["sites"][0]["call_lines"] == []


def test_missing_source_folder_is_an_error(tmp_path: Path) -> None:
    result = scan(record(tmp_path), "--source", tmp_path / "missing")
    assert isinstance(result.exception, UsageError)
    assert "--source" in str(result.exception)


def test_all_candidate_lines_are_named(tmp_path: Path) -> None:
    write_source(tmp_path)
    site: Site = build.make_site(
        function="twice",
        file="engine/sampler.py",
        line=10,
        stack=["engine/sampler.py(10): twice"],
        op_chain=ITEM.split(),
    )
    site.call_lines = []
    add_call_lines(build.make_report(site), [tmp_path])
    assert [line.line for line in site.call_lines] == [11]
    assert site.line == 10


def test_lines_from_a_detector_are_kept(tmp_path: Path) -> None:
    write_source(tmp_path)
    site = build.make_site(function="sample", file="engine/sampler.py", line=6, line_is="call")
    assert add_call_lines(build.make_report(site), [tmp_path]) == []
    assert site.call_lines == []


def test_file_outside_of_the_folders_is_read_at_its_own_path(tmp_path: Path) -> None:
    write_source(tmp_path)
    assert read_source(str(tmp_path / "engine/sampler.py"), []) is not None
    assert read_source("engine/sampler.py", []) is None
    assert read_source("<string>", [tmp_path]) is None


def test_form_feeds_do_not_shift_the_text_of_lines(tmp_path: Path) -> None:
    """Only line feeds end a line of Python; a form feed or a line separator within one does not."""
    (tmp_path / "m.py").write_text('\f\ndef sample(x):\n    """A\u2028B."""\n    \f\n    return x.item()\n')
    site = build.make_site(function="sample", file="m.py", line=2, line_is="function", stack=[])
    add_call_lines(build.make_report(site), [tmp_path])
    assert [(line.line, line.text) for line in site.call_lines] == [(5, "return x.item()")]

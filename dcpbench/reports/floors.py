"""Report how far steps are from the machine's limits, and which phases lose most time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from dcpbench.models import get_title
from dcpbench.records.metrics import METRIC
from dcpbench.reports.load_labels import list_rows
from dcpbench.reports.tables import FOLD_ABOVE, Table, make_column, make_table
from dcpbench.show.numbers import format_integer, format_number, format_ratio, format_value_range, is_missing
from dcpbench.show.text import format_capitalized, format_list

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from dcpbench.reports.dataframes import Frames

PHASE_COLUMN = re.compile(r"phase_.+_us")  # time of a phase; the column `floor_…_us` has its floor
MAX_SENTENCE_PHASES, MAX_ROW_PHASES = 3, 6  # phases that a sentence names, and that a row lists, at most
MIN_KNOWN_FLOORS = 0.99  # minimum share of the floor of a step that phases must have, so that their losses are known
TELLING = 0.01  # minimum share of a step that a phase must lose to be named
TITLE = "A step against what its machine allows"


def find_phases(columns: Iterable[object]) -> dict[str, str]:
    """Return the column with the time of each phase, by phase."""
    return {c.removeprefix("phase_").removesuffix("_us"): c for c in map(str, columns) if PHASE_COLUMN.fullmatch(c)}


class Loss(NamedTuple):
    """Hold a phase with the time above its floor."""

    phase: str
    lost_us: float

    @property
    def name(self) -> str:
        """Name of the phase in sentences."""
        return self.phase.replace("_", " ")

    @property
    def lost_ms(self) -> str:
        """Time above the floor in ms, as text."""
        return format_number(self.lost_us / 1e3, 3)


def list_losses(row: dict[str, Any]) -> list[Loss]:
    """Return the phases of a profiled point, largest loss first; kernels outside ranges and idle time count as lost in full.

    The list is empty if the floors of phases do not add up to that of the step, as for servers, which have other phases.
    """
    floors = [row.get(f"floor_{phase}_us", 0.0) for phase in find_phases(row)]
    known_ms = sum(0.0 if is_missing(floor) else floor for floor in floors) / 1e3
    if not known_ms >= MIN_KNOWN_FLOORS * row["floor_ms"]:
        return []
    found = []
    for phase, column in find_phases(row).items():
        us, floor = row[column], row.get(f"floor_{phase}_us")
        if not is_missing(us) and not is_missing(floor) and us > 0:
            found.append(Loss(phase, us - floor))
    if found and not is_missing(row["idle_us"]) and row["idle_us"] > 0:
        found.append(Loss("idle", row["idle_us"]))
    return sorted(found, key=lambda loss: -loss.lost_us)


def list_named_losses(row: dict[str, Any], most: int) -> list[Loss]:
    """Return at most `most` of the largest losses that are large enough to be named."""
    return [loss for loss in list_losses(row) if loss.lost_us >= TELLING * row["step_ms"] * 1e3][:most]


def format_floor_sentences(frames: Frames) -> list[str]:
    """Return sentences on how far the steps of all points are from the machine's limits."""
    return format_decode_sentences(frames.points) + format_served_sentences(frames.served)


def _select_floored(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points that have a floor."""
    return points if points.empty else points.dropna(subset=["floor_share"])


def format_short_sentence(points: pd.DataFrame) -> str:
    """Return one sentence on all points of `decode`; empty if none has a floor."""
    held = _select_floored(points)
    if held.empty:
        return ""
    far = list_rows(held.sort_values("floor_share", kind="stable").head(1))[0]
    lost = format_list([f"{loss.name} ({loss.lost_ms} ms)" for loss in list_named_losses(far, 2)])
    over = format_value_range(1 / held["floor_share"])
    model = f"{get_title(far['model'])}, " if len(set(held["model"])) > 1 else ""
    where = (
        f"at the worst point, {model}{far['label']} with {far['concurrency']} × {format_integer(far['context'])} tokens, "
        if len(held) > 1
        else ""
    )
    text = f"A step takes {over} the minimum time that the hardware allows."
    return f"{text} {format_capitalized(f'{where}most of the time above this minimum is in {lost}')}." if lost else text


def format_decode_sentences(points: pd.DataFrame) -> list[str]:
    """Return, for each run and model, how far steps are from their floors, and in which phases the worst point loses most."""
    held, texts = _select_floored(points), []
    for (run, model), group in held.groupby(["run", "model"], sort=False) if len(held) else ():
        subject = _name_group(points, str(run), str(model))
        rows = list_rows(group.sort_values("floor_share", kind="stable"))
        far, near = rows[0], rows[-1]
        over, least = (format_ratio(1 / row["floor_share"], 2) for row in (far, near))
        where = f"{far['label']} at {far['load']}"
        took = f"{format_number(far['step_ms'], 3)} ms, minimum {format_number(far['floor_ms'], 3)}"
        lost = ", ".join(f"{loss.name} {loss.lost_ms} ms" for loss in list_named_losses(far, MAX_SENTENCE_PHASES))
        lost = f". Time above the limit: {lost}" if lost else ""
        if len(rows) == 1 or over == least:
            texts.append(f"{subject}: a step takes {over} what this machine allows ({where}: {took}){lost}.")
        else:
            texts.append(
                f"{subject}: a step takes {least} to {over} what this machine allows; the worst point is {where}: {took}{lost}."
            )
    return texts


def _name_group(points: pd.DataFrame, run: str, model: str) -> str:
    """Return the model, with the run or engine if several of these points' runs have it."""
    runs = set(points["run"][points["model"] == model])
    return f"{model}, {run}" if len(runs) > 1 else model


def format_served_sentences(points: pd.DataFrame) -> list[str]:
    """Return, for each run and model, how far the steps of served points are from their floors, from the best to the worst."""
    texts = []
    for (run, model), group in points.groupby(["run", "model"], sort=False) if len(points) else ():
        subject = _name_group(points, str(run), str(model))
        prompts, products, others = (
            group[f"{name}_share"].dropna() for name in ("prefill_floor", "prefill_matmul", "decode_floor")
        )
        clauses = []
        if len(prompts):
            rate = f" (at {format_value_range(products, '{:.2f}')} of its matrix rate)" if len(products) else ""
            clauses.append(f"steps with prompts take {format_value_range(1 / prompts)} what this machine allows{rate}")
        if len(others):
            clauses.append(f"steps without prompts {'' if clauses else 'take '}{format_value_range(1 / others)}")
        if clauses:
            texts.append(f"{subject}: {', '.join(clauses)}{'' if len(prompts) else ' what this machine allows'}.")
    return texts


def build_table(points: pd.DataFrame) -> Table:
    """Build a table of the points that have a floor, with their phases ordered by loss."""
    held = _select_floored(points)
    return make_table(
        TITLE,
        held,
        [
            ("layout", "label"),
            (
                "most time above the limit, ms",
                lambda r: ", ".join(f"{loss.name} {loss.lost_ms}" for loss in list_named_losses(r, MAX_ROW_PHASES)),
            ),
            make_column(METRIC["step_ms"], "step ms"),
            make_column(METRIC["floor_ms"]),
            ("step / floor", lambda r: format_ratio(1 / r["floor_share"], 2)),
        ],
        load=True,
        text_columns=2,
        fold=len(held) > FOLD_ABOVE,
    )

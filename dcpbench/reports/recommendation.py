"""Find the rule that says which layout to use from which load on and holds in the most loads, and format it.

A rule is one layout up to a load, and one from a heavier load on, which may be the same. Loads are ordered by their
tokens in flight, requests × length of each; if all have one length, or some length is unknown, by their requests alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from dcpbench.models import get_title
from dcpbench.points.names import CLOSED, REPLAY, UNKNOWN
from dcpbench.reports import findings, launch_bands
from dcpbench.reports.load_labels import OBJECTIVES, format_clients, list_unique
from dcpbench.show.model_fit import format_no_fit
from dcpbench.show.numbers import format_integer, format_percent, format_value_range, is_missing
from dcpbench.show.text import format_capitalized, format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import pandas as pd

ENOUGH = 0.75  # share of loads in which a rule must hold; below it each model has its own, or there is none
MAX_RULES = 4
MAX_LOADS = 2  # maximum number of loads named if several have the same number of tokens in flight
MILLION = 1_000_000
NEEDED = (  # columns of `Findings.against_others` that a rule needs, in addition to those of a load
    *("device", "named", "who", "concurrency", "input_typical", "load_arrival", "arrival", "layers", "layers_held"),
    *("slo_excess", "slo_missed", "slo_result", "slo_limits", "meets", "near", "ratio"),
    *("output_tok_s", "output_tok_s_low", "output_tok_s_high"),
    launch_bands.COLUMN,
)


def format_recommendation(rows: pd.DataFrame, models: int) -> str:
    """Return the answer: the GPUs, which layout to use from which load on, its lead, and the layers that memory holds.

    `models` is the number of models in the report; if no two layouts of some were compared, the others are named.
    """
    machines = [own for _, own in rows.groupby([rows["device"].map(str), "gpus"], sort=False)]
    clauses: list[str] = []
    for own in machines[:MAX_RULES]:
        clauses += [f"{format_conditions(own, of_layers=False)}{format_advice(own, models)}", *format_no_fit_notes(own)]
    more = len(machines) - MAX_RULES
    clauses += [f"{more:,} more numbers of GPUs are below"] if more > 0 else []
    return f"{'. '.join(map(format_capitalized, clauses))}."


def format_conditions(rows: pd.DataFrame, *, of_layers: bool = True) -> str:
    """Return `on 4 × H200 (replayed, not served live), `: the GPUs, and in brackets conditions, by default also of layers held."""
    devices = [n.removeprefix("NVIDIA ") for n in list_unique(rows["device"].dropna()) if n != UNKNOWN]
    basis = f" ({'; '.join(found)})" if (found := _list_conditions(rows, of_layers)) else ""
    if not (many := format_gpu_count(rows)):
        return ""
    gpus = f"{many} × {format_list(devices, 'or')}" if devices else f"{many} {'GPU' if many == '1' else 'GPUs'}"
    return f"on {gpus}{basis}, "


def format_gpu_count(rows: pd.DataFrame) -> str:
    """Return the number of GPUs of these points: `4` or `2–8`; empty if it is unknown."""
    sizes = [int(n) for n in rows["gpus"] if not is_missing(n) and n]
    return format_value_range(sizes, "{:,}") if sizes else ""


def format_forecast(rows: pd.DataFrame) -> str:
    """Return `a forecast`, `partly a forecast`, or an empty string, depending on how many points were emulated."""
    emulated = rows["emulate"].fillna("").astype(bool)
    return "" if not emulated.any() else "a forecast" if emulated.all() else "partly a forecast"


def _list_conditions(rows: pd.DataFrame, of_layers: bool) -> list[str]:
    conditions = [emulated] if (emulated := format_forecast(rows)) else []
    replayed = rows["mode"].eq(REPLAY)
    if replayed.any():
        conditions.append("replayed, not served live" if replayed.all() else "partly replayed")
    return conditions + (format_no_fit_notes(rows) if of_layers else [])


def format_no_fit_notes(rows: pd.DataFrame) -> list[str]:
    """Return how many layers memory holds, an entry for each number of layers; empty if all layers were held everywhere.

    Models are named unless all hold the same number: `GPU memory holds 7 (DeepSeek-V3) and 3–4 (Kimi-K2) of 61 layers, …`,
    and `GPU memory holds 60 of Kimi-K2's 61 layers, …` if the other models are held whole.
    """
    cut = rows[rows["layers_held"].notna() & (rows["layers_held"] < rows["layers"])]
    counts = {
        model: format_value_range(own["layers_held"], "{:,.0f}") for model, own in cut.groupby("model", sort=False)
    }
    all_equal = len(set(counts.values())) == 1 and set(counts) == set(rows["model"])
    notes = []
    for layers, own in cut.groupby("layers", sort=False):
        names = {model: get_title(model) for model in list_unique(own["model"])}
        many, of = format_value_range(own["layers_held"], "{:,.0f}"), f"{layers:g}"
        if len(names) > MAX_RULES:
            many = f"{many} ({format_count(len(names), 'model')})"
        elif len(names) > 1 and not all_equal:
            many = format_list([f"{counts[model]} ({name})" for model, name in names.items()])
        elif not all_equal:
            of = f"{next(iter(names.values()))}'s {of}"
        notes.append(format_no_fit(many, of))
    return notes


def format_advice(rows: pd.DataFrame, models: int) -> str:
    """Return `take tp4 up to …, and tp4·dp4 from … on: …`, for each model separately if no single rule holds for all.

    Models are named if these are not all of the `models` in the report.
    """
    rows = rows[list(dict.fromkeys([*findings.RIVAL_OF, *NEEDED]))]
    rule = find_rule(rows)
    compared = list_unique(rows["model"])
    if rule.share >= ENOUGH or len(compared) == 1:
        named = "" if len(compared) == models else f"for {format_list([get_title(name) for name in compared])}, "
        return f"{named}{rule.format_sentence()}"
    own = [(str(name), group) for name, group in rows.groupby("model", sort=False)]
    clauses = [f"for {get_title(name)}, {find_rule(group).format_sentence()}" for name, group in own[:MAX_RULES]]
    more = len(own) - len(clauses)
    text = ". ".join([clauses[0], *map(format_capitalized, clauses[1:])])
    return f"{text}. {more:,} more models are below" if more > 0 else text


def format_load(row: pd.Series[Any]) -> str:
    """Return `32 requests of 32,000 tokens`, `concurrency 32` or `2 req/s Poisson`."""
    if row["load_arrival"] != CLOSED:
        return str(row["arrival"])
    if is_missing(row["input_typical"]):
        return f"concurrency {int(row['concurrency']):,}"
    return f"{format_count(int(row['concurrency']), 'request')} of {row['input_typical']:,.0f} tokens"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Describe one layout up to a load, and one from a heavier load on, which may be the same."""

    rows: pd.DataFrame  # rows of all loads
    loads: pd.DataFrame  # of `rows`, loads that some layout runs within the SLO; `place` numbers them by weight
    first: str
    then: str
    at: int  # the `place` of the first load from which `then` is to be used
    right: list[bool]  # true for each load in which the rule's layout is within the SLO and none is clearly ahead of it

    @property
    def share(self) -> float:
        """Return the share of loads in which the rule is right."""
        return sum(self.right) / len(self.right) if self.right else 1.0

    def format_sentence(self) -> str:
        """Return which layout to use from which load on, its lead over which layout, and in how many loads this rule is right."""
        if not self.right:
            return self._format_none_meets()
        if self.share < ENOUGH:
            won = self.loads[self.loads["near"]]["who"].value_counts()
            each = format_list([f"{who} in {n:,}" for who, n in won.items()])
            loads = format_count(len(self.right), "load")
            return f"no layout is to be taken throughout: of {loads}, {self._kind} is {each}{self._format_slo()}{launch_bands.format_launches(self.rows)}{self._format_beyond()}"
        light, heavy = self.loads[self.loads["place"] < self.at], self.loads[self.loads["place"] >= self.at]
        if light.empty:
            text = f"take {_format_taken_at(heavy, self.then)} at {self._format_tried()}"
            leads = [_format_lead(heavy, self.then)]
        else:
            text = (
                f"take {_format_taken_at(light, self.first)} up to {self._format_size(light.iloc[-1])} in flight"
                f"{self._format_named_loads(light, -1)}, and {_format_taken_at(heavy, self.then)} "
                f"{self._format_reach(heavy)}{self._format_named_loads(heavy, 0)}"
            )
            leads = [_format_lead(light, self.first), _format_lead(heavy, self.then)]
        lead = ", and ".join(filter(None, leads))
        return f"{text}{lead and f': {lead}'}. {self._format_right()}{self._format_slo()}{launch_bands.format_launches(self.rows)}{self._format_wrong()}{self._format_beyond()}"

    def _format_slo(self) -> str:
        """Return ` within the SLO (TTFT ≤ 2,000 ms)`; empty without one."""
        judged = self.rows[self.rows["slo_excess"].notna()]
        if judged.empty:
            return ""
        limits = list_unique(
            ", ".join(f"{OBJECTIVES[name]} ≤ {limit:,g} ms" for name, limit in of.items())
            for of in judged["slo_limits"]
        )
        return f" within the SLO{f' ({limits[0]})' if len(limits) == 1 else ''}"

    @property
    def _by_tokens(self) -> bool:
        lengths = self.rows["input_typical"]
        return bool(lengths.notna().all() and len(set(lengths)) > 1)

    def _format_size(self, load: pd.Series[Any], *, short: bool = False) -> str:
        """Return `256,000 tokens` or `16 requests of 4,000 tokens`; with `short`, after such a text, `1.02 million` or `24`."""
        if not self._by_tokens:
            return format_integer(load["concurrency"]) if short else format_load(load)
        tokens = load["weight"]
        many = f"{tokens / MILLION:.3g} million" if tokens >= MILLION else f"{tokens:,.0f}"
        if short:
            return many
        return f"{many} {'tokens' if self.rows['mode'].eq('decode').any() else 'prompt tokens'}"

    def _format_reach(self, heavy: pd.DataFrame) -> str:
        """Return `from 1.02 million on`, or `from 64,000 to 96,000` if no layout meets the SLO at some load above."""
        least, most = (self._format_size(heavy.iloc[i], short=True) for i in (0, -1))
        if not self.rows["weight"].max() > self.loads["weight"].max():
            return f"from {least} on"
        return f"from {least} to {most}" if most != least else f"at {least}"

    def _format_named_loads(self, loads: pd.DataFrame, at: int) -> str:
        """Return ` (32 requests of 32,000 or 8 of 128,000)`: the first or last loads (`at`) of a rule that is based on tokens."""
        if not self._by_tokens:
            return ""
        rows = loads[loads["weight"] == loads["weight"].iloc[at]].drop_duplicates(["concurrency", "input_typical"])
        pairs = [
            (int(n), f"{length:,.0f}") for n, length in zip(rows["concurrency"], rows["input_typical"], strict=True)
        ]
        named = [f"{format_count(pairs[0][0], 'request')} of {pairs[0][1]}"]
        named += [f"{n:,} of {length}" for n, length in pairs[1:MAX_LOADS]]
        return f" ({' or '.join(named)})"

    def _format_tried(self) -> str:
        """Return `every load tried (8–48 requests of 4,000–128,000 tokens)`; `most of the loads` if another layout is ahead at some.

        The words before the brackets are left out if no layout is within the SLO at some load.
        """
        requests = format_clients(self.loads)
        if len(self.right) == 1 or len(self._find_missed()):
            return requests
        return f"{'every load' if all(self.right) else 'most of the loads'} tried ({requests})"

    def _format_right(self) -> str:
        """Return `This choice is best or level in all 18 loads`."""
        n, loads = sum(self.right), len(self.right)
        if loads == 1:
            return "Only this load was compared"
        all_of = "both loads" if loads == 2 else f"all {loads:,} loads"  # noqa: PLR2004 - a pair
        return f"This choice is {self._kind} in {all_of if n == loads else f'{n:,} of {loads:,} loads'}"

    @property
    def _kind(self) -> str:
        """Return the text for a layout at a load where none is clearly ahead of it."""
        if launch_bands.has_single_launches(self.rows):
            return f"fastest or {launch_bands.NOT_DISTINGUISHABLE} from the fastest"
        return "best or level"

    def _format_wrong(self) -> str:
        """Return `; in the other 3 loads the best is tp4·dcp4, by up to 4.1 %`: the layout that is ahead where the rule is wrong."""
        wrong = {i: self.first if i < self.at else self.then for i, right in enumerate(self.right) if not right}
        if not wrong:
            return ""
        rows = self.loads[self.loads["place"].isin(wrong)]
        own = rows[rows["meets"] & (rows["who"] == rows["place"].map(wrong))].set_index("place")["output_tok_s"]
        tops = _select_fastest(rows[rows["near"]])
        tops = tops.assign(by=tops["output_tok_s"] / tops["place"].map(own) - 1)
        each = []
        for who, group in tops.groupby("who", sort=False):
            by = group["by"].dropna()
            margin = f", by {'up to ' if len(by) > 1 else ''}{format_percent(by.max())}" if len(by) else ""
            each.append(f"{who}{margin}" if len(group) == len(tops) else f"{who} in {len(group):,}{margin}")
        others = "the other load" if len(wrong) == 1 else f"the other {len(wrong):,} loads"
        return f"; in {others} the best is {format_list(each)}"

    def _format_beyond(self) -> str:
        """Return `; at 50 more loads no layout meets it` for the loads that the rule does not cover."""
        n = len(self._find_missed())
        return f"; at {format_count(n, 'more load')} no layout meets it" if n else ""

    def _find_missed(self) -> pd.DataFrame:
        missed = self.rows[~self.rows.groupby(findings.RIVAL_OF)["meets"].transform("any")]
        return missed.drop_duplicates(findings.RIVAL_OF)

    def _format_none_meets(self) -> str:
        n = self.rows.drop_duplicates(findings.RIVAL_OF).shape[0]
        near = self.rows.sort_values("slo_excess", kind="stable").iloc[0]
        missed = near["slo_missed"]
        which = "the one load compared" if n == 1 else f"any of {n:,} loads"
        return (
            f"no layout is to be taken: at {which} none is{self._format_slo()}; nearest is {near['named']} at "
            f"{format_load(near)}{f' ({missed})' if missed else ''}"
        )


def find_rule(rows: pd.DataFrame) -> Rule:
    """Return the rule that holds in the most loads; of several the one without a change, then the fastest one."""
    lengths = rows["input_typical"]
    rows = rows.assign(weight=rows["concurrency"] * (lengths if lengths.notna().all() else 1))
    rows = rows.sort_values(["weight", "input_typical"], kind="stable")
    loads = rows[rows.groupby(findings.RIVAL_OF)["meets"].transform("any")]
    loads = loads.assign(place=loads.groupby(findings.RIVAL_OF, sort=False).ngroup()).sort_values(
        "place", kind="stable"
    )
    weights = loads.drop_duplicates("place")["weight"].tolist()
    names = list_unique(loads["who"])
    holds = {n: [False] * len(weights) for n in names}
    gains = {n: [0.0] * len(weights) for n in names}
    for place, who, near, ratio in zip(loads["place"], loads["who"], loads["near"], loads["ratio"], strict=True):
        holds[who][place], gains[who][place] = bool(near), float(ratio)
    until = {n: list(itertools.accumulate(holds[n], initial=0)) for n in names}
    gained = {n: list(itertools.accumulate(gains[n], initial=0.0)) for n in names}
    best = ("", "", 0)
    most: tuple[int, bool, float] = (-1, False, 0.0)
    for first, then in itertools.product(names, names):
        for at in range(1, len(weights)) if first != then else [0]:
            if at and weights[at - 1] == weights[at]:
                continue
            right = until[first][at] + until[then][-1] - until[then][at]
            score = (right, first == then, gained[first][at] + gained[then][-1] - gained[then][at])
            if score > most:
                best, most = (first, then, at), score
    first, then, at = best
    right_at = [holds[first if i < at else then][i] for i in range(len(weights))]
    return Rule(rows, loads, first, then, at, right_at)


def _select_fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest row of each load."""
    return rows.sort_values("output_tok_s", ascending=False, kind="stable").drop_duplicates("place")


def _list_level_layouts(loads: pd.DataFrame, who: str) -> list[str]:
    """Return the layout, and all others that none is clearly ahead of in any of these loads."""
    near = loads[loads["near"]]["who"].value_counts()
    n = len(set(loads["place"]))
    return [who, *(name for name in list_unique(loads["who"]) if name != who and near.get(name, 0) == n)]


def format_taken(names: Sequence[str], level: str = "level") -> str:
    """Return what to take: `tp4·dcp4 (symm)`, or `tp4·dcp4 (symm) or tp4·dp4, which are level,` for several."""
    return names[0] if len(names) == 1 else f"{format_list(names, 'or')}, which are {level},"


def _format_taken_at(loads: pd.DataFrame, who: str) -> str:
    """Return a layout and all that are level with it; a layout has its variant if that is the same in all loads."""
    named, names = [], _list_level_layouts(loads, who)
    for name in names:
        variants = list_unique(loads[loads["who"] == name]["named"])
        named.append(variants[0] if len(variants) == 1 else name)
    own = loads[loads["who"].isin(names)]
    return format_taken(named, launch_bands.format_level(own, own["place"]))


@dataclasses.dataclass(frozen=True)
class _Lead:
    """Hold the lead of a layout over the best others in some loads."""

    over: str  # another layout, `the next best layout` for several, or empty if no other meets the SLO
    share: float = 0.0  # the largest
    several: bool = False  # True if there are several loads


def _find_lead(loads: pd.DataFrame, who: str) -> _Lead | None:
    """Return the lead over the best other layout; None unless it is clear by findings' rule."""
    level, meets = loads["who"].isin(_list_level_layouts(loads, who)), loads["meets"]
    others = _select_fastest(loads[~level & meets])
    if others.empty:
        return None if level.all() else _Lead("")
    found = findings.add_ratios(_select_fastest(loads[level & meets]), others, ["place"], "output_tok_s", "who")
    clear = found[findings.compute_verdicts(found) == "higher"]
    if clear.empty:
        return None
    rivals = list_unique(clear["over_who"])
    over = rivals[0] if len(rivals) == 1 else "the next best layout"
    return _Lead(over, clear["ratio"].max() - 1, len(set(loads["place"])) > 1)


def _format_lead(loads: pd.DataFrame, who: str) -> str:
    """Return `tp4 gives up to 10 % more output than tp4·dp4`, or that no other layout meets the SLO; empty without a clear lead."""
    lead = _find_lead(loads, who)
    if lead is None:
        return ""
    names = _list_level_layouts(loads, who)
    if not lead.over:
        only = "is the only layout" if len(names) == 1 else "are the only layouts"
        return f"{format_list(names)} {only} within the SLO there"
    gives = "gives" if len(names) == 1 else "give"
    return f"{format_list(names)} {gives} {'up to ' if lead.several else ''}{format_percent(lead.share)} more output than {lead.over}"

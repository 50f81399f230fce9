"""Format the forecast as text and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from dcpbench.show.text import format_count
from tools.layout_from_parts.composition import MAX_IDLE_SHARE

if TYPE_CHECKING:
    from tools.layout_from_parts.composition import Composition, Forecast, Part
    from tools.layout_from_parts.steps import Target

NOT_CHECKED = (
    "The check does not test changes by more ranks in the kernels around an exchange, which are those of tp2·dcp2. Nor does it test "
    "the communication model beyond the measured ranks; the wider range has the error of that model."
)


def format_json(found: Forecast) -> str:
    """Format the forecast as JSON, with its times, band and errors."""
    fields = msgspec.to_builtins(found)
    fields["band"] = found.band
    for given, step in zip(fields["steps"], found.steps, strict=True):
        given |= {"us": step.us, "low_us": step.low_us, "high_us": step.high_us}
    for given, check in zip(fields["checks"], found.checks, strict=True):
        given["error"] = check.error
        given["composition"]["us"] = check.composition.us
    return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"


def format_forecast(found: Forecast) -> str:
    """Format the parts of each step, the check, and the limits of both."""
    steps = [_format_step(step, found) for step in found.steps]
    return "\n".join([*steps, _format_checks(found), *_list_limits(found)]) + "\n"


def _format_target(target: Target) -> str:
    return f"{target.layout}, {format_count(target.requests, 'request')} of {target.context:,} tokens"


def _format_step(step: Composition, found: Forecast) -> str:
    """Format the step with its band and its parts."""
    text = f"{_format_target(step.target)}: {step.us / 1e3:.2f} ms"
    if found.band is not None:
        low, high = step.us / (1 + found.band), step.us * (1 + found.band)
        wide_low, wide_high = step.low_us / (1 + found.band), step.high_us * (1 + found.band)
        text += (
            f" ({low / 1e3:.2f}–{high / 1e3:.2f} by the check; {wide_low / 1e3:.2f}–{wide_high / 1e3:.2f} with the error of the "
            "communication model)"
        )
    rows = [f"  {part.name:<16} {part.us:>8,.0f} µs  {_format_origin(part, found.machine)}" for part in step.parts]
    return "\n".join([text, *rows, ""])


def _format_origin(part: Part, machine: str) -> str:
    if part.source is None:
        calls = ", ".join(f"{count} × {what}" for what, count in part.calls.items())
        return f"communication model of {machine}, {part.low_us:,.0f}–{part.high_us:,.0f} µs: {calls}"
    source = part.source
    return f"{source.run}, {source.layout}: {source.heads} heads over {source.rank_context:,} tokens, experts {source.experts_width:,} wide"


def _format_checks(found: Forecast) -> str:
    """Format the steps of the check with their errors, and the band."""
    if found.band is None:
        why = found.unchecked or ["no run has a measured step of a smaller layout at this load; add one of --check-tp."]
        return "\n".join(["No band, as the composition was not checked:", *why])
    rows = [
        f"  {_format_target(check.composition.target)}: {check.composition.us / 1e3:.2f} ms composed, {check.measured_us / 1e3:.2f} ms "
        f"measured ({check.run}), {check.error:+.1%}"
        for check in found.checks
    ]
    head = "Check: the same composition of smaller layouts against their measured steps"
    return "\n".join(
        [head, *rows, *found.unchecked, f"The band is the largest error of the check, {found.band:.1%}. {NOT_CHECKED}"]
    )


def _list_limits(found: Forecast) -> list[str]:
    """Return sentences on the limits of the forecast."""
    compositions = [*found.steps, *(check.composition for check in found.checks)]
    layers = {step.layers for step in compositions}
    texts = [
        f"Steps are of {n} of {found.all_layers} layers; parts inside and outside of layers are not separated, so do not multiply them."
        for n in sorted(layers)
        if n < found.all_layers
    ]
    texts += [
        f"{_format_target(step.target)}: no kernel runs in {step.idle_share:.0%} of the step; waits for the host may be among "
        "these gaps, and longer steps of more layers have fewer."
        for step in compositions
        if step.idle_share > MAX_IDLE_SHARE
    ]
    return texts + list(dict.fromkeys(sentence for step in compositions for sentence in step.differences))

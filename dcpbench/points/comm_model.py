"""Model the time of a collective or an exchange by ranks and bytes, fitted to measurements. No torch.

    seconds(call, N, bytes) = M·(launch + per_rank·(N − 1)) + bytes / rate     the model
                              · exp(residual at these bytes)                    deviation of the measurements

N ranks, M barriers (1 for a collective; 2 for an exchange that gathers q first, else 1), bytes that a rank receives. Launch, per_rank
and rate are fitted per call by least squares of relative errors, none negative; the residual is interpolated between the
sizes that were measured, linearly in the logarithm of the bytes of a barrier, and in the same way between numbers of ranks.

The band is the error of the model without a measurement: between two measured sizes the error of a fit without the size in
between (its 90th percentile); beyond the measured ranks, for each doubling, the worst error of a fit to fewer ranks at the most
ranks; beyond the measured sizes, the first error again for each doubling.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.names import EXCHANGES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNKNOWN_RANKS_ERROR = 0.25  # per doubling of ranks if measured with one number of ranks; H200, 2 to 4 ranks: up to 0.48
UNKNOWN_SIZE_ERROR = 0.2  # error if fewer than three sizes were measured, so that none lies between two others
MIN_ERROR = 0.01  # minimum error: two measurements of the same thing on one machine do not agree better


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Hold a measured call: the median of its slowest rank, in a CUDA graph."""

    ranks: int
    barriers: int
    received_bytes: int  # bytes that a rank receives, by the call's own formula (exchange/*.py)
    us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTime:
    """Hold the time of one call on the slowest rank."""

    mean: float
    low: float
    high: float

    @classmethod
    def from_mean(cls, mean: float, error: float) -> CallTime:
        """Return a time with a relative error in both directions, as a factor of 1 + error."""
        return cls(mean=mean, low=mean / (1 + error), high=mean * (1 + error))

    def apply_factor(self, factor: float) -> CallTime:
        """Return the time multiplied by a factor."""
        return CallTime(mean=factor * self.mean, low=factor * self.low, high=factor * self.high)


@dataclasses.dataclass(frozen=True)
class Fit:
    """Hold the parameters of the fit, in microseconds and microseconds per byte."""

    launch_us: float
    per_rank_us: float  # time for each rank beyond the first, in µs
    us_per_byte: float

    def predict_us(self, ranks: int, barriers: int, received_bytes: float) -> float:
        """Return the time of the model without its residual, in µs."""
        return barriers * (self.launch_us + self.per_rank_us * (ranks - 1)) + received_bytes * self.us_per_byte

    @property
    def bytes_s(self) -> float | None:
        """Return the rate in bytes/s; None if the time did not depend on the size."""
        return 1e6 / self.us_per_byte if self.us_per_byte else None


def fit_samples(samples: Sequence[Sample]) -> Fit:
    """Fit these samples by least squares of relative errors; a parameter that would be negative is 0."""
    import numpy as np

    terms = np.array([[s.barriers, s.barriers * (s.ranks - 1), s.received_bytes] for s in samples], dtype=float)
    terms /= np.array([[s.us] for s in samples])
    best, found = math.inf, np.zeros(3)
    for count in (1, 2, 3):
        for kept in map(list, itertools.combinations(range(3), count)):
            scale = np.abs(terms[:, kept]).max(axis=0)
            solved = np.linalg.lstsq(terms[:, kept] / scale, np.ones(len(samples)), rcond=None)[0] / scale
            error = float(((terms[:, kept] @ solved - 1) ** 2).sum())
            if (solved >= 0).all() and error < best * (1 - 1e-9):
                best, found = error, np.zeros(3)
                found[kept] = solved
    return Fit(*map(float, found))


@dataclasses.dataclass(frozen=True)
class Call:
    """Model one kind of call from its measurements."""

    name: str
    samples: tuple[Sample, ...]

    @functools.cached_property
    def fitted(self) -> Fit:
        """Return the fit to all samples."""
        return fit_samples(self.samples)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the numbers of ranks that were measured."""
        return tuple(sorted({s.ranks for s in self.samples}))

    @functools.cached_property
    def size_error(self) -> float:
        """Return the 90th percentile of the error at a size between two others, by a fit without it."""
        errors = sorted(self.compute_left_out_errors())
        return max(errors[math.ceil(0.9 * len(errors)) - 1], MIN_ERROR) if errors else UNKNOWN_SIZE_ERROR

    @functools.cached_property
    def ranks_error(self) -> float:
        """Return the worst error per doubling of ranks at the most ranks, by a fit to the fewer ranks."""
        fewer = [s for s in self.samples if s.ranks < self.ranks[-1]]
        if not fewer:
            return UNKNOWN_RANKS_ERROR
        by_fewer = Call(self.name, tuple(fewer))
        doublings = math.log2(self.ranks[-1] / by_fewer.ranks[-1])
        errors = [
            abs(by_fewer.predict_us(s.ranks, s.received_bytes, s.barriers) / s.us - 1)
            for s in self.samples
            if s not in fewer
        ]
        return max(max(errors) / max(doublings, 1.0), MIN_ERROR)

    def compute_left_out_errors(self) -> list[float]:
        """Return, for each sample with a size between two others of its ranks, the error of the model without that
        sample.
        """
        found = []
        for left_out in self.samples:
            rest = tuple(s for s in self.samples if s is not left_out)
            sizes = [_compute_size(s) for s in rest if s.ranks == left_out.ranks]
            if len(sizes) > 1 and min(sizes) < _compute_size(left_out) < max(sizes):
                us = Call(self.name, rest).predict_us(left_out.ranks, left_out.received_bytes, left_out.barriers)
                found.append(abs(us / left_out.us - 1))
        return found

    def predict_us(self, ranks: int, received_bytes: float, barriers: int = 1) -> float:
        """Return the microseconds of one call."""
        size = math.log(max(received_bytes / barriers, 1.0))
        residual = _interpolate(
            math.log(ranks), [(math.log(n), _interpolate(size, self._residuals[n])) for n in self.ranks]
        )
        return self.fitted.predict_us(ranks, barriers, received_bytes) * math.exp(residual)

    def estimate_error(self, ranks: int, received_bytes: float, barriers: int = 1) -> float:
        """Return the relative error of `us`, as the module describes."""
        sizes = [_compute_size(s) for s in self.samples]
        size = received_bytes / barriers
        past = max(size / max(sizes), min(sizes) / max(size, 1.0), 1.0)
        more = max(ranks / self.ranks[-1], self.ranks[0] / ranks, 1.0)
        return self.size_error * (1 + math.log2(past)) + self.ranks_error * math.log2(more)

    @functools.cached_property
    def _residuals(self) -> Mapping[int, list[tuple[float, float]]]:
        """Return, by ranks, the logarithms of measured over modelled time against those of sizes; means if a size was
        measured twice.
        """
        found: dict[int, dict[float, list[float]]] = {n: {} for n in self.ranks}
        for s in self.samples:
            modelled = self.fitted.predict_us(s.ranks, s.barriers, s.received_bytes)
            found[s.ranks].setdefault(math.log(_compute_size(s)), []).append(math.log(s.us / modelled))
        return {n: [(x, sum(ys) / len(ys)) for x, ys in sorted(of.items())] for n, of in found.items()}


def _compute_size(sample: Sample) -> float:
    return sample.received_bytes / sample.barriers


def _interpolate(x: float, points: Sequence[tuple[float, float]]) -> float:
    """Interpolate linearly between points in order of x; outside them return the nearest point's value."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


RING, OWN_LINK = "ring", "own link"  # how bytes leave a host: over the links of all GPUs, or each GPU's own
ACROSS: dict[str, str] = {  # calls that can cross hosts, as named by the benches; others read the memory of peers
    "all-gather": RING,
    "reduce-scatter": RING,
    "all-to-all": OWN_LINK,
    "all-reduce": RING,
    "ag_rs": RING,
    "ag_rs-bf16": RING,
    "a2a": OWN_LINK,
}
GATHERS = {"ag_rs": "all-gather", "a2a": "all-gather", "symm": "symm"}  # gathers the queries, by emulated exchange
LINK_SHARE = 0.8  # share of a link's nominal rate that large messages reach (nccl-tests over RDMA); see LINK_BAND
LINK_BAND = 1.0  # relative error of links between hosts, which we never measured: half to twice the time


IN_STEP_FACTOR = 1.1
"""Time of all-reduces in steps of DeepSeek-V3 and Kimi-K2 on two and four H200 over the time of the same calls alone: the work
between them takes each rank a different time. Exchanges follow shortly after, and have no such factor (docs/comm-model.md)."""
# Shares of a step by which the step of all ranks may be shorter and longer than that of the emulated rank, in addition to the
# error of calls: the slowest GPU decides, and the busiest rank is emulated. Set by 42 decode steps that were measured with all
# ranks and emulated: 32 of results/decode_4xH200/decode-serving-fp8_4xH200_2026-11-26 and ten of
# results/emulation_H200/emulated-against-live_2xH200_2026-11-23. 41 of them lie within both errors if gaps between kernels are
# equal, and 20 within the error of calls alone. `python -m tools.emulation_live --live RUN... --emulated RUN...` compares the
# runs of these folders (docs/emulation.md).
RANKS_LOW, RANKS_HIGH = 0.01, 0.02

# Share by which a step with prompts may be longer, if that is more than both errors together: the largest of 224 forecasts, of
# 112 steps of two pairs of H200 (live-0, live-2) by each of their GPUs (emulated-0 to emulated-3), which are the raw records of
# results/emulation_H200/emulated-chunks_4xH200_2026-11-26. `python -m tools.chunk_forecasts` compares them.
CHUNKS_HIGH = 0.09

# Share by which a step with prompts may be shorter or longer if the machine's file has the times of such steps on its GPUs
# together: of the same 224 forecasts, with the factors of the other pair, one exceeds it (the same tool).
PROMPTS_APART = 0.03


class Prompts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Hold the time of steps with prompts on GPUs that work together, relative to one GPU that represents them."""

    tokens: int  # number of prompt tokens in a step of a replica
    times: float  # factor of the time


def describe_invalid_prompts(prompts: Sequence[Prompts]) -> str:
    """Return a sentence on the first invalid entry; empty if all are valid."""
    for number, p in enumerate(prompts):
        if p.tokens < 1 or not 0 < p.times < math.inf or (number and p.tokens <= prompts[number - 1].tokens):
            return (
                f"prompts[{number}] = [{p.tokens}, {p.times:g}] cannot be: each has more prompt tokens than the one before, and "
                "a positive number, of times as long as one GPU takes."
            )
    return ""


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe a link between hosts by its nominal values."""

    name: str
    bytes_s: float  # bandwidth of each GPU in one direction, in bytes/s
    latency_us: float  # latency of a message from GPU to GPU, in µs
    source: str


@dataclasses.dataclass(frozen=True)
class CommModel:
    """Model all calls of a machine, of which the first `host` ranks share memory."""

    calls: Mapping[str, Call]
    host: int
    link: Link | None = None
    scale: float = 1.0  # this machine's link rate over the measured machine's; it scales bytes, never launches
    borrowed: float = 0.0  # additional relative error if another machine was measured
    in_step_factor: float = 1.0  # factor on collectives, which ranks reach at different times; not on exchanges

    @property
    def in_step(self) -> CommModel:
        """Return the model for calls inside steps, which wait for the slowest rank."""
        return dataclasses.replace(self, in_step_factor=IN_STEP_FACTOR)

    def predict_seconds(self, what: str, ranks: int, received_bytes: int, barriers: int = 1) -> CallTime:
        """Return the time of one call over `ranks` ranks, each of which receives `received_bytes`.

        Raise UsageError if nothing is known of such a call, or if it cannot leave a host.
        """
        if ranks == 1:
            return CallTime(mean=0.0, low=0.0, high=0.0)
        call = self.calls.get(what)
        if call is None:
            known = ", ".join(self.calls) or "nothing"
            raise UsageError(
                f"{what} was not measured on this machine (known: {known}); measure it with dcpbench bench calibrate."
            )
        us = call.predict_us(ranks, received_bytes, barriers)
        bytes_us = min(received_bytes * call.fitted.us_per_byte, us)
        alone = us - bytes_us * (1 - 1 / self.scale)
        error = call.estimate_error(ranks, received_bytes, barriers) + self.borrowed + abs(us / alone - 1)
        mean = alone * (1.0 if what in EXCHANGES else self.in_step_factor)
        if ranks > self.host:
            return self._predict_across_hosts(what, ranks, received_bytes, barriers, mean)
        return CallTime.from_mean(mean * 1e-6, error)

    def predict_hop_seconds(self, received_bytes: int, *, across: bool) -> CallTime:
        """Return the time of a message from one GPU to another, `across` hosts or inside one.

        Inside a host it is an all-gather over two ranks, each of which receives as many bytes; no message alone was measured.
        """
        inside = self.predict_seconds("all-gather", 2, received_bytes)
        if not across:
            return inside
        if self.link is None:
            raise UsageError("a pipeline stage on another host needs a link between hosts; use a machine with +LINK.")
        us = max(inside.mean * 1e6, received_bytes / (self.link.bytes_s * LINK_SHARE) * 1e6) + self.link.latency_us
        return CallTime.from_mean(us * 1e-6, LINK_BAND)

    def _predict_across_hosts(
        self, what: str, ranks: int, received_bytes: int, barriers: int, inside_us: float
    ) -> CallTime:
        """Return the larger of the call inside a host and its part between hosts, plus a message's latency for each
        host.
        """
        way = ACROSS.get(what)
        if way is None or self.link is None:
            why = "it reads the memory of peers" if way is None else "no link between hosts is described"
            raise UsageError(
                f"{what} over {ranks} ranks leaves a host of {self.host} GPUs, and {why}; use "
                f"{'another exchange or all-reduce' if way is None else 'a machine with +LINK, such as H200+rdma-400, a file with link'}, or fewer ranks."
            )
        rate = self.link.bytes_s * LINK_SHARE
        crossing = received_bytes / self.host if way == RING else received_bytes * (ranks - self.host) / (ranks - 1)
        hops = barriers * (math.ceil(ranks / self.host) - 1 if way == RING else 1)
        us = max(inside_us, crossing / rate * 1e6) + hops * self.link.latency_us
        return CallTime.from_mean(us * 1e-6, LINK_BAND)

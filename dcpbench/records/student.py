"""Compute Student's t distribution for any degrees of freedom and far into its tails, for simultaneous tests."""

from __future__ import annotations

import math
from functools import lru_cache

NORMAL_FROM = 1e7  # degrees of freedom from which on the normal distribution is the same to seven digits
TINY = 1e-300
STEPS = 2000  # more than the continued fraction ever takes for the arguments that occur here
HALVINGS = 200
PRECISION = 1e-12


def sf(t: float, df: float) -> float:
    """Return P(T > t) for Student's T with `df` > 0 degrees of freedom; infinity is the normal distribution.

    P(T > t) = I_x(df/2, 1/2) / 2 with x = df / (df + t²) for t ≥ 0 (Abramowitz and Stegun, 26.5.27 and 26.7.1).
    """
    if t < 0:
        return 1 - sf(-t, df)
    if df > NORMAL_FROM:
        return math.erfc(t / math.sqrt(2)) / 2
    if math.isinf(t):
        return 0.0
    square = t * t
    return _compute_incomplete_beta(df / 2, 0.5, df / (df + square), square / (df + square)) / 2


@lru_cache(maxsize=65536)
def compute_quantile(tail: float, df: float) -> float:
    """Return the t that is exceeded with probability `tail`, 0 < tail ≤ 1/2; infinity beyond the range of floats."""
    low, high = 0.0, 1.0
    while sf(high, df) > tail:
        low, high = high, high * 2
        if math.isinf(high):
            return math.inf
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if high - low <= PRECISION * high:
            break
        low, high = (middle, high) if sf(middle, df) > tail else (low, middle)
    return (low + high) / 2


def _compute_incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b); `rest` is 1 - x, as x may round to 1."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    if x < (a + 1) / (a + b + 2):
        return math.exp(front) * _compute_beta_fraction(a, b, x) / a
    return 1 - math.exp(front) * _compute_beta_fraction(b, a, rest) / b


def _compute_beta_fraction(a: float, b: float, x: float) -> float:
    """Evaluate the continued fraction of the incomplete beta function (26.5.8 there) from the front (Lentz's method)."""
    c, d = 1.0, 1 / _ensure_nonzero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, STEPS):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 + numerator * d, 1 + numerator / c
            d = 1 / (d if d > TINY or d < -TINY else TINY)  # inlined _ensure_nonzero: calls would dominate
            c = c if c > TINY or c < -TINY else TINY
            value *= c * d
        if abs(c * d - 1) < 1e-15:  # noqa: PLR2004 -- rounding of a double
            break
    return value


def _ensure_nonzero(value: float) -> float:
    return value if abs(value) > TINY else TINY

"""Define the appearance of a layout in all figures: one colour on light, one on dark, and one marker, independent of other layouts.

Hue encodes the sharing: blue none (`tp4`), amber to crimson KV over DCP ranks, green attention data parallel, pink to
violet both. Within a hue, a higher degree is darker, and twice the GPUs are another shade. All other differences
between two lines of one layout (exchange, backend, server, run, division of work between instances) are encoded by dash
and marker.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

Lch = tuple[float, float, float]  # lightness, chroma and hue of Björn Ottosson's OKLCH, where equal steps look equal
PLAIN: Lch = (0.53, 0.14, 245)
DCP: tuple[Lch, ...] = ((0.72, 0.16, 78), (0.63, 0.18, 48), (0.50, 0.19, 22), (0.40, 0.14, 5))
DP: tuple[Lch, ...] = ((0.72, 0.12, 190), (0.62, 0.13, 163), (0.43, 0.11, 150), (0.35, 0.09, 135))  # degrees 2 to 16
BOTH: tuple[Lch, ...] = (  # 2 × 2; 2 × 4 and 4 × 2; 2 × 8, 4 × 4 and 8 × 2, which is used for all further ones
    (0.68, 0.13, 345),
    (0.58, 0.17, 325),
    (0.50, 0.20, 300),
    (0.40, 0.16, 285),
    (0.66, 0.09, 285),
    (0.46, 0.07, 320),
)
SHADES = (0.0, -0.10, 0.06)  # added to the lightness: of tp4 and tp32, of tp8, and of tp2 and tp16
ALONE = 0.17  # chroma of tp1
ON_DARK = 0.13
DARKEST_ON_DARK, LIGHTEST = 0.53, 0.92
PALEST, DARKEST = 0.78, 0.36
PLAIN_MARKER, DCP_MARKERS, DP_MARKERS, BOTH_MARKERS = 0, (1, 2, 4, 5), (5, 3, 4, 6), (6, 5, 4, 1, 2, 3)
"""Places in figures.MARKERS: different ones for layouts of as many GPUs with colours that some readers cannot distinguish."""
UNKNOWN: Lch = (0.45, 0.0, 0.0)


class Degrees(NamedTuple):
    """Hold the degrees of a layout by which it is drawn; they need not divide each other, as in imports."""

    tp: int  # 0: unknown
    dp: int = 1
    dcp: int = 1


UNKNOWN_DEGREES = Degrees(0)


def get_colours(degrees: Degrees) -> tuple[str, str]:
    """Return the colours of a layout on light and on dark; grey for unknown degrees."""
    lightness, chroma, hue = _compute_lch(degrees)
    return _encode_hex(lightness, chroma, hue), _encode_hex(
        min(max(lightness + ON_DARK, DARKEST_ON_DARK), LIGHTEST), chroma, hue
    )


def format_css_colours(degrees: Degrees) -> str:
    """Return both colours as a CSS value: `light-dark(#…, #…)`."""
    return f"light-dark({', '.join(get_colours(degrees))})"


def compute_shade(degrees: Degrees, share: float) -> str:
    """Return the layout's hue on light, from pale at 0 to dark at 1, for measurements of one layout alone."""
    _, chroma, hue = _compute_lch(degrees)
    return _encode_hex(PALEST + share * (DARKEST - PALEST), chroma, hue)


def find_marker_index(degrees: Degrees) -> int:
    """Return the layout's place in figures.MARKERS."""
    _, dp, dcp = degrees
    if not degrees.tp:
        return 0
    if dp == 1 and dcp == 1:
        return PLAIN_MARKER
    markers = BOTH_MARKERS if dp > 1 and dcp > 1 else DCP_MARKERS if dcp > 1 else DP_MARKERS
    return markers[_find_family_index(dp, dcp)]


def _compute_lch(degrees: Degrees) -> Lch:
    tp, dp, dcp = degrees
    if not tp:
        return UNKNOWN
    family = BOTH if dp > 1 and dcp > 1 else DCP if dcp > 1 else DP if dp > 1 else (PLAIN,)
    lightness, chroma, hue = family[_find_family_index(dp, dcp) if family[1:] else 0]
    return lightness + (ALONE if tp == 1 else SHADES[(round(math.log2(tp)) - 2) % 3]), chroma, hue


def _find_family_index(dp: int, dcp: int) -> int:
    """Return the index of these degrees in their family."""
    of_dp, of_dcp = (max(round(math.log2(degree)), 1) for degree in (dp, dcp))
    if dp == 1 or dcp == 1:
        return min(max(of_dp, of_dcp), len(DCP)) - 1
    both = of_dp + of_dcp - 2
    return min(both * (both + 1) // 2 + of_dp - 1, len(BOTH) - 1)


@cache
def _encode_hex(lightness: float, chroma: float, hue: float) -> str:
    """Return the colour as sRGB, with chroma reduced to the displayable range."""
    rgb = _compute_linear_rgb(lightness, chroma, hue)
    while chroma > 0 and not all(0 <= part <= 1 for part in rgb):
        chroma -= 0.005
        rgb = _compute_linear_rgb(lightness, chroma, hue)
    return "#" + "".join(f"{round(255 * _encode_srgb(part)):02x}" for part in rgb)


def _encode_srgb(part: float) -> float:
    return 12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055  # noqa: PLR2004 - sRGB's own


def _compute_linear_rgb(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """Return linear red, green and blue, below 0 or above 1 outside the displayable range (bottosson.github.io/posts/oklab)."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    l, m, s = (
        (lightness + x * a + y * b) ** 3
        for x, y in ((0.3963377774, 0.2158037573), (-0.1055613458, -0.0638541728), (-0.0894841775, -1.2914855480))
    )
    return (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )

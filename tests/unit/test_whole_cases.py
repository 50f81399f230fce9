"""The steps that are measured for a replay, whole, as tests/data/said/cases.txt has them: of engines made at random.

`SAID=write` writes the file anew, as for test_whole_outputs.py.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from dcpbench.errors import DcpbenchError
from dcpbench.serving.step_cases import Extent, make_cases
from tests.unit.test_whole_outputs import hold

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.serving.step_times import Case


def extent(rng: random.Random) -> Extent:
    """Of a cache of a few pages up to one with room for all."""
    context = rng.choice([9, 40, 700, 4_000, 100_000])
    return Extent(
        requests=rng.choice([1, 2, 3, 8, 17, 300]),
        context=context,
        pages=rng.choice([1, 2, 5, 33, 400, 20_000]),
        virtual_page=rng.choice([1, 16, 64, 512]),
        chunk=rng.choice([16, 100, 512, 2_048, 8_192]),
        targets=tuple(sorted(rng.sample([1, 4, 6, 200], rng.choice([0, 1, 2])))),
        open_loop=rng.random() < 0.5,
        prompts=tuple(sorted(rng.sample([5, 300, 3_000], rng.choice([0, 1, 2])))),
        shared=rng.random() < 0.3,
        changes=tuple(sorted(rng.sample([7, 128, 700, 1823], rng.choice([0, 1, 2])))),
    )


def line(case: Case) -> str:
    """`line: 3 × 700, 2 of 512 behind 64`."""
    decodes = [f"{d.requests} × {d.context}" for d in case.decodes]
    return f"{case.use}: {', '.join(decodes + [f'{c.chunks} of {c.tokens} behind {c.prefix}' for c in case.chunks])}"


def test_steps_that_are_measured(tmp_path: Path) -> None:
    rng = random.Random(7)
    text = ""
    for _ in range(60):
        one = extent(rng)
        try:
            found = [line(case) for case in make_cases(one)]
        except DcpbenchError as e:
            found = [str(e)]
        shown = found if len(found) <= 60 else [*found[::7], found[-1]]
        text += f"{one}: {len(found)}\n" + "".join(f"  {each}\n" for each in shown)
    hold("cases.txt", text, tmp_path)

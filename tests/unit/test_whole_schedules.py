"""What schedulers decide and what steps are predicted to take, whole, as tests/data/said/schedules/ has it.

Loads are made at random and served in steps of one second each, on few pages, so that requests wait, are preempted, and share what
they begin with. `SAID=write` writes the files anew, as for test_whole_outputs.py.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dcpbench.errors import DcpbenchError
from dcpbench.points.names import MIXED, PREFILL_FIRST
from dcpbench.serving import step_model
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.step_cases import Extent, find_fullest, make_cases, make_hot_runs
from dcpbench.serving.step_model import Heat, HotStep, Slowdown, StepModel, Work
from dcpbench.serving.step_times import CHECK, GATHER, LINE
from dcpbench.serving.traffic import Traffic
from tests.unit import step_times_builder, virtual_serving
from tests.unit.test_whole_outputs import hold

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.serving.requests import Step


def load(rng: random.Random, sessions: int, *, clients: bool) -> list[ServeRequest]:
    """Requests of which some begin alike, and some are turns of a session."""
    found: list[ServeRequest] = []
    for session in range(sessions):
        begins = np.arange(rng.choice([0, 8, 16, 20]), dtype=np.int32) + 1000
        prompt = np.concatenate(
            [begins, np.arange(rng.choice([1, 7, 16, 17, 40]), dtype=np.int32) + 10_000 * (session + 1)]
        )
        turns = rng.choice([1, 1, 1, 3])
        for turn in range(turns):
            tokens = rng.choice([1, 2, 9, 30])
            answer = np.arange(tokens, dtype=np.int32) + 500_000 + 1000 * len(found) if turn + 1 < turns else None
            arrival = None if clients or turn else round(session * rng.choice([0.0, 1.0, 3.0]), 1)
            in_session = {"session": session, "turn": turn} if turns > 1 else {}
            found.append(
                ServeRequest(
                    number=len(found),
                    prompt=prompt,
                    output_tokens=tokens,
                    arrival_s=arrival,
                    answer=answer,
                    **in_session,
                )
            )
            if answer is not None:
                prompt = np.concatenate([prompt, answer, np.arange(5, dtype=np.int32) + 700_000])
    return found


def words(step: Step) -> str:
    """Who decodes where, which chunks there are, and what is written into tables."""
    said = []
    for replica in step.replicas:
        decodes = [
            f"{s.request.number}@{slot}:{p}"
            for s, slot, p in zip(replica.decodes, replica.slots, replica.positions, strict=True)
        ]
        chunks = [f"{c.sequence.request.number}@{c.slot}:{c.start}-{c.stop}" for c in replica.chunks]
        table = [f"{w.slot}:{w.start}={','.join(map(str, w.locs.tolist()))}" for w in replica.table]
        said.append(f"[{' '.join(decodes)} | {' '.join(chunks)} | {' '.join(table)}]")
    return f"{' '.join(said)}{f' preempted {step.preempted}' if step.preempted else ''}"


@pytest.mark.parametrize("seed", range(12))
def test_schedules_of_loads_made_at_random(seed: int, tmp_path: Path) -> None:
    """Step by step; one in four is cancelled before its end."""
    rng = random.Random(seed)
    replicas, dcp, clients = rng.choice([1, 1, 2]), rng.choice([1, 2]), rng.choice([None, 2, 4])
    config = virtual_serving.config(
        replicas=replicas,
        dcp=dcp,
        page_size=4,
        pages=rng.choice([14, 20, 40]),
        interleave=rng.choice([1, 2]) if dcp > 1 else 1,
        max_requests=rng.choice([2, 4, 8]),
        chunk=rng.choice([8, 16, 32]),
        policy=rng.choice([MIXED, PREFILL_FIRST]),
        prefix_cache=rng.random() < 0.7,
        max_context=rng.choice([60, 100]),
    )
    scheduler = Scheduler(config)
    traffic = Traffic(load(rng, 9, clients=clients is not None), scheduler, clients, think_s=rng.choice([0.0, 2.0]))
    lines, now, until = [str(config)], 0.0, rng.choice([1e9, 1e9, 1e9, 12.0])
    while not traffic.is_done and now < until:
        traffic.submit(*traffic.count_due(now), now)
        step = scheduler.plan_step()
        if step is None:
            now = max(now + 0.5, traffic.find_next_arrival_s() or now)
            continue
        now += 1.0
        lines.append(f"{now:g} {words(step)} waiting {[s.request.number for s in scheduler.waiting]}")
        traffic.record_tokens(step, now)
        free = [
            (r.allocator.free_pages, r.available_pages, r.cache.evictable, sorted(r.slots)) for r in scheduler.replicas
        ]
        lines.append(f"  {free}")
    if not traffic.is_done:
        traffic.stop()
    for s in traffic.samples:
        about = [
            s.request.number,
            s.submitted_s,
            s.token_s[:1],
            s.token_s[-1:],
            len(s.token_s),
            s.cached,
            s.sequence and s.sequence.preemptions,
            s.rejected,
        ]
        lines.append(" ".join(map(str, about)))
    hold(f"schedules/{seed:02}.txt", "\n".join(lines), tmp_path)


EXTENTS = {
    "long": step_times_builder.EXTENT,
    "small": Extent(requests=6, context=40, pages=32, virtual_page=4, chunk=16),
    "open": Extent(requests=600, context=5500, pages=1200, virtual_page=256, chunk=8192, open_loop=True),
    "shared": Extent(requests=64, context=5500, pages=100, virtual_page=256, chunk=2048, shared=True),
    "alone": Extent(requests=1, context=900, pages=5, virtual_page=64, chunk=256),
}


def work(*, rows: int = 0, kv: int = 0, tokens: int = 0, pairs: float = 0.0, prefix: int = 0) -> Work:
    """What a replica does, nothing unless said."""
    return Work(rows, kv, tokens, pairs, prefix)


def noisy(of: Work) -> float:
    """ms of a step of an engine that bends: by rows, pairs and prefix."""
    bend = 3.0 * ((7 * of.rows + 3 * of.tokens) % 11) / 11
    begins = 4.0 if of.prefix else 0.0
    return step_times_builder.true_ms(of) + bend + begins + 0.01 * (of.pairs**0.5)


@pytest.mark.parametrize("name", EXTENTS)
def test_predicted_steps(name: str, tmp_path: Path) -> None:
    """Of cases measured and between them, at the ends of what was measured and past them."""
    extent = EXTENTS[name]
    cases = make_cases(extent)
    by_use = {
        use: [(c.compute_work(), noisy(c.compute_work())) for c in cases if c.use == use]
        for use in (LINE, GATHER, CHECK)
    }
    lines = [f"hot {case}" for run in make_hot_runs(extent, find_fullest(cases)) for case in run.cases]
    try:
        model = StepModel(by_use[LINE], by_use[GATHER])
    except DcpbenchError as e:
        hold(f"schedules/steps-{name}.txt", f"{e}", tmp_path)
        return
    lines.append(
        f"gather {model.prefill.gather_ms:.6g} most {model.prefill.most} begin {model.prefill.begin.xs} {model.prefill.begin.ys}"
    )
    lines.append(f"least {model.least:.6g} graphs {model.graphs.surface.sizes} mixed {model.mixed.tokens}")
    known = [w for w, _ in by_use[LINE]]
    tried = [[w] for w, _ in by_use[CHECK] + by_use[LINE]]
    for one, other in itertools.pairwise(known[::3]):
        middle: dict[str, Any] = {
            f: (getattr(one, f) + getattr(other, f)) // 2 for f in ("rows", "kv_tokens", "tokens", "pairs", "prefix")
        }
        tried += [[Work(**middle)], [one, other], [Work(**{**middle, "kv_tokens": middle["kv_tokens"] * 20})]]
    tried += [[work(rows=extent.requests + 1, kv=10)], [work(tokens=extent.chunk * 2, pairs=10)]]
    for works in tried:
        try:
            said = f"{model.predict_step_ms(works):.6g} ms"
        except DcpbenchError as e:
            said = str(e).partition(". Measure")[0]
        except ZeroDivisionError:
            said = "a step of nothing"
        lines.append(f"{' and '.join(' '.join(str(v) for v in w) for w in works)}: {said}")
    hold(f"schedules/steps-{name}.txt", "\n".join(lines), tmp_path)


def test_lines_surfaces_and_heat(tmp_path: Path) -> None:
    """Between points, at them and past both ends; points at one place count by their mean."""
    line = step_model.Line([(2.0, 10.0), (4.0, 20.0), (4.0, 30.0), (8.0, 21.0)])
    surface = step_model.Surface([(1, 0.0, 5.0), (1, 10.0, 6.0), (4, 0.0, 9.0), (4, 20.0, 19.0), (8, 5.0, 11.0)])
    xs = (0.0, 2.0, 3.0, 4.0, 7.0, 8.0, 9.0)
    lines = [f"{x}: {line(x):.6g} {line.predict_clamped(x):.6g} {line.max_x}" for x in xs]
    lines += [
        f"{rows} × {x}: {surface(rows, x):.6g} {surface.compute_max_x(rows):.6g}"
        for rows in (0, 1, 2, 4, 6, 8, 9)
        for x in (0.0, 5.0, 30.0)
    ]
    works = [
        HotStep(work(rows=2, kv=9), 1.1),
        HotStep(work(rows=8, kv=9), 1.2),
        HotStep(work(tokens=512, pairs=9), 1.3),
        HotStep(work(tokens=4096, pairs=9), 0.8),
        HotStep(work(rows=2, kv=9), 1.04, before=128),
        HotStep(work(rows=2, kv=9), 1.03, since_s=0.05),
    ]
    for kept in (works, works[:2], works[2:4], []):
        slowed = Slowdown(kept)
        lines.append(
            str(
                [
                    round(slowed([w]), 6)
                    for w in (
                        work(rows=1, kv=1),
                        work(rows=5, kv=1),
                        work(rows=99, kv=1),
                        work(tokens=16, pairs=1),
                        work(rows=9, kv=1, tokens=2000, pairs=1),
                        work(tokens=99_999, pairs=1),
                    )
                ]
            )
            + f" left {[round(slowed.compute_final_heat([work(tokens=n, pairs=1)]), 6) for n in (16, 512, 9000)]}"
            + f" settles in {slowed.settle_s:.6g}"
        )
    heat = Heat()
    for begin, seconds, towards in (
        (0.0, 0.05, 1.0),
        (0.05, 0.3, 0.5),
        (0.5, 0.02, 0.0),
        (0.4, 0.0, 1.0),
        (9.0, 0.4, 1.0),
    ):
        lines.append(f"{heat.compute_share(begin):.6g} {heat.until_s:.6g}")
        heat.add_step(seconds, towards)
    lines.append(f"{heat.compute_share(9.4):.6g} {heat.share:.6g} {heat.until_s:.6g}")
    hold("schedules/lines.txt", "\n".join(lines), tmp_path)

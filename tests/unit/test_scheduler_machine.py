"""Test with random requests that every step obeys the scheduler's rules and reads the right KV.

The rules are asserted by serving_simulation.py at each step, the KV by the device on paper of serving_builder.py.
"""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dcpbench.points.names import MIXED, OWN_POLICIES
from dcpbench.points.speculation import Speculation
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import SchedulerConfig
from tests.unit.serving_builder import check_books, make_request
from tests.unit.serving_simulation import Simulation

LONGEST = 200
FAMILIES = [[7 * family + i % 3 for i in range(LONGEST)] for family in range(2)]
"""Prompts begin like one of these, so that they share prefixes."""
PERCENT = (1, 10, 25, 50, 75, 100)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    """Draw any geometry: pools from a single page up, and chunks from a page up that need not be whole pages."""
    interleave = draw(st.sampled_from([1, 2]))
    page = interleave * draw(st.sampled_from([1, 2] if interleave == 2 else [1, 2, 3, 4]))
    dcp = draw(st.integers(1, 4))
    chunk = draw(st.integers(page * dcp, 5 * page * dcp))
    return SchedulerConfig(
        replicas=draw(st.integers(1, 3)),
        pages=draw(st.integers(2, 16)),
        page_size=page,
        dcp=dcp,
        interleave=interleave,
        max_requests=draw(st.integers(1, 5)),
        chunk=chunk,
        policy=draw(st.sampled_from(OWN_POLICIES)),
        prefix_cache=draw(st.booleans()),
        max_context=draw(st.sampled_from([LONGEST, 20])),
        speculation=draw(st.sampled_from([None, Speculation(1, (0.7,)), Speculation(3, (0.85, 0.6, 0.4))])),
    )


Sizes = tuple[int, int, int, int, int]
SIZES = st.tuples(
    st.sampled_from(PERCENT),
    st.sampled_from((0, *PERCENT)),
    st.sampled_from((*PERCENT, 200)),
    st.integers(0, 1),
    st.integers(0, 1),
)
"""Prompt in percent of what fits; of it what a family shares; output in percent of the room left; family; ending."""


def make_sized_request(config: SchedulerConfig, number: int, sizes: Sizes) -> ServeRequest:
    """Return a request that fits into a pool, unless its output exceeds 100 % of the capacity."""
    prompt_share, shared_share, output_share, family, end = sizes
    fits = min((config.pages - 1) * config.virtual_page, config.max_context)
    prompt = max(1, fits * prompt_share // 100)
    shared = prompt * shared_share // 100
    output = 1 + (fits - prompt) * output_share // 100
    return make_request(number, FAMILIES[family][:shared] + [end] * (prompt - shared), output)


class SchedulerMachine(RuleBasedStateMachine):
    """Submit requests, plan and run steps, and cancel everything."""

    @initialize(config=configs())
    def make(self, config: SchedulerConfig) -> None:
        self.simulation = Simulation(config)
        self.number = 0

    @rule(sizes=SIZES, copies=st.integers(1, 3))
    def submit(self, sizes: Sizes, copies: int) -> None:
        """Submit one or more requests, which can have equal tokens."""
        for _ in range(copies):
            self.simulation.submit(make_sized_request(self.simulation.config, self.number, sizes))
            self.number += 1

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @rule()
    def finish(self) -> None:
        self.simulation.finish()

    @rule()
    def cancel(self) -> None:
        self.simulation.cancel()

    @invariant()
    def books_are_right(self) -> None:
        for replica in self.simulation.scheduler.replicas:
            check_books(replica)

    def teardown(self) -> None:
        """Finish the remaining requests."""
        if hasattr(self, "simulation"):
            self.simulation.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@settings(max_examples=100, deadline=None)
@given(config=configs(), load=st.lists(SIZES, min_size=2, max_size=12))
def test_load_that_arrives_at_once_is_served_completely(config, load):
    """The pool is then the fullest, with the most preemptions and evictions."""
    simulation = Simulation(config)
    for number, sizes in enumerate(load):
        simulation.submit(make_sized_request(config, number, sizes))
    simulation.finish()


def crowded(policy: str, replicas: int, seed: int) -> Simulation:
    """Return requests that arrive one after the other, more at a time than fit, many of them equal."""
    draw = random.Random(seed)
    page, dcp = draw.choice([1, 2, 4]), draw.randint(1, 4)
    config = SchedulerConfig(
        replicas=replicas,
        pages=draw.randint(6, 16),
        page_size=page,
        dcp=dcp,
        max_requests=6,
        policy=policy,
        chunk=page * dcp * draw.randint(1, 4) + draw.randrange(page * dcp),
        max_context=LONGEST,
    )
    simulation = Simulation(config)
    for number in range(12 * replicas):
        shared = draw.choice((0, 50, 100, 100))
        sizes = (draw.randint(5, 60), shared, draw.randint(0, 100), draw.randint(0, 1), draw.randint(0, 1))
        simulation.submit(make_sized_request(config, number, sizes))
        for _ in range(draw.choice((0, 0, 1, 5))):
            simulation.step()
    simulation.finish()
    return simulation


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("policy", OWN_POLICIES)
@pytest.mark.sample(3)
def test_under_kv_pressure_every_request_finishes_with_the_right_kv(policy, replicas):
    """All twenty loads together need preemption and the prefix cache."""
    runs = [crowded(policy, replicas, seed) for seed in range(20)]
    assert sum(run.preempted for run in runs) > 10
    finished = [sequence for run in runs for sequence in run.finished]
    assert len(finished) == 20 * 12 * replicas
    assert sum(s.cached > 0 for s in finished) > 20
    mixed = sum(run.mixed for run in runs)
    assert mixed > 20 if policy == MIXED else mixed == 0

"""What a record says of the client and of the answers, worked out from a few requests."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from dcpbench.records.record import ClientLoad
from dcpbench.servers.load import Call, Outcome, Pace
from dcpbench.servers.measure import _client_bound, _client_load, _not_as_asked
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.traffic import Sample


@pytest.mark.parametrize(
    ("cpu", "lag_ms", "itl_ms", "bound"),
    [
        (0.9, None, None, False),
        (0.91, None, None, True),
        (0.5, 3.0, None, False),
        (0.5, 3.1, None, True),
        (0.5, 3.1, 20.0, True),
        (0.5, 5.0, 50.0, False),
        (0.5, 5.1, 50.0, True),
        (0.95, 0.1, 50.0, True),
    ],
)
def test_a_client_is_the_bottleneck_where_it_is_busy_or_late(
    cpu: float, lag_ms: float | None, itl_ms: float | None, bound: bool
) -> None:
    """Past 90 % of a core, or at p99 later than 3 ms and than a tenth of the median gap."""
    assert _client_bound(ClientLoad(processes=1, cpu_share=cpu, lag_p99_ms=lag_ms), itl_ms) is bound
    assert not _client_bound(None, itl_ms)


def test_the_worst_process_stands_for_the_client() -> None:
    """Two processes for 10 s, of which one was busy for 4 and starved for 1; 100 requests 1 to 100 ms late: p99 is 99.01."""
    paces = [
        Pace(lags_s=[0.001] * 100, ages_s=[0.004], cpu_s=4.0, starved_s=0.5, realtime=True, wall_s=10.0),
        Pace(lags_s=[0.003] * 100, ages_s=[0.002], cpu_s=2.0, starved_s=1.0, realtime=False, wall_s=10.0),
    ]
    calls = [Outcome(Call(i, b"", 1), submitted_s=5.0, sent_s=5.0 + (i + 1) / 1e3) for i in range(100)]
    load = _client_load([*calls, Outcome(Call(100, b"", 1), submitted_s=5.0)], paces, {"null_streams": 7})
    assert load.late_p99_ms == pytest.approx(99.01)
    assert load.read_late_p99_ms == pytest.approx(3.98)
    expected = ClientLoad(
        processes=2,
        cpu_share=0.4,
        late_p99_ms=load.late_p99_ms,
        lag_p99_ms=3.0,
        read_late_p99_ms=load.read_late_p99_ms,
        starved_share=0.1,
        realtime=False,
        null_streams=7,
    )
    assert msgspec.to_builtins(load) == msgspec.to_builtins(expected)


def test_what_no_process_noted_is_absent() -> None:
    load = _client_load([], [Pace(realtime=True)], {})
    assert load == ClientLoad(processes=1, cpu_share=0.0, realtime=True)


@pytest.mark.parametrize(
    ("prompt", "tokens", "nominal"),
    [
        (100, 20, False),
        (105, 21, False),
        (95, 19, False),
        (106, 20, True),
        (94, 20, True),
        (100, 18, True),
        (100, 22, True),
    ],
)
def test_lengths_that_differ_by_more_than_a_twentieth_are_said(prompt: int, tokens: int, nominal: bool) -> None:
    """20 tokens were asked for behind 100; of the second request, which did not finish, nothing is asked."""

    def request(number: int, length: int, output: int) -> ServeRequest:
        return ServeRequest(number=number, prompt=np.zeros(length, np.int32), output_tokens=output, arrival_s=0.0)

    asked = [request(0, 100, 20), request(1, 100, 20)]
    came = [
        Sample(request(0, prompt, tokens), 0.0, token_s=[1.0] * tokens),
        Sample(request(1, 500, 20), 0.0, token_s=[1.0]),
    ]
    assert _not_as_asked(came, asked) is nominal

"""Run a small engine as vLLM does: a front end without a GPU, and a core in a child process that steps a model.

    python -m tools.syncs.engine_core fork|spawn|forkserver wait|no-wait

With `wait` the core waits for the GPU once a step, in `sample`.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

STEPS = 12
NAME, FUNCTION = "EngineCore", "sample"


def sample(hidden: torch.Tensor, *, wait: bool) -> torch.Tensor:
    """Return the next tokens of the sequences."""
    tokens = hidden.argmax(-1)
    if wait:
        tokens.tolist()
    return tokens


def run_engine_core(connection: Connection, *, wait: bool) -> None:
    """Step the model once for each number that arrives, until None does."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, device="cuda"), torch.nn.Tanh())
    hidden = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        while (number := connection.recv()) is not None:
            hidden = model(hidden)
            sample(hidden, wait=wait)
            connection.send(number)


def main() -> None:
    """Start the core, and request its steps."""
    method, wait = sys.argv[1], sys.argv[2] == "wait"
    ours, its = multiprocessing.Pipe()
    context: Any = multiprocessing.get_context(method)
    core = context.Process(target=run_engine_core, args=(its,), kwargs={"wait": wait}, name=NAME)
    core.start()
    for number in range(STEPS):
        ours.send(number)
        assert ours.recv() == number
    ours.send(None)
    core.join()
    assert core.exitcode == 0


if __name__ == "__main__":
    main()

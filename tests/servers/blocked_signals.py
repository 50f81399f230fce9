"""Print which signals of Ctrl-C and hang-ups each of three client processes blocks.

python -m tests.servers.blocked_signals
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from dcpbench.servers.client import Target
from dcpbench.servers.client_pool import ClientPool, open_load
from dcpbench.servers.load import Call, LoadOptions

NOWHERE = Target.from_url("http://127.0.0.1:9")


def format_blocked_signals(pid: int) -> str:
    """Return the names of the blocked signals among SIGHUP and SIGINT."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk:"))
    mask = int(line.split()[1], 16)
    return " ".join(number.name for number in (signal.SIGHUP, signal.SIGINT) if mask >> (number - 1) & 1)


async def main() -> None:
    """Start the processes, and print their blocked signals."""
    calls = [Call(n, NOWHERE.encode_request("POST", "/v1/completions", b""), 1) for n in range(3)]
    async with open_load(NOWHERE, calls, LoadOptions(clients=3), 3) as run:
        assert isinstance(run, ClientPool)
        await run.prepare(3)
        for process in run._processes:
            print(format_blocked_signals(process.pid or 0))  # noqa: T201 -- the output of this program


if __name__ == "__main__":
    asyncio.run(main())

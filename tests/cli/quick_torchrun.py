"""Replace torchrun on one machine without torch, which takes the agent two seconds to import.

As torchrun does, it ends the other ranks with SIGTERM after one has failed, which it names, or when it gets SIGTERM
itself. It kills remaining ranks after half a minute.
"""

import os
import signal
import subprocess
import sys
import threading

ROOT_CAUSE = """\
Root Cause (first observed failure):
[0]:
  rank      : {0} (local_rank: {0})
  exitcode  : {1}
"""


def main(arguments: list[str]) -> int:
    """Start the ranks and wait for their end; return 1 if one failed."""
    count = int(arguments[arguments.index("--nproc-per-node") + 1])
    command = arguments[arguments.index("--no-python") + 1 :]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ranks: list[subprocess.Popen[bytes]] = []
    ended = threading.Semaphore(0)
    try:
        for rank in range(count):
            env = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            ranks.append(subprocess.Popen(command, env=env, stdin=0, start_new_session=True))
        for rank in ranks:
            threading.Thread(target=lambda rank=rank: (rank.wait(), ended.release()), daemon=True).start()
        for _ in ranks:
            ended.acquire()
            if first := [(number, code) for number, rank in enumerate(ranks) if (code := rank.poll())]:
                sys.stderr.write(ROOT_CAUSE.format(*first[0]))
                return 1
        return 0
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        try:
            for rank in ranks:
                rank.wait(30)
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A rank in place of `-m dcpbench.worker`: a fork of a process with torch that has one program order a prefix, and that
exchanges with others through memory.

Triton's interpreter takes as long for 256 rows as for 16, of which tests/kernels/test_kv_gather.py has several programs.
"""

import runpy
import sys

from tests import as_fork

INSIDE = "--inside"

if __name__ == "__main__":
    if INSIDE not in sys.argv:
        sys.exit(as_fork.main([__spec__.name, *sys.argv[1:], INSIDE]))
    from dcpbench.kernels import kv_gather
    from tests.distributed import shared

    shared.replace()
    sys.argv.remove(INSIDE)
    kv_gather.ROWS = 256
    runpy.run_module("dcpbench.worker", run_name="__main__")

"""dcpbench.worker, with as many rows as there are in a program of the kernel that orders a prefix.

Triton's interpreter takes as long for 256 rows as for 16, of which tests/kernels/test_kv_gather.py has several programs.
"""

import runpy

from dcpbench.kernels import kv_gather

if __name__ == "__main__":
    kv_gather.ROWS = 256
    runpy.run_module("dcpbench.worker", run_name="__main__")

"""Run a rank as rank.py starts it, with an engine that has the defect in DEFECT; see defects.py."""

from __future__ import annotations

import os
import runpy
import sys

from tests import as_fork

DEFECT, INSIDE = "DEFECT", "--inside"

if __name__ == "__main__":
    if INSIDE not in sys.argv:
        sys.exit(as_fork.main([__spec__.name, *sys.argv[1:], INSIDE]))
    from tests.distributed.defects import DEFECTS

    DEFECTS[os.environ[DEFECT]](setattr)
    runpy.run_module("tests.distributed.rank", run_name="__main__")

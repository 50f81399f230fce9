"""Set up the recording or notes of this process when Python starts, then import the next sitecustomize on sys.path."""

import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = {"DCPBENCH_SYNCS_RECORD": "recording", "DCPBENCH_SYNCS_CHILDREN": "child"}  # variable (JSON settings) -> module


def load_module(part: str) -> Any:  # noqa: ANN401  (a module)
    """Load a module of this folder, under a name that no program uses."""
    spec = importlib.util.spec_from_file_location(f"_dcpbench_{part}", HERE / f"{part}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_next_sitecustomize() -> Any:  # noqa: ANN401  (a module, or None)
    """Return the next sitecustomize on sys.path, not yet run."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None or (spec.origin and Path(spec.origin).resolve().parent == HERE):
        return None
    return importlib.util.module_from_spec(spec)


if any(name in os.environ for name in PARTS) and __name__ == "sitecustomize":
    # The program must find no module here, and the next sitecustomize must not be this one again.
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]
    for name, part in PARTS.items():
        try:
            if name in os.environ:
                hook = load_module("import_hook").run_after_import
                load_module(part).install(json.loads(os.environ[name]), hook)
        except Exception as error:  # noqa: BLE001  (whatever fails here must not fail the program)
            sys.stderr.write(f"dcpbench syncs: this process is not recorded: {error!r}\n")
    following = find_next_sitecustomize()
    if following is not None:
        sys.modules["sitecustomize"] = following
        following.__spec__.loader.exec_module(following)

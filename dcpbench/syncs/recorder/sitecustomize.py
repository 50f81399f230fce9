"""Imported by Python at its start: sets the recorder up, then imports the sitecustomize that would have been found."""

import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VARIABLE = "DCPBENCH_SYNCS_RECORD"


def install(settings: dict[str, Any]) -> None:
    """Loads recording.py of this folder, under a name that no program uses."""
    spec = importlib.util.spec_from_file_location("_dcpbench_recorder", HERE / "recording.py")
    assert spec is not None
    assert spec.loader is not None
    recording = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recording)
    recording.install(settings)


def other() -> Any:  # noqa: ANN401  (a module, or None)
    """The sitecustomize behind this one on sys.path, not yet run."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None or (spec.origin and Path(spec.origin).resolve().parent == HERE):
        return None
    return importlib.util.module_from_spec(spec)


if VARIABLE in os.environ and __name__ == "sitecustomize":
    # The program must find no module here, and the next sitecustomize must not be this one again.
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]
    try:
        install(json.loads(os.environ[VARIABLE]))
    except Exception as error:  # noqa: BLE001  (whatever fails here must not fail the program)
        sys.stderr.write(f"dcpbench syncs run: this process is not recorded: {error!r}\n")
    following = other()
    if following is not None:
        sys.modules["sitecustomize"] = following
        following.__spec__.loader.exec_module(following)

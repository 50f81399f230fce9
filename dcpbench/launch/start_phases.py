"""Time the phases of a job until it measures its first step."""

from __future__ import annotations

from dcpbench.records.record import StartPhase

COMPILING = "compiling kernels of FlashInfer"
PHASES = {  # by stage of jobs.Progress
    "start": "starting",
    "limits": "measuring rates of the GPU",
    "build": "building the engine",
    "choose": "choosing backend and exchange",
    "check": "checking attention",
    "capture": "capturing CUDA graphs",
    "compile": COMPILING,
    "warm up": "warming up",
}


class StartPhases:
    """Time the phases from the start of a job, or from the build of another engine, to the first measured step."""

    def __init__(self, started: float) -> None:
        """Start the first phase at this time in s; all times have the same clock."""
        self._stage, self._since = "start", started
        self._seconds: dict[str, float] = {}

    def enter_stage(self, stage: str, now: float) -> list[StartPhase]:
        """Return the phases, in order, if this stage measures the first step of an engine; otherwise an empty list."""
        name = PHASES.get(self._stage)
        if name is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._stage, self._since = stage, now
        if stage in PHASES:
            return []
        found = self._seconds if stage == "measure" and PHASES["build"] in self._seconds else {}
        self._seconds = {}
        return [StartPhase(name=name, seconds=round(seconds, 2)) for name, seconds in found.items()]

"""Count the blocking calls in traces of torch.profiler, independently of `dcpbench syncs scan`.

    python -m tools.syncs.count_calls TRACE...

The program reads the Kineto events with the json module and imports nothing of dcpbench, so that its counts can be compared with the
scanner's. It counts four kinds of calls:

- cudaEventSynchronize, cudaStreamSynchronize and cudaDeviceSynchronize;
- cudaMemcpy, which is synchronous;
- cudaMemcpyAsync between the GPU and pageable host memory. The name of the copy on the GPU, which has the same correlation id, holds the
  memory;
- a copy of pageable memory and the synchronisation that is the next call of the same operator are two calls, and one wait.

A call belongs to the innermost Python function around it that is neither PyTorch's nor the standard library's, and to the step that began
last: the annotations of vLLM (`execute_context_N(…)_generation_M(…)`) and SGLang (`step[MODE bs=N …]`) mark the steps. A call before the
first step or after the end of the last one has the step kind `none`.

The output is JSON: for each trace the number of steps of each kind and, for each function, the number of calls by name and of waits by step
kind.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import re
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

SYNCHRONISE = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
NO_FUNCTION, NO_STEP = "unknown", "none"
_QUERIES = re.compile("Query|Captur|Attribute|LastError|GetDevice|Occupancy")
_FRAME = re.compile(r"^(?P<file>[^<].*\.py)\(\d+\): (?P<function>.+)$")
_VLLM = re.compile(r"^execute_(?:\d+_)?context_(\d+)\(.*\)_generation_(\d+)\(.*\)$")
_SGLANG = re.compile(r"^step\[(\w+) bs=")
_SGLANG_KINDS = {"EXTEND": "prefill", "DECODE": "decode", "MIXED": "mixed"}

Event = dict[str, Any]


def load_events(path: Path) -> list[Event]:
    """Return the complete events of a trace, in order of their start, a containing event before those inside."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    return sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def find_step_kind(name: str) -> str | None:
    """Return `prefill`, `decode` or `mixed` for an engine's annotation of a step; None for another annotation."""
    if found := _VLLM.match(name):
        prefill, decode = (int(number) for number in found.groups())
        return "mixed" if prefill and decode else "prefill" if prefill else "decode"
    if found := _SGLANG.match(name):
        return _SGLANG_KINDS.get(found[1], found[1].lower())
    return None


def count_trace(path: Path) -> dict[str, Any]:
    """Return the steps, the calls and the waits of one trace."""
    events = load_events(path)
    steps = [
        (event["ts"], event["ts"] + event["dur"], kind)
        for event in events
        if event.get("cat") == "user_annotation" and (kind := find_step_kind(event["name"]))
    ]
    calls: defaultdict[str, Counter[str]] = defaultdict(Counter)
    waits: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for event, name, merged in find_calls(events):
        function, step = event["function"], find_step(steps, event["ts"])
        calls[function][name] += 1
        waits[function][step] += not merged
    return {
        "trace": path.name,
        "steps": dict(Counter(kind for _, _, kind in steps)),
        "functions": {name: {"calls": dict(calls[name]), "waits": dict(waits[name])} for name in sorted(calls)},
    }


def find_step(steps: list[tuple[float, float, str]], moment: float) -> str:
    """Return the kind of the step that began last before a moment."""
    at = bisect.bisect_right([start for start, _, _ in steps], moment) - 1
    return NO_STEP if at < 0 or moment > max(end for _, end, _ in steps) else steps[at][2]


def find_calls(events: list[Event]) -> list[tuple[Event, str, bool]]:
    """Return each blocking call, its name with the direction of a copy, and whether it ends a wait that a copy began."""
    copies = {
        event["args"].get("correlation"): event["name"]
        for event in events
        if event.get("cat") == "gpu_memcpy" and "Pageable" in event["name"]
    }
    by_thread: defaultdict[object, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in {"python_function", "cpu_op", "cuda_runtime", "cuda_driver"}:
            by_thread[event.get("pid"), event.get("tid")].append(event)
    found = []
    for of_thread in by_thread.values():
        found += _find_thread_calls(of_thread, copies)
    return found


def _find_thread_calls(events: list[Event], copies: dict[object, str]) -> list[tuple[Event, str, bool]]:
    """Walk the events of a thread, with the functions and operators that are open at each call."""
    functions: list[Event] = []
    operators: list[Event] = []
    found: list[tuple[Event, str, bool]] = []
    copied_in: object = None
    for event in events:
        for stack in (functions, operators):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
        if event["cat"] == "python_function":
            functions.append(event)
            continue
        if event["cat"] == "cpu_op":
            operators.append(event)
            continue
        if _QUERIES.search(event["name"]):
            continue
        operator = id(operators[-1]) if operators else None
        name = _name_blocking_call(event, copies)
        is_copy = bool(name) and "Memcpy" in name
        if name:
            merged = not is_copy and copied_in is not None and copied_in == operator
            found.append(({**event, "function": _find_function(functions)}, name, merged))
        copied_in = operator if is_copy else None
    return found


def _name_blocking_call(event: Event, copies: dict[object, str]) -> str:
    """Return the name of a call that blocks, with the direction of a copy; empty for every other call."""
    if event["name"] in SYNCHRONISE:
        return str(event["name"])
    copy = copies.get(event.get("args", {}).get("correlation"), "")
    if event["name"] == "cudaMemcpy":
        return f"cudaMemcpy {copy}".strip()
    direction = "DtoH" if "DtoH" in copy else "HtoD" if "HtoD" in copy else ""
    return f"cudaMemcpyAsync {direction} pageable" if event["name"] == "cudaMemcpyAsync" and direction else ""


def _find_function(functions: list[Event]) -> str:
    """Return `file: function` of the innermost function outside PyTorch and the standard library."""
    for event in reversed(functions):
        found = _FRAME.match(event["name"])
        if found and not _is_framework(found["file"]):
            return f"{found['file']}: {found['function']}"
    return NO_FUNCTION


def _is_framework(file: str) -> bool:
    """Return True for a file of PyTorch, Triton or the standard library; the profiler shortens their paths."""
    parts = file.rsplit("-packages/", maxsplit=1)[-1].split("/")
    return parts[0] in {"torch", "triton"} or parts[0].removesuffix(".py") in sys.stdlib_module_names


def main(arguments: list[str]) -> None:
    """Print the counts of these traces as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    counts = []
    for path in parser.parse_args(arguments).traces:
        try:
            counts.append(count_trace(path))
        except OSError as e:
            parser.error(f"{path} cannot be read ({e.strerror or e}); name a trace that torch.profiler wrote")
        except (EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            parser.error(
                f"{path} is no trace ({type(e).__name__}: {str(e)[:100]}); name a file that torch.profiler wrote, such as "
                "NAME.pt.trace.json.gz"
            )
    sys.stdout.write(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

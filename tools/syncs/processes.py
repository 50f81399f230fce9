"""Check that `dcpbench syncs run` finds a wait in an engine's child process, on a GPU.

The small engine is engine_core.py. For vLLM, a sitecustomize loads a copy of the model runner with one more line in `_sample` into each
process, and the model has dummy weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.syncs.engine_core import FUNCTION, NAME

ROOT = Path(__file__).parents[2]
WARMUP, RECORDED = 3, 6
RUNNER = "vllm.v1.worker.gpu_model_runner"
ANCHOR_LINE = "        # Sample the next token and get logprobs if needed.\n"
INJECTED_LINE = "        if logits is not None: logits.max().item()\n"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VLLM_PROGRAM = """
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        load_format="dummy",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        gpu_memory_utilization=0.2,
    )
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False, temperature=0.0)
    outputs = llm.generate([{"prompt_token_ids": list(range(2, 34))} for _ in range(2)], sampling)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [16, 16]
"""
SITECUSTOMIZE = """
import importlib.util
import sys

class Replacement:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            return importlib.util.spec_from_file_location(name, {file!r})

sys.meta_path.insert(len(sys.meta_path) - 1, Replacement)  # before the finder of files
"""


def check_small_engine(method: str) -> list[str]:
    """Run the small engine with and without the wait; return the problems."""
    problems = []
    for wait, status in (("wait", "findings"), ("no-wait", "clean")):
        report = _run_syncs([sys.executable, "-m", "tools.syncs.engine_core", method, wait], [], {})
        problems += _check_site(report, FUNCTION, "SYNC003") if wait == "wait" else []
        if report["verdict"]["status"] != status:
            problems.append(f"{method}, {wait}: {report['verdict']} instead of {status}")
    return problems


def check_vllm(method: str) -> list[str]:
    """Run vLLM with a wait in its model runner; return the problems."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        env = {"PYTHONPATH": _replace_model_runner(home), "VLLM_WORKER_MULTIPROC_METHOD": method}
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        (home / "model").mkdir()
        (home / "model" / "config.json").write_text(json.dumps(CONFIG))
        (home / "offline.py").write_text(VLLM_PROGRAM)
        step = ["--step", f"{RUNNER}:GPUModelRunner.sample_tokens"]
        report = _run_syncs([sys.executable, str(home / "offline.py"), str(home / "model")], step, env)
    return _check_site(report, "_sample", "SYNC001")


def _replace_model_runner(home: Path) -> str:
    """Write a copy of the model runner with the wait; return the PYTHONPATH with which processes load it."""
    (package,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr, misc]
    source = Path(package, "v1/worker/gpu_model_runner.py").read_text()
    assert source.count(ANCHOR_LINE) == 1, "the model runner of this version of vLLM has another text"
    copy = home / "gpu_model_runner.py"
    copy.write_text(source.replace(ANCHOR_LINE, INJECTED_LINE + ANCHOR_LINE))
    hook = home / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(SITECUSTOMIZE.format(module=RUNNER, file=str(copy)))
    return os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _run_syncs(command: list[str], options: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Run `dcpbench syncs run`, and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        limits = ["--warmup", str(WARMUP), "--steps", str(RECORDED), "--format", "json", "-o", str(out)]
        arguments = [sys.executable, "-m", "dcpbench", "syncs", "run", *limits, *options, "--", *command]
        done = subprocess.run(arguments, cwd=ROOT, env={**os.environ, **env}, check=False)
        sys.stdout.write(f"exit code {done.returncode}: {' '.join(command)}\n")
        report: dict[str, Any] = json.loads(out.read_text())
    for site in report["sites"]:
        shown = ("rule", "function", "file", "line", "count", "count_per_step", "traces", "own", "may_block")
        sys.stdout.write(f"{ {key: site[key] for key in shown} }\n")
    return report


def _check_site(report: dict[str, Any], function: str, rule: str) -> list[str]:
    """Return the problems of the site of the wait, which must be in the core, once per step."""
    found = [s for s in report["sites"] if (s["function"], s["rule"], s["own"]) == (function, rule, False)]
    if len(found) != 1:
        return [f"{len(found)} sites {rule} in {function}"]
    (site,) = found
    problems = [] if site["count_per_step"] == 1.0 else [f"{site['count_per_step']} waits per step in {function}"]
    return problems + [f"{trace} is not the core" for trace in site["traces"] if not trace.startswith(NAME)]

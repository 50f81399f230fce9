"""Compare greedy tokens of dcpbench's engine, vLLM and SGLang with the same synthetic weights, and judge differences in fp32.

On a machine with two GPUs, `vllm` and `sglang-server` on PATH, and vllm.toml and sglang.toml of docs/servers.md:

    python -m tools.greedy_tokens model FOLDER
    torchrun --standalone --nproc-per-node 2 -m tools.greedy_tokens own --model FOLDER -o own-tp2.json
    torchrun --standalone --nproc-per-node 2 -m tools.greedy_tokens own --model FOLDER --dcp 2 -o own-tp2-dcp2.json
    python -m tools.greedy_tokens ask --engine vllm.toml --model FOLDER --tp 2 -o vllm-tp2.json
    python -m tools.greedy_tokens ask --engine vllm.toml --model FOLDER --tp 2 --dcp 2 -o vllm-tp2-dcp2.json
    python -m tools.greedy_tokens ask --engine sglang.toml --model FOLDER --tp 2 -o sglang-tp2.json
    python -m tools.greedy_tokens ask --engine sglang.toml --model FOLDER --tp 2 --dcp 2 -o sglang-tp2-dcp2.json
    python -m tools.greedy_tokens judge --model FOLDER own-*.json vllm-*.json sglang-*.json -o judge.json
    python -m tools.greedy_tokens compare --judge judge.json own-*.json vllm-*.json sglang-*.json

`model` writes a folder without weights: two layers of DeepSeek-V3 with published widths, 16 experts and 1,024 tokens. With a vocabulary of
129,280 tokens and random weights, rounding would decide between the two likeliest tokens. `--set FIELD=VALUE` changes config.json; with
`--fp8` or more layers, near-ties can exceed 5 % of the positions. `own` decodes seeded random prompts with dcpbench's engine, on the CPU if
there is no GPU. `ask` starts a server and sends it the same prompts, one after another.

`judge` computes the same model with transformers in fp32, on prompts and answers. Run it on the machine of the engines, because other GPUs
draw other random numbers. It needs host memory for twice the weights in fp32 (12 GB with the folder above). `compare --model FOLDER` judges
and compares.

Exit codes of `compare`:

    0  tokens are equal except for near-ties, which are at most 5 % of the positions of any two engines
    1  an engine has a token that is less likely in fp32 by more than a near-tie, or log-probabilities that differ from fp32
       by more than rounding explains
    3  undecided: too many near-ties, or too few positions
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from tools.command_line import parse_count, report_errors
from tools.greedy_tokens.answers import Answers, check_same_weights, compute_sizes_key, read_answers
from tools.greedy_tokens.comparison import decide
from tools.greedy_tokens.engines import decode_own, fetch_answers, load_checked_shape
from tools.greedy_tokens.model_folder import write_model_folder
from tools.greedy_tokens.scores import Judgement
from tools.greedy_tokens.text import format_json, format_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.greedy_tokens", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help="write a small model folder without weights")
    model.add_argument("folder", type=Path, help="folder to write")
    model.add_argument("--fp8", action="store_true", help="fp8 weights in blocks of 128 × 128")
    model.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of config.json")
    _add_engine_options(commands.add_parser("own", help="decode with dcpbench's engine; run by torchrun"), own=True)
    _add_engine_options(commands.add_parser("ask", help="ask the server of another engine"), own=False)
    judge = commands.add_parser("judge", help="score answers in fp32")
    judge.add_argument("--model", required=True, help="model folder of the answers")
    judge.add_argument("-o", "--output", type=Path, required=True, help="JSON file for the scores")
    compare = commands.add_parser("compare", help="compare answers, and decide differences in fp32")
    source = compare.add_mutually_exclusive_group(required=True)
    source.add_argument("--judge", type=Path, help="file of `judge`")
    source.add_argument("--model", help="model folder of the answers, to score them now")
    compare.add_argument("--json", action="store_true", help="print the verdict as JSON")
    for part in (judge, compare):
        part.add_argument("files", nargs="+", type=Path, help="files of `own` and `ask`")
    return parser.parse_args(words)


def _add_engine_options(part: argparse.ArgumentParser, *, own: bool) -> None:
    part.add_argument("--model", required=True, help="model folder without a checkpoint")
    part.add_argument("--dcp", type=parse_count, default=1, help="DCP degree; default: %(default)s")
    part.add_argument("--prompts", type=parse_count, default=64, help="number of prompts; default: %(default)s")
    part.add_argument(
        "--length", type=parse_count, default=64, help="tokens of the longest prompt; default: %(default)s"
    )
    part.add_argument("--new-tokens", type=parse_count, default=16, help="tokens of an answer; default: %(default)s")
    part.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the prompts; default: %(default)s. DCPBENCH_WEIGHTS_SEED is the seed of the weights",
    )
    part.add_argument("-o", "--output", required=True, help="JSON file for the answers")
    if own:
        part.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="dtype of the computation")
    else:
        part.add_argument("--engine", required=True, help="vllm, sglang or an engine's file")
        part.add_argument("--tp", type=parse_count, default=1, help="tensor-parallel degree; default: %(default)s")
        part.add_argument("--exchange", default="", help="ag_rs or a2a; default: the engine's choice")


def run_command(args: argparse.Namespace) -> int:
    """Run a command; return its exit code."""
    if args.command == "model":
        write_model_folder(args.folder, args.set, fp8=args.fp8)
        return 0
    if args.command in {"own", "ask"}:
        answers = decode_own(args) if args.command == "own" else fetch_answers(args)
        if answers is not None:
            Path(args.output).write_bytes(msgspec.json.encode(answers))
        return 0
    files = read_answers(args.files)
    if args.command == "judge":
        args.output.write_bytes(msgspec.json.encode(score_answers(files, args.files[0], args.model)))
        return 0
    judgement = (
        read_judgement(args.judge, files, args.files[0])
        if args.judge
        else score_answers(files, args.files[0], args.model)
    )
    verdict = decide(files, judgement)
    sys.stdout.write(format_json(verdict) if args.json else format_verdict(verdict))
    return verdict.exit_code


def score_answers(files: Sequence[Answers], path: Path, folder: str) -> Judgement:
    """Return the fp32 scores of answers. Raise UsageError if they are from another model than the folder's."""
    from tools.greedy_tokens.reference import judge_answers

    shape = load_checked_shape(folder)
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(f"--model {folder} is no folder with a config.json; name that of the answers.")
    key = files[0].weights
    check_same_weights(path, key, Path(folder), msgspec.structs.replace(key, sizes=compute_sizes_key(shape)))
    return judge_answers(files, folder, shape)


def read_judgement(path: Path, files: Sequence[Answers], other: Path) -> Judgement:
    """Return the scores in a file. Raise UsageError if they are from other weights or prompts than the answers."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Judgement)
    except (OSError, msgspec.DecodeError) as e:
        raise UsageError(f"--judge {path} is not a file of scores ({e}); write it with `judge -o {path}`.") from e
    check_same_weights(path, found.weights, other, files[0].weights)
    if found.prompts != files[0].prompts:
        raise UsageError(
            f"--judge {path} has scores of other prompts than {other}; run `judge` again with these files."
        )
    return found


if __name__ == "__main__":
    sys.exit(report_errors(lambda: run_command(parse_arguments())))

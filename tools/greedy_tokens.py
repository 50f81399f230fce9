"""Compare the likeliest next tokens of dcpbench's engine, vLLM and SGLang over the same synthetic weights.

    torchrun --nproc-per-node 2 -m tools.greedy_tokens own --model FOLDER -o own.json
    torchrun --nproc-per-node 2 -m tools.greedy_tokens own --model FOLDER --dcp 2 -o own-dcp2.json
    python -m tools.greedy_tokens ask --engine vllm.toml --model FOLDER --tp 2 -o vllm.json
    python -m tools.greedy_tokens compare own.json own-dcp2.json vllm.json

`own` decodes seeded random prompts with dcpbench's engine, `ask` starts a server and sends it the same prompts, one after
another. FOLDER needs the tokenizer with one word for each id ("t0", "t1", …), so that text and ids map one to one.

Of 129,280 random tokens the likeliest two are about as far apart as the rounding of bf16 moves their log-probabilities, so that
greedy answers soon differ between any two computations of the same function. `compare` therefore compares log-probabilities of
tokens that both files list, up to the first token that differs. Two layouts of one engine compute the same function: the first
two files give the rounding. Each further file may differ from the first MAX_RATIO times as much on average; else it ends with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.points.names import NO_EXCHANGE, SYNTHETIC

if TYPE_CHECKING:
    from dcpbench.servers.answer_pairs import Answer

MAX_RATIO = 1.5  # mean difference of log-probabilities between engines over that between layouts of one engine
LISTED = 5  # most likely tokens that a position keeps
START_TIMEOUT_S = 500.0


class Position(msgspec.Struct, frozen=True):
    """The token of one position, and log-probabilities of the likeliest tokens there by their ids."""

    token: int
    logprobs: dict[int, float]


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy answers of one engine, in the order of the prompts."""

    name: str
    answers: list[list[Position]]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between the answers of two engines. Positions after the first difference of an answer are left out."""

    prompts: int
    positions: int
    same_first: int  # prompts whose answers begin with the same token
    same: int  # positions with the same token
    logprobs: int  # log-probabilities that both list
    mean: float  # absolute difference of these
    largest: float


def make_prompts(vocab: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Return seeded random prompts of different lengths up to `length`, without the ids 0 and 1 (begin and end of text)."""
    rng = random.Random(seed)
    return [[rng.randrange(2, vocab) for _ in range(max(1, length - number % 7))] for number in range(count)]


def compare_answers(left: Answers, right: Answers) -> Comparison:
    """Compare the answers of two engines; raise ValueError if they answer different numbers of prompts or share no token."""
    positions = same_first = same = 0
    differences: list[float] = []
    for one, other in zip(left.answers, right.answers, strict=True):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            positions += 1
            differences += [
                abs(a.logprobs[token] - b.logprobs[token]) for token in a.logprobs.keys() & b.logprobs.keys()
            ]
            if a.token != b.token:
                break
            same += 1
            same_first += number == 0
    if not differences:
        raise ValueError(f"{left.name} and {right.name} list no token in common")
    return Comparison(
        prompts=len(left.answers),
        positions=positions,
        same_first=same_first,
        same=same,
        logprobs=len(differences),
        mean=sum(differences) / len(differences),
        largest=max(differences),
    )


def format_comparison(left: Answers, right: Answers, found: Comparison) -> str:
    """Return the comparison as one line."""
    return (
        f"{left.name} and {right.name}: {found.same_first} of {found.prompts} answers begin with the same token, {found.same} of "
        f"{found.positions} positions have the same; {found.logprobs} log-probabilities differ by {found.mean:.4f} on average and "
        f"{found.largest:.2f} at most"
    )


def ask(args: argparse.Namespace) -> Answers:
    """Start the server of an engine's file and return its answers."""
    from dcpbench.models import load_shape
    from dcpbench.points.point import Point
    from dcpbench.servers.launch import Server, find_free_port
    from dcpbench.servers.presets import make_environment, resolve_engine

    engine = resolve_engine(args.engine, None)
    point = Point(
        model=args.model, tp=args.tp, dcp=args.dcp, concurrency=1, context=args.length, backend=engine.name,
        exchange=args.exchange or NO_EXCHANGE, dtype="bf16", weights=SYNTHETIC,
    )  # fmt: skip
    port = find_free_port()
    words = engine.make_command(point, {}, args.model, port)
    log = Path(args.output).with_suffix(".log")
    vocab = load_shape(args.model).vocab
    prompts = make_prompts(vocab, args.prompts, args.length, args.seed)
    with Server(words, log, make_environment(engine, point), port, engine.ready) as server:
        server.wait_until_ready(START_TIMEOUT_S)
        answers = asyncio.run(_fetch_answers(server.url, args.model, vocab, prompts, args.new_tokens))
    return Answers(name=f"{engine.name} {point.layout}", answers=answers)


async def _fetch_answers(
    url: str, model: str, vocab: int, prompts: list[list[int]], new_tokens: int
) -> list[list[Position]]:
    """Return a server's greedy answers, one after another. Raise ValueError if it lists no likeliest tokens."""
    from dcpbench.servers.ask import Side
    from dcpbench.servers.client import Client, Target
    from dcpbench.servers.prompt_format import COMPLETIONS, PromptFormat

    form = PromptFormat(endpoint=COMPLETIONS, model=model, extras={"ignore_eos": True}, vocab=vocab)
    async with Client(Target.from_url(url)) as client:
        side = Side(client, form)
        return [list_positions(await side.fetch_answer(np.array(prompt, np.int32), new_tokens)) for prompt in prompts]


def list_positions(answer: Answer) -> list[Position]:
    """Return the positions of a server's answer, with the likeliest tokens that LISTED keeps and the token itself.

    Raise ValueError if the server lists no likeliest tokens.
    """
    if not answer.tops:
        raise ValueError("the server lists no log-probabilities of its likeliest tokens")
    found = []
    for name, logprob, tops in zip(answer.names, answer.logprobs, answer.tops, strict=True):
        top = sorted(tops.items(), key=lambda item: -item[1])[:LISTED]
        found.append(Position(_find_id(name), {_find_id(text): p for text, p in top} | {_find_id(name): logprob}))
    return found


def _find_id(text: str) -> int:
    """Return the id of a word of the tokenizer, "t17"."""
    return int(text.strip().removeprefix("t"))


def decode_own(args: argparse.Namespace) -> Answers | None:
    """Return the answers of dcpbench's engine on rank 0, None on other ranks. Run by torchrun."""
    import tempfile

    import torch
    import torch.distributed as dist

    from dcpbench.bench.operators.rendezvous import start_distributed
    from dcpbench.models import load_shape
    from dcpbench.points.point import Point
    from dcpbench.workloads.session import build_whole_session, free_memory

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    meeting = Path(tempfile.gettempdir()) / f"greedy-tokens-{os.environ['MASTER_PORT']}"
    start_distributed(device, rank, ranks, meeting)
    shape = load_shape(args.model)
    prompts = make_prompts(shape.vocab, args.prompts, args.length, args.seed)
    point = Point(
        model=args.model, tp=ranks, dcp=args.dcp, ep="1", concurrency=args.prompts, context=args.length + args.new_tokens + 1,
        backend="triton" if cuda else "reference", exchange="ag_rs" if args.dcp > 1 else NO_EXCHANGE,
        dtype="bf16" if cuda else "fp32", page_size=64 if cuda else 1, weights_dtype=shape.published.name if cuda else "fp32",
    )  # fmt: skip
    with torch.inference_mode():
        lengths = [args.length + args.new_tokens + 1] * len(prompts)
        engine = build_whole_session(point, shape, lengths, rank=rank, device=device, seed=0).engine
        answers = _decode(engine, prompts, args.new_tokens)
    del engine
    free_memory(device)
    dist.barrier()
    meeting.unlink(missing_ok=True)
    dist.destroy_process_group()
    return Answers(name=f"dcpbench {point.layout}", answers=answers) if rank == 0 else None


def _decode(engine, prompts: list[list[int]], new_tokens: int) -> list[list[Position]]:  # type: ignore[no-untyped-def] # noqa: ANN001 -- torch is loaded late
    """Feed prompts token by token and continue each greedily. Collective."""
    requests = [engine.add_request(1) for _ in prompts]
    answers: list[list[Position]] = [[] for _ in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        engine.requests.set_tokens(request.slot, 0, prompt[:1])
    while any(len(answer) < new_tokens for answer in answers):
        batch = engine.plan_step(requests)
        engine.run_eager(batch)
        logprobs_BV = engine.model.gather_logits(batch.logits).float().log_softmax(-1)
        top = logprobs_BV.topk(LISTED, dim=-1)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        for row, (ids, values) in zip(range(len(prompts)), rows, strict=False):  # further rows are padding
            at, prompt = requests[row].length, prompts[row]
            if at >= len(prompt) and len(answers[row]) < new_tokens:
                answers[row].append(Position(ids[0], dict(zip(ids, values, strict=True))))
            engine.append_token(requests[row])
            if at < len(prompt):
                engine.requests.set_tokens(requests[row].slot, at, [prompt[at]])
        if all(len(answer) >= new_tokens for answer in answers):
            break
    return answers


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("own", "ask"):
        part = commands.add_parser(name)
        part.add_argument("--model", required=True, help="model folder without a checkpoint")
        part.add_argument("--dcp", type=int, default=1)
        part.add_argument("--prompts", type=int, default=24)
        part.add_argument("--length", type=int, default=64, help="tokens of the longest prompt")
        part.add_argument("--new-tokens", type=int, default=16)
        part.add_argument("--seed", type=int, default=0)
        part.add_argument("-o", "--output", required=True, help="JSON file for the answers")
        if name == "ask":
            part.add_argument("--engine", required=True, help="vllm, sglang or an engine's file")
            part.add_argument("--tp", type=int, default=1)
            part.add_argument("--exchange", default="", help="ag_rs or a2a; by default the engine's own")
    compare = commands.add_parser("compare")
    compare.add_argument("files", nargs="+", type=Path, help="two layouts of one engine, then other engines")
    return parser.parse_args()


def main() -> int:
    """Run the command; return 1 if an engine differs more than rounding explains."""
    args = parse_arguments()
    if args.command != "compare":
        answers = decode_own(args) if args.command == "own" else ask(args)
        if answers is not None:
            Path(args.output).write_bytes(msgspec.json.encode(answers))
        return 0
    first, again, *others = [msgspec.json.decode(path.read_bytes(), type=Answers) for path in args.files]
    rounding = compare_answers(first, again)
    sys.stdout.write(format_comparison(first, again, rounding) + "\n")
    found = [compare_answers(first, other) for other in others]
    for other, one in zip(others, found, strict=True):
        sys.stdout.write(f"{format_comparison(first, other, one)}, {one.mean / rounding.mean:.2f} times as much\n")
    return 0 if all(one.mean <= MAX_RATIO * rounding.mean for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())

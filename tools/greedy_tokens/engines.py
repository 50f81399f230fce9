"""Get greedy answers from dcpbench's engine, and from servers of vLLM and SGLang."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.engine_plugins import SEED_VARIABLE, find_lack
from dcpbench.errors import ModelError, UsageError, WorkerError
from dcpbench.models import load_shape
from dcpbench.models.weight_formats import FP8
from dcpbench.points.names import NO_EXCHANGE, SYNTHETIC
from dcpbench.points.point import Point
from tools.greedy_tokens.answers import Answers, Position, WeightsKey, compute_sizes_key, make_prompts

if TYPE_CHECKING:
    import argparse

    from dcpbench.engine.decode_engine import Batch, DecodeEngine
    from dcpbench.models.shapes import ModelShape
    from dcpbench.servers.answer_pairs import Answer

MAX_LISTED = 5  # number of likeliest tokens that a position keeps
START_TIMEOUT_S = 500.0
GPU_PAGE = 64  # tokens of a page of KV rows


def load_checked_shape(folder: str) -> ModelShape:
    """Return the shape of a model folder. Raise ModelError if it has no synthetic weights."""
    shape = load_shape(folder)
    if lack := find_lack(shape, shape.published.name):
        raise ModelError(lack)
    return shape


def make_weights_key(shape: ModelShape, dtype: str) -> WeightsKey:
    """Return the key of the weights that an engine draws on this machine. Raise UsageError for a bad seed in the environment."""
    import torch

    seed = os.environ.get(SEED_VARIABLE, "0")
    if not seed.isdecimal():
        raise UsageError(f"{SEED_VARIABLE}={seed!r} is not a whole number; set it to one, or unset it for 0.")
    return WeightsKey(
        sizes=compute_sizes_key(shape),
        seed=int(seed),
        dtype=dtype,
        format=FP8 if shape.published.name == FP8 else dtype,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    )


def fetch_answers(args: argparse.Namespace) -> Answers:
    """Start the server of an engine's file and return its answers."""
    from dcpbench.servers.launch import Server, find_free_port
    from dcpbench.servers.presets import make_environment, resolve_engine

    shape = load_checked_shape(args.model)
    engine = resolve_engine(args.engine, None)
    point = Point(
        model=args.model, tp=args.tp, dcp=args.dcp, concurrency=1, context=args.length, backend=engine.name,
        exchange=args.exchange or NO_EXCHANGE, dtype="bf16", weights=SYNTHETIC,
    )  # fmt: skip
    port = find_free_port()
    command = engine.make_command(point, {}, args.model, port)
    log = Path(args.output).with_suffix(".log")
    prompts = make_prompts(shape.vocab, args.prompts, args.length, args.seed)
    with Server(command, log, make_environment(engine, point), port, engine.ready) as server:
        server.wait_until_ready(START_TIMEOUT_S)
        answers = asyncio.run(_request_answers(server.url, args.model, shape.vocab, prompts, args.new_tokens))
    # The name of the GPU is read after the engine has ended, because a CUDA context takes memory that the engine needs.
    key = make_weights_key(shape, "bf16")
    return Answers(name=f"{engine.name} {point.layout}", weights=key, prompts=prompts, answers=answers)


async def _request_answers(
    url: str, model: str, vocab: int, prompts: list[list[int]], new_tokens: int
) -> list[list[Position]]:
    """Request greedy answers from a server, one after another. Raise the errors of `list_positions`."""
    from dcpbench.servers.ask import Side
    from dcpbench.servers.client import Client, Target
    from dcpbench.servers.prompt_format import COMPLETIONS, PromptFormat

    prompt_format = PromptFormat(endpoint=COMPLETIONS, model=model, extras={"ignore_eos": True}, vocab=vocab)
    async with Client(Target.from_url(url)) as client:
        side = Side(client, prompt_format)
        return [list_positions(await side.fetch_answer(np.array(prompt, np.int32), new_tokens)) for prompt in prompts]


def list_positions(answer: Answer) -> list[Position]:
    """Return the positions of a server's answer, with the likeliest tokens that a position keeps and the token itself.

    Likeliest tokens without text are left out, because servers list special tokens as empty text. Raise WorkerError if a position
    has no log-probabilities, or if a token of the answer has neither an id nor a text.
    """
    if not answer.tops:
        raise WorkerError(
            "the server lists no log-probabilities of its likeliest tokens; start it with a flag that allows 5 of them, such as --max-logprobs 20."
        )
    found = []
    for token, name, logprob, tops in zip(answer.tokens, answer.names, answer.logprobs, answer.tops, strict=True):
        own = int(token) if answer.has_ids else find_id(name)
        if own is None:
            raise WorkerError(
                f"the server answered {name!r}, which is not one of t0, t1, …; write the model folder with `model FOLDER`."
            )
        top = sorted(tops.items(), key=lambda item: -item[1])[:MAX_LISTED]
        listed = {number: p for text, p in top if (number := find_id(text)) is not None}
        found.append(Position(own, listed | {own: logprob}))
    return found


def find_id(text: str) -> int | None:
    """Return the id of a token of the tokenizer, such as 17 for "t17"; None for other text."""
    word = text.strip()
    return int(word[1:]) if word[:1] == "t" and word[1:].isdecimal() else None


def decode_own(args: argparse.Namespace) -> Answers | None:
    """Return the answers of dcpbench's engine on rank 0, and None on other ranks. Run it with torchrun for several ranks."""
    import torch
    import torch.distributed as dist

    from dcpbench.bench.operators.rendezvous import start_distributed
    from dcpbench.workloads.session import build_whole_session, free_memory

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    rendezvous = Path(tempfile.gettempdir()) / f"greedy-tokens-{os.environ.get('MASTER_PORT', '')}"
    if ranks > 1:
        start_distributed(device, rank, ranks, rendezvous)
    shape = load_checked_shape(args.model)
    key = make_weights_key(shape, args.dtype)
    prompts = make_prompts(shape.vocab, args.prompts, args.length, args.seed)
    context = args.length + args.new_tokens + 1
    point = Point(
        model=args.model, tp=ranks, dcp=args.dcp, ep="1", concurrency=args.prompts, context=context,
        backend="triton" if cuda else "reference", exchange="ag_rs" if args.dcp > 1 else NO_EXCHANGE,
        dtype=args.dtype, page_size=GPU_PAGE if cuda else 1, weights_dtype=key.format,
    )  # fmt: skip
    with torch.inference_mode():
        lengths = [context] * len(prompts)
        engine = build_whole_session(point, shape, lengths, rank=rank, device=device, seed=key.seed).engine
        answers = decode_prompts(engine, prompts, args.new_tokens)
    del engine
    free_memory(device)
    if ranks > 1:
        dist.barrier()
        rendezvous.unlink(missing_ok=True)
        dist.destroy_process_group()
    name = f"dcpbench {point.layout}"
    return Answers(name=name, weights=key, prompts=prompts, answers=answers) if rank == 0 else None


def decode_prompts(engine: DecodeEngine, prompts: list[list[int]], new_tokens: int) -> list[list[Position]]:
    """Feed prompts token by token, and continue each greedily. Collective."""
    requests = [engine.add_request(1) for _ in prompts]
    answers: list[list[Position]] = [[] for _ in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        engine.request_pool.set_tokens(request.slot, 0, prompt[:1])
    while True:
        batch = engine.plan_step(requests)
        engine.run_eager(batch)
        rows = list_step(engine, batch)
        for request, prompt, answer, row in zip(
            requests, prompts, answers, rows, strict=False
        ):  # rows behind these are padding
            if request.length >= len(prompt) and len(answer) < new_tokens:
                answer.append(row)
        if all(len(answer) >= new_tokens for answer in answers):
            return answers
        for request, prompt in zip(requests, prompts, strict=True):
            at = request.length
            engine.append_token(request)
            if at < len(prompt):
                engine.request_pool.set_tokens(request.slot, at, [prompt[at]])


def list_step(engine: DecodeEngine, batch: Batch) -> list[Position]:
    """Return the position of each row of a step that has run. Collective."""
    assert batch.logits is not None
    assert batch.next_tokens is not None
    logprobs_BV = engine.model.gather_logits(batch.logits).float().log_softmax(-1)
    top = logprobs_BV.topk(MAX_LISTED, dim=-1)
    own_B1 = batch.next_tokens.unsqueeze(1)
    own = logprobs_BV.gather(1, own_B1)
    rows = zip(own_B1.tolist(), own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        Position(token, dict(zip(ids, values, strict=True)) | {token: logprob})
        for (token,), (logprob,), ids, values in rows
    ]

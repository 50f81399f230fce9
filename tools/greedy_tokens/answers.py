"""Read files of greedy answers, with the prompts and the weights of an engine."""

from __future__ import annotations

import dataclasses
import random
import zlib
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.models.shapes import ModelShape


class WeightsKey(msgspec.Struct, frozen=True, kw_only=True):
    """Identify synthetic weights: equal keys give equal numbers."""

    sizes: str  # CRC-32 of the model's shape, without its name, as 8 hex digits
    seed: int
    dtype: str  # dtype of the drawn tensors, bf16 or fp32
    format: str  # format of linear layers, the dtype or fp8
    device: str  # name of the GPU, or cpu: random numbers differ between kinds of devices


class Position(msgspec.Struct, frozen=True):
    """Hold the token of one position, and the log-probabilities of its likeliest tokens by id."""

    token: int
    logprobs: dict[int, float]


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the greedy answers of one engine, in the order of the prompts."""

    name: str
    weights: WeightsKey
    prompts: list[list[int]]
    answers: list[list[Position]]

    def list_tokens(self, prompt: int) -> list[int]:
        """Return the tokens of the answer to a prompt."""
        return [position.token for position in self.answers[prompt]]


def make_prompts(vocab: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Return seeded random prompts of different lengths up to `length`, without the ids 0 and 1 (begin and end of text)."""
    rng = random.Random(seed)
    return [[rng.randrange(2, vocab) for _ in range(max(1, length - number % 7))] for number in range(count)]


def compute_sizes_key(shape: ModelShape) -> str:
    """Return the CRC-32 of a model's sizes, routing rule and names of tensors, without its own name."""
    unnamed = dataclasses.replace(shape, name="")
    return f"{zlib.crc32(msgspec.json.encode(unnamed, order='deterministic')):08x}"


def read_answers(paths: Sequence[Path]) -> list[Answers]:
    """Return the answers of all files. Raise UsageError if they are from different prompts or weights."""
    files = [_read_file(path) for path in paths]
    for path, one in zip(paths[1:], files[1:], strict=True):
        check_same_weights(path, one.weights, paths[0], files[0].weights)
        if one.prompts != files[0].prompts:
            raise UsageError(
                f"{path} and {paths[0]} answer different prompts ({_format_prompts(one)}; {_format_prompts(files[0])}); "
                "give all commands the same --prompts, --length and --seed."
            )
        if list(map(len, one.answers)) != list(map(len, files[0].answers)):
            raise UsageError(
                f"{path} and {paths[0]} have answers of different lengths; give all commands the same --new-tokens, and see in the server's "
                "log why an answer ended early."
            )
    return _make_names_unique(paths, files)


def check_same_weights(path: Path, weights: WeightsKey, other: Path, others: WeightsKey) -> None:
    """Raise UsageError with the first differing field if two files are from different weights."""
    for field in msgspec.structs.fields(WeightsKey):
        mine, theirs = getattr(weights, field.name), getattr(others, field.name)
        if mine != theirs:
            raise UsageError(
                f"{path} and {other} are from different weights ({field.name}: {mine} and {theirs}); run both with the same "
                f"{_REMEDIES[field.name]}."
            )


_REMEDIES = {
    "sizes": "--model folder",
    "seed": "value of DCPBENCH_WEIGHTS_SEED",
    "dtype": "--dtype",
    "format": "--model folder and --dtype",
    "device": "kind of GPU",
}


def _read_file(path: Path) -> Answers:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Answers)
    except (OSError, msgspec.DecodeError) as e:
        raise UsageError(
            f"{path} is not a file of answers ({e}); write it with `own -o {path}` or `ask -o {path}`."
        ) from e
    if len(found.answers) != len(found.prompts) or not all(found.answers):
        raise UsageError(
            f"{path} has {sum(map(bool, found.answers))} answers to {len(found.prompts)} prompts; run its command again."
        )
    return found


def _format_prompts(one: Answers) -> str:
    return f"{len(one.prompts)} prompts, the first of {len(one.prompts[0])} tokens that begin with {one.prompts[0][:3]}"


def _make_names_unique(paths: Sequence[Path], files: Sequence[Answers]) -> list[Answers]:
    """Append the name of the file to names that several files have."""
    names = [one.name for one in files]
    return [
        msgspec.structs.replace(one, name=f"{one.name} ({path.stem})") if names.count(one.name) > 1 else one
        for path, one in zip(paths, files, strict=True)
    ]

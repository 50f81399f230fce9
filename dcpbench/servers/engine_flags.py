"""Read limits from the command lines of vLLM's and SGLang's servers. No torch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from dcpbench.servers.kv_capacity import parse_count
from dcpbench.servers.step_probe import ServerLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.records.record import EngineSettings

TOKEN_BUDGET_FLAGS = ("--max-num-batched-tokens", "--chunked-prefill-size")
MAX_REQUESTS_FLAGS = ("--max-num-seqs", "--max-running-requests")
MAX_LENGTH_FLAGS = ("--max-model-len", "--context-length")
PCP_FLAGS = ("--prefill-context-parallel-size", "-pcp")  # vLLM's prefill context parallelism
MAX_CHUNK_FLAGS = ("--long-prefill-token-threshold",)
OF_A_REPLICA = "--max-num-seqs"  # limits each data-parallel replica by itself
KV_BLOCKS_FLAGS, BLOCK_FLAGS = ("--num-gpu-blocks-override",), ("--block-size",)  # vLLM's KV cache of a rank
KV_TOKENS_FLAGS = ("--max-total-tokens",)  # SGLang's KV cache of a rank
MAX_DEFAULT_BLOCK = 128  # tokens of a KV block that an attention backend of vLLM chooses at most


def find_count(words: Sequence[str], flags: Sequence[str]) -> int | None:
    """Return the last positive number that any of these flags has in a command line; None without one."""
    found = None
    for word, after in itertools.pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag in flags:
            found = parse_count(value if equals else after) or found
    return found


def find_token_budget(words: Sequence[str], settings: EngineSettings | None) -> int | None:
    """Return the prompt tokens of a step, from the flags of a server or from its log; None if both leave them out."""
    logged = settings.max_batched_tokens if settings is not None else None
    return find_count(words, TOKEN_BUDGET_FLAGS) or logged or None


def read_limits(words: Sequence[str], dp: int = 1, dcp: int = 1) -> ServerLimits:
    """Return the limits that the command line of a server with `dp` replicas states; `dcp`: its decode context parallel degree."""
    requests = find_count(words, MAX_REQUESTS_FLAGS)
    each = any(word.partition("=")[0] == OF_A_REPLICA for word in words)
    return ServerLimits(
        max_batched_tokens=find_count(words, TOKEN_BUDGET_FLAGS),
        max_requests=requests * (dp if each else 1) if requests else None,
        max_model_len=find_count(words, MAX_LENGTH_FLAGS),
        kv_tokens=_compute_max_kv_tokens(words, dp, dcp),
    )


def _compute_max_kv_tokens(words: Sequence[str], dp: int, dcp: int) -> int | None:
    """Return the tokens that a server's KV cache holds at most in all, as its flags limit it; None if they do not."""
    blocks, of_rank = find_count(words, KV_BLOCKS_FLAGS), find_count(words, KV_TOKENS_FLAGS)
    if blocks is not None:
        block_tokens = find_count(words, BLOCK_FLAGS) or MAX_DEFAULT_BLOCK
        return blocks * block_tokens * dp * dcp * (find_count(words, PCP_FLAGS) or 1)
    return None if of_rank is None else of_rank * dp * dcp

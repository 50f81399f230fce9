"""Divide a model into pipeline stages, and compute the time of a round of micro-batches. No torch.

Layers are divided as vLLM's `get_pp_indices` divides them: evenly, with one layer more for stages before the last. The first
stage has the embedding, the last one the final norm and the LM head. As many micro-batches are in flight as there are stages
(vLLM's batch queue), unless stated otherwise, and a micro-batch enters the first stage again once it has left the last:

    round = max(Σ stages + hops, micro-batches · slowest stage)

Each request of a round gets a token. A stage waits for the rest of the round: that share is the bubble.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.errors import UnusedOptionsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.cluster_specs import Machine
    from dcpbench.points.comm_model import CommModel
    from dcpbench.points.layout import Layout
    from dcpbench.points.roofline import Sharding

SENT_TENSORS = 2  # tensors of a row that a stage sends to the next one: hidden state and residual


def check_micro_batches(micro_batches: int | None, stages: Sequence[int]) -> None:
    """Raise UsageError for a number of micro-batches that no number of stages uses."""
    if micro_batches and max(stages) == 1:
        raise UnusedOptionsError(
            f"--stages micro-batches={micro_batches} has no effect without pipeline stages; add for example pp=2.",
            ["--stages micro-batches"],
        )


def split_layers(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage; those that remain go to stages from the second last one backwards."""
    each, more = divmod(layers, stages)
    return [each + (stages - 1 - more <= stage < stages - 1) for stage in range(stages)]


def make_stages(shape: ModelShape, stages: int) -> list[ModelShape]:
    """Return the part of a model that each stage holds.

    Layers with an indexer, or with a sliding window, are taken to be spread evenly; the last stage drafts tokens.
    """
    if stages == 1:
        return [shape]
    found, begin = [], 0
    for count in split_layers(shape.layers, stages):
        end = begin + count

        def share(number: int, begin: int = begin, end: int = end) -> int:
            return end * number // shape.layers - begin * number // shape.layers

        found.append(
            dataclasses.replace(
                shape,
                layers=count,
                first_k_dense_replace=min(max(shape.first_k_dense_replace - begin, 0), count),
                gqa=shape.gqa and dataclasses.replace(shape.gqa, window_layers=share(shape.gqa.window_layers)),
                indexer=shape.indexer and dataclasses.replace(shape.indexer, layers=share(shape.indexer.layers)),
                has_embedding=begin == 0,
                has_head=end == shape.layers,
                mtp_layers=shape.mtp_layers if end == shape.layers else 0,
                drafts=shape.drafts and end == shape.layers,
            )
        )
        begin = end
    return found


def split_chunks(chunks: Sequence[tuple[int, int]], parts: int) -> tuple[tuple[int, int], ...]:
    """Return the share of one of `parts` equal parts of prompt chunks, (tokens, stored tokens before them).

    The share has 1/parts of the tokens and of the pairs of a query and a key, as ranks of prefill context parallelism have, which
    take a piece from the beginning and one from the end. Micro-batches have it on average.
    """
    return tuple((-(-n // parts), stored + (n - -(-n // parts)) // 2) for n, stored in chunks)


def compute_hop_bytes(rows: int, hidden: int, itemsize: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that a rank of a stage receives for a micro-batch: from the stage before it, and from its own stage.

    Each of `ranks` tensor-parallel ranks is sent its share of the rows' tensors, and gathers the others (vLLM's
    `send_tensor_dict` with `all_gather_group`).
    """
    whole = SENT_TENSORS * rows * hidden * itemsize
    return whole // ranks, whole - whole // ranks


def check_hosts(layout: Layout, machine: Machine, option: str = "name a machine") -> None:
    """Raise UsageError if calls between ranks of different hosts are needed and unknown. `option`: how a machine is named."""
    host = machine.gpus_per_host
    if layout.gpus > host and machine.link is None:
        raise UsageError(
            f"{layout.gpus} GPUs are more than the {host} of a host, and no link between hosts is described; use fewer, or {option} "
            f"with +LINK, such as {machine.gpu}+rdma-400, or a file with link."
        )
    if layout.spread.tp > host and 1 < layout.spread.dp <= host:
        ranks = "ranks of prefill context parallelism" if layout.pcp > 1 else "attention replicas"
        raise UsageError(
            f"its {ranks} lie on several hosts, and what calls between a few ranks of different hosts take is not known."
        )


def predict_hops_us(comm_model: CommModel, sharding: Sharding, rows: int, stages: int) -> list[float]:
    """Return the time that a micro-batch of `rows` rows takes from each stage to the next, by the model of the machine's links.

    A stage has the ranks of `sharding`, and stages follow each other on the hosts. Raise UsageError if a call is unknown.
    """
    layout = sharding.layout
    sent, gathered = compute_hop_bytes(rows, sharding.shape.hidden, sharding.itemsize, layout.attn_tp)
    hops = []
    for stage in range(1, stages):
        seconds = comm_model.predict_hop_seconds(sent, across=stage * layout.tp % comm_model.host == 0).mean
        if gathered:
            seconds += comm_model.predict_seconds("all-gather", layout.attn_tp, gathered).mean
        hops.append(1e6 * seconds)
    return hops


def count_micro_batches(wanted: int, decodes: int, *, chunks: bool) -> int:
    """Return the number of micro-batches of a step; no more than decodes, unless chunks fill the others."""
    return wanted if chunks else max(min(wanted, decodes), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Hold the time of a round of micro-batches."""

    us: float
    bubble_share: float  # share of the round in which the mean stage has no work


def compute_round(stages_us: Sequence[float], hops_us: Sequence[float], micro_batches: int) -> Round:
    """Return a round of `micro_batches`, each of which takes these times in the stages and between them."""
    through = sum(stages_us) + sum(hops_us)
    us = max(through, micro_batches * max(stages_us))
    return Round(us=us, bubble_share=1 - micro_batches * sum(stages_us) / len(stages_us) / us)

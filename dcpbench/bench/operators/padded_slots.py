"""Bench padded-slots: a decode step with more graph rows than requests, with and without a padding slot.

    slot-0-live       slots 0 … n-1 are requests': unused rows of the graph, on slot 0, are rows of a live request
    slot-0-padding    slot 0 is reserved: unused rows use the padding page

The reference is the same step with the unused rows filled by requests of their own, so that there is no padding:
tensors have the same shapes, and every difference is caused by padding.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import Calls, compute_relative_error
from dcpbench.bench.record import Overwritten
from dcpbench.engine.decode import DecodeEngine
from dcpbench.engine.groups import make_groups
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.points.batches import pad_batch
from dcpbench.points.layout import Layout
from dcpbench.points.memory import Layers, count_all_layers
from dcpbench.points.shapes import SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.bench.record import Case
    from dcpbench.engine.decode import Batch, Request

LIVE, PADDING = "slot-0-live", "slot-0-padding"
KNOWN = "known"
"""The engine has the ids of the prompt, and a KV row of its first token that it has computed itself."""
VICTIM = 0
"""Index of the request in slot 0, if that slot is not reserved."""
ALONE = Layout(1)
HELD_MOE = 4
"""Distinct MoE layers in memory, which the others reuse in turn; far more than the L2 cache."""
ROUNDING = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""‖x − ref‖ / ‖ref‖ of logits that other rows' routing may explain, by changing in which order sums are taken."""

Stored = list[tuple["torch.Tensor", "torch.Tensor"]]
"""KV rows [layers, tokens, Q] and token ids [tokens] of each request."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Device and settings of the measurement."""

    model: str
    dtype: torch.dtype
    page_size: int
    backend: str


MACHINES = {
    "cuda": Machine("deepseek-v2-lite", torch.bfloat16, 64, "triton"),
    "cpu": Machine("tiny", torch.float32, 4, "reference"),
}


@dataclasses.dataclass
class Scene:
    """An engine with requests in flight, and the step that is about to run."""

    engine: DecodeEngine
    live: list[Request]
    guests: list[Request]
    """Requests of one token in the rows that would be padding."""
    batch: Batch
    logits: torch.Tensor
    """[live, vocab] of the last step; one tensor for life, as a captured graph writes it, too."""

    def run_step(self) -> None:
        """Decode a token of every request."""
        self.engine.run_eager(self.batch)
        assert self.batch.logits is not None
        self.logits.copy_(self.batch.logits[: len(self.live), : self.logits.shape[1]])

    def copy_stored(self, context: int) -> Stored:
        """Return copies of the data that each live request has stored before the step, which writes KV row context - 1."""
        rows, requests = self.engine.model.kv.get_all_rows(), self.engine.requests
        return [
            (
                rows[:, requests.table[request.slot, : context - 1].long()],
                requests.tokens[request.slot, :context].clone(),
            )
            for request in self.live
        ]


@dataclasses.dataclass(frozen=True)
class Corruption:
    """Changes to each live request in a step."""

    rows: list[list[tuple[int, int]]]
    """(layer, token) of KV rows that were stored before the step and have changed."""
    ids: list[list[int]]
    """Tokens of the prompt with changed ids."""
    errors: list[float]
    """‖x − ref‖ / ‖ref‖ of the logits."""

    @classmethod
    def from_states(cls, before: Stored, after: Stored, errors: list[float]) -> Corruption:
        """Return the changes between the data stored before and after the step."""
        pairs = list(zip(before, after, strict=True))
        return cls(
            rows=[[(layer, token) for layer, token in _list_places((a != b).any(dim=-1))] for (a, _), (b, _) in pairs],
            ids=[[token for (token,) in _list_places(a != b)] for (_, a), (_, b) in pairs],
            errors=errors,
        )


def _list_places(differs: torch.Tensor) -> list[list[int]]:
    places: list[list[int]] = differs.nonzero().tolist()
    return places


class PaddedSlots:
    """Builds cases; the weights are made once."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed, self.machine = device, seed, MACHINES[device.type]
        self.shape = SHAPES[self.machine.model]
        source = SyntheticSource(seed, self.machine.dtype, device)
        whole = count_all_layers(self.shape)
        self.weights = load_weights(source, self.shape, ALONE, 0, Layers(whole.dense, min(HELD_MOE, whole.moe)))

    def build_calls(self, case: Case) -> Calls:
        """Return calls of one decode step with sizes requests, context and ids, `known` or `elsewhere`."""
        requests, context = int(case.sizes["requests"]), int(case.sizes["context"])
        known, spare = case.sizes["ids"] == KNOWN, pad_batch(requests) - requests
        scene = self._make_scene(requests, 0, context, padding=case.variant == PADDING)
        seen: list[Corruption] = []

        def check_step(run: Callable[[], None]) -> str:
            # Beside the truth's rows, those of padding read the same token.
            reads = self._make_prompt(VICTIM, context)[0] if known and case.variant == LIVE else 0
            truth = self._make_scene(requests, spare, context, padding=True)
            self._reset_state(truth, context, known=known, guest=reads)
            truth.run_step()
            self._reset_state(scene, context, known=known)
            before = scene.copy_stored(context)
            run()
            errors = [compute_relative_error(*pair) for pair in zip(scene.logits, truth.logits, strict=True)]
            seen[:] = [Corruption.from_states(before, scene.copy_stored(context), errors)]
            return describe_unexpected(seen[0], case, self.shape.layers, ROUNDING[self.machine.dtype])

        def count_overwritten() -> Overwritten:
            tables, kv, harm = scene.engine.requests, scene.engine.model.kv, seen[0]
            return Overwritten(
                kv_rows=sum(map(len, harm.rows)),
                token_ids=sum(map(len, harm.ids)),
                logit_error=max(harm.errors),
                table_bytes=tables.table[0].nbytes + tables.tokens[0].nbytes if case.variant == PADDING else 0,
                page_bytes=kv.data.nbytes // kv.data.shape[1],
            )

        return Calls(
            calls=[scene.run_step],
            check=check_step,
            written_bytes=self.weights.count_bytes(),
            overwritten=count_overwritten,
        )

    def _make_scene(self, requests: int, guests: int, context: int, *, padding: bool) -> Scene:
        shape, machine = self.shape, self.machine
        pages = 1 + requests * -(-context // machine.page_size) + guests
        kv = KvPool(shape.layers, pages, machine.page_size, shape.kv_width, machine.dtype, self.device)
        model = Model(
            shape, ALONE, make_groups(ALONE, 0), self.weights, kv, interleave=1, max_context=context, device=self.device
        )
        engine = DecodeEngine(
            model,
            backend=machine.backend,
            exchange="none",
            max_requests=requests + guests,
            max_context=context,
            padding=padding,
        )
        live = [engine.add_request(context) for _ in range(requests)]
        others = [engine.add_request(1) for _ in range(guests)]
        batch = engine.get_batch(requests + guests)
        logits = torch.empty(requests, shape.vocab, dtype=machine.dtype, device=self.device)
        return Scene(engine, live, others, batch, logits)

    def _reset_state(self, scene: Scene, context: int, *, known: bool, guest: int = 0) -> None:
        """Restore KV and token ids of all requests to their state before the step; `guest` is the token of each guest."""
        engine, both = scene.engine, [*scene.live, *scene.guests]
        engine.requests.tokens.zero_()
        for number, request in enumerate(scene.live):
            engine.write_random_kv(request, number, self.seed)
        for request in scene.guests:
            engine.requests.set_tokens(request.slot, 0, [guest])
        if known:  # a first token attends to itself alone, so that a step computes its row as a prefill would
            self._write_prompts(scene, context)
            engine.run_eager(engine.plan_rows([r.slot for r in both], [0] * len(both)))
            self._write_prompts(scene, context)
        else:
            for number, request in enumerate(scene.live):
                engine.requests.set_tokens(request.slot, context - 1, [self._make_prompt(number, context)[-1]])
        engine.plan_step(both)

    def _write_prompts(self, scene: Scene, context: int) -> None:
        for number, request in enumerate(scene.live):
            scene.engine.requests.set_tokens(request.slot, 0, self._make_prompt(number, context))

    def _make_prompt(self, number: int, context: int) -> list[int]:
        """Return the token ids of a request, none of them 0."""
        return [1 + (7919 * (number + 1) + 104729 * i) % (self.shape.vocab - 1) for i in range(context)]


def describe_unexpected(harm: Corruption, case: Case, layers: int, rounding: float) -> str:
    """Return an unexpected effect of padding: expected are no effect, or changes to one request in known places."""
    others = slice(0 if case.variant == PADDING else VICTIM + 1, None)
    if any(harm.rows[others]) or any(harm.ids[others]) or any(e > rounding for e in harm.errors[others]):
        return "padding rows changed a request that is not in slot 0"
    if case.variant == PADDING:
        return ""
    if any(token for _, token in harm.rows[VICTIM]) or set(harm.ids[VICTIM]) - {1}:
        return "padding rows changed other tokens of the request in slot 0 than its first KV row and second id"
    if case.sizes["ids"] != KNOWN and (len(harm.rows[VICTIM]) != layers or not harm.errors[VICTIM]):
        return "padding rows did not change the first KV row of slot 0 in every layer, and with it its logits"
    return ""

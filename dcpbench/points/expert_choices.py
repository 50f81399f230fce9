"""Choose experts for tokens so that they follow a stated distribution. No torch.

A token takes k different experts. A distribution states for each layer and expert the share of tokens that take it: at most
1, and k in sum. Tokens draw one of many sets of k experts, independently of each other, so that the shares alone determine
how many experts a step reads. The sets keep to the groups of a model, and together they contain each expert as often as its
share states (herding: each set is the best feasible one for the shares that are still missing).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import UsageError
from dcpbench.points.expert_distribution import HASH_MARK, ZIPF, parse_exponent, read_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.models.shapes import ModelShape

ZIPF_CHOICES, FILE_CHOICES = 16384, 2048  # sets of experts per layer that tokens draw from; a file takes longer
MAX_DEVIATION = 0.02  # largest share of routed rows that may miss the stated experts before the load is refused
SIMULATED_TOKENS, MIN_STEPS = 16384, 4  # tokens and fewest steps for an estimate of the busiest rank's work


@functools.lru_cache(maxsize=16)
def load_choices(routing: str, shape: ModelShape) -> Choices:
    """Return the choices of a model's tokens; raise UsageError if the model cannot route like that."""
    if not shape.experts:
        raise UsageError(f"--routing {routing}: {shape.name} has no experts; leave --routing out.")
    if routing.startswith(ZIPF):
        sets_LSk = _select_zipf_sets(routing, shape)
    else:
        path = routing.partition(HASH_MARK)[0]
        wanted_LE = _fit_counts(path, parse_counts(path, read_counts(routing)), shape)
        sets_LSk = _select_checked(routing, wanted_LE, FILE_CHOICES, shape)
    return Choices(sets_LSk.astype(np.int16), shape.experts)


def _select_zipf_sets(routing: str, shape: ModelShape) -> np.ndarray:
    """Return the sets of all layers, [L, S, k]: those of one layer, with other experts in each rank of the law in the others."""
    rng = np.random.default_rng(0)
    ranked_E = compute_zipf_shares(shape.experts, shape.top_k, parse_exponent(routing))
    (sets_Sk,) = _select_checked(routing, rng.permutation(ranked_E)[None], ZIPF_CHOICES, shape)
    return np.stack([_permute(sets_Sk, shape, rng) for _ in range(shape.layers - shape.first_k_dense_replace)])


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """Hold the sets of experts that tokens draw from."""

    sets: np.ndarray  # [L, S, k]
    experts: int

    @functools.cached_property
    def shares_LE(self) -> np.ndarray:
        """Share of tokens that take each expert, by layer."""
        rows_LE = np.stack([np.bincount(sets.ravel(), minlength=self.experts) for sets in self.sets])
        return np.asarray(rows_LE / self.sets.shape[1])

    def draw(self, numbers: Sequence[int], seed: int) -> np.ndarray:
        """Return the experts of tokens, [layers, T, k]; those of a token depend on its number, the seed and the layer alone."""
        layers, sets, _ = self.sets.shape
        drawn_TL = np.array([np.random.default_rng((seed, number)).integers(sets, size=layers) for number in numbers])
        return np.asarray(self.sets[np.arange(layers)[:, None], drawn_TL.reshape(-1, layers).T])

    def estimate_hit(self, tokens: int) -> float:
        """Return the expected number of experts with a token, the mean of all layers: Σ (1 − (1 − share)^T)."""
        return float((1 - (1 - self.shares_LE) ** tokens).sum(1).mean())

    @functools.lru_cache(maxsize=256)  # noqa: B019 -- choices are cached themselves
    def estimate_busiest(self, tokens: int, ranks: int) -> float:
        """Return the mean number of experts with a token on each layer's busiest rank, from simulated steps of all layers.

        Ranks hold contiguous runs of experts.
        """
        rng = np.random.default_rng(0)
        steps = max(MIN_STEPS, SIMULATED_TOKENS // tokens)
        busiest = []
        for sets_Sk in self.sets:
            hit = np.zeros((steps, self.experts), dtype=bool)
            chosen = sets_Sk[rng.integers(len(sets_Sk), size=(steps, tokens))].reshape(steps, -1)
            hit[np.arange(steps)[:, None], chosen] = True
            busiest.append(hit.reshape(steps, ranks, -1).sum(2).max(1).mean())
        return float(np.mean(busiest))


def compute_zipf_shares(experts: int, top_k: int, exponent: float) -> np.ndarray:
    """Return the share of tokens that take the first, second, … expert: in proportion to rank^−S, at most 1, k in sum.

    What experts with a share of 1 cannot take goes to the others in proportion.
    """
    weight_E = np.arange(1, experts + 1, dtype=float) ** -exponent
    full = 0
    while True:
        rest_E = weight_E[full:] * (top_k - full) / weight_E[full:].sum()
        over = int((rest_E > 1).sum())
        if not over:
            return np.concatenate([np.ones(full), rest_E])
        full += over


def select_sets(shares_LE: np.ndarray, count: int, top_k: int, groups: int, top_groups: int) -> np.ndarray:
    """Return `count` sets of k experts of at most `top_groups` groups for each layer, [L, S, k], that contain experts in proportion to
    the shares.
    """
    layers, experts = shares_LE.shape
    each, layer_L1 = experts // groups, np.arange(layers)[:, None]
    combined_XG = np.array(list(itertools.combinations(range(groups), top_groups if groups > 1 else 1)))
    missing_LE = shares_LE / 2  # half of the first step, so that rounding is even over all experts
    found = np.empty((layers, count, top_k), dtype=np.int64)
    for row in range(count):
        missing_LE = missing_LE + shares_LE
        best_LGk = (
            _find_largest(missing_LE.reshape(layers, groups, each), min(top_k, each))
            + np.arange(0, experts, each)[:, None]
        )
        value_LGk = np.take_along_axis(missing_LE, best_LGk.reshape(layers, -1), 1).reshape(best_LGk.shape)
        value_LXk = value_LGk[:, combined_XG].reshape(layers, len(combined_XG), -1)
        sums_LX = -np.partition(-value_LXk, top_k - 1, axis=2)[..., :top_k].sum(2)
        taken_LG = combined_XG[sums_LX.argmax(1)]
        member_Lm = best_LGk[layer_L1, taken_LG].reshape(layers, -1)
        chosen_Lk = _find_largest(np.take_along_axis(missing_LE, member_Lm, 1), top_k)
        found[:, row] = np.take_along_axis(member_Lm, chosen_Lk, 1)
        missing_LE[layer_L1, found[:, row]] -= 1
    return found


def _find_largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the largest values along the last axis."""
    return np.argpartition(-values, count - 1, axis=-1)[..., :count]


def _permute(sets_Sk: np.ndarray, shape: ModelShape, rng: np.random.Generator) -> np.ndarray:
    """Return sets with other experts in the same roles: groups change places, and so do the experts within each group."""
    each = shape.experts // shape.n_group
    groups_G = rng.permutation(shape.n_group)
    within_Ge = np.stack([rng.permutation(each) for _ in range(shape.n_group)])
    return np.asarray((groups_G[:, None] * each + within_Ge).ravel()[sets_Sk])


def _select_checked(routing: str, wanted_LE: np.ndarray, count: int, shape: ModelShape) -> np.ndarray:
    """Return the sets of layers, [L, S, k]; raise UsageError if the groups of the model do not allow their distribution."""
    found = Choices(select_sets(wanted_LE, count, shape.top_k, shape.n_group, shape.topk_group), shape.experts)
    deviation = np.abs(found.shares_LE - wanted_LE).sum(1).max() / 2 / shape.top_k
    if deviation > MAX_DEVIATION:
        raise UsageError(
            f"--routing {routing}: {shape.name} routes a token to at most {shape.topk_group} of {shape.n_group} groups of experts, so "
            f"{deviation * 100:.0f} % of the rows would go to other experts than that distribution states; "
            + ("use a smaller exponent." if routing.startswith(ZIPF) else "give a file of that model.")
        )
    return found.sets


def parse_counts(path: str, content: bytes) -> np.ndarray:
    """Return the counts of a file, [layers, experts]; raise UsageError if it has none."""
    try:
        loaded = json.loads(content)
        counts = np.asarray(loaded["logical_count"] if isinstance(loaded, dict) else loaded, dtype=float)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        counts = np.empty(0)
        cause: Exception | None = e
    else:
        cause = None
    counts = counts.sum(0) if counts.ndim == 3 else counts  # noqa: PLR2004 -- steps, layers, experts
    if counts.ndim != 2 or not counts.size or not np.isfinite(counts).all() or (counts < 0).any():  # noqa: PLR2004
        raise UsageError(
            f'--routing {path}: no counts of experts by layer; it should be JSON such as {{"logical_count": [[12, 0, 7, …], …]}}.'
        ) from cause
    return counts


def _fit_counts(path: str, counts_LE: np.ndarray, shape: ModelShape) -> np.ndarray:
    """Return the shares of tokens of a model's layers with experts, from the counts of a file."""
    layers = shape.layers - shape.first_k_dense_replace
    rows, experts = counts_LE.shape
    if experts != shape.experts or (rows != layers and rows < shape.layers):
        raise UsageError(
            f"--routing {path} has {rows} × {experts} counts, layers × experts, and {shape.name} has {shape.layers} layers, {layers} of them with "
            f"{shape.experts} experts; record that model."
        )
    used_LE = counts_LE if rows == layers else counts_LE[shape.first_k_dense_replace : shape.layers]
    totals_L1 = used_LE.sum(1, keepdims=True)
    shares_LE = np.asarray(used_LE * shape.top_k / np.where(totals_L1 > 0, totals_L1, 1))
    if (totals_L1 <= 0).any() or (shares_LE > 1 + MAX_DEVIATION).any():
        raise UsageError(
            f"--routing {path}: a layer has no counts, or an expert with more than 1/{shape.top_k} of them, as no router of {shape.name} "
            "produces; check that the file has the counts of logical experts."
        )
    return shares_LE

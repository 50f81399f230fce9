"""Find the names under which a report shows models that were given as folders."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from dcpbench.models import SHAPES, get_title
from dcpbench.points.budget import ITEMSIZE
from dcpbench.points.layout import Layout
from dcpbench.points.memory import compute_weight_bytes, count_all_layers
from dcpbench.records.model_sizes import (
    ModelSizes,
    ShortenedModel,
    find_shortened_model,
    is_published_name,
    shorten_shape,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.records.record import Record
    from dcpbench.records.runs import Run


def find_model_names(runs: Sequence[Run]) -> dict[str, str]:
    """Return the shown name of each model folder that holds a published model with fewer layers.

    A folder is left out if its records disagree on its sizes. A record without sizes has those of the other records with the
    same folder. Folders with the same sizes that one run measured keep their own names in brackets.
    """
    found: dict[str, set[ShortenedModel]] = {}
    for record in (record for run in runs for record in run.records):
        if (model := identify_model(record)) is not None:
            found.setdefault(record.point.model, set()).add(model)
    names = {
        folder: f"{get_title(one.name)}, {one.layers} of {one.all_layers} layers"
        for folder, (one, *others) in found.items()
        if not others
    }
    doubled = {name for run in runs for name in _find_doubled(names, {record.point.model for record in run.records})}
    return {folder: f"{name} ({PurePath(folder).name})" if name in doubled else name for folder, name in names.items()}


def _find_doubled(names: dict[str, str], folders: Iterable[str]) -> set[str]:
    shown = [names[folder] for folder in folders if folder in names]
    return {name for name in shown if shown.count(name) > 1}


def identify_model(record: Record) -> ShortenedModel | None:
    """Return the published model of which a record's folder has fewer layers; None if it is another one, or unknown."""
    if is_published_name(record.point.model):
        return None
    if isinstance(record.model_sizes, ModelSizes):
        return find_shortened_model(record.model_sizes)
    return _identify_by_weights(record)


def _identify_by_weights(record: Record) -> ShortenedModel | None:
    """Return the model with exactly the recorded weights per GPU; for records of dcpbench's engine without sizes."""
    point, conditions = record.point, record.conditions
    if conditions is None or point.dtype not in ITEMSIZE:
        return None
    for name, shape in SHAPES.items():
        if not conditions.layers < shape.layers:
            continue
        short = shorten_shape(shape, conditions.layers)
        if conditions.full_weights_bytes_per_gpu == compute_weight_bytes(
            short,
            Layout(tp=point.tp, dp=point.dp, dcp=point.dcp),
            ITEMSIZE[point.dtype],
            *count_all_layers(short),
            point.query_replication,
            shape.get_weight_format(point.weights_precision),
            ep=point.ep,
        ):
            return ShortenedModel(name, conditions.layers, shape.layers)
    return None

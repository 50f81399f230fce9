"""A Hugging Face checkpoint folder: safetensors files, read part by part so that a rank touches only its shard."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from dcpbench.errors import ModelError
from dcpbench.points.shapes import INDEX_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from pathlib import Path

FP8_BLOCK = 128
"""Side of the square blocks that share one scale in DeepSeek's FP8 checkpoints."""


class CheckpointSource:
    """Reads parts of tensors by name. Raises ModelError for missing or misshaped tensors, naming them.

    DeepSeek's published FP8 weights (`weight` in e4m3 with `weight_scale_inv` per 128 × 128 block) become the model's
    dtype as they are read: weight · scale.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.kind = str(folder)
        self.folder, self.dtype, self.device = folder, dtype, device
        self.file_of = _tensor_files(folder)
        self.open_files: dict[Path, safe_open] = {}

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See weights.Source."""
        part = self._slice(name, shape)
        index = (rows or slice(None),) if len(shape) == 1 else (rows or slice(None), columns or slice(None))
        tensor = part[index]
        scale_name = name + "_scale_inv"
        if scale_name in self.file_of:
            tensor = self._dequantise(tensor, scale_name, shape, rows, columns)
        elif tensor.dtype.itemsize == 1:
            raise ModelError(f"{self.folder}: {name!r} is {tensor.dtype}, and there is no {scale_name!r} to scale it.")
        return tensor.to(self.device, dtype or self.dtype)

    def _slice(self, name: str, shape: tuple[int, ...]):  # noqa: ANN202 - safetensors' type is private
        if name not in self.file_of:
            raise ModelError(f"{self.folder} has no tensor {name!r}; the checkpoint does not match its config.json.")
        path = self.file_of[name]
        try:
            part = self._open(path).get_slice(name)
        except SafetensorError as e:
            raise ModelError(f"{path} has no tensor {name!r}, though {INDEX_FILE} says so: {e}.") from e
        if tuple(part.get_shape()) != shape:
            raise ModelError(
                f"{self.folder}: {name!r} has shape {tuple(part.get_shape())}, while config.json makes it {shape}."
            )
        return part

    def _dequantise(
        self, tensor: torch.Tensor, scale_name: str, shape: tuple[int, ...], rows: slice | None, columns: slice | None
    ) -> torch.Tensor:
        blocks = tuple(-(-n // FP8_BLOCK) for n in shape)
        scale = self._slice(scale_name, blocks)[:].float()
        for dim, part in enumerate((rows, columns)):
            start, stop, _ = (part or slice(None)).indices(shape[dim])
            block_of = torch.arange(start, stop) // FP8_BLOCK
            scale = scale.index_select(dim, block_of)
        return tensor.float() * scale

    def _open(self, path: Path) -> safe_open:
        if path not in self.open_files:
            try:
                self.open_files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as e:
                raise ModelError(f"{path} cannot be read as safetensors: {e}.") from e
        return self.open_files[path]


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise ModelError(f"{index} is not a safetensors index: {e!r}.") from e
    single = folder / WEIGHTS_FILE
    if not single.is_file():
        raise ModelError(f"{folder} holds neither {INDEX_FILE} nor {WEIGHTS_FILE}; give a Hugging Face checkpoint.")
    try:
        with safe_open(single, framework="pt") as f:
            return dict.fromkeys(f.keys(), single)
    except (OSError, SafetensorError) as e:
        raise ModelError(f"{single} cannot be read as safetensors: {e}.") from e

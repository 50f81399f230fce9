"""A Hugging Face checkpoint folder: safetensors files, read part by part so that a rank touches only its shard."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from dcpbench.engine.scaled_weights import ALL, expand_to_blocks, slice_scaled
from dcpbench.errors import ModelError
from dcpbench.kernels.block_scaled import dequantize_weight, quantize_weight
from dcpbench.models.checkpoint_folder import INDEX_FILE, WEIGHTS_FILE
from dcpbench.models.tensor_names import SCALE
from dcpbench.models.weight_formats import SCALE_BLOCK

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.kernels.block_scaled import Scaled

E4M3_NAN = 0x7F  # in all bits below the sign; e4m3 has no infinity
CHECKED_NUMBERS = 1 << 20  # numbers that are checked at once


class CheckpointSource:
    """Read parts of tensors by name. Raise ModelError for missing or misshaped tensors, naming them.

    DeepSeek's published FP8 weights (`weight` in e4m3 with `weight_scale_inv` per 128 × 128 block) are kept if they are
    requested with `get_scaled`, and are otherwise converted to the model's dtype while they are read: weight · scale. Files
    are memory-mapped, so only the current part of a file is held.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.kind = str(folder)
        self.folder, self.dtype, self.device = folder, dtype, device
        self.file_of = _find_tensor_files(folder)
        self.open_files: dict[Path, safe_open] = {}

    def get_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Implement weights.Source.get_tensor."""
        part = self._get_slice(name, shape)
        if name + SCALE in self.file_of:
            height, depth = shape
            weight = self.get_scaled(name, (height, depth), rows=rows or ALL, columns=columns or ALL)
            return dequantize_weight(weight).to(dtype or self.dtype)
        tensor = part[(rows or ALL,) if len(shape) == 1 else (rows or ALL, columns or ALL)]
        if tensor.dtype.itemsize == 1:
            raise ModelError(
                f"{self.folder}: {name!r} is {tensor.dtype}, and there is no {name + SCALE!r} to scale it."
            )
        self._check_finite(name, tensor)
        return tensor.to(self.device, dtype or self.dtype)

    def get_scaled(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Scaled:
        """Implement weights.Source.get_scaled. Other weights than fp8 are quantised in the published blocks."""
        part = self._get_slice(name, shape)
        if name + SCALE not in self.file_of:
            around_it = part[expand_to_blocks(rows, shape[0]), expand_to_blocks(columns, shape[1])]
            self._check_finite(name, around_it)
            return self._quantize_part(around_it, shape, rows, columns)
        data = part[rows, columns]
        if data.dtype != torch.float8_e4m3fn:
            raise ModelError(f"{self.folder}: {name!r} is {data.dtype}, with scales; only e4m3 is read with scales.")
        blocks = tuple(-(-n // SCALE_BLOCK) for n in shape)
        scale = self._get_slice(name + SCALE, blocks)[:]
        self._check_finite(name, data)
        self._check_finite(name + SCALE, scale)
        return slice_scaled(data.to(self.device), scale.to(self.device, torch.float32), shape, rows, columns)

    def _check_finite(self, name: str, part: torch.Tensor) -> None:
        """Raise ModelError for NaN and infinity, which would make every comparison agree or differ.

        Numbers are checked in pieces, so that no mask of the whole part is held.
        """
        if not all(_is_finite(piece) for piece in part.reshape(-1).split(CHECKED_NUMBERS)):
            raise ModelError(f"{self.folder}: {name!r} holds NaN or infinity; download the checkpoint again.")

    def _quantize_part(self, around_it: torch.Tensor, shape: tuple[int, int], rows: slice, columns: slice) -> Scaled:
        """Return a quantised part, computed from the whole blocks around it."""
        blocks = quantize_weight(around_it.to(self.device))
        scale = torch.ones([-(-n // SCALE_BLOCK) for n in shape], device=self.device)
        data, of_blocks = blocks.data, scale
        for dim, part in enumerate((rows, columns)):
            start, stop, _ = part.indices(shape[dim])
            first = expand_to_blocks(part, shape[dim]).start
            data = data.narrow(dim, start - first, stop - start)
            of_blocks = of_blocks.narrow(dim, first // SCALE_BLOCK, blocks.scale.shape[dim])
        of_blocks.copy_(blocks.scale)
        return slice_scaled(data, scale, shape, rows, columns)

    def _get_slice(self, name: str, shape: tuple[int, ...]):  # noqa: ANN202 - safetensors' type is private
        if name not in self.file_of:
            raise ModelError(f"{self.folder} has no tensor {name!r}; the checkpoint does not match its config.json.")
        path = self.file_of[name]
        try:
            part = self._open_file(path).get_slice(name)
        except SafetensorError as e:
            raise ModelError(f"{path} has no tensor {name!r}, though {INDEX_FILE} says so: {e}.") from e
        if tuple(part.get_shape()) != shape:
            raise ModelError(
                f"{self.folder}: {name!r} has shape {tuple(part.get_shape())}, while config.json makes it {shape}."
            )
        return part

    def _open_file(self, path: Path) -> safe_open:
        if path not in self.open_files:
            try:
                self.open_files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as e:
                raise ModelError(f"{path} cannot be read as safetensors: {e}.") from e
        return self.open_files[path]


def _is_finite(numbers: torch.Tensor) -> bool:
    if numbers.dtype == torch.float8_e4m3fn:
        return not bool(((numbers.view(torch.uint8) & E4M3_NAN) == E4M3_NAN).any())
    return bool(torch.isfinite(numbers).all())


def _find_tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            files = {name: PurePath(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ModelError(f"{index} is not a safetensors index: {e!r}.") from e
        for file in files.values():
            if file.is_absolute() or ".." in file.parts:
                raise ModelError(
                    f"{index} names {str(file)!r}, which is outside of its folder; only files in it are read."
                )
        return {name: folder / file for name, file in files.items()}
    single = folder / WEIGHTS_FILE
    if not single.is_file():
        raise ModelError(f"{folder} holds neither {INDEX_FILE} nor {WEIGHTS_FILE}; give a Hugging Face checkpoint.")
    try:
        with safe_open(single, framework="pt") as f:
            return dict.fromkeys(f.keys(), single)
    except (OSError, SafetensorError) as e:
        raise ModelError(f"{single} cannot be read as safetensors: {e}.") from e

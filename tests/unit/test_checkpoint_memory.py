"""Host memory of a rank that reads its part of DeepSeek-V3 in the published shapes and files."""

from __future__ import annotations

import json
import multiprocessing
import struct
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Self

import pytest
import torch

from dcpbench.engine.checkpoint import CheckpointSource
from dcpbench.engine.weights import load_weights
from dcpbench.models import load_shape
from dcpbench.models.checkpoint_folder import INDEX_FILE
from dcpbench.points.layout import Layout
from dcpbench.points.memory import count_all_layers
from tests.unit.engine_builder import count_bytes
from tests.unit.test_shapes import CONFIGS

SHARD = 4_300_000_000  # approximate size of a published file in bytes
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
LAYOUT, RANK = Layout(8), 3
EXPERTS = 16  # experts of a layer, instead of 256; all are read in the same way
KNOWN = 500_000_000  # bytes of a tensor that the watch must detect


def list_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return names, dtypes and shapes of one dense and one MoE layer, as DeepSeek-V3's index lists them."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("BF16", (129280, 7168))}

    def fp8(name: str, *shape: int) -> None:
        found[name] = ("F8_E4M3", shape)
        found[f"{name}_scale_inv"] = ("F32", tuple(-(-n // 128) for n in shape))

    def mlp(prefix: str, width: int) -> None:
        for name, shape in (("gate", (width, 7168)), ("up", (width, 7168)), ("down", (7168, width))):
            fp8(f"{prefix}{name}_proj.weight", *shape)

    for layer in ("model.layers.0.", "model.layers.1."):
        a = f"{layer}self_attn."
        for name, shape in {
            "q_a_proj": (1536, 7168),
            "q_b_proj": (24576, 1536),
            "kv_a_proj_with_mqa": (576, 7168),
            "kv_b_proj": (32768, 512),
            "o_proj": (7168, 16384),
        }.items():
            fp8(f"{a}{name}.weight", *shape)
        for name, size in {
            f"{a}q_a_layernorm": 1536,
            f"{a}kv_a_layernorm": 512,
            f"{layer}input_layernorm": 7168,
            f"{layer}post_attention_layernorm": 7168,
        }.items():
            found[f"{name}.weight"] = ("BF16", (size,))
    mlp("model.layers.0.mlp.", 18432)
    moe = "model.layers.1.mlp."
    found[f"{moe}gate.weight"] = ("BF16", (EXPERTS, 7168))
    found[f"{moe}gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
    mlp(f"{moe}shared_experts.", 2048)
    for expert in range(EXPERTS):
        mlp(f"{moe}experts.{expert}.", 2048)
    return found | {"model.norm.weight": ("BF16", (7168,)), "lm_head.weight": ("BF16", (129280, 7168))}


def write_checkpoint(folder: Path) -> list[Path]:
    """Write files of such tensors as sparse zeros, with their index and config.json."""
    config = CONFIGS["deepseek-v3"] | {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": EXPERTS}
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    headers: list[dict[str, object]] = []
    end = SHARD
    for name, (dtype, shape) in list_tensors().items():
        size = BYTES[dtype] * torch.Size(shape).numel()
        if end + size > SHARD:
            headers.append({})
            end = 0
        headers[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        weight_map[name] = f"model-{len(headers):05d}.safetensors"
        end += size
    files = []
    for number, header in enumerate(headers, start=1):
        files.append(folder / f"model-{number:05d}.safetensors")
        text = json.dumps(header).encode()
        last = max(place["data_offsets"][1] for place in header.values())  # type: ignore[index]
        with files[-1].open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + last)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


class MemoryWatch:
    """The largest private memory of this process in a block, above its memory before."""

    def __enter__(self) -> Self:
        self.before = self.most = self.now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    @property
    def grown(self) -> int:
        return self.most - self.before

    def now(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")

    def watch(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, self.now())


def measure_reading(folder: Path) -> tuple[int, int, int]:
    """Return the private memory in bytes for reading a rank's part and for a known tensor, and the bytes of the part."""
    shape = load_shape(str(folder))
    source = CheckpointSource(folder, torch.bfloat16, torch.device("meta"))
    with MemoryWatch() as memory:
        held = load_weights(source, shape, LAYOUT, RANK, count_all_layers(shape), ep="1", fp8=True)
    with MemoryWatch() as known:
        taken = torch.ones(KNOWN, dtype=torch.uint8)
        time.sleep(0.05)
        del taken
    return memory.grown, known.grown, count_bytes(held)


@pytest.mark.long
def test_reading_a_checkpoint_needs_memory_for_one_part_only(tmp_path: Path) -> None:
    """The largest part has 16,160 rows of the vocabulary, 232 MB. The loaded weights go to the meta device.

    A new process is used, as one that has run other tests has free memory to read into, and would not grow.
    """
    files = write_checkpoint(tmp_path)
    assert files[0].stat().st_size > 3e9
    assert load_shape(str(tmp_path)).published.name == "fp8"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        grown, known, held = fresh.submit(measure_reading, tmp_path).result()
    part = 129280 // 8 * 7168 * 2
    assert known > 0.9 * KNOWN, "the watch detects an allocation"
    assert grown < 1.2 * part
    assert grown < 0.1 * files[0].stat().st_size, "a file has 3 GB"
    assert held > 2 * part, "much more was read than was held at once"

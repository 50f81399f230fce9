"""Reading of a Hugging Face checkpoint folder: parts of tensors, FP8 dequantisation, and named errors."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dcpbench.engine.checkpoint import INDEX_FILE, CheckpointSource
from dcpbench.engine.weights import load_weights
from dcpbench.errors import ModelError
from dcpbench.kernels.moe import select_experts
from dcpbench.points.layout import Layout
from tests.unit import engine_builder as build

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def open_source(folder, dtype=torch.float32):
    """Return the folder as a source on the CPU."""
    return CheckpointSource(folder, dtype, build.CPU)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with one file that has a matrix [6, 4] of 0 … 23 and a vector [4]."""
    save_file(
        {"a.weight": torch.arange(24.0).view(6, 4), "norm.weight": torch.arange(4.0)}, tmp_path / "model.safetensors"
    )
    return tmp_path


def write_index(folder, weight_map):
    """Write an index, which is preferred to model.safetensors."""
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


class TestParts:
    def test_rows_and_columns_of_a_matrix_are_read(self, folder):
        """Rows 2, 3 of four columns begin with 8 and 12; columns 1, 2 of them are 9 10 and 13 14."""
        get = open_source(folder).get_tensor
        assert get("a.weight", (6, 4), rows=slice(2, 4))[:, 0].tolist() == [8, 12]
        assert get("a.weight", (6, 4), columns=slice(3, 4)).flatten().tolist() == [3, 7, 11, 15, 19, 23]
        assert get("a.weight", (6, 4), rows=slice(2, 4), columns=slice(1, 3)).tolist() == [[9, 10], [13, 14]]
        assert get("norm.weight", (4,)).tolist() == [0, 1, 2, 3]

    def test_parts_are_returned_in_the_models_dtype(self, folder):
        part = open_source(folder, torch.bfloat16).get_tensor("a.weight", (6, 4), rows=slice(0, 1))
        assert part.dtype == torch.bfloat16
        assert part.tolist() == [[0, 1, 2, 3]]

    def test_index_gives_the_file_of_each_tensor(self, folder):
        """Two tensors are in two files with names other than model.safetensors."""
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        save_file({"b.weight": torch.full((1, 2), 7.0)}, folder / "two.safetensors")
        write_index(folder, {"a.weight": "one.safetensors", "b.weight": "two.safetensors"})
        assert open_source(folder).get_tensor("b.weight", (1, 2)).tolist() == [[7, 7]]
        assert open_source(folder).get_tensor("a.weight", (6, 4), rows=slice(5, 6)).tolist() == [[20, 21, 22, 23]]

    def test_lm_head_is_the_embedding_only_with_tied_embeddings(self, tmp_path):
        """Without `tie_word_embeddings`, a checkpoint without an LM head is refused."""
        tensors = build.make_tensors(build.TINY)
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        tied = build.make_shape(tie_word_embeddings=True)
        loaded = load_weights(open_source(tmp_path), tied, Layout(2), 1, build.make_layers(tied))
        assert torch.equal(loaded.lm_head, tensors["model.embed_tokens.weight"][256:])
        with pytest.raises(ModelError, match=r"has no tensor 'lm_head\.weight'"):
            load_weights(open_source(tmp_path), build.TINY, Layout(1), 0, build.make_layers(build.TINY))


class TestRoutingBias:
    """The routing bias is published in fp32 and kept so: it is added to fp32 scores, and rounding it changes chosen
    experts.
    """

    def load_router(self, folder, tensors, dtype):
        """Return the routing of the first MoE layer, loaded in `dtype` from a checkpoint of these tensors."""
        save_file(tensors, folder / "model.safetensors")
        return (
            load_weights(open_source(folder, dtype), build.TINY, Layout(1), 0, build.make_layers(build.TINY)).moe[0].mlp
        )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_routing_bias_stays_fp32_for_every_model_dtype(self, tmp_path, dtype):
        """In bf16, 8 is followed by 8.0625: all biases between the two would be rounded to one of them."""
        tensors = build.make_tensors(build.TINY)
        published = 8 + torch.arange(8.0) / 256
        tensors[BIAS] = published
        assert torch.equal(self.load_router(tmp_path, tensors, dtype).bias, published)

    def test_adding_8_to_all_biases_chooses_the_same_experts(self, tmp_path):
        """A common offset of all scores changes no order; bf16 would round biases of 0.01 on 8 to 8."""
        tensors = build.make_tensors(build.TINY)
        logits_TE = torch.randn(1000, build.TINY.experts, generator=torch.Generator().manual_seed(0))
        rule, chosen = build.TINY, []
        for shift in (0, 8):
            bias = self.load_router(tmp_path, tensors | {BIAS: tensors[BIAS] + shift}, torch.bfloat16).bias
            chosen.append(select_experts(logits_TE, bias, rule)[1].sort(-1).values)
        moved = (chosen[0] != chosen[1]).any(-1).sum().item()
        assert moved == 0
        rounded = select_experts(logits_TE, (tensors[BIAS] + 8).bfloat16().float(), rule)[1].sort(-1).values
        assert (rounded != chosen[0]).any(-1).sum().item() > 0, "the biases matter"


class TestFp8:
    """Weights of 300 × 200 in e4m3 have one scale for each of 3 × 2 blocks of 128 × 128, the last ones cut off."""

    @pytest.fixture
    def weight(self):
        """Return integers up to 15, which e4m3 represents exactly."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(-15, 16, (300, 200), generator=generator).float()

    @pytest.fixture
    def folder(self, tmp_path, weight):
        """Return a folder with the weight and its scales 1 … 6."""
        tensors = {
            "w.weight": weight.to(torch.float8_e4m3fn),
            "w.weight_scale_inv": torch.arange(1.0, 7).view(3, 2),
        }
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    @pytest.mark.parametrize(
        ("rows", "columns"),
        [(None, None), (slice(100, 130), None), (slice(129, 300), slice(50, 200)), (None, slice(127, 129))],
        ids=["whole", "rows-across-a-block", "both", "two-columns-of-two-blocks"],
    )
    def test_every_element_is_multiplied_by_the_scale_of_its_block(self, folder, weight, rows, columns):
        """Element (r, c) lies in block (r // 128, c // 128), with the scale 1 + 2·(r // 128) + c // 128."""
        r, c = torch.arange(300)[:, None], torch.arange(200)[None, :]
        expected = weight * (1 + 2 * (r // 128) + c // 128)
        part = open_source(folder).get_tensor("w.weight", (300, 200), rows=rows, columns=columns)
        assert torch.equal(part, expected[rows or slice(None), columns or slice(None)])

    def test_scales_for_another_block_size_are_refused(self, folder, weight):
        """300 / 64 = 4.7, so that five rows of scales mean blocks of 64."""
        tensors = {"w.weight": weight.to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(5, 4)}
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelError, match=r"'w.weight_scale_inv' has shape \(5, 4\).* makes it \(3, 2\)"):
            open_source(folder).get_tensor("w.weight", (300, 200))

    def test_quantised_weights_without_scales_are_refused(self, folder, weight):
        """Without scales the values would be wrong by orders of magnitude."""
        save_file({"w.weight": weight.to(torch.float8_e4m3fn)}, folder / "model.safetensors")
        with pytest.raises(
            ModelError, match=r"'w\.weight' is torch\.float8_e4m3fn, and there is no 'w\.weight_scale_inv'"
        ):
            open_source(folder).get_tensor("w.weight", (300, 200), rows=slice(0, 1))


class TestErrors:
    """Errors name the cause instead of passing on those of safetensors."""

    def test_missing_tensor_is_named(self, folder):
        with pytest.raises(ModelError, match=r"has no tensor 'b\.weight'; the checkpoint does not match its config"):
            open_source(folder).get_tensor("b.weight", (1, 1))

    def test_tensor_with_a_wrong_shape_is_named_with_both_shapes(self, folder):
        with pytest.raises(ModelError, match=r"'a.weight' has shape \(6, 4\), while config.json makes it \(6, 5\)"):
            open_source(folder).get_tensor("a.weight", (6, 5), rows=slice(0, 1))

    def test_loading_a_model_stops_at_its_first_missing_tensor(self, folder):
        """A rank reads the embedding first."""
        with pytest.raises(ModelError, match=r"no tensor 'model.embed_tokens.weight'"):
            load_weights(open_source(folder), build.TINY, Layout(1), 0, build.make_layers(build.TINY))

    def test_folder_without_weights_is_refused(self, tmp_path):
        with pytest.raises(ModelError, match=r"holds neither model\.safetensors\.index\.json nor model\.safetensors"):
            open_source(tmp_path)

    def test_truncated_file_is_refused(self, folder):
        """An interrupted download leaves less data than the header states."""
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
            open_source(folder)

    def test_corrupt_file_of_an_index_is_refused_when_it_is_read(self, folder):
        """A rank opens only the files that it needs."""
        (folder / "bad.safetensors").write_bytes(b"not this")
        write_index(folder, {"a.weight": "model.safetensors", "b.weight": "bad.safetensors"})
        assert open_source(folder).get_tensor("a.weight", (6, 4)).shape == (6, 4)
        with pytest.raises(ModelError, match=r"bad\.safetensors cannot be read as safetensors"):
            open_source(folder).get_tensor("b.weight", (1, 1))

    def test_missing_file_of_an_index_is_refused(self, folder):
        write_index(folder, {"b.weight": "gone.safetensors"})
        with pytest.raises(ModelError, match=r"gone\.safetensors cannot be read"):
            open_source(folder).get_tensor("b.weight", (1, 1))

    def test_index_with_a_wrong_file_is_refused(self, folder):
        write_index(folder, {"b.weight": "model.safetensors"})
        with pytest.raises(ModelError, match=r"model\.safetensors has no tensor 'b\.weight', though"):
            open_source(folder).get_tensor("b.weight", (1, 1))

    @pytest.mark.parametrize(
        "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a.weight": 3}}', "\ud800"], ids=ascii
    )
    def test_invalid_index_is_refused(self, folder, text):
        """The indexes are no JSON, a list, without a map, with a list for a map, with a number for a file name, and not
        UTF-8.
        """
        (folder / INDEX_FILE).write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(ModelError, match=r"index\.json is not a safetensors index"):
            open_source(folder)

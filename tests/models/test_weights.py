"""Every tensor of a checkpoint is accounted for, and what does not fit is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onela.errors import CheckpointError
from onela.models import load_model
from tests.checkpoints import save_qwen3, save_qwen3_5, save_qwen3_next

Tensors = dict[str, Tensor]


def edit(directory: Path, change: Callable[[Tensors], None]) -> None:
    """Rewrite a checkpoint's one weight file."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(directory: Path, *messages: str) -> None:
    """Loading fails, and the error has all these lines."""
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    lines = [line.strip() for line in str(caught.value).split("\n")]
    assert lines[0] == f"{directory}: {len(messages)} tensors do not fit"
    assert sorted(lines[1:]) == sorted(messages)


def test_a_missing_tensor(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(tmp_path, "model.layers.1.mlp.up_proj.weight: missing")


def test_an_unused_tensor(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.9.input_layernorm.weight": torch.ones(48)}))
    refused(
        tmp_path, "model.layers.9.input_layernorm.weight: not used by a qwen3 model of this configuration"
    )


def test_a_wrong_shape(tmp_path: Path) -> None:
    save_qwen3_5(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    refused(tmp_path, "model.norm.weight: shape [47], expected [48]")


def test_a_tensor_of_integers(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    refused(tmp_path, "model.norm.weight: dtype torch.int8, expected a floating-point one")


def test_a_tensor_given_twice(tmp_path: Path) -> None:
    save_qwen3_5(tmp_path)
    edit(
        tmp_path,
        lambda tensors: tensors.update({"model.language_model.norm.weight": torch.ones(48)}),
    )
    # Which of the two stands second in the file is not ours to say.
    with pytest.raises(CheckpointError, match=r"model\.(language_model\.)?norm\.weight: given twice"):
        load_model(tmp_path)


def test_all_offenders_are_named(tmp_path: Path) -> None:
    save_qwen3(tmp_path)

    def change(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(3)
        tensors["extra"] = torch.ones(1)

    edit(tmp_path, change)
    refused(
        tmp_path,
        "model.norm.weight: missing",
        "model.layers.0.self_attn.q_norm.weight: shape [3], expected [16]",
        "extra: not used by a qwen3 model of this configuration",
    )


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({f"extra.{i}": torch.ones(1) for i in range(50)}))
    with pytest.raises(CheckpointError, match="50 tensors do not fit") as caught:
        load_model(tmp_path)
    assert str(caught.value).endswith("and 30 more")


class TestTiedHead:
    def test_stored_as_well(self, tmp_path: Path) -> None:
        save_qwen3(tmp_path, tie_word_embeddings=True)
        edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        model = load_model(tmp_path)
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_stored_with_other_numbers(self, tmp_path: Path) -> None:
        save_qwen3(tmp_path, tie_word_embeddings=True)
        edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
        refused(
            tmp_path,
            "lm_head.weight: differs from model.embed_tokens.weight, but tie_word_embeddings is true",
        )

    def test_without_an_embedding(self, tmp_path: Path) -> None:
        save_qwen3(tmp_path, tie_word_embeddings=True)
        edit(tmp_path, lambda t: t.pop("model.embed_tokens.weight"))
        refused(tmp_path, "model.embed_tokens.weight: missing", "lm_head.weight: missing")

    def test_an_untied_head_must_be_there(self, tmp_path: Path) -> None:
        save_qwen3(tmp_path)
        edit(tmp_path, lambda t: t.pop("lm_head.weight"))
        refused(tmp_path, "lm_head.weight: missing")


class TestExperts:
    PREFIX = "model.layers.1.mlp.experts"

    def test_a_missing_expert_is_named(self, tmp_path: Path) -> None:
        save_qwen3_next(tmp_path)

        def change(tensors: Tensors) -> None:
            del tensors[f"{self.PREFIX}.4.up_proj.weight"]
            del tensors[f"{self.PREFIX}.0.down_proj.weight"]

        edit(tmp_path, change)
        refused(
            tmp_path,
            f"{self.PREFIX}.4.up_proj.weight: missing",
            f"{self.PREFIX}.0.down_proj.weight: missing",
        )

    def test_a_layer_without_experts_is_one_line(self, tmp_path: Path) -> None:
        save_qwen3_next(tmp_path)

        def change(tensors: Tensors) -> None:
            for name in [name for name in tensors if name.startswith(self.PREFIX)]:
                del tensors[name]

        edit(tmp_path, change)
        refused(tmp_path, f"{self.PREFIX}.gate_up_proj: missing", f"{self.PREFIX}.down_proj: missing")

    def test_an_expert_too_many(self, tmp_path: Path) -> None:
        save_qwen3_next(tmp_path)
        name = f"{self.PREFIX}.6.up_proj.weight"
        edit(tmp_path, lambda tensors: tensors.update({name: torch.zeros(24, 48)}))
        refused(tmp_path, f"{name}: not used by a qwen3_next model of this configuration")

    def test_a_wrong_shape(self, tmp_path: Path) -> None:
        save_qwen3_next(tmp_path)
        name = f"{self.PREFIX}.5.down_proj.weight"
        edit(tmp_path, lambda tensors: tensors.update({name: torch.zeros(24, 48)}))
        refused(tmp_path, f"{name}: shape [24, 48], expected [48, 24]")

    @pytest.mark.parametrize("stacked_first", [True, False])
    def test_one_by_one_and_stacked_at_once(self, tmp_path: Path, stacked_first: bool) -> None:
        save_qwen3_next(tmp_path)
        # Files are read in order of their names.
        other = tmp_path / ("a.safetensors" if stacked_first else "z.safetensors")
        save_file({f"{self.PREFIX}.down_proj": torch.zeros(6, 48, 24)}, other)
        with pytest.raises(CheckpointError, match="given twice") as caught:
            load_model(tmp_path)
        assert str(caught.value).count("given twice") == (6 if stacked_first else 1)


class TestFiles:
    def test_no_weights(self, tmp_path: Path) -> None:
        save_qwen3(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
            load_model(tmp_path)

    def test_a_shard_is_absent(self, tmp_path: Path) -> None:
        reference = save_qwen3(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        reference.save_pretrained(tmp_path, max_shard_size="20KB")
        shards = sorted(tmp_path.glob("model-*.safetensors"))
        assert len(shards) > 2
        shards[1].unlink()
        message = f"{shards[1]}: named by model.safetensors.index.json, but not there"
        with pytest.raises(CheckpointError, match=re.escape(message)):
            load_model(tmp_path)

    @pytest.mark.parametrize("index", [{"metadata": {}}, {"weight_map": {}}, {"weight_map": {"a": 3}}])
    def test_an_unusable_index(self, tmp_path: Path, index: dict[str, object]) -> None:
        save_qwen3(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"index\.json: no weight_map"):
            load_model(tmp_path)

    def test_a_broken_file(self, tmp_path: Path) -> None:
        save_qwen3(tmp_path)
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not readable as safetensors"):
            load_model(tmp_path)


def test_the_decay_stays_fp32_in_a_bf16_model(tmp_path: Path) -> None:
    save_qwen3_5(tmp_path, dtype=torch.bfloat16)
    state = load_model(tmp_path).state_dict()
    kept = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    assert kept == {
        f"model.layers.{i}.linear_attn.{name}" for i in (0, 2, 3) for name in ("A_log", "dt_bias")
    }
    assert {tensor.dtype for tensor in state.values()} == {torch.float32, torch.bfloat16}

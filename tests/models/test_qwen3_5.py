"""Qwen3.5 against transformers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from onela.errors import CheckpointError, ConfigError
from onela.models import load_model
from onela.models.qwen3_5 import Qwen3_5
from tests import checkpoints
from tests.checkpoints import qwen3_5_config, randomize
from tests.models.parity import (
    GAIN,
    assert_bf16_runs,
    assert_decode_parity,
    assert_prefill_parity,
    prefill_logits,
    prompts_of,
    reference_logits,
)
from tests.tolerances import MODEL

LINEAR, FULL = "linear_attention", "full_attention"
save_qwen3_5 = partial(checkpoints.save_qwen3_5, gain=GAIN)


def test_prefill_matches_transformers(tmp_path: Path) -> None:
    assert_prefill_parity(tmp_path, save_qwen3_5(tmp_path))


def test_decode_matches_transformers(tmp_path: Path) -> None:
    assert_decode_parity(tmp_path, save_qwen3_5(tmp_path))


def test_bf16(tmp_path: Path) -> None:
    assert_bf16_runs(tmp_path, save_qwen3_5(tmp_path, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "layer_types",
    [[LINEAR], [FULL], [FULL, LINEAR], [LINEAR, FULL], [LINEAR, LINEAR, FULL, FULL, LINEAR]],
    ids=lambda types: "".join(t[0].upper() for t in types),
)
def test_any_mix_of_layers(tmp_path: Path, layer_types: list[str]) -> None:
    reference = save_qwen3_5(tmp_path, layer_types=layer_types, num_hidden_layers=len(layer_types))
    assert_prefill_parity(tmp_path, reference)
    assert_decode_parity(tmp_path, reference)


@pytest.mark.parametrize(
    ("heads", "value_heads", "key_dim", "value_dim", "kernel"),
    [(2, 2, 16, 16, 4), (1, 4, 8, 32, 2), (3, 6, 24, 8, 3)],
)
def test_head_geometries(
    tmp_path: Path, heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int
) -> None:
    reference = save_qwen3_5(
        tmp_path,
        linear_num_key_heads=heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=kernel,
    )
    assert_prefill_parity(tmp_path, reference)
    assert_decode_parity(tmp_path, reference)


def test_tied_head(tmp_path: Path) -> None:
    reference = save_qwen3_5(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_decode_parity(tmp_path, reference)


def test_attention_bias(tmp_path: Path) -> None:
    assert_decode_parity(tmp_path, save_qwen3_5(tmp_path, attention_bias=True))


def test_many_shards(tmp_path: Path) -> None:
    reference = save_qwen3_5(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert_decode_parity(tmp_path, reference)


def test_a_prompt_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    save_qwen3_5(tmp_path)
    model = load_model(tmp_path)
    prompts = prompts_of((9, 70, 33))
    together = prefill_logits(model, prompts)
    for prompt, logits in zip(prompts, together):
        assert_close(logits, prefill_logits(model, [prompt])[0], **MODEL)


def test_unfused_projections_agree(tmp_path: Path) -> None:
    save_qwen3_5(tmp_path)
    fused = load_model(tmp_path)
    apart = Qwen3_5(fused.config).requires_grad_(False)
    apart.load_state_dict(fused.state_dict())
    assert all(getattr(module, "fused", None) is None for module in apart.modules())
    prompts = prompts_of((20,))
    assert_close(prefill_logits(apart, prompts)[0], prefill_logits(fused, prompts)[0], **MODEL)


class TestVisionLanguage:
    """Published checkpoints wrap the text model: other names, a vision tower, a prediction head of later tokens."""

    @pytest.fixture
    def wrapped(self, tmp_path: Path) -> Any:
        text = qwen3_5_config(
            rope_parameters={**qwen3_5_config().rope_parameters, "mrope_section": [2, 1, 1]}
        )
        vision = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 48,
            "num_position_embeddings": 4,
        }
        config = Qwen3_5Config(text_config=text.to_dict(), vision_config=vision)
        reference = randomize(Qwen3_5ForConditionalGeneration(config), gain=GAIN).eval()
        reference.save_pretrained(tmp_path)
        return reference

    def test_text_part_is_found(self, tmp_path: Path, wrapped: Any) -> None:
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        assert any(name.startswith("model.language_model.layers.0.") for name in tensors)
        assert any(name.startswith("model.visual.") for name in tensors)
        save_file(
            {**tensors, "mtp.fc.weight": torch.zeros(3, 3), "mtp.layers.0.norm.weight": torch.zeros(3)}, file
        )
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_5"
        assert_prefill_parity(tmp_path, wrapped)
        assert_decode_parity(tmp_path, wrapped)

    def test_only_the_known_extras_are_skipped(self, tmp_path: Path, wrapped: Any) -> None:
        file = tmp_path / "model.safetensors"
        save_file({**load_file(file), "model.audio.weight": torch.zeros(3)}, file)
        with pytest.raises(CheckpointError, match=r"model\.audio\.weight: not used by a qwen3_5_text model"):
            load_model(tmp_path)

    def test_the_wrapper_ties_the_head(self, tmp_path: Path) -> None:
        values = {"text_config": {"num_hidden_layers": 1}, "tie_word_embeddings": True}
        assert Qwen3_5.read_config(values).tie_word_embeddings
        values["text_config"] = {"num_hidden_layers": 1, "tie_word_embeddings": False}
        assert not Qwen3_5.read_config(values).tie_word_embeddings


def test_configuration_of_a_published_model() -> None:
    config = Qwen3_5.read_config(
        {
            "model_type": "qwen3_5",
            "text_config": {
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "full_attention_interval": 4,
                "mamba_ssm_dtype": "float32",
                "mtp_num_hidden_layers": 1,
                "output_gate_type": "swish",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000000,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10],
                    "mrope_interleaved": True,
                },
            },
        }
    )
    assert config.layer_types[:5] == (LINEAR, LINEAR, LINEAR, FULL, LINEAR)
    assert (config.rope_theta, config.rotary_dim, config.num_hidden_layers) == (1e7, 64, 24)


@pytest.mark.parametrize(
    ("field", "value"), [("attn_output_gate", False), ("output_gate_type", "sigmoid"), ("hidden_act", "gelu")]
)
def test_other_mathematics_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} = .* is not supported"):
        Qwen3_5.read_config({field: value})


def test_long_positions(tmp_path: Path) -> None:
    reference = save_qwen3_5(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    (prompt,) = prompts_of((900,))
    (logits,) = prefill_logits(load_model(tmp_path), [prompt])
    assert_close(logits, reference_logits(reference, prompt), **MODEL)


def test_logits_of_a_bf16_model_are_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_qwen3_5(tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path, dtype="bfloat16")
    weight = model.lm_head.weight.data
    monkeypatch.setattr("onela.models.rounding.HEAD_ROWS", len(weight) // 3)
    hidden = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = hidden.double() @ weight.double().t()
    ids = torch.arange(len(weight) // 2, len(weight))
    assert_close(model.logits(hidden).double(), expected, **MODEL)
    assert_close(model.logits(hidden, model.head_rows(ids)).double(), expected[:, ids], **MODEL)

"""Qwen3.5-MoE against transformers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from onela.models import load_model
from onela.models.qwen3_5_moe import Qwen3_5Moe
from tests import checkpoints
from tests.models.parity import GAIN, assert_bf16_runs, assert_decode_parity, assert_prefill_parity

save_qwen3_5_moe = partial(checkpoints.save_qwen3_5_moe, gain=GAIN)


def test_matches_transformers(tmp_path: Path) -> None:
    reference = save_qwen3_5_moe(tmp_path)
    assert_prefill_parity(tmp_path, reference)
    assert_decode_parity(tmp_path, reference)


def test_bf16(tmp_path: Path) -> None:
    assert_bf16_runs(tmp_path, save_qwen3_5_moe(tmp_path, dtype=torch.bfloat16))


def test_vision_language_wrapping_with_stacked_experts(tmp_path: Path) -> None:
    reference = save_qwen3_5_moe(tmp_path)
    tensors = {}
    for name, tensor in reference.state_dict().items():
        tensors[name.replace("model.", "model.language_model.", 1)] = tensor.contiguous()
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    extras = {"model.visual.patch_embed.proj.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    save_file({**tensors, **extras}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    wrapper = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    assert_decode_parity(tmp_path, reference)


def test_experts_load_one_by_one(tmp_path: Path) -> None:
    reference = save_qwen3_5_moe(tmp_path)
    assert "model.layers.2.mlp.experts.0.down_proj.weight" in load_file(tmp_path / "model.safetensors")
    experts = load_model(tmp_path).model.layers[2].mlp.experts
    expected = reference.model.layers[2].mlp.experts
    assert torch.equal(experts.gate_up_proj, expected.gate_up_proj)
    assert torch.equal(experts.down_proj, expected.down_proj)


def test_configuration_of_a_published_model() -> None:
    config = Qwen3_5Moe.read_config(
        {"model_type": "qwen3_5_moe", "text_config": {"num_experts": 256, "num_experts_per_tok": 8}}
    )
    assert config.moe is not None
    assert config.moe.normalize_weights
    assert config.moe.sparse_layers == set(range(40))
    assert (config.moe.shared_intermediate_size, config.hidden_size, config.rotary_dim) == (512, 2048, 64)

"""The search that the overlap benchmark runs over transformers' forwards, against `generate` itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.cpu import FIRST, LEVELS, hf_generate, save_model, vocabulary
from bench.overlap import hf_beams, mean_and_error, our_beams, wide_logits
from onela import Engine


@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
def test_the_same_beams_as_generate_and_as_ours(tmp_path: Path) -> None:
    save_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine = Engine.from_pretrained(tmp_path, vocabulary=vocabulary(), device="cpu")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, FIRST, (length,), generator=generator).tolist() for length in (17, 9)]
    levels = [torch.as_tensor(engine.vocabulary.token_ids(level)).long() for level in range(LEVELS)]
    heads = {"own": model.lm_head, "wide": wide_logits(model)}
    for i, prompt in enumerate(prompts):
        found = hf_beams(model, prompt, levels, [5, 24], heads, chunk=7)
        assert set(found) == {(name, width) for name in heads for width in (5, 24)}
        for width in (5, 24):
            expected = hf_generate(model, prompt, width).sequences[:, len(prompt) :].tolist()
            sids = {tuple(row) for row in expected}
            assert found["own", width] == found["wide", width] == sids
            assert our_beams(engine, prompts, width)[i] == sids


def test_mean_and_error() -> None:
    assert mean_and_error([3.0]) == (3.0, 0.0)
    assert mean_and_error([1.0, 3.0]) == (2.0, 1.0)

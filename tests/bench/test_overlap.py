"""The search that the overlap benchmark runs over transformers' forwards, against `generate` itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.cpu import FIRST, LEVELS, hf_generate, save_model, vocabulary
from bench.overlap import hf_beams, our_beams
from onela import Engine


@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
@pytest.mark.parametrize("width", [5, 24])
def test_the_same_beams_as_generate_and_as_ours(tmp_path: Path, width: int) -> None:
    save_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine = Engine.from_pretrained(tmp_path, vocabulary=vocabulary(), device="cpu")
    prompt = torch.randint(0, FIRST, (17,), generator=torch.Generator().manual_seed(1)).tolist()
    levels = [torch.as_tensor(engine.vocabulary.token_ids(level)).long() for level in range(LEVELS)]
    expected = hf_generate(model, prompt, width).sequences[:, len(prompt) :].tolist()
    assert hf_beams(model, prompt, levels, width, chunk=7) == {tuple(row) for row in expected}
    assert our_beams(engine, prompt, width) == {tuple(row) for row in expected}

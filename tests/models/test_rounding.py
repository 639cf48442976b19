"""`rounding="transformers"`: a bf16 model gives transformers' own bf16 numbers, and so its lists.

Both call torch's products and attention in the same shapes, so most numbers are the same bits. What is not: sums of a
hybrid's recurrence and of a mixture's experts, which both make their own way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from bench.overlap import Sids, hf_beams, our_beams
from onela import BeamParams, Engine, EngineConfig, Request, SidVocabulary
from onela.errors import ConfigError
from onela.models import load_model
from tests import checkpoints
from tests.models.parity import LENGTHS, prefill_logits, prompts_of, reference_logits
from tests.tolerances import MODEL

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

VOCAB = 400
LEVELS = (range(10, 110), range(110, 210), range(210, 310))
VOCABULARY = SidVocabulary.from_token_ids([list(level) for level in LEVELS])
WIDTH = 48
SAVE: dict[str, Callable[..., Any]] = {
    "qwen3": checkpoints.save_qwen3,
    "qwen3_5": checkpoints.save_qwen3_5,
    "qwen3_next": checkpoints.save_qwen3_next,
    "qwen3_5_moe": checkpoints.save_qwen3_5_moe,
}


def save(name: str, path: Path, **overrides: Any) -> Any:
    """A bf16 checkpoint, and transformers' model of it, read from the file: one that is rounded in place has its
    rotation's frequencies rounded too."""
    SAVE[name](path, dtype=torch.bfloat16, gain=0.7, vocab_size=VOCAB, **overrides)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def engine_of(path: Path, *, device: str = "cpu", **options: Any) -> Engine:
    return Engine.from_pretrained(path, vocabulary=VOCABULARY, device=device, dtype="bfloat16", **options)


def theirs(reference: Any, prompt: list[int]) -> Sids:
    """The beams of transformers, `WIDTH` a forward as `generate` has them."""
    levels = [torch.tensor(list(level)) for level in LEVELS]
    return hf_beams(reference, prompt, levels, [WIDTH], {"": reference.lm_head}, chunk=WIDTH)["", WIDTH]


def in_common(found: list[Sids], expected: list[Sids]) -> float:
    """Percent, over all prompts."""
    return 100 * sum(len(a & b) for a, b in zip(found, expected)) / sum(map(len, expected))


def answers(engine: Engine, prompts: list[list[int]]) -> list[Sids]:
    """One request at a time, as transformers has them."""
    return [our_beams(engine, [prompt], WIDTH)[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "share"), [("qwen3", 0.99), ("qwen3_5", 0.7), ("qwen3_next", 0.9), ("qwen3_5_moe", 0.9)]
)
def test_most_logits_of_a_prompt_are_the_same_bits(tmp_path: Path, name: str, share: float) -> None:
    """On one machine: all, 87 %, 99.7 % and all of them; under the least rounding 6 % of the hybrids'."""
    reference = save(name, tmp_path)
    prompts = prompts_of(LENGTHS, VOCAB)
    expected = [reference_logits(reference, prompt) for prompt in prompts]

    def run(**options: Any) -> list[Tensor]:
        model = load_model(tmp_path, dtype="bfloat16", **options)
        return [prefill_logits(model, [prompt])[0] for prompt in prompts]

    def equal(found: list[Tensor]) -> float:
        return float(torch.cat([a == b for a, b in zip(found, expected)]).float().mean())

    def away(found: list[Tensor]) -> float:
        return float(torch.cat([a - b for a, b in zip(found, expected)]).abs().mean())

    alike, least = run(rounding="transformers"), [x.bfloat16().float() for x in run()]
    assert equal(alike) >= share
    assert away(alike) <= 0.5 * away(least)


@pytest.mark.parametrize(("name", "least_share"), [("qwen3", 99), ("qwen3_5", 95), ("qwen3_next", 95)])
def test_the_same_beams(tmp_path: Path, name: str, least_share: float) -> None:
    reference = save(name, tmp_path)
    prompts = prompts_of((33, 70, 12, 50), VOCAB, seed=4)
    expected = [theirs(reference, prompt) for prompt in prompts]
    alike = in_common(answers(engine_of(tmp_path, rounding="transformers"), prompts), expected)
    least = in_common(answers(engine_of(tmp_path), prompts), expected)
    assert alike >= least_share
    assert alike > least


@pytest.mark.parametrize(
    "options",
    [
        {"recurrent_backend": "full_state"},
        {"recurrent_backend": "full_state", "full_state_mode": "read_parent"},
        {"recurrent_backend": "replay_ssm"},
        {"recurrent_backend": "records_moved"},
        {"max_batch_tokens": 32},
        {"prompt_cache_bytes": 1 << 22, "prompt_cache_interval": 16, "page_size": 16},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_other_roads_lead_there(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Every backend, a prompt in pieces, and one that goes on from a cached state."""
    reference = save(name, tmp_path)
    prompts = prompts_of((70, 40), VOCAB, seed=4)
    expected = [theirs(reference, prompt) for prompt in prompts]
    engine = engine_of(tmp_path, rounding="transformers", **options)
    found = answers(engine, prompts)
    if engine.cache is not None:
        found = answers(engine, prompts)
        assert engine.cache.stats.hits
    assert in_common(found, expected) >= 95


def test_requests_together(tmp_path: Path) -> None:
    """They run one after the other, so that each gets what it gets alone, scores and all."""
    save("qwen3_5", tmp_path)
    prompts = prompts_of((33, 70, 12, 50), VOCAB, seed=4)
    engine = engine_of(tmp_path, rounding="transformers")
    requests = [Request(prompt_token_ids=prompt) for prompt in prompts]
    params = BeamParams(beam_width=WIDTH, normalizer="vocabulary")
    alone = [engine.generate([request], params)[0] for request in requests]
    for request in requests:
        engine.submit(request, params)
    engine.step()
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (1, 3)
    together = engine_of(tmp_path, rounding="transformers").generate(requests, params)
    assert [result.items for result in together] == [result.items for result in alone]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "least_share"), [("qwen3", 99), ("qwen3_5", 85), ("qwen3_next", 75)])
def test_beams_on_a_gpu(tmp_path: Path, name: str, least_share: float) -> None:
    """The same ones of a dense model. A hybrid's recurrence is summed by fla-core's kernels there, where it is
    installed, and in an order of their own; a mixture's experts change at near-ties, too."""
    reference = save(name, tmp_path, hidden_size=256, head_dim=64).cuda()
    prompts = prompts_of((33, 70, 12, 50), VOCAB, seed=4)
    expected = [theirs(reference, prompt) for prompt in prompts]
    engine = engine_of(tmp_path, device="cuda", rounding="transformers")
    assert engine.runner.graphs is None
    assert in_common(answers(engine, prompts), expected) >= least_share


@pytest.mark.parametrize("name", SAVE)
def test_in_fp32_there_is_nothing_to_round(tmp_path: Path, name: str) -> None:
    SAVE[name](tmp_path, gain=0.7, vocab_size=VOCAB)
    prompts = prompts_of((40, 9), VOCAB)
    models = [load_model(tmp_path, dtype="float32", rounding=way) for way in ("least", "transformers")]
    for ours, theirs_ in zip(*(prefill_logits(model, prompts) for model in models)):
        assert_close(ours, theirs_, **MODEL)


def test_the_option_is_checked(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="rounding: 'most' is none of least, transformers"):
        engine_of(tmp_path, rounding="most")
    with pytest.raises(ConfigError, match="rounding: 'most' is none of least, transformers"):
        load_model(tmp_path, rounding="most")
    with pytest.raises(ConfigError, match="rounding: 'transformers' does not go with quantization 'fp8'"):
        load_model(tmp_path, rounding="transformers", quantization="fp8")
    model = load_model(tmp_path)
    with pytest.raises(
        ConfigError, match="rounding: 'transformers' was asked for, the model given has 'least'"
    ):
        Engine(model, VOCABULARY, config=EngineConfig(device="cpu", rounding="transformers"))
    assert EngineConfig.from_env({"ONELA_ROUNDING": "transformers"}).rounding == "transformers"

"""Our models against transformers' own, on the same checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from onela.decoding import BeamParams
from onela.engine import Engine, Request
from onela.items import SidVocabulary
from onela.models import CausalLM, load_model
from onela.state import DecodeState, PrefillInputs, PromptPool, Records, make_backend
from tests.tolerances import MODEL

# Short, one below and one past a chunk of the recurrence and a page of keys, and several of both.
LENGTHS = (5, 1, 63, 65, 130)
# Weights of this gain keep rounding from growing through the layers, and the logits a unit apart.
GAIN = 0.7
LEVELS = (range(10, 28), range(30, 50), range(50, 67), range(70, 90))


def prompts_of(lengths: Sequence[int], vocab_size: int = 97, seed: int = 1) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def new_state(model: CausalLM, page_size: int = 64) -> DecodeState:
    """An empty state, its memory filled with NaN so that nothing can be read before it is written."""
    geometry, dtype = model.config.geometry, model.lm_head.weight.dtype
    device = model.lm_head.weight.device
    prompts = PromptPool(geometry, dtype=dtype, device=device, page_size=page_size)
    records = Records(geometry, dtype=dtype, record_dtype=dtype, device=device)
    backend = make_backend("replay", geometry, prompts, records, dtype=dtype, record_dtype=dtype)
    return DecodeState(prompts, records, backend)


@torch.inference_mode()
def prefill_logits(
    model: CausalLM, prompts: Sequence[Sequence[int]], cuts: Sequence[int] = (), page_size: int = 64
) -> list[Tensor]:
    """Logits [length, vocab_size] of every prompt, all run together, cut at the places `cuts` into several forwards."""
    state = new_state(model, page_size)
    places = [state.prompts.allocate(len(prompt)) for prompt in prompts]
    for tensors in (state.prompts.prompt_tensors.tensors, state.prompts.page_tensors.tensors):
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
    rows: list[list[Tensor]] = [[] for _ in prompts]
    edges = [0, *cuts, max(len(prompt) for prompt in prompts)]
    for start, end in itertools.pairwise(edges):
        members = [i for i, prompt in enumerate(prompts) if len(prompt) > start]
        parts = [list(prompts[i][start:end]) for i in members]
        bounds = [0]
        for part in parts:
            bounds.append(bounds[-1] + len(part))
        inputs = PrefillInputs(
            token_ids=torch.tensor([token for part in parts for token in part]),
            positions=torch.cat([torch.arange(start, start + len(part)) for part in parts]),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            prompts=torch.tensor([places[i].index for i in members], dtype=torch.int32),
            cached_lens=torch.full((len(members),), start, dtype=torch.int32),
        )
        logits = model.logits(model.prefill(inputs, state))
        for i, part, first, last in zip(members, parts, bounds, bounds[1:]):
            state.prompts.extend(places[i], len(part))
            rows[i].append(logits[first:last])
    return [torch.cat(parts) for parts in rows]


@torch.inference_mode()
def reference_logits(reference: Any, prompt: Sequence[int]) -> Tensor:
    """Logits [length, vocab_size] fp32 of one full forward by transformers."""
    return reference(torch.tensor([list(prompt)]), use_cache=False).logits[0].float()


def assert_prefill_parity(directory: Path, reference: Any) -> None:
    """Packed prompts of different lengths, at once and in pieces, give the logits of transformers."""
    model = load_model(directory, dtype="float32")
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    expected = [reference_logits(reference, prompt) for prompt in prompts]
    for cuts in ((), (3, 64, 67)):
        for given, wanted in zip(prefill_logits(model, prompts, cuts, page_size=16), expected):
            assert_close(given, wanted, **MODEL)


def decoded_scores(
    model: CausalLM, prompts: Sequence[Sequence[int]], width: int = 20
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Tokens and score (over the whole vocabulary) of each SID that our engine returns."""
    engine = Engine(model, SidVocabulary.from_token_ids([list(level) for level in LEVELS]))
    params = BeamParams(beam_width=width, normalizer="vocabulary")
    results = engine.generate([Request(prompt_token_ids=prompt) for prompt in prompts], params)
    return [[(item.token_ids, item.cum_logprob) for item in result.items] for result in results]


@torch.inference_mode()
def reference_scores(reference: Any, prompt: Sequence[int], sids: Sequence[Sequence[int]]) -> Tensor:
    """The same SIDs' scores, each from one full forward over prompt and SID."""
    ids = torch.tensor([[*prompt, *sid] for sid in sids])
    logprobs = reference(ids, use_cache=False).logits.float()[:, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, ids[:, len(prompt) :, None]).sum((1, 2))


def assert_decode_parity(directory: Path, reference: Any) -> None:
    """Stepwise decoding, wide beams of several requests together, gives the scores of full forwards."""
    model = load_model(directory, dtype="float32")
    prompts = prompts_of((2, 40, 70), model.config.vocab_size, seed=2)
    for prompt, found in zip(prompts, decoded_scores(model, prompts)):
        sids, scores = zip(*found)
        assert len(set(sids)) == 20
        assert all(token in level for sid in sids for token, level in zip(sid, LEVELS, strict=True))
        assert_close(torch.tensor(scores), reference_scores(reference, prompt, sids), **MODEL)


def assert_bf16_runs(directory: Path, reference: Any) -> None:
    """A checkpoint saved in bf16 loads as it is, and is no further from fp32 than transformers' own bf16."""
    model = load_model(directory)
    assert model.lm_head.weight.dtype == torch.bfloat16
    (prompt,) = prompts_of((120,), model.config.vocab_size, seed=3)
    theirs = reference_logits(reference, prompt)
    (ours,) = prefill_logits(model, [prompt])
    exact = reference_logits(reference.float(), prompt)
    # The median: single positions lie on an edge (two experts as good as equal) and would decide a mean alone.
    our_error, their_error = ((x - exact).abs().amax(-1).median() for x in (ours, theirs))
    assert our_error <= 1.25 * their_error
    (found,) = decoded_scores(model, [prompt])
    sids, scores = zip(*found)
    wanted = reference_scores(reference, prompt, sids)
    # Scores of SIDs span several units; bf16 blurs each step by less than a fifth of one.
    assert_close(torch.tensor(scores), wanted, rtol=0, atol=0.8)

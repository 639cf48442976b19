"""A model of integers: every logit depends on every token of the row's past, read from where the engine says it lies.

A wrong page, slot, ancestor or boundary changes the numbers, and there is no rounding behind which it could hide.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from onela import BeamParams, Engine, EngineConfig, ItemCatalog, Request, Result, SidVocabulary
from onela.state import AttentionGeometry, DecodeState, GatedDeltaGeometry, PrefillInputs, StepInputs
from tests.engine.helpers import catalog_of, random_sids, vocabulary_of

NAN_TOKEN, RAISE_TOKEN = 1, 2
SIZES = (6, 8, 7)
VOCABULARY = vocabulary_of(*SIZES)
LEGAL = random_sids(120, SIZES)
CATALOG = catalog_of(LEGAL, VOCABULARY)
MODULUS = 65521


def follow(state: float, token: int) -> float:
    """The running hash of a history: its recurrent state."""
    return (
        float("nan")
        if token == NAN_TOKEN or state != state
        else float((int(state) * 31 + token * 7 + 1) % MODULUS)
    )


class FakeModel:
    """One recurrent layer (0) that holds a hash of the history, one softmax layer (1) that holds the tokens.

    A beam's own hash lies in the softmax layer's record, which every backend has: how the recurrent layer's are held is
    not seen here.
    """

    def __init__(self) -> None:
        self.config = SimpleNamespace(
            vocab_size=97,
            max_position_embeddings=4096,
            geometry=(GatedDeltaGeometry(1, 1, 2, 2), AttentionGeometry(1, 2)),
        )
        self.lm_head = SimpleNamespace(weight=torch.zeros(97, 2))
        self.prefilled_tokens = 0

    def head_rows(self, token_ids: Tensor) -> Tensor:
        return token_ids.double()

    def logits(self, hidden: Tensor, head: Tensor | None = None) -> Tensor:
        tokens = torch.arange(97.0, dtype=torch.float64) if head is None else head
        mixed = hidden[:, :1].double() * 1103 + hidden[:, 1:].double() * 7919 + (tokens + 3) ** 2 * 2654.0
        return (mixed.remainder(10007) / 1250).to(torch.float32)

    def prefill(self, inputs: PrefillInputs, state: DecodeState) -> Tensor:
        if RAISE_TOKEN in inputs.token_ids.tolist():
            raise RuntimeError("a kernel fell over")
        self.prefilled_tokens += len(inputs.token_ids)
        prompts = state.prompts
        rows = []
        bounds = inputs.cu_seqlens.tolist()
        for i, prompt in enumerate(inputs.prompts.tolist()):
            cached = int(inputs.cached_lens[i])
            recurrent = prompts.layer(0, "recurrent_state")[prompt]
            tail = prompts.layer(0, "conv_state")[prompt]
            h = float(recurrent[0, 0, 0]) if cached else 0.0
            last = tail[0].tolist() if cached else [0.0, 0.0, 0.0]
            for place in range(bounds[i], bounds[i + 1]):
                token, position = int(inputs.token_ids[place]), int(inputs.positions[place])
                assert position == cached + place - bounds[i]
                h = follow(h, token)
                last = [*last[1:], float(token)]
                page = int(prompts.page_table[prompt, position // prompts.page_size])
                prompts.cache(1)[0][page, position % prompts.page_size] = token
                rows.append([h, self._attend(state, prompt, position + 1) + sum(last)])
            recurrent[0, 0, 0] = h
            tail[0] = torch.tensor(last)
        hidden = torch.tensor(rows)
        return hidden if inputs.last_rows is None else hidden[inputs.last_rows]

    def decode(self, inputs: StepInputs, state: DecodeState) -> Tensor:
        rows = []
        cu_rows = inputs.cu_rows.tolist()
        for i, prompt in enumerate(inputs.prompts.tolist()):
            depth, length = int(inputs.depths[i]), int(state.prompts.lengths[prompt])
            attended = self._attend(state, prompt, length)
            for row in range(cu_rows[i], cu_rows[i + 1]):
                slot = int(inputs.slots[row])
                if slot < 0:
                    rows.append([0.0, 0.0])
                    continue
                token = int(inputs.token_ids[row])
                assert int(inputs.positions[row]) == length + depth
                ancestors = inputs.ancestors[row, :depth].tolist()
                h = float(state.prompts.layer(0, "recurrent_state")[prompt, 0, 0, 0])
                if ancestors:
                    h = float(state.records.layer(1, "v")[ancestors[-1], 0, 0])
                own = sum(
                    float(state.records.layer(1, "k")[a, 0, 0]) * (j + 2) for j, a in enumerate(ancestors)
                )
                h = follow(h, token)
                state.records.layer(1, "v")[slot] = h
                state.records.layer(1, "k")[slot] = token
                rows.append([h, attended + own + token])
        return torch.tensor(rows)

    @staticmethod
    def _attend(state: DecodeState, prompt: int, length: int) -> float:
        prompts = state.prompts
        places = torch.arange(length)
        pages = prompts.page_table[prompt][places // prompts.page_size].long()
        keys = prompts.cache(1)[0][pages, places % prompts.page_size, 0, 0]
        return float((keys * ((places % 13) + 1)).sum()) % 9973


def fake_engine(
    catalog: ItemCatalog | None = CATALOG, vocabulary: SidVocabulary = VOCABULARY, **options: Any
) -> Engine:
    return Engine(FakeModel(), vocabulary, catalog, config=EngineConfig(device="cpu", **options))  # type: ignore[arg-type]


def alone(request: Request, params: BeamParams | None = None, **options: Any) -> Result:
    """The answer of an engine that has nothing else to do."""
    [result] = fake_engine(**options).generate([request], params)
    return result


def answer(result: Result) -> list[tuple[Any, ...]]:
    """What must not depend on the company a request is in."""
    return [(item.sid, item.item_ids, item.cum_logprob) for item in result.items]


def check_nothing_is_held(engine: Engine) -> None:
    """No request, slot, beam row, prompt place or page that is not the prompt cache's is in use."""
    scheduler, prompts = engine.scheduler, engine.state.prompts
    assert not scheduler.has_work
    assert scheduler.rows.num_taken == 0
    assert engine.state.records.slots.num_taken == 0
    assert prompts.places.num_taken == 0
    assert engine.served.masks is None or engine.served.masks.num_taken == 0
    cache = getattr(scheduler, "cache", None)
    assert prompts.pages.num_taken == (0 if cache is None else cache.num_pages)

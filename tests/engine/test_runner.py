"""Forced trees: whatever selection does, every beam equals a replay of its own tokens from the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onela import BeamParams, Engine, Request
from onela.engine.active import ActiveRequest
from onela.ops.beams import advance_beams, pack_beams
from tests.engine.helpers import random_prompt, save_qwen3_5, tiny_engine, vocabulary_of
from tests.engine.test_engine import BACKENDS, name_of

VOCABULARY = vocabulary_of(8, 8, 8, 8)

# Parents of each step after the first beams; -1 is a beam that does not live.
TREES: dict[str, list[list[int]]] = {
    "the second beam twice": [[1, 1], [1, 1]],
    "the first beam three times": [[0, 0, 0], [0, 0, 0]],
    "a full reversal": [[4, 3, 2, 1, 0], [4, 3, 2, 1, 0], [4, 3, 2, 1, 0]],
    "growing and shrinking": [[2, 0, 0, 1, 2, 2, 1], [6], [0, 0, 0]],
    "beams that die": [[0, 2, -1], [1, -1, 1], [2, 0, -1]],
    "straight on": [[0, 1], [0, 1], [0, 1]],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen3_5")
    return path, save_qwen3_5(path)


def first_width(tree: list[list[int]]) -> int:
    return max(max(tree[0]) + 1, 2)


def force(request: ActiveRequest, parents: list[int], generator: torch.Generator) -> None:
    """Advance a request as a selection with these parents and random codes would."""
    pool, parent = request.pool, torch.tensor(parents, dtype=torch.int32)
    pool.reserve(request.first_row + request.num_rows)
    place = {
        "cu_rows": torch.tensor([0, request.width], dtype=torch.int32),
        "first_rows": torch.tensor([request.first_row], dtype=torch.int32),
    }
    _, nodes, _, rows = pack_beams(
        pool.rows,
        **place,
        hidden_starts=torch.zeros(1, dtype=torch.int32),
        num_rows=request.width,
        level=request.level,
        num_levels=pool.num_levels,
    )
    # A parent that does not live has no children either.
    parent = parent.where((parent >= 0) & (nodes[parent.clamp(min=0).long()] >= 0), torch.tensor(-1)).int()
    dead = parent < 0
    codes = torch.randint(0, 8, (len(parents),), generator=generator, dtype=torch.int32)
    slot = request.step_start if request.level and not request.in_last_step else -1
    advance_beams(
        pool.rows,
        rows,
        parent,
        codes.masked_fill(dead, -1),
        torch.zeros(len(parents)).masked_fill(dead, float("-inf")),
        torch.zeros(len(parents), dtype=torch.int64).masked_fill(dead, -1),
        trie_nodes=nodes,
        finite=torch.ones(request.width, dtype=torch.bool),
        cu_out=torch.tensor([0, len(parents)], dtype=torch.int32),
        first_slots=torch.tensor([slot], dtype=torch.int32),
        **place,
        level=request.level,
        num_levels=pool.num_levels,
    )
    request.advance()


def start(engine: Engine, prompt: list[int], tree: list[list[int]]) -> ActiveRequest:
    """Admit a request whose widths are those of the tree."""
    widths = (first_width(tree), *(len(step) for step in tree))
    request = engine.prepare(Request(prompt_token_ids=prompt), BeamParams(beam_width_array=widths))
    request.widths = widths
    engine.scheduler.add(request)
    return request


@pytest.mark.parametrize("options", BACKENDS, ids=name_of)
def test_every_beam_is_a_replay_of_its_own_tokens(
    checkpoint: tuple[Path, Any], options: dict[str, Any]
) -> None:
    """All trees at once, their prompts of different lengths, their steps at different depths."""
    path, model = checkpoint
    engine = tiny_engine(path, VOCABULARY, None, **options)
    generator = torch.Generator().manual_seed(3)
    trees = list(TREES.values())
    prompts = [random_prompt(length, seed=length) for length in (2, 5, 64, 70, 1, 3)]
    with torch.inference_mode():
        requests = [start(engine, prompt, tree) for prompt, tree in zip(prompts, trees)]
        engine.runner.prefill(engine.scheduler.schedule().prefill)
        for request, tree in zip(requests, trees):
            force(request, [0] * first_width(tree), generator)
        for step in range(3):
            # The last request stays one step behind, so that one forward holds two depths.
            running = [r for r, tree in zip(requests, trees) if r.level <= len(tree)]
            if step == 0:
                running = running[:-1]
            hidden = engine.runner.decode(running)
            for request, rows in zip(running, hidden):
                check_rows(model, request, engine.model.logits(rows))
            for request in running:
                tree = trees[requests.index(request)]
                if request.level <= len(tree):
                    force(request, tree[request.level - 1], generator)


def check_rows(model: Any, request: ActiveRequest, logits: torch.Tensor) -> None:
    """Each living beam's logits against one full forward over its prompt and its own tokens."""
    for beam in range(request.width):
        if not request.beams.alive[beam]:
            continue
        codes = request.beams.codes[beam].tolist()
        tokens = [int(VOCABULARY.token_ids(level)[code]) for level, code in enumerate(codes)]
        expected = model(torch.tensor([[*request.prompt_token_ids, *tokens]])).logits[0, -1]
        torch.testing.assert_close(logits[beam], expected, rtol=1e-4, atol=1e-4)

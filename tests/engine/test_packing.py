"""Padding costs a step nothing but room: the same rows come out, and nothing else is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onela import Engine
from onela.engine.active import ActiveRequest
from onela.engine.graphs import padded_shape
from onela.engine.packing import StepShape
from onela.state import StepInputs
from tests.engine.helpers import random_prompt, save_qwen3_5, tiny_engine
from tests.engine.test_engine import BACKENDS, name_of
from tests.engine.test_runner import TREES, VOCABULARY, first_width, force, start


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_5")
    save_qwen3_5(path)
    return path


def pools(engine: Any) -> dict[str, torch.Tensor]:
    state = engine.state
    kept = {f"prompts.{name}": t for name, t in state.prompts.prompt_tensors.tensors.items()}
    kept |= {f"pages.{name}": t for name, t in state.prompts.page_tensors.tensors.items()}
    kept |= {f"records.{name}": t for name, t in state.records.pool.tensors.items()}
    pool = getattr(state.backend, "pool", None)
    return kept | ({} if pool is None else {f"backend.{name}": t for name, t in pool.tensors.items()})


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN (memory that nobody wrote) to NaN."""
    return bool(torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0)))


def packed(engine: Engine, requests: list[ActiveRequest], shape: StepShape) -> StepInputs:
    """The beams of these requests, padded up to a shape."""
    runner = engine.runner
    runner.state.prompts.flush()
    runner.beams.reserve(max((r.first_row + r.num_rows for r in requests), default=1))
    runner.table.reserve(max(len(requests), shape.num_requests), 1)
    runner.table.fill(requests, [runner.level_starts[r.level - 1] for r in requests], [])
    return runner.step_inputs(shape)


@pytest.mark.parametrize("options", BACKENDS, ids=name_of)
def test_a_padded_step_gives_the_same_rows_and_changes_nothing_more(
    path: Path, options: dict[str, Any]
) -> None:
    """Two engines side by side; one packs every step into a larger shape, after a step of nothing but padding."""
    trees = list(TREES.values())
    plain, padded = (tiny_engine(path, VOCABULARY, None, **options) for _ in range(2))
    hidden: list[list[torch.Tensor]] = []
    with torch.inference_mode():
        for engine in (plain, padded):
            generator = torch.Generator().manual_seed(5)
            hidden.append([])
            requests = [start(engine, random_prompt(3 + i, seed=i), tree) for i, tree in enumerate(trees)]
            engine.runner.prefill(engine.scheduler.schedule().prefill)
            for request, tree in zip(requests, trees):
                force(request, [0] * first_width(tree), generator)
            for step in range(3):
                running = [r for r, tree in zip(requests, trees) if r.level <= len(tree)]
                running = running[:-1] if step == 0 else running
                shape = StepShape.of(running)
                engine.state.backend.reserve(max(r.first_row + r.num_rows for r in requests), 4)
                if engine is padded:
                    shape = replace(padded_shape(shape), depth=shape.depth + 2)
                    assert shape.num_rows > sum(r.width for r in running)
                    before = {name: tensor.clone() for name, tensor in pools(engine).items()}
                    engine.runner.forward(packed(engine, [], shape))
                    assert all(same(tensor, before[name]) for name, tensor in pools(engine).items())
                inputs = packed(engine, running, shape)
                rows = sum(r.width for r in running)
                hidden[-1].append(engine.runner.forward(inputs)[:rows])
                live = inputs.slots[:rows] >= 0
                hidden[-1][-1] = hidden[-1][-1][live]
                for request in running:
                    tree = trees[requests.index(request)]
                    if request.level <= len(tree):
                        force(request, tree[request.level - 1], generator)
    for given, expected in zip(hidden[1], hidden[0]):
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    after = pools(plain)
    for name, tensor in pools(padded).items():
        if not name.startswith("backend."):
            torch.testing.assert_close(tensor, after[name], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (StepShape(1, 1, 0, True), StepShape(16, 1, 0, True)),
        (StepShape(100, 3, 2, False), StepShape(112, 4, 2, False)),
        (StepShape(1024, 4, 6, False), StepShape(1024, 4, 6, False)),
        (StepShape(1025, 5, 9, False), StepShape(1280, 8, 16, False)),
    ],
)
def test_shapes_are_padded_by_at_most_a_quarter(given: StepShape, expected: StepShape) -> None:
    assert padded_shape(given) == expected

"""What a comparison of backends says, and of what."""

from __future__ import annotations

import pytest

from onela import BeamParams, Engine, EngineConfig, Request
from onela.engine.prompting import PromptOptions
from onela.engine.verify import VARIANTS, BackendDifference, verify_backends
from tests.engine.fake_model import CATALOG, VOCABULARY, FakeModel
from tests.engine.fake_text import FakeTokenizer


def test_every_backend_reads_the_prompts_that_the_engine_does() -> None:
    model = FakeModel()
    engine = Engine(
        model,  # type: ignore[arg-type]
        VOCABULARY,
        CATALOG,
        config=EngineConfig(device="cpu"),
        tokenizer=FakeTokenizer(),
        prompt_options=PromptOptions(forced_prefix="xy"),
    )
    lines = verify_backends(engine, [Request(prompt="abc")], BeamParams(beam_width=4))
    assert [line.backend for line in lines] == [name for name, _ in VARIANTS]
    # The forced prefix is two letters more.
    assert model.prefilled_tokens == len(VARIANTS) * 5
    for line in lines:
        assert (line.same_items, line.overlap, line.max_score_difference) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("overlap", "difference", "expected"),
    [(1.0, 0.5, True), (0.1, 0.5, True), (1.0, 0.6, False), (0.0, 0.0, False), (1.0, float("nan"), False)],
)
def test_lists_with_nothing_in_common_do_not_agree(overlap: float, difference: float, expected: bool) -> None:
    assert BackendDifference("replay", 0.0, overlap, difference, 0).within(0.5) == expected

"""The rule behind `recurrent_backend="auto"`."""

from __future__ import annotations

import pytest
import torch

from onela import Engine, EngineConfig
from onela.state import AttentionGeometry, GatedDeltaGeometry, choose_backend
from onela.state.backends import FullStateBackend, ReplayBackend
from onela.state.choice import replay_share
from tests.engine.fake_model import FakeModel
from tests.engine.helpers import vocabulary_of

LARGE = (GatedDeltaGeometry(16, 16, 128, 128), AttentionGeometry(2, 256))
SMALL = (GatedDeltaGeometry(4, 4, 16, 16),)


def test_short_sids_are_replayed_and_very_long_ones_are_not() -> None:
    assert {choose_backend(LARGE, num_levels=levels, beam_width=256) for levels in (2, 3, 7, 64)} == {
        "replay"
    }
    assert choose_backend(LARGE, num_levels=1000, beam_width=256) == "full_state"
    # A state of 16 x 16 is worth few records.
    assert choose_backend(SMALL, num_levels=7, beam_width=256) == "replay"
    assert choose_backend(SMALL, num_levels=64, beam_width=256) == "full_state"


@pytest.mark.parametrize("layers", [LARGE, SMALL])
def test_replay_pays_less_the_longer_a_sid_and_the_wider_a_record(
    layers: tuple[GatedDeltaGeometry, ...],
) -> None:
    shares = [replay_share(layers, num_levels=levels, beam_width=64) for levels in range(3, 200)]
    assert shares == sorted(shares)
    wide = replay_share(layers, num_levels=9, beam_width=64, dtype=torch.float32, record_dtype=torch.float32)
    assert wide > replay_share(layers, num_levels=9, beam_width=64)


def test_a_single_beam_pays_for_the_prompts_state_alone() -> None:
    """One beam reads the whole state at each step, as a full state does, but does not write it."""
    alone, many = (replay_share(LARGE, num_levels=3, beam_width=width) for width in (1, 4096))
    assert many < 0.05
    assert 0.45 < alone < 0.7
    assert choose_backend(LARGE, num_levels=3, beam_width=1) == "replay"


def test_a_model_without_recurrent_layers_has_nothing_to_choose() -> None:
    assert choose_backend(LARGE[1:], num_levels=500, beam_width=4) == "replay"


@pytest.mark.parametrize(("levels", "kind"), [(3, ReplayBackend), (64, FullStateBackend)])
def test_the_engine_takes_the_rules_choice(levels: int, kind: type) -> None:
    model = FakeModel()
    model.config.geometry = SMALL
    model.config.vocab_size = 400
    config = EngineConfig(device="cpu", recurrent_backend="auto")
    engine = Engine(model, vocabulary_of(*[4] * levels), config=config)  # type: ignore[arg-type]
    backend = engine.state.backend
    assert type(backend) is kind
    assert not isinstance(backend, FullStateBackend) or backend.read_parent

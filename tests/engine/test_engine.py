"""The whole road on tiny models: every answer against exhaustive search with transformers' model."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onela
from onela import BeamParams, Engine, Request
from onela.engine.scheduler import Batch
from tests.engine.fake_model import alone, answer, check_nothing_is_held, fake_engine
from tests.engine.helpers import (
    Scorer,
    catalog_of,
    check_equal,
    random_prompt,
    random_sids,
    save_qwen3_5,
    tiny_engine,
    vocabulary_of,
)

SIZES = (6, 8, 7)
BACKENDS: list[dict[str, Any]] = [
    {"recurrent_backend": "replay"},
    {"recurrent_backend": "full_state", "full_state_mode": "copy"},
    {"recurrent_backend": "full_state", "full_state_mode": "read_parent"},
    {"recurrent_backend": "replay_ssm", "replay_ssm_checkpoint": "per_beam"},
    {"recurrent_backend": "replay_ssm", "replay_ssm_checkpoint": "shared"},
    {"recurrent_backend": "replay", "fused_layer_step": False},
    {"recurrent_backend": "records_moved"},
]


def name_of(options: dict[str, Any]) -> str:
    """A name for a choice of options."""
    return "-".join(str(value) for value in options.values())


VOCABULARY = vocabulary_of(*SIZES)
LEGAL = random_sids(120, SIZES)
CATALOG = catalog_of(LEGAL, VOCABULARY)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen3_5")
    return path, save_qwen3_5(path)


@pytest.fixture(scope="module")
def mild(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine over weights that do not blow small differences up.

    Matrix products round differently at other batch sizes; with wild weights that rounding alone passes 1e-5.
    """
    path = tmp_path_factory.mktemp("mild")
    save_qwen3_5(path, gain=0.5)
    return tiny_engine(path, VOCABULARY, CATALOG)


@pytest.fixture(scope="module")
def engine(checkpoint: tuple[Path, Any]) -> Engine:
    return tiny_engine(checkpoint[0], VOCABULARY, CATALOG)


@pytest.mark.parametrize("options", BACKENDS, ids=name_of)
def test_every_backend_equals_exhaustive_search(
    checkpoint: tuple[Path, Any], options: dict[str, Any]
) -> None:
    path, model = checkpoint
    engine = tiny_engine(path, VOCABULARY, CATALOG, **options)
    prompts = [random_prompt(length, seed=length) for length in (1, 3, 37, 90)]
    widths = [5, 16, 40, 120]
    requests = [Request(prompt_token_ids=p, params=BeamParams(beam_width=w)) for p, w in zip(prompts, widths)]
    scorer = Scorer(model, VOCABULARY, LEGAL)
    for result, prompt, width in zip(engine.generate(requests), prompts, widths):
        check_equal(result.items, scorer.beam_search(prompt, [width] * 3))


def test_sids_of_64_levels(tmp_path: Path) -> None:
    """Records, tree, vocabulary and every backend at 63 ancestors; the last row is one forward over the whole path."""
    vocabulary = vocabulary_of(*[4] * 64)
    types = ["linear_attention", "full_attention"]
    model = save_qwen3_5(tmp_path, gain=0.5, vocab_size=400, num_hidden_layers=2, layer_types=types)
    requests = [Request(prompt_token_ids=random_prompt(20))]
    answers = []
    for options in BACKENDS:
        engine = tiny_engine(tmp_path, vocabulary, None, **options)
        answers.append(engine.generate(requests, BeamParams(beam_width=5)))
    for results in answers[1:]:
        for result, expected in zip(results, answers[0]):
            check_equal(result.items, [(item.sid, item.cum_logprob) for item in expected.items], 1e-3)
    for request, result in zip(requests, answers[0]):
        item = result.items[0]
        tokens = [int(vocabulary.token_ids(level)[code]) for level, code in enumerate(item.sid)]
        prompt = list(request.prompt_token_ids or ())
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].detach()
        own = [torch.as_tensor(vocabulary.token_ids(level)) for level in range(64)]
        score = sum(float(row[ids].log_softmax(-1)[code]) for row, ids, code in zip(logits, own, item.sid))
        assert abs(score - item.cum_logprob) < 2e-3


@pytest.mark.parametrize("normalizer", ["level", "allowed", "vocabulary"])
def test_normalizers_mean_what_they_say(
    checkpoint: tuple[Path, Any], engine: Engine, normalizer: Any
) -> None:
    prompt = random_prompt(20)
    expected = Scorer(checkpoint[1], VOCABULARY, LEGAL, normalizer).beam_search(prompt, [12, 12, 12])
    [result] = engine.generate(
        [Request(prompt_token_ids=prompt)], BeamParams(beam_width=12, normalizer=normalizer)
    )
    check_equal(result.items, expected)


@pytest.mark.parametrize("widths", [(16, 32, 100), (64, 8, 8), (1, 1, 1), (1, 5, 30), (3, 2, 1)])
def test_widths_per_step(checkpoint: tuple[Path, Any], widths: tuple[int, ...]) -> None:
    """Widths that grow (TensorRT-LLM returns empty beams there) and that shrink."""
    path, model = checkpoint
    sizes = (8, 6, 10)
    vocabulary = vocabulary_of(*sizes, first=5)
    legal = random_sids(400, sizes)
    engine = tiny_engine(path, vocabulary, catalog_of(legal, vocabulary))
    prompt = random_prompt(15)
    [result] = engine.generate([Request(prompt_token_ids=prompt)], BeamParams(beam_width_array=widths))
    check_equal(result.items, Scorer(model, vocabulary, legal).beam_search(prompt, widths))
    assert len(result.items) == widths[-1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("num_beams", [4, 8, 32])
def test_equals_transformers_generate(checkpoint: tuple[Path, Any], engine: Engine, num_beams: int) -> None:
    _, model = checkpoint
    prompt = random_prompt(25, seed=num_beams)
    tokens = VOCABULARY.decode_tokens(VOCABULARY.encode(torch.tensor(LEGAL).numpy())).tolist()

    def allowed(_: int, sentence: torch.Tensor) -> list[int]:
        written = sentence[len(prompt) :].tolist()
        return sorted({row[len(written)] for row in tokens if row[: len(written)] == written})

    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=3,
        min_new_tokens=3,
        length_penalty=0.0,
        do_sample=False,
        prefix_allowed_tokens_fn=allowed,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    params = BeamParams(beam_width=num_beams, normalizer="vocabulary")
    [result] = engine.generate([Request(prompt_token_ids=prompt)], params)
    sequences = [tuple(row) for row in expected.sequences[:, len(prompt) :].tolist()]
    assert [item.token_ids for item in result.items] == sequences
    for item, score in zip(result.items, expected.sequences_scores.tolist()):
        assert abs(item.cum_logprob - score) < 1e-4


def test_a_batch_of_uneven_prompts_equals_each_alone(mild: Engine) -> None:
    requests = [
        Request(prompt_token_ids=random_prompt(n, seed=n), params=BeamParams(beam_width=w))
        for n, w in ((1, 7), (64, 100), (65, 1), (130, 33), (2, 64))
    ]
    together = mild.generate(requests)
    for request, result in zip(requests, together):
        [alone] = mild.generate([request])
        assert [item.sid for item in alone.items] == [item.sid for item in result.items]
        for a, b in zip(alone.items, result.items):
            assert abs(a.cum_logprob - b.cum_logprob) < 1e-5


def test_requests_of_different_depths_share_a_forward(mild: Engine) -> None:
    """Small batches force requests to join while others are under way."""
    requests = [Request(prompt_token_ids=random_prompt(9, seed=i)) for i in range(5)]
    params = BeamParams(beam_width=20)
    expected = mild.generate(requests, params)
    config = onela.EngineConfig(max_batch_tokens=10, max_tokens_beside_decode=None)
    staggered = Engine(mild.model, mild.vocabulary, mild.catalog, config=config)
    depths: list[set[int]] = []
    run = staggered.runner.run

    def watched(batch: Batch) -> None:
        depths.append({request.depth for request in batch.decode})
        run(batch)

    staggered.runner.run = watched  # type: ignore[method-assign]
    results = staggered.generate(requests, params)
    assert any(len(step) > 1 for step in depths), "no forward held requests of different depths"
    for a, b in zip(expected, results):
        assert [item.sid for item in a.items] == [item.sid for item in b.items]
        assert all(abs(x.cum_logprob - y.cum_logprob) < 1e-5 for x, y in zip(a.items, b.items))


def test_a_pairwise_trie_would_allow_what_the_catalogue_does_not(checkpoint: tuple[Path, Any]) -> None:
    vocabulary = vocabulary_of(10, 10, 10)
    engine = tiny_engine(checkpoint[0], vocabulary, catalog_of([(1, 2, 3), (8, 2, 9)], vocabulary))
    [result] = engine.generate([Request(prompt_token_ids=[1, 2])], BeamParams(beam_width=50))
    assert {item.sid for item in result.items} == {(1, 2, 3), (8, 2, 9)}
    assert result.finish_reason == "exhausted"
    assert result.usage.num_legal == 2
    assert [item.item_id for item in result.items] == ["-".join(map(str, item.sid)) for item in result.items]
    assert result.items[0].title == f"Item {result.items[0].sid}"


def test_one_child_beside_seven(checkpoint: tuple[Path, Any]) -> None:
    vocabulary = vocabulary_of(4, 4, 8)
    legal = [(0, 1, 5), *((2, 3, code) for code in range(7))]
    engine = tiny_engine(checkpoint[0], vocabulary, catalog_of(legal, vocabulary))
    for width in (1, 2, 3, 8, 9):
        [result] = engine.generate([Request(prompt_token_ids=[3, 1, 4])], BeamParams(beam_width=width))
        check_equal(
            result.items, Scorer(checkpoint[1], vocabulary, legal).beam_search([3, 1, 4], [width] * 3)
        )


@pytest.mark.parametrize("sizes", [(9,), (3, 2, 2, 2, 2, 2, 3)])
def test_one_level_and_seven(checkpoint: tuple[Path, Any], sizes: tuple[int, ...]) -> None:
    vocabulary = vocabulary_of(*sizes)
    legal = random_sids(min(60, 9 if len(sizes) == 1 else 60), sizes)
    engine = tiny_engine(checkpoint[0], vocabulary, catalog_of(legal, vocabulary))
    [result] = engine.generate([Request(prompt_token_ids=random_prompt(6))], BeamParams(beam_width=11))
    expected = Scorer(checkpoint[1], vocabulary, legal).beam_search(random_prompt(6), [11] * len(sizes))
    check_equal(result.items, expected)


def test_one_item(checkpoint: tuple[Path, Any]) -> None:
    engine = tiny_engine(checkpoint[0], VOCABULARY, catalog_of([(5, 7, 6)], VOCABULARY))
    [result] = engine.generate([Request(prompt_token_ids=[1])])
    assert [item.sid for item in result.items] == [(5, 7, 6)]
    assert result.usage.beam_widths == (1, 1, 1)


def test_without_a_catalogue_every_combination_is_legal(checkpoint: tuple[Path, Any]) -> None:
    vocabulary = vocabulary_of(4, 3, 5)
    legal = random_sids(60, (4, 3, 5))
    engine = tiny_engine(checkpoint[0], vocabulary, None)
    [result] = engine.generate([Request(prompt_token_ids=[9, 9])], BeamParams(beam_width=60))
    check_equal(result.items, Scorer(checkpoint[1], vocabulary, legal).beam_search([9, 9], [60] * 3))
    assert result.items[0].item_ids == ()
    assert result.items[0].item_id is None


def test_fewer_tokens_give_prefixes(engine: Engine) -> None:
    [result] = engine.generate([Request(prompt_token_ids=[1])], BeamParams(beam_width=10, max_tokens=2))
    assert {len(item.sid) for item in result.items} == {2}
    assert {item.sid for item in result.items} <= {sid[:2] for sid in LEGAL}
    assert result.items[0].item_ids == ()


def test_length_penalty_divides_the_sum(engine: Engine) -> None:
    request = Request(prompt_token_ids=[5, 6, 7])
    [plain] = engine.generate([request], BeamParams(beam_width=8))
    [mean] = engine.generate([request], BeamParams(beam_width=8, length_penalty=1.0))
    assert [i.sid for i in plain.items] == [i.sid for i in mean.items]
    for a, b in zip(plain.items, mean.items):
        assert a.sequence_score == a.cum_logprob
        assert b.sequence_score == pytest.approx(b.cum_logprob / 3)


def test_a_generation_config_cuts_no_beams(tmp_path: Path) -> None:
    """`top_k` in a checkpoint's generation_config.json silently cut beams elsewhere."""
    model = save_qwen3_5(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"top_k": 2, "top_p": 0.1, "num_beams": 1, "do_sample": true}'
    )
    engine = tiny_engine(tmp_path, VOCABULARY, CATALOG)
    [result] = engine.generate([Request(prompt_token_ids=[4, 2])], BeamParams(beam_width=30))
    check_equal(result.items, Scorer(model, VOCABULARY, LEGAL).beam_search([4, 2], [30] * 3))


def test_bf16_is_near_fp32(checkpoint: tuple[Path, Any], engine: Engine) -> None:
    narrow = tiny_engine(checkpoint[0], VOCABULARY, CATALOG, dtype="bfloat16")
    request = Request(prompt_token_ids=random_prompt(40))
    [a], [b] = engine.generate([request]), narrow.generate([request])
    scores = {item.sid: item.cum_logprob for item in a.items}
    differences = [abs(scores[item.sid] - item.cum_logprob) for item in b.items]
    assert max(differences) < 1.0
    assert sum(differences) / len(differences) < 0.2


BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt_token_ids", {"prompt_token_ids": []}),
    ("prompt_token_ids", {"prompt_token_ids": [3, 97]}),
    ("prompt_token_ids", {"prompt_token_ids": [-1]}),
    ("prompt_token_ids", {"prompt_token_ids": [1.5]}),
    ("prompt_token_ids", {"prompt_token_ids": [1] * 3000}),
    ("prompt", {"prompt": "there is no tokenizer here"}),
    ("prompt_token_ids", {}),
    ("session_id", {"prompt_token_ids": [1], "session_id": ["no", "text"]}),
    ("params", {"prompt_token_ids": [1], "params": {"beam_width": 3}}),
    ("timeout_s", {"prompt_token_ids": [1], "timeout_s": 10**400}),
    ("timeout_s", {"prompt_token_ids": [1], "timeout_s": float("nan")}),
    ("prompt_token_ids", {"prompt_token_ids": [1], "prompt": "both"}),
]


@pytest.mark.parametrize(("field", "arguments"), BAD_REQUESTS)
def test_bad_requests_name_the_field_and_leave_the_engine_usable(
    engine: Engine, field: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(onela.RequestError) as caught:
        engine.generate([Request(prompt_token_ids=[1, 2]), Request(**arguments)])
    assert caught.value.field == field
    assert len(engine.generate([Request(prompt_token_ids=[1, 2])])[0].items) == 120


BAD_PARAMS: list[tuple[str, dict[str, Any]]] = [
    ("num_return_sequences", {"beam_width": 4, "num_return_sequences": 5}),
    ("num_return_sequences", {"num_return_sequences": 0}),
    ("beam_width", {"beam_width": 0}),
    ("beam_width", {"beam_width": True}),
    ("beam_width", {"beam_width": 10**6}),
    ("beam_width_array", {"beam_width_array": [4, 0, 2]}),
    ("beam_width_array", {"beam_width_array": []}),
    ("beam_width_array", {"beam_width_array": [4, 4], "max_tokens": 3}),
    ("beam_width", {"beam_width": np.bool_(True)}),
    ("beam_width", {"beam_width": np.float64(4)}),
    ("max_tokens", {"max_tokens": np.int64(0)}),
    ("length_penalty", {"length_penalty": np.bool_(True)}),
    ("length_penalty", {"length_penalty": np.float32("nan")}),
    ("length_penalty", {"length_penalty": float("nan")}),
    ("length_penalty", {"length_penalty": 10**400}),
    ("length_penalty", {"length_penalty": -1000.0}),
    ("normalizer", {"normalizer": "softmax"}),
    ("temperature", {"temperature": 0.5}),
    ("n", {"beam_width": 4, "n": 5}),
    ("num_beams", {"num_beams": 0}),
    ("max_new_tokens", {"max_new_tokens": 65}),
    ("n", {"num_return_sequences": 2, "n": 2}),
]


@pytest.mark.parametrize("requests", [None, 5, Request(prompt_token_ids=[1] * 10_000), [None], "ab"])
def test_what_is_no_list_of_requests_is_said_so_shortly(engine: Engine, requests: Any) -> None:
    with pytest.raises(onela.RequestError, match="requests: a list of Request is expected") as caught:
        engine.generate(requests)
    assert len(str(caught.value)) < 300


def test_among_several_requests_the_wrong_one_is_named(engine: Engine) -> None:
    """By its name, or by its place, which it does not need alone."""
    right, wrong = Request(prompt_token_ids=[1]), Request(prompt_token_ids=[-1])
    with pytest.raises(
        onela.RequestError, match=r"^requests\[1\]: prompt_token_ids: the token in place 0 lies"
    ):
        engine.generate(request for request in (right, wrong))  # type: ignore[arg-type]
    with pytest.raises(onela.RequestError, match=r"^user 8: prompt_token_ids: the token in place 0 lies"):
        engine.generate([right, dataclasses.replace(wrong, request_id="user 8")])
    with pytest.raises(onela.RequestError, match=r"^user 8: prompt_token_ids: the token in place 0 lies"):
        engine.generate([dataclasses.replace(wrong, request_id="user 8")])
    with pytest.raises(onela.RequestError, match=r"^prompt_token_ids: the token in place 0 lies"):
        engine.generate([wrong])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("path", None, "path: a checkpoint directory is expected, got None"),
        ("path", 5, "path: a checkpoint directory is expected, got 5"),
        ("catalog", [], r"catalog: a path or an ItemCatalog is expected, got \[\]"),
        ("vocabulary", [[1], [2]], r"vocabulary: a SidVocabulary is expected, got \[\[1\], \[2\]\]"),
    ],
)
def test_what_an_engine_is_made_of_has_a_kind(name: str, value: Any, message: str) -> None:
    with pytest.raises(onela.ConfigError, match=message):
        Engine.from_pretrained(**{"path": "unused", name: value})


@pytest.mark.parametrize("options", [["beam_width"], "beam_width", 5, None])
def test_options_are_parsed_from_a_mapping(options: Any) -> None:
    with pytest.raises(onela.RequestError, match="params: a mapping of options is expected"):
        BeamParams.parse(options)


@pytest.mark.parametrize(("field", "options"), BAD_PARAMS)
def test_bad_options_name_the_field(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(onela.RequestError) as caught:
        BeamParams.parse(options)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("field", "requests", "params"),
    [
        ("requests", ["text"], None),
        ("requests", Request(prompt_token_ids=[1]), None),
        ("params", [Request(prompt_token_ids=[1])], {"beam_width": 3}),
        ("prompt_token_ids", [Request(prompt_token_ids=5)], None),  # type: ignore[arg-type]
    ],
)
def test_other_engines_habits_are_refused_by_name(
    engine: Engine, field: str, requests: Any, params: Any
) -> None:
    with pytest.raises(onela.RequestError) as caught:
        engine.generate(requests, params)
    assert caught.value.field == field


def test_more_tokens_than_levels_are_refused(engine: Engine) -> None:
    with pytest.raises(onela.RequestError, match=r"max_tokens.*3"):
        engine.generate([Request(prompt_token_ids=[1])], BeamParams(max_tokens=4))


def test_nan_logits_fail_the_request_and_free_everything(checkpoint: tuple[Path, Any]) -> None:
    engine = tiny_engine(checkpoint[0], VOCABULARY, CATALOG)
    norm = engine.model.model.norm.weight
    before = norm.clone()
    norm.fill_(float("nan"))
    with pytest.raises(onela.NumericsError, match=r"logits.*NaN"):
        engine.generate([Request(prompt_token_ids=[1, 2, 3], request_id="broken")])
    norm.copy_(before)
    assert engine.state.records.slots.num_taken == 0
    assert engine.state.prompts.places.num_taken == 0
    assert engine.state.prompts.pages.num_taken == 0
    assert len(engine.generate([Request(prompt_token_ids=[1, 2, 3])])[0].items) == 120


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_of_other_tokens_fail_what_is_normalised_over_them(
    checkpoint: tuple[Path, Any], bad: float
) -> None:
    engine = tiny_engine(checkpoint[0], VOCABULARY, CATALOG)
    codes = {int(token) for level in range(3) for token in VOCABULARY.token_ids(level)}
    engine.model.lm_head.weight[min(set(range(97)) - codes)] = bad
    request = Request(prompt_token_ids=[3, 1, 4])
    with pytest.raises(onela.NumericsError, match="logits"):
        engine.generate([request], BeamParams(beam_width=8, normalizer="vocabulary"))
    assert len(engine.generate([request], BeamParams(beam_width=8))[0].items) == 8


def test_threads_take_turns(engine: Engine) -> None:
    requests = [Request(prompt_token_ids=random_prompt(20, seed=i)) for i in range(3)]
    expected = engine.generate(requests)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: engine.generate(requests), range(6)))
    assert answers == [expected] * 6
    assert engine.state.records.slots.num_taken == 0
    assert engine.state.prompts.places.num_taken == 0


def test_everything_is_given_back(engine: Engine) -> None:
    engine.generate([Request(prompt_token_ids=random_prompt(30, seed=i)) for i in range(4)])
    assert engine.state.records.slots.num_taken == 0
    assert engine.state.prompts.places.num_taken == 0
    assert engine.state.prompts.pages.num_taken == 0
    assert engine.scheduler.rows.num_taken == 0


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(checkpoint: tuple[Path, Any]) -> None:
    engine = tiny_engine(checkpoint[0], VOCABULARY, CATALOG, max_slots=50)
    with pytest.raises(onela.CapacityError, match=r"52 record slots.*50"):
        engine.generate([Request(prompt_token_ids=[1])], BeamParams(beam_width=120))
    assert (
        engine.generate([Request(prompt_token_ids=[1])], BeamParams(beam_width=40))[0].finish_reason == "stop"
    )


def test_small_pools_only_make_requests_wait(checkpoint: tuple[Path, Any], engine: Engine) -> None:
    small = tiny_engine(
        checkpoint[0], VOCABULARY, CATALOG, max_slots=100, max_prompts=2, max_pages=4, page_size=16
    )
    requests = [Request(prompt_token_ids=random_prompt(20, seed=i)) for i in range(6)]
    params = BeamParams(beam_width=40)
    for a, b in zip(engine.generate(requests, params), small.generate(requests, params)):
        assert [item.sid for item in a.items] == [item.sid for item in b.items]


def test_no_requests_no_results(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_pools_are_allocated_at_the_start_when_that_is_asked_for(checkpoint: Any) -> None:
    limits = {"max_slots": 90, "max_prompts": 3, "max_pages": 7}
    engine = tiny_engine(checkpoint[0], VOCABULARY, CATALOG, preallocate=True, **limits)
    generation = engine.state.records.pool.generation
    assert engine.state.records.pool.capacity == 90
    assert engine.state.prompts.prompt_tensors.capacity == 3
    assert engine.state.prompts.page_tensors.capacity == 7
    engine.generate([Request(prompt_token_ids=[3])], BeamParams(beam_width=4))
    assert engine.state.records.pool.generation == generation
    with pytest.raises(onela.ConfigError, match="preallocate: max_pages must be set"):
        tiny_engine(checkpoint[0], VOCABULARY, CATALOG, preallocate=True, max_slots=90, max_prompts=3)


def test_a_rehearsal_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    options = {"warm_up_requests": 3, "warm_up_beams": 8, "prompt_cache_bytes": 100_000}
    engine = fake_engine(**options)
    check_nothing_is_held(engine)
    assert engine.cache is not None
    assert engine.cache.stats.misses == 0
    request = Request(prompt_token_ids=[5, 6, 7])
    assert answer(engine.generate([request])[0]) == answer(alone(request))
    assert not caplog.text
    with pytest.raises(
        onela.ConfigError, match="warm_up_beams: a whole number <= 65536 is expected, got 65537"
    ):
        fake_engine(warm_up_requests=1, warm_up_beams=65537)
    # What goes wrong with it is said, and no more.
    fake_engine(**options, max_slots=1)
    assert "the rehearsal of a warm start failed: the request needs" in caplog.text

"""The `openai` client drives the server, as it drives vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from onela import BeamParams, Request, Result
from tests.engine.fake_model import VOCABULARY
from tests.serve.helpers import CATALOG, serving, text_engine

openai = pytest.importorskip("openai")
MESSAGES: list[Any] = [{"role": "user", "content": "what next"}]


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with serving(text_engine(), api_key="key", model_name="tiny") as client:
        yield client


@pytest.fixture(scope="module")
def client(server: httpx.Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="key", max_retries=0) as client:
        yield client


def direct(request: Request, **params: Any) -> Result:
    [result] = text_engine().generate([request], BeamParams(**params))
    return result


def texts(result: Result) -> list[str]:
    return [VOCABULARY.format_sid(item.sid) for item in result.items]


def test_models(client: Any) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny"
    assert model.catalog_version == CATALOG.version


def test_completions_give_one_choice_per_beam_best_first(client: Any) -> None:
    expected = direct(Request(prompt_token_ids=[5, 6, 7]), beam_width=8)
    answer = client.completions.create(
        model="tiny",
        prompt=[5, 6, 7],
        n=8,
        max_tokens=16,
        temperature=0,
        extra_body={"use_beam_search": True},
    )
    assert answer.object == "text_completion"
    assert [choice.text for choice in answer.choices] == texts(expected)
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert [choice.cumulative_logprob for choice in answer.choices] == [i.cum_logprob for i in expected.items]
    assert [choice.item_ids for choice in answer.choices] == [list(item.item_ids) for item in expected.items]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 24)


def test_a_width_of_its_own(client: Any) -> None:
    expected = direct(Request(prompt="abc"), beam_width=50, num_return_sequences=4)
    answer = client.completions.create(model="tiny", prompt="abc", n=4, extra_body={"beam_width": 50})
    assert [choice.text for choice in answer.choices] == texts(expected)
    every = client.completions.create(model="tiny", prompt="abc", extra_body={"beam_width": 50})
    assert len(every.choices) == 50
    one = client.completions.create(model="tiny", prompt="abc")
    assert len(one.choices) == 1


def test_several_prompts_one_after_the_other(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=["abc", "defg"], n=3)
    expected = [direct(Request(prompt=text), beam_width=3) for text in ("abc", "defg")]
    assert [choice.text for choice in answer.choices] == texts(expected[0]) + texts(expected[1])
    assert answer.usage.prompt_tokens == 7


def test_logprobs_of_completions(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", n=5, logprobs=1)
    for choice in answer.choices:
        assert sum(choice.logprobs.token_logprobs) == pytest.approx(choice.cumulative_logprob, abs=1e-5)
        assert "".join(choice.logprobs.tokens) == choice.text
        for token, start in zip(choice.logprobs.tokens, choice.logprobs.text_offset):
            assert choice.text[start:].startswith(token)
    assert client.completions.create(model="tiny", prompt="abc", n=5).choices[0].logprobs is None


def test_chat(client: Any) -> None:
    expected = direct(Request(messages=MESSAGES), beam_width=6)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=6, logprobs=True, max_completion_tokens=3
    )
    assert answer.object == "chat.completion"
    assert [choice.message.content for choice in answer.choices] == texts(expected)
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        total = sum(token.logprob for token in choice.logprobs.content)
        assert total == pytest.approx(choice.cumulative_logprob, abs=1e-5)


def test_max_tokens_cuts_a_sid_and_says_length(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=4, max_tokens=2)
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert {len(choice.sid) for choice in answer.choices} == {2}


def test_filters_go_into_the_extra_body(client: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt="abc", n=9, extra_body={"filter": {"lang": "de"}, "exclude_item_ids": [1]}
    )
    ids = [choice.item_ids[0] for choice in answer.choices]
    assert len(ids) == 9
    assert all(item % 3 == 1 and item != 1 for item in ids)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "other"}, "model"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"stream": True}, "stream"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"extra_body": {"use_beam_search": False}}, "use_beam_search"),
        ({"extra_body": {"best_of": 4}}, "best_of"),
        ({"n": 5, "extra_body": {"beam_width": 4}}, "n"),
        ({"n": 2000}, "n"),
        ({"n": 5, "extra_body": {"beam_width": 2000}}, "beam_width"),
    ],
)
def test_what_a_beam_search_cannot_do_is_refused_by_name(
    client: Any, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as error:
        client.completions.create(**{"model": "tiny", "prompt": "abc", **change})
    assert error.value.body["param"] == field


def test_a_wrong_key(server: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="no", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()

"""From text and messages to tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onela import ConfigError, Request, RequestError, SidVocabulary
from onela.engine.prompting import PromptEncoder, PromptOptions
from tests.engine.fake_text import text_engine
from tests.fixtures import make_tokenizer

SIDS = [f"<s_{level}_{code}>" for level in "ab" for code in range(3)]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(SIDS, ("<|sid_begin|>", "<|sid_end|>"))


def encoder(tokenizer: Any, vocab_size: int | None = None, **options: Any) -> PromptEncoder:
    vocabulary = SidVocabulary.from_tokenizer(tokenizer)
    return PromptEncoder(tokenizer, vocabulary, vocab_size or len(tokenizer), PromptOptions(**options))


def words(tokenizer: Any, tokens: np.ndarray[Any, Any]) -> str:
    return tokenizer.decode(tokens.tolist())


class FixedTokenizer:
    """Knows one answer, 0 as the unknown token, and 1 and 2 as the tokens around a text."""

    unk_token_id, unk_token = 0, "<unk>"
    bos_token_id, eos_token_id = 1, 2

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self.ids}


class TestForcedPrefix:
    def test_auto_is_the_begin_token(self, tokenizer: Any) -> None:
        tokens = encoder(tokenizer).encode(Request(prompt="Hello"))
        assert words(tokenizer, tokens) == "Hello<|sid_begin|>"

    def test_is_not_doubled(self, tokenizer: Any) -> None:
        tokens = encoder(tokenizer).encode(Request(prompt="Hello<|sid_begin|>"))
        assert words(tokenizer, tokens) == "Hello<|sid_begin|>"
        tokens = encoder(tokenizer).encode(Request(prompt="Hello<|sid_begin|> "))
        assert words(tokenizer, tokens) == "Hello<|sid_begin|> <|sid_begin|>"

    def test_none(self, tokenizer: Any) -> None:
        tokens = encoder(tokenizer, forced_prefix="").encode(Request(prompt="Hello"))
        assert words(tokenizer, tokens) == "Hello"

    def test_auto_without_a_begin_token(self) -> None:
        tokenizer = make_tokenizer(SIDS)
        assert encoder(tokenizer).forced_prefix == []

    def test_any_text(self, tokenizer: Any) -> None:
        longer = encoder(tokenizer, forced_prefix="Next: <|sid_begin|>")
        assert words(tokenizer, longer.encode(Request(prompt="A. "))) == "A. Next: <|sid_begin|>"
        assert (
            words(tokenizer, longer.encode(Request(prompt="A. Next: <|sid_begin|>")))
            == "A. Next: <|sid_begin|>"
        )

    def test_tokens_are_taken_as_they_are(self, tokenizer: Any) -> None:
        assert encoder(tokenizer).encode(Request(prompt_token_ids=(5, 6))).tolist() == [5, 6]

    @pytest.mark.parametrize(
        "given",
        [
            (0, 6),
            range(0, 7, 6),
            np.array([0, 6]),
            np.array([0, 6], dtype=np.uint8),
            [np.int32(0), 6],
            [np.uint64(0), np.int8(6)],
            torch.tensor([0, 6]),
            [torch.tensor(0), 6],
        ],
        ids=repr,
    )
    def test_tokens_may_be_any_whole_numbers(self, tokenizer: Any, given: Any) -> None:
        tokens = encoder(tokenizer).encode(Request(prompt_token_ids=given))
        assert (tokens.dtype, tokens.tolist()) == (np.int32, [0, 6])

    @pytest.mark.parametrize(
        ("given", "shown"),
        [
            ([2, True], "True"),
            ((5, False), "False"),
            ([5, np.True_], r"np\.True_"),
            ([5, torch.tensor(True)], r"tensor\(True\)"),
            ([5, np.array(True)], r"array\(True\)"),
        ],
        ids=repr,
    )
    def test_a_boolean_is_no_token(self, tokenizer: Any, given: Any, shown: str) -> None:
        message = rf"^prompt_token_ids: the token in place 1 is not a whole number \(got {shown}\)"
        with pytest.raises(RequestError, match=message):
            encoder(tokenizer).encode(Request(prompt_token_ids=given))

    @pytest.mark.parametrize("given", [np.array([True, False]), torch.tensor([True, False])], ids=repr)
    def test_an_array_of_booleans_is_no_prompt(self, tokenizer: Any, given: Any) -> None:
        with pytest.raises(RequestError, match="the token in place 0 is not a whole number"):
            encoder(tokenizer).encode(Request(prompt_token_ids=given))

    @pytest.mark.parametrize("token", [-(2**31) - 1, 2**31, 2**70])
    def test_a_token_that_no_int32_holds(self, tokenizer: Any, token: int) -> None:
        with pytest.raises(
            RequestError, match="prompt_token_ids: the token in place 1 lies outside the vocab"
        ):
            encoder(tokenizer).encode(Request(prompt_token_ids=[3, token]))

    @pytest.mark.parametrize("name", ["chat_template", "enable_thinking"])
    @pytest.mark.parametrize("value", ["no", 1, None])
    def test_a_switch_is_true_or_false(self, name: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"{name}: true or false is expected, got {value!r}"):
            PromptOptions(**{name: value})

    @pytest.mark.parametrize("prefix", [None, 3])
    def test_no_text(self, tokenizer: Any, prefix: Any) -> None:
        with pytest.raises(ConfigError, match="forced_prefix: text is expected"):
            encoder(tokenizer, forced_prefix=prefix)

    def test_without_a_tokenizer(self, tokenizer: Any) -> None:
        vocabulary = SidVocabulary.from_token_ids([[5], [6]], begin_token_id=4)
        with pytest.raises(ConfigError, match="forced_prefix: 'x' needs a tokenizer"):
            PromptEncoder(None, vocabulary, 10, PromptOptions(forced_prefix="x"))
        assert PromptEncoder(None, vocabulary, 10).encode(Request(prompt_token_ids=[1])).tolist() == [1]

    def test_a_token_that_the_tokenizer_lacks(self) -> None:
        vocabulary = SidVocabulary.from_token_ids([[5], [6]])
        for ids in ([], [0]):
            with pytest.raises(ConfigError, match="the tokenizer has no tokens for '<x>'"):
                PromptEncoder(FixedTokenizer(ids), vocabulary, 10, PromptOptions(forced_prefix="<x>"))

    def test_a_token_that_the_model_lacks(self, tokenizer: Any) -> None:
        size = tokenizer.convert_tokens_to_ids("<|sid_begin|>")
        with pytest.raises(
            ConfigError, match=f"forced_prefix: token {size} lies outside the model's vocabulary"
        ):
            encoder(tokenizer, size)


class TestMessages:
    def test_an_empty_think_block(self, tokenizer: Any) -> None:
        messages = [{"role": "system", "content": "Be brief."}, *HELLO]
        tokens = encoder(tokenizer).encode(Request(messages=messages))
        assert words(tokenizer, tokens) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n<|sid_begin|>"
        )

    def test_thinking(self, tokenizer: Any) -> None:
        tokens = encoder(tokenizer, enable_thinking=True, forced_prefix="").encode(Request(messages=HELLO))
        assert words(tokenizer, tokens) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"

    def test_text_through_the_template(self, tokenizer: Any) -> None:
        chatting = encoder(tokenizer, chat_template=True)
        as_text, as_message = (chatting.encode(r) for r in (Request(prompt="Hello"), Request(messages=HELLO)))
        assert as_text.tolist() == as_message.tolist()

    def test_no_template(self) -> None:
        tokenizer = make_tokenizer(SIDS)
        tokenizer.chat_template = None
        with pytest.raises(RequestError, match="messages: the checkpoint's tokenizer has no chat template"):
            encoder(tokenizer).encode(Request(messages=HELLO))
        with pytest.raises(RequestError, match="prompt: the checkpoint's tokenizer has no chat template"):
            encoder(tokenizer, chat_template=True).encode(Request(prompt="Hello"))

    def test_a_template_that_refuses(self) -> None:
        tokenizer = make_tokenizer(SIDS)
        tokenizer.chat_template = "{{ raise_exception('system first') }}"
        with pytest.raises(RequestError, match="messages: the chat template refuses it: system first"):
            encoder(tokenizer).encode(Request(messages=HELLO))

    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ([], "messages"),
            ("Hello", "messages"),
            ({"role": "user", "content": "x"}, "messages"),
            (["Hello"], "messages[0]"),
            ([*HELLO, {"content": "x"}], "messages[1].role"),
            ([{"role": "user"}], "messages[0].content"),
            ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "messages[0].content"),
        ],
    )
    def test_malformed(self, tokenizer: Any, messages: Any, field: str) -> None:
        with pytest.raises(RequestError) as caught:
            encoder(tokenizer).encode(Request(messages=messages))
        assert caught.value.field == field


class TestRefused:
    def test_no_tokenizer(self) -> None:
        bare = PromptEncoder(None, SidVocabulary.from_token_ids([[5], [6]]), 10)
        for request in (Request(prompt="x"), Request(messages=HELLO)):
            with pytest.raises(RequestError, match="this engine has no tokenizer; give prompt_token_ids"):
                bare.encode(request)

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ({"prompt": ""}, "prompt: at least one character is needed"),
            ({"prompt": 3}, "prompt: text is expected"),
            ({"prompt": "a\ud800b"}, "prompt: the text is not valid Unicode"),
            (
                {"messages": [{"role": "user", "content": "\udfff"}]},
                "messages: the text is not valid Unicode",
            ),
            ({"prompt_token_ids": []}, "prompt_token_ids: at least one token is needed"),
            ({"prompt_token_ids": [1, 2.5]}, "prompt_token_ids: the token in place 1 is not a whole number"),
            (
                {"prompt_token_ids": [1, 10000]},
                "prompt_token_ids: the token in place 1 lies outside the vocabulary",
            ),
            (
                {"prompt_token_ids": [-1]},
                "prompt_token_ids: the token in place 0 lies outside the vocabulary",
            ),
        ],
    )
    def test_unusable_prompts(self, tokenizer: Any, prompt: dict[str, Any], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            encoder(tokenizer).encode(Request(**prompt))

    @pytest.mark.parametrize("ids", [[0], [1, 0, 0, 2], [0, 2]])
    def test_text_that_the_tokenizer_knows_nothing_of(self, ids: list[int]) -> None:
        """It would be run as the unknown token, and answered with whatever is popular."""
        vocabulary = SidVocabulary.from_token_ids([[5], [6]])
        with pytest.raises(
            RequestError, match=r"prompt: the tokenizer knows nothing of it.* '<unk>'.*'some words'"
        ):
            PromptEncoder(FixedTokenizer(ids), vocabulary, 10).encode(Request(prompt="some words"))

    def test_text_that_the_tokenizer_knows_in_part(self, caplog: pytest.LogCaptureFixture) -> None:
        vocabulary = SidVocabulary.from_token_ids([[5], [6]])
        encoder = PromptEncoder(FixedTokenizer([1, 0, 5, 0]), vocabulary, 10)
        assert encoder.encode(Request(prompt="some <5> words")).tolist() == [1, 0, 5, 0]
        assert "prompt: 2 of 4 tokens are unknown to the tokenizer and become '<unk>'" in caplog.text
        caplog.clear()
        known = PromptEncoder(FixedTokenizer([1, 5]), vocabulary, 10)
        assert known.encode(Request(prompt="<5>")).tolist() == [1, 5]
        assert not caplog.text

    def test_text_beyond_the_model(self, tokenizer: Any) -> None:
        with pytest.raises(
            RequestError, match="prompt: the token in place 1 lies outside the vocabulary of 264"
        ):
            encoder(tokenizer, 264, forced_prefix="").encode(Request(prompt="<s_a_2><s_b_2>"))

    @pytest.mark.parametrize(
        "given", [{}, {"prompt": "x", "messages": HELLO}, {"prompt": "x", "prompt_token_ids": [1]}]
    )
    def test_exactly_one_kind_of_prompt(self, given: dict[str, Any]) -> None:
        with pytest.raises(RequestError, match="give exactly one of prompt_token_ids, prompt and messages"):
            Request(**given)


@pytest.mark.parametrize(
    ("field", "prompt"),
    [
        ("prompt", "x" * 5000),
        ("messages", [{"role": "user", "content": "x" * 5000}]),
        ("prompt_token_ids", [5] * 5000),
    ],
)
def test_a_prompt_too_long_for_the_model_is_named_as_it_was_given(field: str, prompt: Any) -> None:
    with pytest.raises(RequestError, match=f"{field}: at most 4094 tokens for this model") as caught:
        text_engine().prepare(Request(**{field: prompt}))
    assert caught.value.field == field

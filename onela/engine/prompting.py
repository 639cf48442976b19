"""From what a request says to the tokens that the model reads: chat template, empty think block, forced prefix.

The models that write semantic IDs were tuned on one exact shape of prompt:

    OpenOneRec, OneRec-Think   messages, the chat template with an empty think block, then `<|sid_begin|>`
    MiniOneRec                 plain text that ends in `### Response:` and a newline, and nothing after it

The forced prefix opens the SID, so that the first token chosen is already its first code. Nothing has to close it: a
SID has as many codes as there are levels, so decoding ends by itself, and what the model would write next (the
end token `<|sid_end|>`, or a newline and the end token) is never asked for.
"""

from __future__ import annotations

import logging
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onela.engine.request import Request
from onela.errors import ConfigError, RequestError
from onela.items import SidVocabulary

logger = logging.getLogger(__name__)
AROUND = ("bos", "eos", "pad", "cls", "sep")
"""Tokens that a tokenizer puts around a text: they say nothing of it."""


@dataclass(frozen=True)
class PromptOptions:
    """How text and messages become tokens. A request's `prompt_token_ids` are taken as they are.

    Attributes:
        forced_prefix: text that every prompt ends in, added where it does not; "auto": the vocabulary's begin token
            if it has one; "": nothing.
        chat_template: whether a plain-text `prompt` is put through the chat template too, as one message of the user.
        enable_thinking: handed to the chat template. Off, Qwen3's templates write the empty think block that
            recommenders are tuned with; on, they leave thinking to the model, which a beam search over SIDs cannot.
    """

    forced_prefix: str = "auto"
    chat_template: bool = False
    enable_thinking: bool = False

    def __post_init__(self) -> None:
        for name in ("chat_template", "enable_thinking"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: true or false is expected, got {getattr(self, name)!r}")


class PromptEncoder:
    """Turns requests into tokens.

    Args:
        tokenizer: the checkpoint's; None: only `prompt_token_ids` are taken.
        vocabulary: for the begin token. vocab_size: of the model.
        options: how.
    Raises:
        ConfigError: a forced prefix that the tokenizer cannot write.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: SidVocabulary, vocab_size: int, options: PromptOptions | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.options = options or PromptOptions()
        self.forced_prefix = self._prefix_tokens(vocabulary)

    def encode(self, request: Request) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The prompt's tokens, [length] int32. Raises `RequestError` that names the field."""
        if request.prompt_token_ids is not None:
            given: Any = request.prompt_token_ids
            try:
                # An array's or a tensor's own list holds Python's numbers, and is made faster.
                given = given.tolist() if hasattr(given, "tolist") else given
                tokens = given if isinstance(given, (list, tuple)) else list(given)
            except TypeError:
                raise RequestError(
                    "prompt_token_ids", "a list of whole numbers is expected", value=given
                ) from None
            return self._array("prompt_token_ids", tokens)
        if request.messages is not None:
            field, tokens = "messages", self._chat("messages", request.messages)
        else:
            assert request.prompt is not None, "a Request has exactly one kind of prompt"
            field, tokens = "prompt", self._text(request.prompt)
        prefix = self.forced_prefix
        if prefix and tokens[-len(prefix) :] != prefix and tokens:
            tokens = tokens + prefix
        return self._array(field, tokens)

    def _text(self, prompt: str) -> list[int]:
        if not isinstance(prompt, str):
            raise RequestError("prompt", "text is expected", value=prompt)
        if not prompt:
            raise RequestError("prompt", "at least one character is needed", value=prompt)
        if self.options.chat_template:
            return self._chat("prompt", [{"role": "user", "content": prompt}])
        return self._tokenize("prompt", prompt)

    def _chat(self, field: str, messages: Sequence[Mapping[str, str]]) -> list[int]:
        _check_messages(messages)
        tokenizer = self._need(field)
        if getattr(tokenizer, "chat_template", None) is None:
            raise RequestError(
                field, "the checkpoint's tokenizer has no chat template; give prompt as plain text"
            )
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=self.options.enable_thinking,
            )
        except Exception as error:  # a template is a program of the checkpoint's, and may raise anything
            raise RequestError(field, f"the chat template refuses it: {error}") from error
        # The template has written all special tokens already.
        return self._tokenize(field, text, add_special_tokens=False)

    def _tokenize(self, field: str, text: str, **options: Any) -> list[int]:
        tokenizer = self._need(field)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(field, f"the text is not valid Unicode ({error.reason})") from None
        tokens = list(tokenizer(text, **options)["input_ids"])
        self._check_known(field, text, tokens)
        return tokens

    def _check_known(self, field: str, text: str, tokens: list[int]) -> None:
        """Refuse a text of which the tokenizer knows nothing, and warn of one of which it knows only a part."""
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if unknown is None or unknown not in tokens:
            return
        name = getattr(self.tokenizer, "unk_token", None) or unknown
        around = {unknown, *(getattr(self.tokenizer, f"{kind}_token_id", None) for kind in AROUND)}
        if around.issuperset(tokens):
            raise RequestError(
                field, f"the tokenizer knows nothing of it, every word becomes {name!r}", value=text[:80]
            )
        logger.warning(
            "%s: %d of %d tokens are unknown to the tokenizer and become %r",
            field, tokens.count(unknown), len(tokens), name,
        )  # fmt: skip

    def _need(self, field: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(field, "this engine has no tokenizer; give prompt_token_ids")
        return self.tokenizer

    def _array(self, field: str, tokens: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The tokens as integers within the vocabulary that lie side by side."""
        if not tokens:
            raise RequestError(field, "at least one token is needed", value=[])
        try:
            # Prompts are long, and nothing turns a list of numbers into an array as fast.
            array = np.frombuffer(struct.pack(f"={len(tokens)}i", *tokens), dtype=np.int32)
        except (struct.error, TypeError, OverflowError):
            array = None
        lowest, highest = (-1, 0) if array is None else (int(array.min()), int(array.max()))
        # True and False pass as 1 and 0; a prompt without these need not be looked through for them.
        doubtful = lowest <= 1 and set(map(type, tokens)) != {int}
        if lowest < 0 or highest >= self.vocab_size or doubtful:
            self._refuse_unusable(field, tokens)
        assert array is not None, "tokens within the vocabulary are int32"
        return array

    def _refuse_unusable(self, field: str, tokens: Sequence[Any]) -> None:
        """Raise `RequestError` for the first token that is no whole number or lies outside the vocabulary, if any."""
        for place, token in enumerate(tokens):
            try:
                number = _whole(token)
            except TypeError:
                raise RequestError(
                    field, f"the token in place {place} is not a whole number", value=token
                ) from None
            if not 0 <= number < self.vocab_size:
                raise RequestError(
                    field,
                    f"the token in place {place} lies outside the vocabulary of {self.vocab_size}",
                    value=token,
                )

    def _prefix_tokens(self, vocabulary: SidVocabulary) -> list[int]:
        text = self.options.forced_prefix
        if not isinstance(text, str):
            raise ConfigError(f"forced_prefix: text is expected, got {text!r}")
        if text == "auto":
            tokens = [] if vocabulary.begin_token_id is None else [vocabulary.begin_token_id]
        elif not text:
            tokens = []
        elif self.tokenizer is None:
            raise ConfigError(f"forced_prefix: {text!r} needs a tokenizer, and there is none")
        else:
            tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            unknown = getattr(self.tokenizer, "unk_token_id", None)
            if not tokens or (unknown is not None and unknown in tokens):
                raise ConfigError(f"forced_prefix: the tokenizer has no tokens for {text!r}")
        if tokens and max(tokens) >= self.vocab_size:
            raise ConfigError(
                f"forced_prefix: token {max(tokens)} lies outside the model's vocabulary of {self.vocab_size}"
            )
        return tokens


def _whole(token: Any) -> int:
    """A token as an integer. Raises `TypeError` for what is none, and for a boolean, NumPy's and torch's too."""
    if isinstance(token, bool) or str(getattr(token, "dtype", "")).endswith("bool"):
        raise TypeError("a boolean is no token")
    return operator.index(token)


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages", "a list of at least one message is expected", value=messages)
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{place}]", "a mapping with role and content is expected", value=message
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(f"messages[{place}].{key}", "text is expected", value=message.get(key))

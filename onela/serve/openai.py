"""Answers in OpenAI's form: one choice per beam, best first."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from onela.engine import RecommendedItem, Result
from onela.items import SidVocabulary


def completion_body(
    results: Sequence[Result], vocabulary: SidVocabulary, model: str, *, logprobs: bool
) -> dict[str, Any]:
    """Body of /v1/completions: the choices of each prompt, one prompt after the other."""
    choices: list[dict[str, Any]] = []
    for result in results:
        for item in result.items:
            text, tokens = _text(item, vocabulary)
            choice = _choice(len(choices), item, vocabulary)
            choice["text"] = text
            if logprobs:
                starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
                choice["logprobs"] = {
                    "tokens": tokens,
                    "token_logprobs": list(item.token_logprobs or ()),
                    "top_logprobs": None,
                    "text_offset": starts,
                }
            choices.append(choice)
    return _body("cmpl", "text_completion", model, choices, results)


def chat_body(result: Result, vocabulary: SidVocabulary, model: str, *, logprobs: bool) -> dict[str, Any]:
    """Body of /v1/chat/completions."""
    choices: list[dict[str, Any]] = []
    for item in result.items:
        text, tokens = _text(item, vocabulary)
        choice = _choice(len(choices), item, vocabulary)
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        if logprobs:
            content = [
                {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                for token, logprob in zip(tokens, item.token_logprobs or ())
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        choices.append(choice)
    return _body("chatcmpl", "chat.completion", model, choices, [result])


def _choice(index: int, item: RecommendedItem, vocabulary: SidVocabulary) -> dict[str, Any]:
    return {
        "index": index,
        # A prefix was cut by max_tokens; a whole SID ends by itself.
        "finish_reason": "stop" if len(item.sid) == vocabulary.num_levels else "length",
        "logprobs": None,
        "cumulative_logprob": item.cum_logprob,
        "sid": list(item.sid),
        "item_ids": list(item.item_ids),
        "titles": list(item.titles),
    }


def _text(item: RecommendedItem, vocabulary: SidVocabulary) -> tuple[str, list[str]]:
    """A SID as text, and the text of its tokens."""
    tokens = vocabulary.token_strings_of(item.sid)
    return "".join(tokens), tokens


def _body(
    prefix: str, kind: str, model: str, choices: list[dict[str, Any]], results: Sequence[Result]
) -> dict[str, Any]:
    prompt = sum(result.usage.prompt_tokens for result in results)
    written = sum(result.usage.completion_tokens * len(result.items) for result in results)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(result.usage.cached_tokens for result in results)},
        },
        "catalog_version": results[0].catalog_version if results else None,
    }

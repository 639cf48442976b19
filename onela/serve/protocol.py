"""What goes over the wire: bodies of requests, checked here, and bodies of answers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
)
from pydantic_core import PydanticCustomError

from onela._version import __version__
from onela.config import MAX_BEAM_WIDTH, ServerConfig
from onela.decoding import BeamParams
from onela.engine import Request, Result
from onela.errors import RequestError

Width = Annotated[StrictInt, Field(ge=1, le=MAX_BEAM_WIDTH)]
Number = StrictFloat  # takes integers too
ItemId = StrictInt | StrictStr
FilterValue = StrictBool | StrictInt | StrictFloat | StrictStr
# Of a long list the first wrong entry is told: to tell of hundreds of thousands would hold up all other requests.
ItemIds = Annotated[list[ItemId], Field(fail_fast=True)]
Filter = dict[str, FilterValue | Annotated[list[FilterValue], Field(fail_fast=True)]]
TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Text = Annotated[StrictStr, Field(min_length=1)]
Name = Annotated[StrictStr, Field(min_length=1, max_length=256)]


def _no_boolean(value: Any) -> Any:
    """Python takes True for 1 and False for 0; a client that writes one has meant something else."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


def _only_boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return value


Zero = Annotated[Literal[0], BeforeValidator(_no_boolean)]
One = Annotated[Literal[1], BeforeValidator(_no_boolean)]
Yes = Annotated[Literal[True], BeforeValidator(_only_boolean)]
No = Annotated[Literal[False], BeforeValidator(_only_boolean)]


class Body(BaseModel):
    """A body in which an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


@contextlib.contextmanager
def field_called(name: str, written: str) -> Iterator[None]:
    """Inside, a `RequestError` about the field `name` names it as the client has written it."""
    try:
        yield
    except RequestError as error:
        if error.field != name:
            raise
        raise error.about(written) from error


class Message(Body):
    role: Annotated[StrictStr, Field(min_length=1, max_length=64)]
    content: StrictStr


class Shared(Body):
    """Fields that every kind of request has."""

    normalizer: Literal["level", "allowed", "vocabulary"] = BeamParams.normalizer
    length_penalty: Annotated[Number, Field(ge=-100, le=100)] = BeamParams.length_penalty
    exclude_item_ids: ItemIds | None = None
    allow_item_ids: ItemIds | None = None
    filter: Filter | None = None
    session_id: Name | None = None
    request_id: Name | None = None
    priority: Annotated[StrictInt, Field(ge=-100, le=100)] = 0
    timeout_s: Annotated[Number, Field(gt=0, le=3600)] | None = None

    def make_request(self, config: ServerConfig, params: BeamParams, **prompt: Any) -> Request:
        """The engine's request, once the server's limits are kept. Raises `RequestError`."""
        if params.beam_width_array is not None:
            _limit("beam_width_array", max(params.beam_width_array), config.max_beam_width)
        else:
            _limit("beam_width", params.beam_width, config.max_beam_width)
        for name, value in prompt.items():
            size = sum(len(m["content"]) for m in value) if name == "messages" else len(value)
            if isinstance(value, list) and name != "messages":
                _limit(name, size, config.max_prompt_tokens, "tokens")
            else:
                # How many tokens a text has, only the tokenizer knows; the model's own limit is kept after it.
                _limit(name, size, 16 * config.max_prompt_tokens, "characters")
        lists = {"exclude_item_ids": self.exclude_item_ids, "allow_item_ids": self.allow_item_ids}
        for name, values in (self.filter or {}).items():
            lists[f"filter.{name}"] = values if isinstance(values, list) else None  # type: ignore[assignment]
        for name, entries in lists.items():
            _limit(name, len(entries or ()), config.max_item_ids, "entries")
        return Request(
            **prompt,
            params=params,
            request_id=self.request_id,
            priority=self.priority,
            timeout_s=self.timeout_s or config.default_timeout_s,
            exclude_item_ids=self.exclude_item_ids,
            allow_item_ids=self.allow_item_ids,
            filter=self.filter,
            session_id=self.session_id,
        )


class RecommendRequest(Shared):
    """Body of POST /v1/recommend. Exactly one of `prompt_token_ids`, `prompt` and `messages`."""

    prompt_token_ids: TokenIds | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)] | None = None
    beam_width: Width = BeamParams.beam_width
    beam_width_array: Annotated[list[Width], Field(min_length=1, max_length=64)] | None = None
    num_return_sequences: Width | None = None
    n: Width | None = Field(None, description="The same as num_return_sequences.")
    max_tokens: Annotated[StrictInt, Field(ge=1, le=64)] | None = None
    stream: StrictBool = Field(
        False, description="Server-sent events: `step` after each level, then `result`."
    )

    def to_request(self, config: ServerConfig) -> Request:
        """The engine's request. Raises `RequestError`."""
        options: dict[str, Any] = {"beam_width": self.beam_width, "length_penalty": self.length_penalty}
        options["normalizer"] = self.normalizer
        for name in ("beam_width_array", "num_return_sequences", "n", "max_tokens"):
            value = getattr(self, name)
            if value is not None:
                options[name] = tuple(value) if isinstance(value, list) else value
        prompt: dict[str, Any] = {}
        if self.prompt_token_ids is not None:
            prompt["prompt_token_ids"] = self.prompt_token_ids
        if self.prompt is not None:
            prompt["prompt"] = self.prompt
        if self.messages is not None:
            prompt["messages"] = [message.model_dump() for message in self.messages]
        return self.make_request(config, BeamParams.parse(options), **prompt)


class OpenAIRequest(Shared):
    """Fields of OpenAI's completions. What a beam search has no use for is accepted only at its neutral value."""

    model: StrictStr
    n: Width | None = None
    beam_width: Width | None = Field(None, description="Default: n, or without n the server's default width.")
    use_beam_search: Yes = True
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = Field(None, description="0 or 1; no effect.")
    top_p: One | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    seed: StrictInt | None = Field(None, description="No effect: the search is deterministic.")
    stream: No = False
    user: Name | None = Field(None, description="The same as session_id.")

    @property
    def width_field(self) -> str:
        """Which field the width comes from."""
        return "n" if self.beam_width is None and self.n is not None else "beam_width"

    def make_request(self, config: ServerConfig, params: BeamParams, **prompt: Any) -> Request:
        with field_called("beam_width", self.width_field):
            return super().make_request(config, params, **prompt)

    def beam_params(self, config: ServerConfig, num_levels: int) -> BeamParams:
        """Options of the beam search. Raises `RequestError`."""
        if self.temperature not in (None, 0, 1):
            raise RequestError(
                "temperature", "0 or 1 is expected, a beam search does not sample", value=self.temperature
            )
        if self.model != config.model_name:
            raise RequestError("model", f"this server has {config.model_name!r}", value=self.model)
        if self.user is not None and self.session_id is None:
            self.session_id = self.user
        width = self.beam_width or self.n or BeamParams.beam_width
        # A SID ends by itself, as other text does with an end token: a larger limit is not an error.
        tokens = None if self.max_tokens is None else min(self.max_tokens, num_levels)
        wanted = self.n if self.n is not None else width if self.beam_width is not None else 1
        with field_called("num_return_sequences", "n"):
            return BeamParams(
                beam_width=width,
                num_return_sequences=wanted,
                max_tokens=tokens,
                length_penalty=self.length_penalty,
                normalizer=self.normalizer,
            )


class CompletionRequest(OpenAIRequest):
    """Body of POST /v1/completions."""

    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=64)]
    logprobs: Annotated[StrictInt, Field(ge=0, le=5)] | None = None
    echo: No = False

    @property
    def prompts(self) -> dict[str, str | list[int]]:
        """Each prompt by the place that the client wrote it in."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return {"prompt": cast(Any, self.prompt)}
        return {f"prompt.{i}": cast(Any, prompt) for i, prompt in enumerate(self.prompt)}

    def to_requests(self, config: ServerConfig, num_levels: int) -> list[Request]:
        """One request per prompt. Raises `RequestError`."""
        params = self.beam_params(config, num_levels)
        requests = []
        for written, prompt in self.prompts.items():
            field = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            with field_called(field, written):
                request = self.make_request(config, params, **{field: prompt})
            requests.append(dataclasses.replace(request, logprobs=self.logprobs is not None))
        return requests


class ChatRequest(OpenAIRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)]
    logprobs: StrictBool | None = None
    top_logprobs: Zero | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None

    def to_request(self, config: ServerConfig, num_levels: int) -> Request:
        """The engine's request. Raises `RequestError`."""
        if self.max_tokens is None:
            self.max_tokens = self.max_completion_tokens
        params = self.beam_params(config, num_levels)
        messages = [message.model_dump() for message in self.messages]
        request = self.make_request(config, params, messages=messages)
        return dataclasses.replace(request, logprobs=bool(self.logprobs))


class LoadRequest(Body):
    """Body of POST /v1/catalog/load."""

    path: Annotated[StrictStr, Field(min_length=1, max_length=4096)]
    format: Annotated[StrictStr, Field(max_length=64)] = "auto"


class SwitchRequest(Body):
    """Body of POST /v1/catalog/switch."""

    version: Name | None = Field(None, description="Refuse unless this is the version that is loaded.")


class ErrorDetail(BaseModel):
    """What is wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None = None
    code: str


class ErrorResponse(BaseModel):
    """Body of every answer that is not 2xx."""

    error: ErrorDetail


class ItemBody(BaseModel):
    """One semantic ID, best first."""

    sid: list[int]
    item_ids: list[int | str]
    titles: list[str | None]
    cum_logprob: float
    sequence_score: float
    token_ids: list[int]


class UsageBody(BaseModel):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    beam_widths: list[int]
    num_legal: int


class TimingsBody(BaseModel):
    """Milliseconds."""

    queue: float
    prefill: float
    decode: float
    total: float


class RecommendResponse(BaseModel):
    """Body of an answer to POST /v1/recommend."""

    request_id: str | None
    items: list[ItemBody]
    finish_reason: Literal["stop", "exhausted", "filtered"]
    reason: str | None
    usage: UsageBody
    timings_ms: TimingsBody
    model: str
    engine_version: str
    catalog_version: str | None


class CatalogResponse(BaseModel):
    """State of the catalogue after an admin call."""

    active: str | None
    previous: str | None
    staged: str | None
    num_items: int
    num_sids: int


def recommend_body(result: Result, model: str) -> dict[str, Any]:
    """A result as JSON."""
    timings = result.timings
    assert timings is not None, "the engine times every request"
    return {
        "request_id": result.request_id,
        "items": [
            {
                "sid": sid,
                "item_ids": item_ids,
                "titles": titles,
                "cum_logprob": cum_logprob,
                "sequence_score": sequence_score,
                "token_ids": token_ids,
            }
            for sid, item_ids, titles, cum_logprob, sequence_score, token_ids, _ in result.items
        ],
        "finish_reason": result.finish_reason,
        "reason": result.reason,
        "usage": dataclasses.asdict(result.usage),
        "timings_ms": {name: round(1000 * value, 3) for name, value in dataclasses.asdict(timings).items()},
        "model": model,
        "engine_version": __version__,
        "catalog_version": result.catalog_version,
    }


def _limit(field: str, value: int, limit: int, what: str = "") -> None:
    if value > limit:
        unit = f" {what}" if what else ""
        raise RequestError(field, f"at most {limit}{unit} (got {value}{unit})")

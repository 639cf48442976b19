"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from onela.decoding import BeamParams
from onela.errors import RequestError

FinishReason = Literal["stop", "exhausted", "filtered"]


@dataclass(frozen=True)
class Request:
    """One user's prompt. Give exactly one of `prompt_token_ids`, `prompt` and `messages`.

    Numbers may be NumPy's; `priority` and `timeout_s` are kept as Python's.

    Attributes:
        prompt_token_ids: the prompt as tokens, run as they are.
        prompt: the prompt as text, for the checkpoint's tokenizer.
        messages: a conversation, each message with `role` and `content`, for the checkpoint's chat template.
        params: options of this request; None: those handed to `generate`.
        request_id: a name of the caller's, given back with the result.
        priority: a waiting request of higher priority is admitted first; ordinary is 0.
        timeout_s: seconds from arrival after which the request is given up; None: as long as it takes. Among
            requests of one priority the one that must end first is admitted first.
        exclude_item_ids: items never to return. allow_item_ids: the only items to return; None: no such limit.
        session_id: whose prompt it is. The prompt cache keeps the latest prompt of a session longer than others,
            and gives up the session's older ones first; replicas are chosen by it.
        logprobs: whether items carry the log-probability of each of their tokens.
        filter: attribute of the catalogue's metadata -> value, or list of values of which an item must have one.
    """

    prompt_token_ids: Sequence[int] | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    params: BeamParams | None = None
    request_id: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    exclude_item_ids: Sequence[int | str] | None = None
    allow_item_ids: Sequence[int | str] | None = None
    filter: Mapping[str, Any] | None = None
    session_id: str | None = None
    logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, numbers.Integral):
            raise RequestError("priority", "a whole number is expected", value=self.priority)
        object.__setattr__(self, "priority", int(self.priority))
        if self.timeout_s is not None:
            object.__setattr__(self, "timeout_s", _seconds(self.timeout_s))
        if self.params is not None and not isinstance(self.params, BeamParams):
            raise RequestError(
                "params", "a BeamParams is expected; BeamParams.parse takes a mapping", value=self.params
            )
        for name in ("session_id", "request_id"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise RequestError(name, "text is expected", value=getattr(self, name))
        if not isinstance(self.logprobs, bool):
            raise RequestError("logprobs", "true or false is expected", value=self.logprobs)
        if isinstance(self.prompt_token_ids, (str, bytes, bytearray, Mapping, Set)):
            raise RequestError(
                "prompt_token_ids", "a list of tokens is expected", value=self.prompt_token_ids
            )
        if sum(given is not None for given in (self.prompt_token_ids, self.prompt, self.messages)) != 1:
            raise RequestError(
                "prompt_token_ids", "give exactly one of prompt_token_ids, prompt and messages"
            )


def prompt_field(request: Request) -> str:
    """Which of its fields holds a request's prompt, for errors about it."""
    if request.prompt_token_ids is not None:
        return "prompt_token_ids"
    return "messages" if request.prompt is None else "prompt"


def _seconds(value: Any) -> float:
    """A timeout as a `float`; any real number will do, but no `bool`. Raises `RequestError`."""
    seconds = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            seconds = float(value)
    if not 0 < seconds < math.inf:
        raise RequestError("timeout_s", "a finite number of seconds above 0 is expected", value=value)
    return seconds


class RecommendedItem(NamedTuple):
    """One semantic ID of the answer, with the items it stands for. A tuple: an answer has thousands of them.

    Attributes:
        sid: codes, as the catalogue writes them.
        item_ids: items with this SID, best first; empty without a catalogue, or for a prefix.
        titles: their titles; None where the catalogue has none.
        cum_logprob: sum of the codes' log-probabilities.
        sequence_score: `cum_logprob / length**length_penalty`.
        token_ids: the tokens that were written. token_logprobs: of each of them, if the request asked for it.
    """

    sid: tuple[int, ...]
    item_ids: tuple[int | str, ...]
    titles: tuple[str | None, ...]
    cum_logprob: float
    sequence_score: float
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...] | None = None

    @classmethod
    def many(
        cls,
        sids: Sequence[tuple[int, ...]],
        item_ids: Sequence[tuple[int | str, ...]],
        titles: Sequence[tuple[str | None, ...]],
        cum_logprobs: Sequence[float],
        sequence_scores: Sequence[float],
        token_ids: Sequence[tuple[int, ...]],
        token_logprobs: Sequence[tuple[float, ...] | None],
    ) -> tuple[RecommendedItem, ...]:
        """Items from one sequence per attribute: the thousands of one answer."""
        columns = zip(
            sids, item_ids, titles, cum_logprobs, sequence_scores, token_ids, token_logprobs, strict=True
        )
        return tuple(map(tuple.__new__, itertools.repeat(cls), columns))

    @property
    def item_id(self) -> int | str | None:
        """The first item, if there is one."""
        return self.item_ids[0] if self.item_ids else None

    @property
    def title(self) -> str | None:
        """The first item's title, if it has one."""
        return self.titles[0] if self.titles else None


@dataclass(frozen=True)
class Usage:
    """What a request took.

    Attributes:
        prompt_tokens: tokens of the prompt. completion_tokens: tokens written per item.
        beam_widths: places that each step really had. num_legal: distinct legal SIDs among the last beams.
        cached_tokens: tokens of the prompt that were not run, for the prompt cache had their state.
    """

    prompt_tokens: int
    completion_tokens: int
    beam_widths: tuple[int, ...]
    num_legal: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Where the time of a request went, in seconds of the host's clock.

    Attributes:
        queue: until it was admitted. prefill: until its first token was chosen. decode: until its last one was.
        total: from arrival to the answer.
    """

    queue: float
    prefill: float
    decode: float
    total: float


@dataclass(frozen=True)
class Result:
    """The answer to one request.

    Attributes:
        items: distinct SIDs in order of score, equal scores in order of SID.
        finish_reason: "stop": as many items as were asked for; "exhausted": there were fewer legal ones;
            "filtered": the request's filters leave nothing, and so does this answer.
        reason: in words, why there are fewer than were asked for.
        usage: counts. request_id: as given. catalog_version: of the catalogue that the items come from.
        timings: where the time went.
    """

    items: tuple[RecommendedItem, ...]
    finish_reason: FinishReason
    usage: Usage
    request_id: str | None = None
    catalog_version: str | None = field(default=None)
    timings: Timings | None = field(default=None, compare=False)
    reason: str | None = field(default=None)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain dictionaries by the attributes' names, for `json.dumps` say."""
        # `asdict` would copy an answer's thousands of items number by number, and leave them tuples.
        return asdict(replace(self, items=())) | {"items": [item._asdict() for item in self.items]}

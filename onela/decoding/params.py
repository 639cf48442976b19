"""What a user may choose about a beam search."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

from onela.config import MAX_BEAM_WIDTH
from onela.errors import RequestError

Normalizer = Literal["level", "allowed", "vocabulary"]
MAX_TOKENS = 64
MAX_LENGTH_PENALTY = 100  # length**penalty stays a finite number for every length

# Spellings of other engines, accepted where options come from outside.
ALIASES = {"n": "num_return_sequences", "num_beams": "beam_width", "max_new_tokens": "max_tokens"}


@dataclass(frozen=True)
class BeamParams:
    """Options of one request's beam search. Numbers may be NumPy's; they are kept as Python's.

    Attributes:
        beam_width: beams kept after each step.
        num_return_sequences: items (distinct SIDs) to return, at most the last step's width; None: as many as
            there are beams.
        max_tokens: tokens to write; None: the number of SID levels. Fewer gives SID prefixes, without items.
        length_penalty: `sequence_score = cum_logprob / length**length_penalty`. 0.0 keeps the sum (Hugging
            Face's default is 1.0, the mean); SIDs have one length, so the order does not change.
        beam_width_array: width after each step, one entry per token; replaces `beam_width`.
        normalizer: what a step's log-probabilities are normalised over: "level", the codes of the level;
            "allowed", the legal continuations of the beam; "vocabulary", all tokens, which gives Hugging
            Face's scores and costs the full head.
    """

    beam_width: int = 128
    num_return_sequences: int | None = None
    max_tokens: int | None = None
    length_penalty: float = 0.0
    beam_width_array: tuple[int, ...] | None = None
    normalizer: Normalizer = "level"

    def __post_init__(self) -> None:
        self._set_count("beam_width", MAX_BEAM_WIDTH)
        if self.beam_width_array is not None:
            # An array of NumPy's is no `Sequence`, but a list of widths.
            if isinstance(self.beam_width_array, (str, bytes, Mapping, Set)) or not isinstance(
                self.beam_width_array, Collection
            ):
                raise RequestError(
                    "beam_width_array", "a list of widths is expected", value=self.beam_width_array
                )
            widths = tuple(_count("beam_width_array", w, MAX_BEAM_WIDTH) for w in self.beam_width_array)
            object.__setattr__(self, "beam_width_array", widths)
            if not widths:
                raise RequestError("beam_width_array", "at least one width is needed", value=widths)
        if self.max_tokens is not None:
            self._set_count("max_tokens", MAX_TOKENS)
        if self.beam_width_array is not None and self.max_tokens not in (None, len(self.beam_width_array)):
            raise RequestError(
                "beam_width_array",
                f"{len(self.beam_width_array)} widths for max_tokens = {self.max_tokens}",
                value=self.beam_width_array,
            )
        if self.num_return_sequences is not None:
            last = self.beam_width if self.beam_width_array is None else self.beam_width_array[-1]
            self._set_count("num_return_sequences", None)
            if self.num_return_sequences > last:
                raise RequestError(
                    "num_return_sequences",
                    f"at most the last beam width, {last}",
                    value=self.num_return_sequences,
                )
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, numbers.Real):
            raise RequestError("length_penalty", "a number is expected", value=self.length_penalty)
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:  # NaN is not either
            raise RequestError(
                "length_penalty",
                f"a number from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY} is expected",
                value=self.length_penalty,
            )
        object.__setattr__(self, "length_penalty", float(self.length_penalty))
        if self.normalizer not in get_args(Normalizer):
            raise RequestError(
                "normalizer", f"one of {', '.join(get_args(Normalizer))}", value=self.normalizer
            )

    def _set_count(self, field: str, limit: int | None) -> None:
        object.__setattr__(self, field, _count(field, getattr(self, field), limit))

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> BeamParams:
        """Build from a mapping, other engines' spellings included (`n`, `num_beams`, `max_new_tokens`).

        Raises:
            RequestError: an option is unknown, given twice under two names, or has an unusable value.
        """
        if not isinstance(options, Mapping):
            raise RequestError("params", "a mapping of options is expected", value=options)
        known = {field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in options.items():
            target = ALIASES.get(name, name)
            if target not in known:
                raise RequestError(
                    name, f"unknown option; known are {', '.join(sorted(known | set(ALIASES)))}"
                )
            if target in values:
                raise RequestError(name, f"given twice, also as {target}")
            values[target] = value
        try:
            return cls(**values)
        except RequestError as error:
            written = next((name for name in options if ALIASES.get(name) == error.field), error.field)
            raise error.about(written) from error

    def widths(self, num_levels: int) -> tuple[int, ...]:
        """Beams asked for after each step of a vocabulary of `num_levels` levels.

        Raises:
            RequestError: more tokens are asked for than there are levels, or too few widths given.
        """
        steps = num_levels if self.max_tokens is None else self.max_tokens
        if self.beam_width_array is not None and self.max_tokens is None:
            steps = len(self.beam_width_array)
        if steps > num_levels:
            field = "max_tokens" if self.max_tokens is not None else "beam_width_array"
            raise RequestError(field, f"at most the number of SID levels, {num_levels}", value=steps)
        return self.beam_width_array if self.beam_width_array is not None else (self.beam_width,) * steps


def _count(field: str, value: Any, limit: int | None) -> int:
    """The value as an `int`; any whole number will do, but no `bool`."""
    whole = not isinstance(value, bool) and isinstance(value, numbers.Integral)
    count = operator.index(value) if whole else 0
    if count < 1:
        raise RequestError(field, "a whole number of at least 1 is expected", value=value)
    if limit is not None and count > limit:
        raise RequestError(field, f"at most {limit}", value=value)
    return count

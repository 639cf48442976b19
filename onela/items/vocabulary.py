"""Which tokens of a model are the codes of a semantic ID, level by level.

Three numbers name one code, and they are kept apart:

    code      the number that the catalogue and the token string carry: 17 in `<a_17>`; may have holes
    index     its position among the codes in use at its level, 0 .. codebook_sizes[level] - 1, in ascending
              code order; logits, masks and the trie all speak this number
    token id  what the model reads and writes; in no particular order

No token id is ever computed: ids come from the tokenizer's own table, or from the user.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onela.errors import VocabularyError, shown
from onela.items.columns import BOOLEANS
from onela.items.sid_text import MAX_CODE, find_levels, parse_sid_text

BEGIN_TOKEN = "<|sid_begin|>"
END_TOKEN = "<|sid_end|>"


@dataclass(frozen=True, eq=False, repr=False)
class SidVocabulary:
    """The SID tokens of one model. Immutable; build it with one of the `from_*` constructors.

    Attributes:
        codebook_sizes: number of codes in use at each level.
        convention: how the tokens were found, for people.
        begin_token_id, end_token_id: ids of `<|sid_begin|>` and `<|sid_end|>`, None where they do not exist.
    """

    _token_ids: tuple[np.ndarray, ...]
    _codes: tuple[np.ndarray, ...]
    _strings: tuple[tuple[str, ...], ...] | None
    convention: str
    begin_token_id: int | None = None
    end_token_id: int | None = None
    codebook_sizes: tuple[int, ...] = field(init=False)
    _by_string: dict[str, tuple[int, int]] = field(init=False)
    _by_code: tuple[dict[int, str], ...] = field(init=False)
    _by_token_id: tuple[tuple[np.ndarray, np.ndarray], ...] = field(init=False)
    # Codes and token ids of all levels, one level after the other, and where each begins.
    _flat: tuple[np.ndarray, np.ndarray] = field(init=False)
    _starts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        _check_ids(self._token_ids, self._strings)
        by_code = tuple(
            dict(zip(codes.tolist(), strings)) for codes, strings in zip(self._codes, self._strings or ())
        )
        by_string = {
            text: (level, code) for level, names in enumerate(by_code) for code, text in names.items()
        }
        orders = [np.argsort(ids) for ids in self._token_ids]
        object.__setattr__(self, "codebook_sizes", tuple(len(ids) for ids in self._token_ids))
        object.__setattr__(self, "_by_string", by_string)
        object.__setattr__(self, "_by_code", by_code)
        object.__setattr__(
            self, "_by_token_id", tuple((ids[order], order) for ids, order in zip(self._token_ids, orders))
        )

        flat = np.concatenate(self._codes), np.concatenate(self._token_ids)
        object.__setattr__(self, "_flat", flat)
        object.__setattr__(self, "_starts", np.cumsum([0, *self.codebook_sizes[:-1]]))

    # ---- constructors

    @classmethod
    def from_token_ids(
        cls,
        token_ids: Sequence[Sequence[int]],
        *,
        codes: Sequence[Sequence[int]] | None = None,
        begin_token_id: int | None = None,
        end_token_id: int | None = None,
    ) -> SidVocabulary:
        """Name the tokens outright: one list per level, where the position in the list is the code.

        Args:
            token_ids: per level, the token id of every code.
            codes: per level, the code of every entry, when the codes in use have holes; default 0, 1, 2, ...
            begin_token_id, end_token_id: the tokens around a SID, if the model has them.
        Raises:
            VocabularyError: no level, an empty level, a negative or repeated id, a repeated code.
        """
        if not isinstance(token_ids, Collection):
            raise VocabularyError(
                f"token_ids: one list of token ids per level is expected, got {shown(token_ids)}"
            )
        if len(token_ids) == 0:
            raise VocabularyError("token_ids: no level given; expected one list of token ids per level")
        if codes is not None and len(codes) != len(token_ids):
            raise VocabularyError(f"codes: {len(codes)} levels, but token_ids has {len(token_ids)}")
        all_ids, all_codes = [], []
        for level, values in enumerate(token_ids):
            ids = _int_array(values, f"token_ids[{level}]")
            level_codes = (
                np.arange(len(ids)) if codes is None else _int_array(codes[level], f"codes[{level}]")
            )
            if len(level_codes) != len(ids):
                raise VocabularyError(f"codes[{level}]: {len(level_codes)} codes for {len(ids)} token ids")
            if level_codes.max() > MAX_CODE:
                raise VocabularyError(f"codes[{level}]: {level_codes.max()} is above the limit {MAX_CODE}")
            order = np.argsort(level_codes, kind="stable")
            repeated = np.flatnonzero(np.diff(level_codes[order]) == 0)
            if len(repeated):
                raise VocabularyError(
                    f"codes[{level}]: code {level_codes[order][repeated[0]]} is given twice"
                )
            all_ids.append(ids[order])
            all_codes.append(level_codes[order].astype(np.int64))
        return cls(tuple(all_ids), tuple(all_codes), None, "explicit token ids", begin_token_id, end_token_id)

    @classmethod
    def from_vocab(
        cls, vocab: Mapping[str, int], sid_pattern: str | Sequence[str] | None = None
    ) -> SidVocabulary:
        """Find the SID tokens in a table of token string to token id.

        Args:
            vocab: every token of the tokenizer, added tokens included.
            sid_pattern: how a SID token reads, when it is none of the published ways (`<s_a_N>`, `<a_N>`): one
                regular expression with the groups `level` and `code` (or two groups in this order), or one
                per level with a single group, the code. It must match the whole token.
        Raises:
            VocabularyError: nothing found, two conventions, a level missing, a code or token id repeated.
        """
        convention, levels = find_levels(vocab, sid_pattern)
        sorted_levels = [sorted(level.items()) for level in levels]
        return cls(
            tuple(np.array([vocab[text] for _, text in level], dtype=np.int64) for level in sorted_levels),
            tuple(np.array([code for code, _ in level], dtype=np.int64) for level in sorted_levels),
            tuple(tuple(text for _, text in level) for level in sorted_levels),
            convention,
            vocab.get(BEGIN_TOKEN),
            vocab.get(END_TOKEN),
        )

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any | str | os.PathLike[str],
        sid_pattern: str | Sequence[str] | None = None,
        *,
        local_files_only: bool = True,
    ) -> SidVocabulary:
        """Find the SID tokens of a tokenizer by their strings.

        Args:
            tokenizer: a Hugging Face tokenizer (anything with `get_vocab()`), or a checkpoint directory.
            sid_pattern: as in `from_vocab`.
            local_files_only: whether a name is only looked for on this machine; False: on the Hugging Face Hub too.
        Raises:
            VocabularyError: the tokenizer cannot be loaded, or `from_vocab` refuses its table.
        """
        if isinstance(tokenizer, (str, os.PathLike)):
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(
                    os.fspath(tokenizer), local_files_only=local_files_only
                )
            except Exception as error:  # the tokenizers library raises bare ones
                raise VocabularyError(f"no tokenizer could be loaded from {tokenizer!r}: {error}") from error
        get_vocab = getattr(tokenizer, "get_vocab", None)
        if get_vocab is None:
            raise VocabularyError(f"tokenizer: {type(tokenizer).__name__} has no get_vocab()")
        return cls.from_vocab(get_vocab(), sid_pattern)

    # ---- tables

    @property
    def num_levels(self) -> int:
        return len(self._token_ids)

    @property
    def max_token_id(self) -> int:
        """The largest SID token id; a model's vocabulary must be larger."""
        return max(int(ids.max()) for ids in self._token_ids)

    def token_ids(self, level: int, indices: Any = None) -> np.ndarray:
        """Token ids of a level in code order, [codebook_sizes[level]] int64, or those of `indices`; a copy."""
        ids = self._token_ids[self._level(level)]
        return ids.copy() if indices is None else ids[indices]

    def codes(self, level: int, indices: Any = None) -> np.ndarray:
        """Published codes of a level, ascending, [codebook_sizes[level]] int64, or those of `indices`; a copy."""
        codes = self._codes[self._level(level)]
        return codes.copy() if indices is None else codes[indices]

    def token_strings(self, level: int) -> tuple[str, ...] | None:
        """Token strings of a level in code order; None when the vocabulary was built from bare token ids."""
        return None if self._strings is None else self._strings[self._level(level)]

    def rows(self, indices: np.ndarray) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The published codes and the token ids of many SIDs, or of prefixes of them, a tuple for each.

        Args:
            indices: [M, length] integers within the codebooks, of the first `length` levels.
        """
        places = indices + self._starts[: indices.shape[1]]
        codes, token_ids = (list(zip(*flat[places].T.tolist())) for flat in self._flat)
        return codes, token_ids

    # ---- code <-> index <-> token id, vectorised

    def encode(self, sids: Any, *, strict: bool = True) -> np.ndarray:
        """Published codes to indices.

        Args:
            sids: [..., num_levels] integers.
            strict: raise on a code without a token; False gives index -1 for it.
        Returns:
            indices: [..., num_levels] int32.
        Raises:
            VocabularyError: wrong depth, or (strict) a code that has no token.
        """
        values = self._last_dim(sids, "sids")
        return self._map_levels(values, list(zip(self._codes, [None] * self.num_levels)), strict, "code")

    def decode(self, indices: Any) -> np.ndarray:
        """Indices to published codes, [..., num_levels] to int64 of the same shape; out of range raises."""
        return self._gather(indices, self._codes)

    def encode_tokens(self, token_ids: Any, *, strict: bool = True) -> np.ndarray:
        """Token ids to indices, [..., num_levels] to int32; a token of another level is unknown here."""
        values = self._last_dim(token_ids, "token_ids")
        return self._map_levels(values, list(self._by_token_id), strict, "token id")

    def decode_tokens(self, indices: Any) -> np.ndarray:
        """Indices to token ids, [..., num_levels] to int64 of the same shape; out of range raises."""
        return self._gather(indices, self._token_ids)

    # ---- text

    def parse_sid(self, text: str) -> tuple[int, ...]:
        """Published codes of a SID written out: `<a_1><b_2><c_3>`, with or without begin and end token.

        Raises:
            VocabularyError: not a row of SID tokens, a token the vocabulary lacks, wrong order or depth.
        """
        body = text.strip().removeprefix(BEGIN_TOKEN).removesuffix(END_TOKEN)
        if self._strings is None:
            codes = parse_sid_text(body)
        else:
            codes = self._parse_known(body)
        if len(codes) != self.num_levels:
            raise VocabularyError(
                f"SID {text!r} has {len(codes)} levels, the vocabulary has {self.num_levels}"
            )
        return codes

    def format_sid(self, sid: Sequence[int]) -> str:
        """The SID written out with the tokens' own strings; `<a_1><b_2>...` when only ids are known."""
        if len(sid) != self.num_levels:
            raise VocabularyError(f"sid: {len(sid)} levels, expected {self.num_levels}")
        return "".join(self.token_strings_of(sid))

    def token_strings_of(self, sid: Sequence[int]) -> list[str]:
        """The strings of a SID's tokens, or of a prefix's; `<a_1>`, `<b_2>`, ... when only ids are known.

        Raises:
            VocabularyError: a code that has no token.
        """
        if self._strings is None:
            return [f"<{chr(ord('a') + level)}_{code}>" for level, code in enumerate(sid)]
        strings = []
        for level, (names, code) in enumerate(zip(self._by_code, sid)):
            if code not in names:
                raise VocabularyError(f"level {level}: no SID token has code {code}")
            strings.append(names[code])
        return strings

    def describe(self) -> str:
        """What was found, a line per level, for a person to confirm."""
        lines = [f"{self.num_levels} levels, {sum(self.codebook_sizes)} SID tokens ({self.convention})"]
        for level, (codes, ids) in enumerate(zip(self._codes, self._token_ids)):
            names = self.token_strings(level)
            first, last = ("code " + str(codes[i]) if names is None else names[i] for i in (0, -1))
            missing = np.setdiff1d(np.arange(codes[-1] + 1), codes)
            holes = "no holes"
            if len(missing):
                shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
                holes = f"{len(missing)} holes ({shown})"
            order = "in code order" if (np.diff(ids) > 0).all() else "not in code order"
            lines.append(
                f"level {level}: {len(codes)} codes, {holes}; {first} = {ids[0]} ... {last} = {ids[-1]}; "
                f"ids {ids.min()}..{ids.max()}, {order}"
            )
        for name, token_id in ((BEGIN_TOKEN, self.begin_token_id), (END_TOKEN, self.end_token_id)):
            lines.append(f"{name}: {'absent' if token_id is None else token_id}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"SidVocabulary(codebook_sizes={self.codebook_sizes}, convention={self.convention!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SidVocabulary):
            return NotImplemented
        return (
            self.codebook_sizes == other.codebook_sizes
            and (self.begin_token_id, self.end_token_id) == (other.begin_token_id, other.end_token_id)
            and all(np.array_equal(a, b) for a, b in zip(self._token_ids, other._token_ids))
            and all(np.array_equal(a, b) for a, b in zip(self._codes, other._codes))
        )

    def __hash__(self) -> int:
        return hash((self.codebook_sizes, tuple(ids.tobytes() for ids in self._token_ids)))

    # ---- helpers

    def _level(self, level: int) -> int:
        if not 0 <= level < self.num_levels:
            raise VocabularyError(
                f"level: {level} is out of range, the vocabulary has levels 0..{self.num_levels - 1}"
            )
        return level

    def _last_dim(self, values: Any, name: str) -> np.ndarray:
        array = np.asarray(values)
        if array.ndim == 0 or array.shape[-1] != self.num_levels:
            raise VocabularyError(f"{name}: shape {array.shape}, expected [..., {self.num_levels}]")
        if array.size and array.dtype.kind not in "iu":
            raise VocabularyError(f"{name}: dtype {array.dtype}, expected integers")
        return array

    def _map_levels(
        self, values: np.ndarray, tables: list[tuple[np.ndarray, np.ndarray | None]], strict: bool, what: str
    ) -> np.ndarray:
        indices = np.empty(values.shape, dtype=np.int32)
        for level, (table, order) in enumerate(tables):
            column = values[..., level]
            if order is None and table[-1] == len(table) - 1:  # codes without holes are their own indices
                known = (column >= 0) & (column < len(table))
                found = column
            else:
                place = np.searchsorted(table, column)
                place = np.minimum(place, len(table) - 1)
                known = table[place] == column
                found = place if order is None else order[place]
            if strict and not known.all():
                bad = column[~known].flat[0]
                raise VocabularyError(f"level {level}: no SID token has {what} {bad}")
            indices[..., level] = np.where(known, found, -1)
        return indices

    def _gather(self, indices: Any, tables: tuple[np.ndarray, ...]) -> np.ndarray:
        array = self._last_dim(indices, "indices")
        values = np.empty(array.shape, dtype=np.int64)
        for level, table in enumerate(tables):
            column = array[..., level]
            bad = (column < 0) | (column >= len(table))
            if bad.any():
                raise VocabularyError(
                    f"level {level}: index {column[bad].flat[0]} is out of range 0..{len(table) - 1}"
                )
            values[..., level] = table[column]
        return values

    def _parse_known(self, body: str) -> tuple[int, ...]:
        codes = []
        closing = body[-1:]  # ">" in the published conventions
        pieces = (
            [body] if closing.isalnum() or not closing else [p + closing for p in body.split(closing)[:-1]]
        )
        for level, piece in enumerate(pieces):
            found = self._by_string.get(piece)
            if found is None:
                raise VocabularyError(f"SID {body!r}: {piece!r} is not a SID token of the vocabulary")
            if found[0] != level:
                raise VocabularyError(
                    f"SID {body!r}: {piece!r} is a token of level {found[0]}, not of level {level}"
                )
            codes.append(found[1])
        return tuple(codes)


def _int_array(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise VocabularyError(f"{name}: expected a non-empty list of integers, got shape {array.shape}")
    # Among integers a boolean becomes one.
    boolean = array.dtype.kind == "b" or (array is not values and not BOOLEANS.isdisjoint(map(type, values)))
    if array.dtype.kind not in "iu" or boolean:
        raise VocabularyError(f"{name}: expected integers, got {'bool' if boolean else array.dtype}")
    if int(array.min()) < 0:
        raise VocabularyError(f"{name}: {int(array.min())} is negative")
    return array.astype(np.int64)


def _check_ids(token_ids: tuple[np.ndarray, ...], strings: tuple[tuple[str, ...], ...] | None) -> None:
    """One token, one code: an id that stands twice makes decoding ambiguous."""
    flat = np.concatenate(token_ids)
    levels = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
    order = np.argsort(flat, kind="stable")
    repeated = np.flatnonzero(np.diff(flat[order]) == 0)
    if len(repeated) == 0:
        return
    one, two = order[repeated[0]], order[repeated[0] + 1]
    names = [text for level in strings for text in level] if strings is not None else None
    shown = "" if names is None else f" ({names[one]} and {names[two]})"
    raise VocabularyError(
        f"token id {flat[one]} stands at level {levels[one]} and again at level {levels[two]}{shown}"
    )

"""What a recommender is judged on: prompts or histories, each with the item that came next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onela.engine.request import Request
from onela.errors import ConfigError
from onela.items import ItemCatalog, SidVocabulary
from onela.items.vocabulary import BEGIN_TOKEN, END_TOKEN

Sid = tuple[int, ...]
ItemId = int | str
PROMPTS = ("history", "prompt", "prompt_token_ids", "messages")
TARGETS = ("target", "target_sid")


@dataclass(frozen=True)
class Example:
    """One question with its right answers.

    Attributes:
        request: the question.
        target_sids: SIDs that count as right, in published codes; at least one.
        target_items: items that count as right; empty when only a SID was given.
    """

    request: Request
    target_sids: frozenset[Sid]
    target_items: frozenset[ItemId] = frozenset()


@dataclass(frozen=True)
class ExampleReader:
    """Reads lines of JSON: one of `history`, `prompt`, `prompt_token_ids`, `messages`, and `target` or `target_sid`.

    A history is a list of item ids, oldest first. It becomes the items' SIDs, each between the vocabulary's begin and
    end token if it has them, one after the other, in the place of `{history}` in the template. A target is an item id
    or a list of them; `target_sid` is a SID as codes or as text.

    Attributes:
        vocabulary: of the model. catalog: where items are looked up; None: only prompts and `target_sid`.
        template: text around the history. max_history: items to keep of it, the latest; None: all.
        as_tokens: write histories as token ids, for a checkpoint without a tokenizer; no text can be around them then.
    """

    vocabulary: SidVocabulary
    catalog: ItemCatalog | None = None
    template: str = "{history}"
    max_history: int | None = None
    as_tokens: bool = False

    def __post_init__(self) -> None:
        if "{history}" not in self.template:
            raise ConfigError(f"template: {self.template!r} has no {{history}}")
        if self.as_tokens and self.template != "{history}":
            raise ConfigError(
                "template: text around the history needs a tokenizer, and the checkpoint has none"
            )
        if self.max_history is not None and self.max_history < 1:
            raise ConfigError(f"max_history: at least 1 is expected, got {self.max_history}")

    def read(self, path: str | Path) -> list[Example]:
        """All examples of a file. Raises `ConfigError` that names the line."""
        examples = []
        for number, row in _rows(Path(path)):
            try:
                examples.append(self.parse(row))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
        if not examples:
            raise ConfigError(f"{path}: no example")
        return examples

    def parse(self, row: Mapping[str, Any]) -> Example:
        """One example. Raises `ConfigError` or `RequestError` that names the field."""
        for field in row:
            if field not in (*PROMPTS, *TARGETS):
                raise ConfigError(f"{field}: unknown field; known are {', '.join((*PROMPTS, *TARGETS))}")
        if sum(field in row for field in PROMPTS) != 1:
            raise ConfigError(f"exactly one of {', '.join(PROMPTS)} is expected")
        if sum(field in row for field in TARGETS) != 1:
            raise ConfigError(f"exactly one of {', '.join(TARGETS)} is expected")
        if "history" in row:
            request = self._history(row["history"])
        else:
            (field,) = (field for field in PROMPTS if field in row)
            request = Request(**{field: row[field]})
        if "target_sid" in row:
            return Example(request, frozenset({self._sid(row["target_sid"])}))
        targets = row["target"] if isinstance(row["target"], list) else [row["target"]]
        if not targets:
            raise ConfigError("target: an empty list")
        sids = frozenset(self._sid_of("target", item_id) for item_id in targets)
        return Example(request, sids, frozenset(targets))

    def _history(self, item_ids: Any) -> Request:
        if not isinstance(item_ids, list) or not item_ids:
            raise ConfigError(f"history: a list of at least one item id is expected, got {item_ids!r}")
        kept = item_ids if self.max_history is None else item_ids[-self.max_history :]
        sids = [self._sid_of("history", item_id) for item_id in kept]
        if self.as_tokens:
            return Request(prompt_token_ids=self._tokens(sids))
        written = "".join(self._write(sid) for sid in sids)
        return Request(prompt=self.template.replace("{history}", written))

    def _write(self, sid: Sid) -> str:
        begin = "" if self.vocabulary.begin_token_id is None else BEGIN_TOKEN
        end = "" if self.vocabulary.end_token_id is None else END_TOKEN
        return f"{begin}{self.vocabulary.format_sid(sid)}{end}"

    def _tokens(self, sids: Sequence[Sid]) -> list[int]:
        begin, end = (
            [] if token is None else [token]
            for token in (self.vocabulary.begin_token_id, self.vocabulary.end_token_id)
        )
        rows = self.vocabulary.decode_tokens(self.vocabulary.encode(sids)).tolist()
        # Nothing is added to a prompt of tokens later, so the token that opens the answer belongs here.
        return [token for row in rows for token in (*begin, *row, *end)] + begin

    def _sid_of(self, field: str, item_id: Any) -> Sid:
        if self.catalog is None:
            raise ConfigError(
                f"{field}: item ids need a catalogue; give prompt and target_sid, or a catalogue"
            )
        if isinstance(item_id, bool) or not isinstance(item_id, (int, str)):
            raise ConfigError(f"{field}: an item id is expected, got {item_id!r}")
        item = self.catalog.find(item_id)
        if item is None:
            raise ConfigError(f"{field}: item {item_id!r} is not in the catalogue")
        return tuple(self.catalog.sids([self.catalog.sid_index_of(item)])[0].tolist())

    def _sid(self, value: Any) -> Sid:
        try:
            if isinstance(value, str):
                value = self.vocabulary.parse_sid(value)
            indices = self.vocabulary.encode([value])
        except ValueError as error:
            raise ConfigError(f"target_sid: {error}") from error
        if self.catalog is not None and int(self.catalog.lookup(indices)[0]) < 0:
            raise ConfigError(f"target_sid: {self.vocabulary.format_sid(value)} is not in the catalogue")
        return tuple(value)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable ({error})") from None
    return json_rows(text, str(path))


def json_rows(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a text with one per line, and the lines' numbers. Raises `ConfigError` that names the line.

    Args:
        name: what the text is called in errors.
    """
    # Not `splitlines`: a string in JSON may hold other separators of lines as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{name}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{name}, line {number}: an object is expected, found {type(row).__name__}")
        yield number, row

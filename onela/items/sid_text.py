"""How a semantic ID is written: the published token conventions, and the search for them in a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from onela.errors import VocabularyError, shown

# name for people -> (level letter, code)
CONVENTIONS: dict[str, re.Pattern[str]] = {
    "<s_a_N><s_b_N>...": re.compile(r"<s_([a-z])_([0-9]+)>"),
    "<a_N><b_N>...": re.compile(r"<([a-z])_([0-9]+)>"),
}

# No published codebook comes near; a larger number is a misread file, and would size tables by it.
MAX_CODE = 2**24 - 1

Level = dict[int, str]  # code -> token string


def parse_sid_text(text: str) -> tuple[int, ...]:
    """Codes of a SID written in a published convention, levels a, b, c, ... in order.

    Raises:
        VocabularyError: the text is anything else.
    """
    codes: list[int] = []
    end = 0
    long_form, short_form = CONVENTIONS.values()
    for match in (long_form if text.startswith("<s_") else short_form).finditer(text):
        if match.start() != end or ord(match[1]) - ord("a") != len(codes):
            break
        codes.append(int(match[2]) if len(match[2]) < 10 else MAX_CODE + 1)
        end = match.end()
    if not codes or end != len(text) or max(codes) > MAX_CODE:
        raise VocabularyError(
            f"{text!r} is not a SID; expected tokens such as <a_1><b_2><c_3> or <s_a_1><s_b_2><s_c_3>"
        )
    return tuple(codes)


def find_levels(vocab: Mapping[str, int], sid_pattern: str | Sequence[str] | None) -> tuple[str, list[Level]]:
    """SID tokens of a vocabulary, per level a map of code to token string, and the name of the convention.

    Raises:
        VocabularyError: nothing found, two conventions present, a level missing, a code that is there twice.
    """
    if isinstance(sid_pattern, str):
        labels = _collect(vocab, _compile(sid_pattern, 2))
        return f"pattern {sid_pattern}", _by_label(labels, f"sid_pattern: {sid_pattern!r}")
    if sid_pattern is not None:
        if not isinstance(sid_pattern, Sequence) or not all(isinstance(p, str) for p in sid_pattern):
            raise VocabularyError(
                f"sid_pattern: a regular expression, or one per level, is expected, got {shown(sid_pattern)}"
            )
        return _one_pattern_per_level(vocab, sid_pattern)
    found = {name: _collect(vocab, regex) for name, regex in CONVENTIONS.items()}
    found = {name: labels for name, labels in found.items() if labels}
    if not found:
        raise VocabularyError(
            f"no SID tokens among {len(vocab)} tokens: looked for {' and '.join(CONVENTIONS)}; "
            "pass sid_pattern= (--sid-pattern), or the ids through SidVocabulary.from_token_ids (--vocabulary)"
        )
    if len(found) > 1:
        seen = "; ".join(f"{name}: {_summary(labels)}" for name, labels in found.items())
        raise VocabularyError(
            f"two SID conventions are present ({seen}); pass sid_pattern= (--sid-pattern) to choose one"
        )
    name, labels = next(iter(found.items()))
    return name, _by_label(labels, name)


def _collect(vocab: Mapping[str, int], regex: re.Pattern[str]) -> dict[str, Level]:
    named = "level" in regex.groupindex
    labels: dict[str, Level] = {}
    for text in vocab:
        match = regex.fullmatch(text)
        if match is None:
            continue
        label, digits = (match["level"], match["code"]) if named else (match[1], match[2])
        _put(labels.setdefault(label, {}), digits, text)
    return labels


def _put(level: Level, digits: str, text: str) -> None:
    # isdecimal() lets through digits of other scripts, which int() reads as well: only ASCII is a code.
    if digits is None or not (digits.isascii() and digits.isdecimal()):
        raise VocabularyError(
            f"sid_pattern: the code group matched {digits!r} of token {text!r}, which is not a number"
        )
    if len(digits) > 9 or int(digits) > MAX_CODE:
        raise VocabularyError(f"token {text!r}: the code is above the limit {MAX_CODE}")
    other = level.setdefault(int(digits), text)
    if other != text:
        raise VocabularyError(f"code {int(digits)} has two tokens: {other!r} and {text!r}")


def _by_label(labels: dict[str, Level], what: str) -> list[Level]:
    """Levels in order; their labels must count up without a gap: a, b, c or 0, 1, 2 or 1, 2, 3."""
    if not labels:
        raise VocabularyError(f"{what}: no token matches")
    if all(label.isascii() and label.isdecimal() for label in labels):
        numbers = {int(label): level for label, level in labels.items()}
        ordered, start = numbers, min(min(numbers), 1)
    elif all(len(label) == 1 and label.isalpha() for label in labels):
        ordered = {ord(label): level for label, level in labels.items()}
        start = ord("A") if all(label.isupper() for label in labels) else ord("a")
    else:
        raise VocabularyError(
            f"{what}: levels must be single letters or numbers, found {', '.join(sorted(labels))}"
        )
    expected = range(start, start + len(labels))
    if len(ordered) != len(labels) or sorted(ordered) != list(expected):
        raise VocabularyError(f"{what}: the levels have a gap; found {_summary(labels)}")
    return [ordered[key] for key in expected]


def _one_pattern_per_level(vocab: Mapping[str, int], patterns: Sequence[str]) -> tuple[str, list[Level]]:
    if len(patterns) == 0:
        raise VocabularyError("sid_pattern: an empty list; expected one regular expression per level")
    regexes = [_compile(pattern, 1) for pattern in patterns]
    levels: list[Level] = [{} for _ in regexes]
    for text in vocab:
        hits = [(level, match) for level, regex in enumerate(regexes) if (match := regex.fullmatch(text))]
        if len(hits) > 1:
            raise VocabularyError(
                f"sid_pattern: token {text!r} matches the patterns of levels {hits[0][0]} and {hits[1][0]}"
            )
        for level, match in hits:
            _put(levels[level], match["code"] if "code" in match.re.groupindex else match[1], text)
    for level, pattern in enumerate(patterns):
        if not levels[level]:
            raise VocabularyError(f"sid_pattern: level {level}: no token matches {pattern!r}")
    return "patterns " + ", ".join(patterns), levels


def _compile(pattern: str, num_groups: int) -> re.Pattern[str]:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise VocabularyError(f"sid_pattern: {pattern!r} is not a regular expression: {error}") from error
    names = {"level", "code"} if num_groups == 2 else {"code"}
    if not (names <= set(regex.groupindex) or (not regex.groupindex and regex.groups == num_groups)):
        groups = "the groups level and code" if num_groups == 2 else "one group, the code"
        raise VocabularyError(f"sid_pattern: {pattern!r} must have {groups}")
    return regex


def _summary(labels: dict[str, Level]) -> str:
    return ", ".join(
        f"{label} ({len(level)} tokens, such as {next(iter(level.values()))})"
        for label, level in sorted(labels.items())
    )

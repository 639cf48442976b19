"""What is wrong with a body, field by field.

Where a field may have several forms (a prompt: text, tokens, or a list of either), pydantic says of each form why the
value has not got it. Here the form that was evidently meant is found, and only its faults are told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from onela.errors import shown

SHOULD_BE = "Input should be "
KINDS = frozenset(
    f"{kind}_type" for kind in ("bool", "int", "float", "string", "list", "dict", "model_attributes")
)
"""pydantic's errors of a value that is another kind of thing."""
MAX_FAULTS = 20
"""Most faults of a body that are told."""
MAX_ERRORS = 1000
"""Most of pydantic's errors that are looked at: a body of 2 MiB may have hundreds of thousands, and nobody else is
answered meanwhile."""

Place = tuple[str | int, ...]


class Fault(NamedTuple):
    """One error of pydantic's.

    Attributes:
        place: where in the body. forms: the forms that were tried on the way there, each with where and its name.
        kind: pydantic's name of it. text: what is wrong. given: the value, written out, or nothing.
    """

    place: Place
    forms: tuple[tuple[Place, str], ...]
    kind: str
    text: str
    given: str

    @property
    def field(self) -> str:
        """The place as the client may write it."""
        return ".".join(map(str, self.place)) or "body"


def faults_of(errors: Sequence[Any], body: Any) -> list[Fault]:
    """The first `MAX_FAULTS` faults of a body, those of the evident form alone.

    Args:
        errors: as `RequestValidationError.errors` gives them. body: what was sent.
    """
    return _evident([_fault(error, body) for error in _few(errors)])[:MAX_FAULTS]


def _few(errors: Sequence[Any]) -> list[Any]:
    """Of errors that only their places in lists tell apart, the first: as many as are told, for every form."""
    seen: Counter[tuple[str, ...]] = Counter()
    few: list[Any] = []
    for error in errors:
        path = tuple(part for part in error["loc"] if isinstance(part, str))
        seen[path] += 1
        if seen[path] <= MAX_FAULTS:
            few.append(error)
        if len(few) == MAX_ERRORS:
            break
    return few


def _fault(error: Any, body: Any) -> Fault:
    """Tell the places of the body in an error's path from the names of the forms that were tried."""
    place: list[str | int] = []
    forms: list[tuple[Place, str]] = []
    for part in error["loc"][1:]:
        inside = isinstance(body, dict) and part in body
        if inside or (isinstance(body, list) and isinstance(part, int) and part < len(body)):
            body = body[part]
            place.append(part)
        elif error["type"] == "missing" and isinstance(part, str):
            place.append(part)
        else:
            forms.append((tuple(place), str(part)))
    if error["type"] == "json_invalid":  # its place is a character's
        return Fault(
            (), (), error["type"], f"not JSON: {error['ctx']['error']}, character {error['loc'][-1]}", ""
        )
    text = f"{SHOULD_BE}an object" if error["type"] == "model_attributes_type" else error["msg"]
    return Fault(tuple(place), tuple(forms), error["type"], text, _given(error))


def _given(error: Any) -> str:
    """The value that was given, written out; of a whole list or object, which may be long, only that it is one."""
    given, kind = error.get("input"), error["type"]
    if isinstance(given, (dict, list)):
        return f" (got {'a list' if isinstance(given, list) else 'an object'})" if kind in KINDS else ""
    return "" if kind in ("missing", "extra_forbidden") else f" (got {shown(given)})"


def _evident(faults: Sequence[Fault]) -> list[Fault]:
    """Faults without forms as they are; of those with forms, for every field, the faults of one form."""
    found: list[Fault] = []
    fields: dict[Place, dict[str, list[Fault]]] = {}
    for fault in faults:
        if not fault.forms:
            found.append(fault)
            continue
        (where, form), *rest = fault.forms
        inner = fault._replace(forms=tuple(rest))
        fields.setdefault(where, {}).setdefault(form, []).append(inner)
    for where, forms in fields.items():
        found += _meant(where, [_evident(of_form) for of_form in forms.values()])
    return found


def _meant(where: Place, forms: Sequence[list[Fault]]) -> list[Fault]:
    """The faults of the form in which a value gets furthest; of a value of no form's kind, one fault with all kinds."""
    fitting = [faults for faults in forms if not _of_kind(faults[0], where)]
    if fitting:
        return max(fitting, key=lambda faults: _progress(where, faults))
    first = forms[0][0]
    kinds = list(dict.fromkeys(faults[0].text.removeprefix(SHOULD_BE) for faults in forms))
    text = " or ".join([", ".join(kinds[:-1]), kinds[-1]] if len(kinds) > 1 else kinds)
    return [first._replace(text=SHOULD_BE + text)]


def _of_kind(fault: Fault, where: Place) -> bool:
    """Whether the value at this place is another kind of thing."""
    return fault.place == where and fault.kind in KINDS


def _progress(where: Place, faults: list[Fault]) -> tuple[int, list[tuple[bool, str | int]]]:
    """How far a value gets in a form: not even its first entry is of the kind; it is too long, say; up to a place."""
    first = faults[0]
    rank = 0 if _of_kind(first, (*where, 0)) else 1 if first.place == where else 2
    return rank, [(isinstance(part, str), part) for part in first.place]

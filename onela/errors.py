"""Every error that OneLA raises on purpose.

    OneLAError
    ├── ConfigError           an option, environment variable or model configuration is wrong
    ├── ShapeError            a tensor handed to an op has the wrong shape
    ├── DtypeError            a tensor handed to an op has the wrong dtype, device or layout
    ├── CheckpointError       a checkpoint directory cannot be loaded
    ├── VocabularyError       SID tokens cannot be found, or are ambiguous
    ├── CatalogError          an item catalogue is malformed (names the file and the line)
    ├── RequestError          a request is wrong (names the field, the value and the limit)
    ├── CapacityError         a request can never fit into the configured memory
    ├── QueueFullError        too many requests wait already (says when to come back)
    ├── DeadlineError         a request did not end in the time that it was given
    ├── CancelledError        a request was cancelled by whoever had sent it
    ├── EngineError           a step failed for a reason that nobody foresaw
    ├── NumericsError         a model produced NaN or infinite logits
    └── UnavailableError      a GPU, kernel or optional package that was asked for is not there

`ShapeError`, `ConfigError`, `VocabularyError`, `CatalogError` and `RequestError` are `ValueError`s too, and
`DtypeError` is a `TypeError`, so that code which does not know OneLA catches them as it would expect.
"""

from __future__ import annotations

from typing import Any

MAX_SHOWN = 200
"""Characters of a field or value that a message quotes: both may be what a client has sent, megabytes of it."""
_NOT_GIVEN = object()


class OneLAError(Exception):
    """Base of all errors raised by OneLA. They can be pickled, so that a pool of processes hands them back."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[OneLAError], args: tuple[Any, ...], attributes: dict[str, Any]) -> OneLAError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(attributes)
    return error


def shorten(text: str) -> str:
    """The text as a message quotes it."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def shown(value: Any) -> str:
    """A value as a message quotes it."""
    try:
        return shorten(repr(value))
    except Exception:  # Python writes no integer of thousands of digits, and an object may refuse too
        return f"something of type {type(value).__name__} that cannot be written out"


class ConfigError(OneLAError, ValueError):
    """An option, an environment variable or a model configuration has an unusable value."""


class ShapeError(OneLAError, ValueError):
    """A tensor has the wrong shape; the message gives the expected and the given one."""


class DtypeError(OneLAError, TypeError):
    """A tensor has the wrong dtype, device or layout; the message gives the expected and the given one."""


class CheckpointError(OneLAError):
    """A checkpoint cannot be loaded; the message names the file or the tensor."""


class VocabularyError(OneLAError, ValueError):
    """The semantic-ID tokens of a checkpoint cannot be found, or more than one reading is possible."""


class CatalogError(OneLAError, ValueError):
    """An item catalogue is malformed.

    Args:
        message: what is wrong.
        path: the file, if the catalogue came from one.
        line: 1-based line (or row) number in that file; without one, of the item in what was given.
    """

    def __init__(self, message: str, *, path: str | None = None, line: int | None = None) -> None:
        self.path = path
        self.line = line
        place = "" if line is None else f"item {line}" if path is None else f", line {line}"
        where = f"{path or ''}{place}"
        super().__init__(f"{where}: {message}" if where else message)


class RequestError(OneLAError, ValueError):
    """A request cannot be run as it stands.

    Args:
        field: name of the offending field, as the user wrote it.
        message: what is wrong with it.
        value: the value that was given; without one the message shows none.
    """

    def __init__(self, field: str, message: str, *, value: Any = _NOT_GIVEN) -> None:
        self.field = field
        self.reason = message if value is _NOT_GIVEN else f"{message} (got {shown(value)})"
        super().__init__(f"{shorten(field)}: {self.reason}")

    def about(self, field: str) -> RequestError:
        """The same error of a field that the user wrote under another name."""
        return RequestError(field, self.reason)

    def in_request(self, name: str) -> RequestError:
        """The same error with a message that tells which of several requests it is about."""
        error = self.about(self.field)
        error.args = (f"{shorten(name)}: {self}",)
        return error


class CapacityError(OneLAError):
    """A request needs more memory than the engine may ever give it."""


class QueueFullError(OneLAError):
    """The queue is full; nothing is wrong with the request.

    Args:
        message: the limit and the option that sets it.
        retry_after_s: after how many seconds there is likely to be room.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineError(OneLAError):
    """A request ran out of the time that it was given; the message says where it stood."""


class CancelledError(OneLAError):
    """A request was cancelled before it ended."""


class EngineError(OneLAError, RuntimeError):
    """A step of the engine failed unexpectedly; `__cause__` is what was raised. Later requests are not affected."""


class NumericsError(OneLAError, ArithmeticError):
    """A model produced logits that cannot be ranked: NaN or infinity."""


class UnavailableError(OneLAError, RuntimeError):
    """Something optional that was asked for is missing: a GPU, a compiled kernel, a package."""

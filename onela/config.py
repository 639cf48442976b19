"""Options of the engine and the server, read once; the only place where the environment is looked at."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from onela.errors import ConfigError

RecurrentBackendName = Literal["replay", "full_state", "replay_ssm", "records_moved"]
RecurrentBackendOption = Literal["replay", "full_state", "replay_ssm", "records_moved", "auto"]
FullStateMode = Literal["copy", "read_parent"]
CheckpointMode = Literal["per_beam", "shared"]
RecordDtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "fp8"]
Rounding = Literal["least", "transformers"]

PREFIX = "ONELA_"
SERVE_PREFIX = "ONELA_SERVE_"
MAX_PORT = 65535
MAX_BEAM_WIDTH = 65536


def _option(
    default: Any,
    text: str,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    optional: bool = False,
) -> Any:
    """A field: a number with a minimum, and perhaps a maximum; text without.

    None is a value of those whose default it is, and of those that are `optional`.
    """
    metadata = {"help": text, "minimum": minimum, "maximum": maximum, "optional": optional or default is None}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine holds its state and fills its batches.

    Every field can be set as `ONELA_<FIELD>` in the environment.
    """

    device: str = _option("auto", "cpu, cuda, cuda:N, or auto: a GPU when there is one")
    dtype: str = _option(
        "auto", "float32, bfloat16, or auto: bfloat16 on a GPU, on a CPU what the checkpoint says"
    )
    quantization: Quantization = _option(
        "none", "none, or fp8: weights and activations of mixers and MLPs in float8, a scale per row"
    )
    rounding: Rounding = _option(
        "least",
        "least, or transformers: a bfloat16 model rounds where transformers does, to get the same lists; slow, and "
        "one request at a time",
    )
    recurrent_backend: RecurrentBackendOption = _option(
        "replay",
        "replay, full_state, replay_ssm, records_moved, or auto: replay, or full states where SIDs are so long "
        "that these pay",
    )
    fused_layer_step: bool = _option(
        True, "replay: run a Gated DeltaNet layer's step fused; false: one launch per part, to compare"
    )
    auto_beam_width: int = _option(128, "beams of a request that auto reckons with", minimum=1)
    full_state_mode: FullStateMode = _option(
        "copy", "full_state: copy states on reorder, or read the parent's"
    )
    replay_ssm_checkpoint: CheckpointMode = _option(
        "per_beam", "replay_ssm: a checkpoint per beam, or a shared one"
    )
    record_dtype: RecordDtype = _option("auto", "dtype of the delta records; auto: the model's dtype")
    cuda_graphs: bool = _option(
        True, "on a GPU, run prefill and decode forwards and selections as CUDA graphs"
    )
    warm_up_tokens: int = _option(
        0,
        "capture prefill forwards of up to so many prompt tokens before the first request; 0: none",
        minimum=0,
    )
    warm_up_requests: int = _option(
        0, "capture decode steps of up to so many requests before the first request; 0: none", minimum=0
    )
    warm_up_beams: int = _option(
        256, "beams of each of the requests of warm_up_requests", minimum=1, maximum=MAX_BEAM_WIDTH
    )
    page_size: int = _option(64, "tokens per KV page", minimum=1)
    max_batch_tokens: int = _option(
        16384, "most prompt tokens in one step; longer prompts run in pieces", minimum=1
    )
    max_tokens_beside_decode: int | None = _option(
        0,
        "most prompt tokens in a step that also decodes; 0: those who decode end first; none: max_batch_tokens",
        minimum=0,
        optional=True,
    )
    max_batch_rows: int = _option(16384, "most beams in one decode forward", minimum=1)
    max_waiting: int = _option(4096, "most requests that may wait; one more is refused", minimum=1)
    max_overtaken: int = _option(
        64,
        "how many later arrivals of higher priority or earlier deadline may pass a waiting request",
        minimum=0,
    )
    prompt_cache_bytes: int = _option(
        0, "device memory for prompt states that later requests may begin with; 0: no prompt cache", minimum=0
    )
    prompt_cache_host_bytes: int = _option(
        0, "host memory for prompt states that the device has no more room for", minimum=0
    )
    prompt_cache_interval: int = _option(
        64, "a prompt state is kept after a multiple of this many tokens; a multiple of page_size", minimum=1
    )
    prompt_cache_tail: int = _option(
        32,
        "tokens at a prompt's end that the user's next prompt will not begin with (its template)",
        minimum=0,
    )
    prompt_cache_pin_s: int = _option(
        300, "seconds for which the latest prompt of a session is evicted after all others", minimum=0
    )
    max_slots: int | None = _option(
        None, "most record slots (beams x steps) at a time; none: no limit", minimum=1
    )
    max_pages: int | None = _option(None, "most KV pages at a time; none: no limit", minimum=1)
    max_prompts: int | None = _option(None, "most prompts at a time; none: no limit", minimum=1)
    preallocate: bool = _option(
        False, "allocate the pools up to max_slots, max_pages and max_prompts at the start, not on demand"
    )

    def __post_init__(self) -> None:
        _check_options(self)
        check_rounding(self.rounding, self.quantization)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> EngineConfig:
        """The defaults, changed by `ONELA_*` variables, changed by `overrides`.

        Raises:
            ConfigError: an option or an `ONELA_*` variable is unknown, or its value unusable.
        """
        return cls(**_gather(cls, PREFIX, os.environ if environ is None else environ, overrides))


@dataclass(frozen=True)
class ServerConfig:
    """How the HTTP server listens, whom it lets in, and what it refuses.

    Every field can be set as `ONELA_SERVE_<FIELD>` in the environment; secrets had better be.
    """

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on; 0: any free one", minimum=0, maximum=MAX_PORT)
    model_name: str = _option("onela", "what the model is called in /v1/models and in answers")
    api_key: str | None = _option(None, "requests need `Authorization: Bearer <api_key>`; none: open to all")
    admin_token: str | None = _option(
        None, "token of /v1/catalog/*, in the same header; none: these routes are shut"
    )
    catalog_dir: str | None = _option(
        None, "only catalogues below this directory may be loaded over HTTP; none: any"
    )
    max_body_bytes: int = _option(2 * 2**20, "longest body of a request", minimum=1)
    max_beam_width: int = _option(1024, "widest beam that a request may ask for", minimum=1)
    max_prompt_tokens: int = _option(
        32768, "longest prompt in tokens; text counts by its characters", minimum=1
    )
    max_item_ids: int = _option(
        10000, "most entries of exclude_item_ids, allow_item_ids or a filter", minimum=1
    )
    body_timeout_s: int = _option(
        60, "seconds without another piece of a request's body after which it is answered 408", minimum=1
    )
    default_timeout_s: int = _option(60, "timeout_s of requests that have none", minimum=1)
    drain_s: int = _option(30, "seconds that requests under way get to end on shutdown", minimum=0)

    def __post_init__(self) -> None:
        _check_options(self)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> ServerConfig:
        """The defaults, changed by `ONELA_SERVE_*` variables, changed by `overrides`. Raises `ConfigError`."""
        return cls(**_gather(cls, SERVE_PREFIX, os.environ if environ is None else environ, overrides))


def _check_options(config: Any) -> None:
    """Refuse a value that is no choice of its option, below its minimum, above its maximum, or of the wrong kind."""
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        if option.name in CHOICES:
            check_choice(option.name, value)
        if value is None and option.metadata["optional"]:
            continue
        if isinstance(option.default, bool):
            if not isinstance(value, bool):
                raise ConfigError(f"{option.name}: true or false is expected, got {value!r}")
            continue
        minimum, maximum = option.metadata["minimum"], option.metadata["maximum"]
        if minimum is None:
            # Empty, a key would let everybody in, a host would listen everywhere, and a directory is no limit.
            if not value or not isinstance(value, str):
                raise ConfigError(f"{option.name}: text is expected, got {value!r}")
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{option.name}: a whole number >= {minimum} is expected, got {value!r}")
        if maximum is not None and value > maximum:
            raise ConfigError(f"{option.name}: a whole number <= {maximum} is expected, got {value}")


def check_choice(option: str, value: Any, *, written: str | None = None) -> None:
    """Refuse a value that is none of an option's choices.

    Args:
        option: a key of `CHOICES`. written: what the user calls it, if not by that name.
    Raises:
        ConfigError: names the option, the value and the choices.
    """
    if value not in CHOICES[option]:
        raise ConfigError(f"{written or option}: {value!r} is none of {', '.join(CHOICES[option])}")


def check_rounding(rounding: str, quantization: str) -> None:
    """Refuse a way to round that the weights do not allow. Raises `ConfigError`."""
    if rounding != "least" and quantization != "none":
        raise ConfigError(
            f"rounding: {rounding!r} does not go with quantization {quantization!r}, only with 'none': "
            "transformers has no such weights to round like"
        )


def _gather(
    cls: Any, prefix: str, environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of a config's fields from the variables of its prefix, then from `overrides`."""
    fields = {option.name: option for option in dataclasses.fields(cls)}
    for name in overrides:
        if name not in fields:
            raise ConfigError(f"{name}: unknown option; known are {', '.join(sorted(fields))}")
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(prefix) or (prefix == PREFIX and variable.startswith(SERVE_PREFIX)):
            continue
        name = variable[len(prefix) :].lower()
        if name not in fields:
            raise ConfigError(
                f"{variable}: unknown variable; known are {', '.join(prefix + n.upper() for n in fields)}"
            )
        values[name] = _parse(variable, text, fields[name])
    return {**values, **overrides}


BOOLEANS = {"1": True, "true": True, "0": False, "false": False}
CHOICES: dict[str, tuple[str, ...]] = {
    "recurrent_backend": get_args(RecurrentBackendOption),
    "full_state_mode": get_args(FullStateMode),
    "replay_ssm_checkpoint": get_args(CheckpointMode),
    "record_dtype": get_args(RecordDtype),
    "quantization": get_args(Quantization),
    "rounding": get_args(Rounding),
}


def _parse(variable: str, text: str, option: dataclasses.Field[Any]) -> Any:
    """Turn a variable's text into the option's type."""
    if isinstance(option.default, bool):
        if text.lower() not in BOOLEANS:
            raise ConfigError(f"{variable}: {text!r} is none of {', '.join(BOOLEANS)}")
        return BOOLEANS[text.lower()]
    if option.metadata["minimum"] is None:
        return text
    if option.metadata["optional"] and text.lower() in ("", "none"):
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable}: a whole number is expected, got {text!r}") from None

"""Options: one source, read once, nothing unknown."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from onela import ConfigError, EngineConfig
from onela.config import ServerConfig


def test_environment_then_arguments() -> None:
    environ = {"ONELA_PAGE_SIZE": "32", "ONELA_MAX_SLOTS": "none", "ONELA_DTYPE": "float32", "HOME": "/"}
    config = EngineConfig.from_env(environ, page_size=16)
    assert (config.page_size, config.max_slots, config.dtype) == (16, None, "float32")


@pytest.mark.parametrize(
    ("environ", "options", "name"),
    [
        ({"ONELA_PAGE_SIZES": "3"}, {}, "ONELA_PAGE_SIZES"),
        ({"ONELA_PAGE_SIZE": "many"}, {}, "ONELA_PAGE_SIZE"),
        ({}, {"page_size": 0}, "page_size"),
        ({}, {"page_size": True}, "page_size"),
        ({}, {"max_slots": -1}, "max_slots"),
        ({}, {"recurrent_backend": "mamba"}, "recurrent_backend"),
        ({}, {"record_dtype": "fp8"}, "record_dtype"),
        ({}, {"cuda_graphs": "no"}, "cuda_graphs"),
        ({}, {"device": None}, "device"),
        ({"ONELA_DTYPE": ""}, {}, "dtype"),
        ({"ONELA_CUDA_GRAPHS": "perhaps"}, {}, "ONELA_CUDA_GRAPHS"),
        ({}, {"beams": 3}, "beams"),
    ],
)
def test_unusable_values_are_named(environ: dict[str, str], options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_env(environ, **options)


def test_float8_weights_have_no_rounding_of_transformers() -> None:
    """Refused before anything is loaded, wherever the two come from."""
    refusal = "rounding: 'transformers' does not go with quantization 'fp8', only with 'none'"
    with pytest.raises(ConfigError, match=refusal):
        EngineConfig(rounding="transformers", quantization="fp8")
    with pytest.raises(ConfigError, match=refusal):
        EngineConfig.from_env({"ONELA_ROUNDING": "transformers"}, quantization="fp8")
    assert EngineConfig(rounding="least", quantization="fp8").quantization == "fp8"


@pytest.mark.parametrize("port", [-1, 65536, "8000"])
def test_a_port_that_does_not_exist_is_refused(port: Any) -> None:
    with pytest.raises(ConfigError, match="port"):
        ServerConfig(port=port)
    assert ServerConfig(port=65535).port == 65535


@pytest.mark.parametrize("name", ["api_key", "admin_token", "catalog_dir", "host", "model_name"])
def test_an_empty_text_is_refused(name: str) -> None:
    """An empty key would be the key of everyone who gives none, and an empty host every address."""
    with pytest.raises(ConfigError, match=name):
        ServerConfig.from_env({f"ONELA_SERVE_{name.upper()}": ""})
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: ""})
    with pytest.raises(ConfigError, match="api_key: text is expected, got b'x'"):
        ServerConfig(api_key=b"x")  # type: ignore[arg-type]
    assert getattr(ServerConfig.from_env({f"ONELA_SERVE_{name.upper()}": "x"}), name) == "x"
    for config, option in ((ServerConfig, "model_name"), (EngineConfig, "dtype"), (EngineConfig, "device")):
        with pytest.raises(ConfigError, match=f"{option}: text is expected, got 5"):
            config(**{option: 5})


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_option_says_what_it_is(config: type[EngineConfig] | type[ServerConfig]) -> None:
    for option in dataclasses.fields(config):
        assert option.metadata["help"], option.name

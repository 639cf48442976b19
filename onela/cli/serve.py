"""`onela serve`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from onela.cli.common import (
    CatalogOption,
    DeviceOption,
    DtypeOption,
    ModelPath,
    VocabularyOption,
    load_engine,
)
from onela.config import ServerConfig
from onela.errors import UnavailableError


def serve(
    model: ModelPath,
    catalog: CatalogOption = None,
    vocabulary: VocabularyOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name in /v1/models.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    recurrent_backend: Annotated[str | None, typer.Option(help="replay, full_state or replay_ssm.")] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Most requests that may wait.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Most prompt tokens in one step.")] = None,
    max_batch_rows: Annotated[int | None, typer.Option(help="Most beams in one step.")] = None,
    prompt_cache_bytes: Annotated[
        int | None, typer.Option(help="Device memory of the prompt cache; 0: none.")
    ] = None,
    prompt_cache_host_bytes: Annotated[
        int | None, typer.Option(help="Host memory of the prompt cache.")
    ] = None,
) -> None:
    """Serve a checkpoint over HTTP: /v1/recommend, OpenAI's completions, metrics, and a page to look at.

    Every option of the engine can also be set as ONELA_<OPTION>, every one of the server as ONELA_SERVE_<OPTION>; keys
    are read from there alone.
    """
    try:
        import uvicorn

        from onela.serve.app import create_app
    except ImportError as error:
        raise UnavailableError(f"onela serve needs the packages of onela[serve] ({error})") from None
    given: dict[str, Any] = {"host": host, "port": port, "model_name": model_name}
    config = ServerConfig.from_env(**{name: value for name, value in given.items() if value is not None})
    engine = load_engine(
        model,
        catalog,
        vocabulary,
        device=device,
        dtype=dtype,
        recurrent_backend=recurrent_backend,
        max_waiting=max_waiting,
        max_batch_tokens=max_batch_tokens,
        max_batch_rows=max_batch_rows,
        prompt_cache_bytes=prompt_cache_bytes,
        prompt_cache_host_bytes=prompt_cache_host_bytes,
    )
    app = create_app(engine, config)
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=config.drain_s,
    )

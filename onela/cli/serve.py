"""`onela serve`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from onela.cli.common import (
    CatalogOption,
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    ForcedPrefixOption,
    ModelPath,
    PatternOption,
    QuantizationOption,
    ThinkingOption,
    VocabularyOption,
    given,
    load_engine,
    read_vocabulary,
)
from onela.config import EngineConfig, ServerConfig
from onela.errors import ConfigError, UnavailableError


def serve(
    model: ModelPath,
    catalog: CatalogOption = None,
    vocabulary: VocabularyOption = None,
    sid_pattern: PatternOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name in /v1/models.")] = None,
    body_timeout_s: Annotated[
        int | None, typer.Option(help="Seconds that a request's body may stand still.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    recurrent_backend: Annotated[
        str | None, typer.Option(help="replay, full_state, replay_ssm, records_moved or auto.")
    ] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Most requests that may wait.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Most prompt tokens in one step.")] = None,
    max_batch_rows: Annotated[int | None, typer.Option(help="Most beams in one step.")] = None,
    warm_up_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens up to which prefill is captured before /ready.")
    ] = None,
    warm_up_requests: Annotated[
        int | None, typer.Option(help="Requests up to which decode steps are captured before /ready.")
    ] = None,
    prompt_cache_bytes: Annotated[
        int | None, typer.Option(help="Device memory of the prompt cache; 0: none.")
    ] = None,
    prompt_cache_host_bytes: Annotated[
        int | None, typer.Option(help="Host memory of the prompt cache.")
    ] = None,
    forced_prefix: ForcedPrefixOption = None,
    chat_template: ChatTemplateOption = False,
    enable_thinking: ThinkingOption = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Serve this many replicas through Ray Serve.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Let Ray start up to this many under load.")
    ] = None,
    gpus_per_replica: Annotated[
        float | None, typer.Option(min=0, help="GPUs that a replica asks Ray for; default: 0.")
    ] = None,
    cpus_per_replica: Annotated[
        float | None, typer.Option(min=0, help="CPUs that a replica asks Ray for; default: 1.")
    ] = None,
) -> None:
    """Serve a checkpoint over HTTP: /v1/recommend, OpenAI's completions, metrics, and a page to look at.

    Every option of the engine can also be set as ONELA_<OPTION>, every one of the server as ONELA_SERVE_<OPTION>; keys
    are read from there alone.
    """
    try:
        from onela.serve.app import create_app
        from onela.serve.run import DrainingServer, bound
    except ImportError as error:
        raise UnavailableError(f"onela serve needs the packages of onela[serve] ({error})") from None
    config = ServerConfig.from_env(
        **given({"host": host, "port": port, "model_name": model_name, "body_timeout_s": body_timeout_s})
    )
    options = given(
        {
            "device": device,
            "dtype": dtype,
            "quantization": quantization,
            "recurrent_backend": recurrent_backend,
            "max_waiting": max_waiting,
            "max_batch_tokens": max_batch_tokens,
            "max_batch_rows": max_batch_rows,
            "warm_up_tokens": warm_up_tokens,
            "warm_up_requests": warm_up_requests,
            "prompt_cache_bytes": prompt_cache_bytes,
            "prompt_cache_host_bytes": prompt_cache_host_bytes,
        }
    )
    prompts: dict[str, Any] = {"chat_template": chat_template, "enable_thinking": enable_thinking}
    if forced_prefix is not None:
        prompts["forced_prefix"] = forced_prefix
    sizes = {"max_replicas": max_replicas, "num_gpus": gpus_per_replica, "num_cpus": cpus_per_replica}
    if replicas is not None:
        _serve_cluster(
            vocabulary,
            model=str(model.resolve()),
            catalog=None if catalog is None else str(catalog.resolve()),
            sid_pattern=sid_pattern,
            replicas=replicas,
            engine=dataclasses.asdict(EngineConfig.from_env(**options)),
            prompts=prompts,
            server=dataclasses.asdict(config),
            **given(sizes),
        )
        return
    if given(sizes):
        raise ConfigError(
            "--max-replicas, --gpus-per-replica, --cpus-per-replica: they go with --replicas, which is not given"
        )
    with bound(config) as sockets:
        engine = load_engine(model, catalog, vocabulary, sid_pattern=sid_pattern, **options, **prompts)
        DrainingServer(create_app(engine, config), config).run(sockets)


def _serve_cluster(vocabulary: Path | None, **options: Any) -> None:
    """Serve replicas; `options` are those of `ClusterSpec` but the vocabulary."""
    try:
        from onela.serve.cluster import ClusterSpec, run
    except ImportError as error:
        raise UnavailableError(f"--replicas needs the packages of onela[cluster] ({error})") from None
    levels = None
    if vocabulary is not None:
        read = read_vocabulary(vocabulary)
        levels = tuple(tuple(read.token_ids(level).tolist()) for level in range(read.num_levels))
    run(ClusterSpec(vocabulary=levels, **options))

"""End to end on a CPU: OneLA's backends beside `transformers.generate`, on one small Qwen3.5 hybrid.

What is timed is a request: prompt in, items out. Before anything is timed, OneLA's sequences and scores are held
against those of `transformers` at 8 beams.

    python bench/cpu.py [--beams 32 128 512] [--no-transformers]
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

from bench.common import append_result
from onela import BeamParams, Engine, Request, SidVocabulary
from onela.engine.verify import VARIANTS

LEVELS, CODEBOOK = 3, 256
FIRST = 64


def save_model(path: Path) -> Any:
    """A 3.7M-parameter hybrid, three Gated DeltaNet layers and one of softmax attention, random weights."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=FIRST + LEVELS * CODEBOOK,
        hidden_size=256,
        intermediate_size=728,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    model.save_pretrained(path)
    return model


def vocabulary() -> SidVocabulary:
    """Three levels of 256 codes, one after the other."""
    starts = [FIRST + level * CODEBOOK for level in range(LEVELS)]
    return SidVocabulary.from_token_ids([list(range(start, start + CODEBOOK)) for start in starts])


def hf_generate(model: Any, prompt: list[int], beams: int) -> Any:
    """`transformers`' beam search, restricted to the codes of each level as a recommender would."""
    levels = [
        list(range(FIRST + level * CODEBOOK, FIRST + (level + 1) * CODEBOOK)) for level in range(LEVELS)
    ]
    return model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=LEVELS,
        min_new_tokens=LEVELS,
        length_penalty=0.0,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda _, ids: levels[min(ids.shape[0] - len(prompt), LEVELS - 1)],
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )


def check(engine: Engine, model: Any, prompt: list[int]) -> None:
    """The gate: same sequences, scores within 1e-4."""
    expected = hf_generate(model, prompt, 8)
    params = BeamParams(beam_width=8, normalizer="vocabulary")
    [result] = engine.generate([Request(prompt_token_ids=prompt)], params)
    sequences = [tuple(row) for row in expected.sequences[:, len(prompt) :].tolist()]
    scores = [item.cum_logprob for item in result.items]
    if [item.token_ids for item in result.items] != sequences:
        raise SystemExit("gate: sequences differ from transformers' at 8 beams; nothing was timed")
    worst = max(abs(a - b) for a, b in zip(scores, expected.sequences_scores.tolist()))
    if worst > 1e-4:
        raise SystemExit(
            f"gate: scores differ from transformers' by {worst:.1e} at 8 beams; nothing was timed"
        )


def seconds(run: Callable[[], Any], samples: int) -> list[float]:
    """Wall-clock seconds of each run, after one that is not counted."""
    run()
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beams", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--samples", type=int, default=5, help="timed runs of each of OneLA's backends")
    parser.add_argument("--hf-samples", type=int, default=1, help="timed runs of transformers")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument(
        "--arms", nargs="+", default=[name for name, _ in VARIANTS], help="of OneLA's backends"
    )
    parser.add_argument("--dtype", default="float32", help="bfloat16: matrix products on AMX, where there is")
    parser.add_argument("--out", type=Path, default=None, help="file for the JSON lines")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, FIRST + LEVELS * CODEBOOK, (options.prompt,), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory))
        engine = Engine.from_pretrained(directory, vocabulary=vocabulary(), device="cpu")
        engines = {
            name: Engine.from_pretrained(
                directory, vocabulary=vocabulary(), device="cpu", dtype=options.dtype, **dict(VARIANTS)[name]
            )
            for name in options.arms
        }
    check(engine, model, prompt)
    parameters = sum(p.numel() for p in model.parameters())
    table = Table(
        title=f"{parameters / 1e6:.1f}M parameters, prompt {options.prompt}, {LEVELS} tokens, seconds a request"
    )
    for column in ("beams", "arm", "median", "min", "max", "against replay"):
        table.add_column(column, justify="right")
    for beams in options.beams:
        request = Request(prompt_token_ids=prompt)
        params = BeamParams(beam_width=beams)
        arms: dict[str, tuple[Callable[[], Any], int]] = {
            name: (partial(e.generate, [request], params), options.samples) for name, e in engines.items()
        }
        if not options.no_transformers:
            arms["transformers"] = (partial(hf_generate, model, prompt, beams), options.hf_samples)
        case = {"beam_width": beams, "prompt": options.prompt, "O": LEVELS, "parameters": parameters}
        reference = 0.0
        for arm, (run, samples) in arms.items():
            times = seconds(run, samples)
            median = statistics.median(times)
            reference = median if arm == "replay" else reference
            append_result(
                "cpu",
                arm=arm,
                case=case | ({"dtype": options.dtype} if options.dtype != "float32" else {}),
                metric="request_time",
                unit="s",
                value=median,
                spread=[min(times), max(times)],
                out=options.out,
                ratio_to_replay=median / reference if reference else None,
                threads=torch.get_num_threads(),
            )
            cells = (
                f"{median:.3f}",
                f"{min(times):.3f}",
                f"{max(times):.3f}",
                f"{median / (reference or median):.1f}x",
            )
            table.add_row(str(beams), arm, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()

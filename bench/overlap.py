"""How much of a beam set two implementations share: OneLA in bfloat16, `transformers` in bfloat16 and in float32.

Both search the same weights for the `n` best SIDs: the tokens of each level alone allowed, scores over the whole
vocabulary. `transformers` runs its own forwards on its own cache; the search above them is written here, since
`generate` puts `n` copies of the prompt through the model first. Rounding decides between beams of nearly equal score,
so two honest bfloat16 runs differ; what `transformers` loses against its own float32 says how much is to be expected.

    python bench/overlap.py --model demo --checkpoint build/demo/checkpoint     (the MovieLens demo, `make demo`)
    python bench/overlap.py --model qwen3-1.7b --device cuda                    (random weights of the public shape)
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import copy
import gc
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.common import append_result, machine
from bench.qwen3 import QWEN3_1_7B, SMALL
from onela import BeamParams, Engine, Request, SidVocabulary

CHUNK = 128
"""Beams in one forward of transformers: each has a copy of the prompt's cache."""

Sids = set[tuple[int, ...]]


@torch.inference_mode()
def hf_beams(
    model: Any, prompt: Sequence[int], levels: Sequence[Tensor], width: int, chunk: int = CHUNK
) -> Sids:
    """The best `width` token sequences, one token of each level, by `transformers`' forwards.

    Scores as in `generate`: a log-softmax in fp32 over the whole vocabulary, summed; ties to the smaller (beam, token).
    """
    device = model.device
    out = model(torch.tensor([list(prompt)], device=device), use_cache=True, logits_to_keep=1)
    shared = out.past_key_values
    beams = torch.empty(1, 0, dtype=torch.int64, device=device)
    totals = torch.zeros(1, device=device)
    last = out.logits[:, -1]
    for level, tokens in enumerate(levels):
        tokens = tokens.to(device)
        if level:
            last = torch.cat([_continue(model, shared, part) for part in beams.split(chunk)])
        scores = totals[:, None] + last.float().log_softmax(-1)[:, tokens]
        best = torch.sort(scores.flatten(), descending=True, stable=True).indices[:width]
        parents, codes = best // len(tokens), best % len(tokens)
        totals = scores.flatten()[best]
        beams = torch.cat([beams[parents], tokens[codes][:, None]], dim=1)
    return {tuple(row) for row in beams.tolist()}


def _continue(model: Any, shared: Any, beams: Tensor) -> Tensor:
    """Logits [n, vocab] after each beam's tokens, fed one after the other to copies of the prompt's cache."""
    cache = copy.deepcopy(shared)
    cache.reorder_cache(torch.zeros(len(beams), dtype=torch.int64, device=beams.device))
    for column in beams.split(1, dim=1):
        out = model(column, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    return out.logits[:, -1]


def our_beams(engine: Engine, prompt: Sequence[int], width: int) -> Sids:
    """The same from OneLA."""
    params = BeamParams(beam_width=width, normalizer="vocabulary")
    [result] = engine.generate([Request(prompt_token_ids=list(prompt))], params)
    return {item.token_ids for item in result.items}


def write_random(path: Path, *, tiny: bool) -> SidVocabulary:
    """Save a random Qwen3-1.7B in bfloat16; returns which tokens are its SIDs."""
    values = dict(QWEN3_1_7B) | (SMALL if tiny else {})
    codebook, first = (128, 64) if tiny else (8192, 100000)
    config = transformers.Qwen3Config(**{k: v for k, v in values.items() if k != "model_type"})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.1 * torch.randn_like(parameter)
            else:
                gain = 2.0 if "embed" in name else 1.0
                parameter.normal_(0, gain / parameter.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(path)
    starts = [first + level * codebook for level in range(3)]
    return SidVocabulary.from_token_ids([range(start, start + codebook) for start in starts])


def demo_prompts(count: int) -> list[list[int]]:
    """What users of the demo's test split have watched, as the demo writes its prompts."""
    from examples.movielens.checkpoint import load_weights
    from examples.movielens.data import load_movielens, split

    data = load_movielens()
    trained = load_weights(data)
    histories = split(data, "test").histories
    step = max(1, len(histories) // count)
    return [
        trained.tokens.prompt(history[-trained.recipe.window :])
        for history in list(histories)[::step][:count]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["demo", "qwen3-1.7b"], required=True)
    parser.add_argument("--checkpoint", type=Path, help="the demo's directory")
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 128, 512])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a random prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--commit", help="the commit that is measured, where there is no checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(machine(), flush=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        if args.model == "demo":
            path, vocabulary = args.checkpoint, None
            prompts = demo_prompts(args.prompts)
        else:
            path = Path(folder)
            vocabulary = write_random(path, tiny=args.tiny)
            config = json.loads((path / "config.json").read_text())
            generator = torch.Generator().manual_seed(1)
            high = min(config["vocab_size"], 100000)
            prompts = torch.randint(0, high, (args.prompts, args.prompt), generator=generator).tolist()
        compare(path, vocabulary, prompts, args)


def compare(
    path: Path, vocabulary: SidVocabulary | None, prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> None:
    """Run all three on all prompts and widths, and write what each pair shares."""
    engine = Engine.from_pretrained(path, vocabulary=vocabulary, device=args.device, dtype="bfloat16")
    vocabulary = engine.vocabulary
    levels = [torch.as_tensor(vocabulary.token_ids(level)).long() for level in range(vocabulary.num_levels)]
    sets: dict[str, dict[int, list[Sids]]] = {}
    length = round(statistics.mean(map(len, prompts)))

    def report(left: str, right: str) -> None:
        for n in args.widths:
            shares = [100 * len(a & b) / n for a, b in zip(sets[left][n], sets[right][n])]
            value = statistics.mean(shares)
            append_result(
                "overlap", arm=f"{left} / {right}",
                case={"model": f"{args.model}, tiny" if args.tiny else args.model, "n": n, "prompt": length},
                metric="overlap", unit="%", value=value, spread=[min(shares), max(shares)],
                prompts=len(prompts), transformers=transformers.__version__, out=args.out, commit=args.commit,
            )  # fmt: skip
            print(
                f"n={n:4d} {left} / {right}: {value:.2f} % ({min(shares):.2f} to {max(shares):.2f})",
                flush=True,
            )

    ours, half, full = "onela bf16", "transformers bf16", "transformers fp32"
    sets[ours] = {n: [our_beams(engine, prompt, n) for prompt in prompts] for n in args.widths}
    del engine
    gc.collect()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = model.to(args.device).eval()
    sets[half] = {n: [hf_beams(model, prompt, levels, n) for prompt in prompts] for n in args.widths}
    report(ours, half)
    model = model.float()  # the same weights
    sets[full] = {n: [hf_beams(model, prompt, levels, n) for prompt in prompts] for n in args.widths}
    report(ours, full)
    report(half, full)


if __name__ == "__main__":
    main()

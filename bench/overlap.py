"""How much of a beam set two implementations share: OneLA in bfloat16, `transformers` in bfloat16 and in float32.

All search the same weights for the `n` best SIDs: the tokens of each level alone allowed, scores over the whole
vocabulary. `transformers` runs its own forwards on its own cache; the search above them is written here, since
`generate` puts `n` copies of the prompt through the model first, and searches of all widths share the forwards that
they have in common. Rounding decides between beams of nearly equal score, so two honest bfloat16 runs differ; what
`transformers` loses against its own float32 says how much is to be expected. Its bfloat16 forwards are also read with
logits in float32, as OneLA makes them, which says how much of that is the rounding of the logits alone. They have `n`
beams a forward, as in `generate`; the same searches with the beams of all widths in shared batches say how far
`transformers` agrees with itself, and a second run of the very same forwards how far it repeats itself: attention on a
GPU need not. `rounding="transformers"` answers one request at a time, in `generate`'s shapes.

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
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.common import append_result, machine
from bench.qwen3 import QWEN3_1_7B, SMALL
from onela import BeamParams, Engine, Request, SidVocabulary

CHUNK = 256
"""Beams in one forward of transformers: each has a copy of the prompt's cache."""
BATCH = 4
"""Prompts that OneLA answers together."""
OURS, HALF, FULL = "onela bf16", "transformers bf16", "transformers fp32"
ALIKE = "onela bf16, transformers' rounding"
SHARED, AGAIN = "transformers bf16, other batches", "transformers bf16, run again"
WIDE = "transformers bf16, fp32 logits"

Sids = set[tuple[int, ...]]
Search = tuple[str, int]
"""An arm and its width."""


@torch.inference_mode()
def hf_beams(
    model: Any,
    prompt: Sequence[int],
    levels: Sequence[Tensor],
    widths: Sequence[int],
    heads: Mapping[str, Callable[[Tensor], Tensor]],
    chunk: int = CHUNK,
) -> dict[Search, Sids]:
    """The best token sequences, one token of each level, by `transformers`' forwards: for every head and width.

    Scores as in `generate`: a log-softmax in fp32 over the whole vocabulary, summed; ties to the smaller (beam, token).

    Args:
        heads: name -> from hidden rows [n, hidden_size] to logits [n, vocab_size].
    """
    device = model.device
    searches = [(name, width) for name in heads for width in widths]
    out = model.model(torch.tensor([list(prompt)], device=device), use_cache=True)
    shared = out.past_key_values
    prefixes = torch.empty(1, 0, dtype=torch.int64, device=device)
    hidden = out.last_hidden_state[:, -1]
    # Of each search, which of the prefixes its beams are, and their scores.
    places = {search: torch.zeros(1, dtype=torch.int64, device=device) for search in searches}
    totals = {search: torch.zeros(1, device=device) for search in searches}
    for level, tokens in enumerate(levels):
        tokens = tokens.to(device)
        if level:
            hidden = torch.cat([_continue(model, shared, part) for part in prefixes.split(chunk)])
        chosen: dict[Search, Tensor] = {}
        for name, head in heads.items():
            scores = torch.cat(
                [head(rows).float().log_softmax(-1)[:, tokens] for rows in hidden.split(chunk)]
            )
            for width in widths:
                search = name, width
                all_scores = (totals[search][:, None] + scores[places[search]]).flatten()
                best = torch.sort(all_scores, descending=True, stable=True).indices[:width]
                parents, codes = best // len(tokens), best % len(tokens)
                totals[search] = all_scores[best]
                chosen[search] = torch.cat([prefixes[places[search][parents]], tokens[codes][:, None]], dim=1)
        prefixes, inverse = torch.unique(torch.cat(list(chosen.values())), dim=0, return_inverse=True)
        counts = [len(beams) for beams in chosen.values()]
        places = dict(zip(chosen, inverse.split(counts)))
    return {search: {tuple(row) for row in prefixes[place].tolist()} for search, place in places.items()}


def _continue(model: Any, shared: Any, beams: Tensor) -> Tensor:
    """Hidden rows [n, hidden_size] after each beam's tokens, fed one by one to copies of the prompt's cache."""
    cache = copy.deepcopy(shared)
    cache.reorder_cache(torch.zeros(len(beams), dtype=torch.int64, device=beams.device))
    for column in beams.split(1, dim=1):
        out = model.model(column, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    return out.last_hidden_state[:, -1]


def wide_logits(model: Any) -> Callable[[Tensor], Tensor]:
    """The model's head on its own hidden rows and weights, with nothing rounded after the sums."""
    weight = model.lm_head.weight

    def head(rows: Tensor) -> Tensor:
        if rows.is_cuda:
            return torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return rows.float() @ weight.float().t()

    return head


def our_beams(engine: Engine, prompts: Sequence[Sequence[int]], width: int) -> list[Sids]:
    """The same from OneLA, for several prompts together."""
    params = BeamParams(beam_width=width, normalizer="vocabulary")
    results = engine.generate([Request(prompt_token_ids=list(prompt)) for prompt in prompts], params)
    return [{item.token_ids for item in result.items} for result in results]


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
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing further after this time")
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
            high = min(json.loads((path / "config.json").read_text())["vocab_size"], 100000)
            generator = torch.Generator().manual_seed(1)
            prompts = torch.randint(0, high, (args.prompts, args.prompt), generator=generator).tolist()
        engine = Engine.from_pretrained(
            path, vocabulary=vocabulary, device=args.device, dtype="bfloat16", cuda_graphs=False
        )
        alike = Engine.from_pretrained(
            path, vocabulary=vocabulary, device=args.device, dtype="bfloat16", rounding="transformers"
        )
        # Read from the file: a model that is rounded in place has its rotation's frequencies rounded too.
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    compare(engine, alike, model.to(args.device), prompts, args)


def compare(
    engine: Engine, alike: Engine, half: Any, prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> None:
    """Run all on all prompts and widths, as many as there is time for, and write what each pair shares."""
    vocabulary, widths = engine.vocabulary, args.widths
    levels = [torch.as_tensor(vocabulary.token_ids(level)).long() for level in range(vocabulary.num_levels)]
    began = time.perf_counter()
    sets: dict[Search, list[Sids]] = {}
    full = copy.deepcopy(half).float()  # the same weights
    wide = wide_logits(half)
    done = 0
    for i, prompt in enumerate(prompts):
        if done and time.perf_counter() - began > args.seconds:
            break
        if i % BATCH == 0:
            for n in widths:
                sets.setdefault((OURS, n), []).extend(our_beams(engine, prompts[i : i + BATCH], n))
        found = hf_beams(half, prompt, levels, widths, {SHARED: half.lm_head})
        found |= hf_beams(full, prompt, levels, widths, {FULL: full.lm_head})
        for n in widths:
            for name, head in ((HALF, half.lm_head), (AGAIN, half.lm_head), (WIDE, wide)):
                found |= hf_beams(half, prompt, levels, [n], {name: head}, chunk=n)
            found[ALIKE, n] = our_beams(alike, [prompt], n)[0]
        for search, sids in found.items():
            sets.setdefault(search, []).append(sids)
        done += 1
    print(f"{time.perf_counter() - began:.1f} s for {done} prompts", flush=True)
    length = round(statistics.mean(map(len, prompts[:done])))
    for n in widths:
        own = shares(sets[HALF, n], sets[FULL, n], n)
        for left, right in (
            (OURS, HALF),
            (ALIKE, HALF),
            (AGAIN, HALF),
            (SHARED, HALF),
            (OURS, FULL),
            (ALIKE, FULL),
            (HALF, FULL),
            (OURS, WIDE),
            (WIDE, HALF),
            (WIDE, FULL),
        ):
            found_shares = shares(sets[left, n], sets[right, n], n)
            value, error = mean_and_error(found_shares)
            more, more_error = mean_and_error([a - b for a, b in zip(found_shares, own)])
            append_result(
                "overlap", arm=f"{left} / {right}",
                case={"model": f"{args.model}, tiny" if args.tiny else args.model, "n": n, "prompt": length},
                metric="overlap", unit="%", value=value, spread=[min(found_shares), max(found_shares)],
                standard_error=error, over_transformers_own=more, over_transformers_own_error=more_error,
                prompts=done, transformers=transformers.__version__, out=args.out, commit=args.commit,
            )  # fmt: skip
            print(
                f"n={n:4d} {left} / {right}: {value:.2f} +- {error:.2f} % ({min(found_shares):.2f} to "
                f"{max(found_shares):.2f}), over transformers' own {more:+.2f} +- {more_error:.2f}",
                flush=True,
            )


def shares(left: Sequence[Sids], right: Sequence[Sids], n: int) -> list[float]:
    """Percent of the beams that each prompt's two sets have in common."""
    return [100 * len(a & b) / n for a, b in zip(left, right)]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; 0 of a single value."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values), error


if __name__ == "__main__":
    main()

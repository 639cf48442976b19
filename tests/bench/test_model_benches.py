"""The benchmarks of whole models: what they build by hand, what their lines say, and what they take a kernel for."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import bench.crossover
import bench.decode
import bench.qwen3
from bench.decode import parse_shape
from bench.report import format_value
from onela import BeamParams
from onela.bench.decode import part_of, run_steps, start, times_apart
from onela.bench.models import engine_of, random_model, vocabulary_of
from onela.bench.operator import step_inputs, tree
from tests.engine.test_graphs import with_graphs

TINY = ["--device", "cpu", "--tiny"]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(monkeypatch: pytest.MonkeyPatch, module: Any, path: Path, *words: str) -> list[dict[str, Any]]:
    monkeypatch.setattr("sys.argv", [module.__file__, *TINY, *words, "--out", str(path)])
    module.main()
    return lines_of(path) if path.exists() else []


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix_products"),
        ("joined_product_hopper_kernel", "matrix_products"),
        ("gated_product_hopper_kernel", "matrix_products"),
        ("float8_product_hopper_kernel", "matrix_products"),
        ("gated_delta_replay_hopper_kernel", "gdn"),
        ("gated_delta_layer_step_hopper_kernel", "gdn"),
        ("conv_gates_kernel", "gdn"),
        ("full_state_step_kernel", "gdn"),
        ("gated_rms_norm_kernel", "gdn"),
        ("copy_rows_kernel", "reorder"),
        ("beam_attention_hopper_kernel", "attention"),
        ("rms_norm_kernel", "rest"),
        ("qk_norm_rotary_kernel", "rest"),
        ("swiglu_kernel", "rest"),
        ("sigmoid_gate_kernel", "rest"),
    ],
)
def test_kernels_and_what_they_are_for(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_kernels_that_wait_for_others_do_not_count_twice() -> None:
    spans = [("a", 0.0, 10.0), ("b", 4.0, 15.0), ("a", 16.0, 20.0), ("c", 5.0, 9.0), ("a", 19.0, 22.0)]
    assert times_apart(spans) == {"a": (1.0 + 4.0 + 2.0, 3), "b": (5.0, 1), "c": (4.0, 1)}


@pytest.mark.parametrize("text", ["4", "x256", "4x", "0x8", "4x256x2"])
def test_a_shape_is_requests_and_beams(text: str) -> None:
    assert parse_shape("16x512") == (16, 512)
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        parse_shape(text)


def test_time_for_shorter_sids_is_the_first_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = shlex.split(
        "--dtype float32 --no-gate --shapes 1x4 2x3 --prompts 9 --tokens 2 4 --codebook 16 --arms replay"
    )
    lines = run(monkeypatch, bench.decode, tmp_path / "lines.jsonl", *words)
    for requests, width in ((1, 4), (2, 3)):
        times = {
            line["case"]["O"]: line
            for line in lines
            if line["metric"] == "decode_forward"
            and (line["case"]["R"], line["case"]["W"]) == (requests, width)
        }
        assert set(times) == {2, 4}
        assert times[2]["steps_us"] == times[4]["steps_us"][:1]
        assert len(times[4]["steps_us"]) == 3


def test_other_shapes_may_have_fewer_arms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = shlex.split(
        "--dtype float32 --no-gate --shapes 1x4 2x3 --prompts 9 --tokens 2 --codebook 16 "
        "--arms replay records_moved --elsewhere replay"
    )
    lines = run(monkeypatch, bench.decode, tmp_path / "lines.jsonl", *words)
    measured = {(line["case"]["W"], line["arm"]) for line in lines}
    assert measured == {(4, "replay"), (4, "records_moved"), (3, "replay")}


def test_an_arm_without_room_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench.decode, "measure_steps", no_room)
    words = shlex.split(
        "--dtype float32 --no-gate --prompts 9 --tokens 3 --codebook 16 --arms full_state_copy"
    )
    [line] = run(monkeypatch, bench.decode, tmp_path / "lines.jsonl", *words)
    assert line["value"] is None
    assert format_value(line) == "does not fit"


def test_the_fp32_gate_has_a_line_per_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = shlex.split("--gate-only --width 6 --tokens 3 --codebook 16 --arms replay records_moved")
    lines = run(monkeypatch, bench.decode, tmp_path / "lines.jsonl", *words)
    assert [(line["arm"], line["value"]) for line in lines] == [("replay", 1.0), ("records_moved", 1.0)]


@pytest.mark.parametrize("kind", ["random", "chain"])
def test_the_crossovers_trees_are_beam_trees(kind: str) -> None:
    """The same parents, step by step as the index is defined, the slots of a request apart."""
    R, W, depth, cpu = 2, 5, 4, torch.device("cpu")
    last, _ = tree(R, W, depth, kind, cpu)
    assert len(set(last[:W].flatten().tolist()) & set(last[W:].flatten().tolist())) == 0
    for t in range(1, depth + 1):
        ancestors, parents = tree(R, W, t, kind, cpu)
        generator = torch.Generator().manual_seed(t)
        own = torch.empty(R * W, 0, dtype=torch.int32)
        for step in range(t):
            chosen = torch.arange(R * W)
            if kind == "random":
                drawn = torch.randint(W, (R, W), generator=generator).sort(-1).values
                chosen = (drawn + torch.tensor([[0], [W]])).flatten()
            own = torch.cat([own[chosen], (chosen + step * R * W)[:, None].int()], dim=1)
        assert torch.equal(own, ancestors)
        assert torch.equal(chosen, parents)
    inputs = step_inputs(R, W, 0, 10, kind, cpu)
    assert inputs.parent_rows.tolist() == [-1] * (R * W)


@pytest.mark.parametrize("what", ["operator", "model"])
def test_a_step_of_every_arm_runs_at_a_depth_beyond_the_usual(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = "1x2" if what == "operator" else "2x3"
    run(monkeypatch, bench.crossover, Path("unused"), "--what", what, "--shapes", shape, "--depths", "0", "9")


def test_a_step_is_timed_over_the_inputs_that_it_had() -> None:
    """What later steps write over the table is put back before a replay."""
    model = random_model(bench.decode.TINY, torch.float32, torch.device("cpu"))
    engine = engine_of(model, vocabulary_of(4, 64), "replay", cuda_graphs=False)
    with_graphs(engine)
    kept, hidden = engine.runner.beam_hidden, []
    with torch.inference_mode():
        steps = run_steps(engine, start(engine, 2, 40, BeamParams(beam_width=16)))
        assert len(steps) == 3
        for step in steps:
            assert step.has_graph
            step.restore()
            assert step.table[0, 0, 1:3].tolist() == [16, 32]
            step.graph.replay()
            hidden.append(kept.rows.clone())
        for before, after in itertools.pairwise(hidden):
            assert not torch.equal(before, after)
        steps[0].restore()
        steps[0].graph.replay()
        torch.testing.assert_close(kept.rows, hidden[0])


def test_a_request_of_a_recommender_and_its_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(bench.qwen3.CASES, "1.7b", bench.qwen3.Case("small", bench.qwen3.QWEN3_1_7B, 40, 8))
    words = shlex.split("--cases 1.7b --dtype float32 --repeat 2 --warm 1")
    lines = run(monkeypatch, bench.qwen3, tmp_path / "lines.jsonl", *words)
    found = {line["metric"]: line["value"] for line in lines}
    assert list(found) == ["request_time", "prefill_time", "decode_time", "step_time"]
    assert found["prefill_time"] + found["decode_time"] < 2 * found["request_time"]
    assert all(value > 0 for value in found.values())

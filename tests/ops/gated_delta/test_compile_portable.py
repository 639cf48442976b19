"""The portable kernels compile for sm_80, sm_90 and sm_100 without a GPU, and hardly spill in the cuts chosen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]

COMPILE = """
import json, sys, triton
from importlib import import_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INDEX = ("p_slots", "p_ancestors", "p_cu_rows", "p_prompts", "p_depths", "p_read_rows", "p_write_rows",
         "p_row_prompts", "p_rows", "p_row_depths", "p_checkpoint_rows")
FP32 = ("p_g", "p_beta", "p_records_g", "p_buffer_g", "p_A_log", "p_dt_bias", "p_states", "p_checkpoints", "p_prompt")

def kind(argument):
    if argument.startswith("p_"):
        return "*i32" if argument in INDEX else "*fp32" if argument in FP32 else "*bf16"
    return "fp32" if argument in ("scale", "norm_eps") else "i32"

for case, (module, name, arch, num_warps, sizes) in json.loads(sys.argv[1]).items():
    kernel = getattr(import_module("onela.ops.gated_delta." + module), name)
    names = kernel.arg_names
    aligned = [i for i, n in enumerate(names) if n.startswith("p_") or (n.startswith("s_") and n != "s_ancestors")]
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in sizes else kind(n) for n in names},
        {(names.index(n),): value for n, value in sizes.items()},
        {(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})
    open(case + ".cubin", "wb").write(compiled.asm["cubin"])
    print(case, compiled.metadata.shared)
"""


def replay(arch: int, num_warps: int, **sizes: int) -> tuple[str, str, int, int, dict[str, int]]:
    common = {
        "H": 8,
        "HV": 16,
        "STAGES": 1,
        "PREFETCH": 1,
        "SPLIT_STATE": 1,
        "UPCAST": 0,
        "NORM": 0,
        "KEY_IS_RECORD": 0,
        "OVERLAP": int(arch == 90),
    }
    depth = sizes.pop("depth")
    depth_sizes = {"MAX_DEPTH": depth, "DEPTH_TILE": max(depth, 2)}
    return "_replay_kernel", "gated_delta_replay_kernel", arch, num_warps, common | depth_sizes | sizes


LARGE = {"BLOCK_W": 32, "BLOCK_V": 128, "K": 128, "V": 128}
CONV = {
    "QK": 2048,
    "C": 8192,
    "HV": 32,
    "KERNEL": 4,
    "MAX_DEPTH": 3,
    "BLOCK_W": 8,
    "BLOCK_C": 256,
    "BLOCK_HV": 32,
    "UPCAST": 0,
}
STATE = {"H": 8, "HV": 16, "K": 128, "V": 128, "BLOCK_V": 32}

KERNELS = {
    "no_records": replay(90, 4, depth=0, KEY_IS_RECORD=1, **LARGE),
    "one_record": replay(90, 4, depth=2, KEY_IS_RECORD=1, **LARGE),
    "records": replay(90, 4, depth=8, **LARGE),
    "deep": replay(90, 4, depth=32, KEY_IS_RECORD=1, **LARGE),
    "layer": replay(90, 4, depth=2, KEY_IS_RECORD=1, NORM=1, **LARGE),
    "ampere": replay(80, 4, depth=8, BLOCK_W=16, BLOCK_V=128, K=128, V=128),
    "blackwell": replay(100, 4, depth=8, BLOCK_W=16, BLOCK_V=128, K=128, V=128),
    "wide_heads": replay(90, 8, depth=8, BLOCK_W=32, BLOCK_V=64, K=256, V=512),
    "conv_gates": ("_conv_gates_kernel", "conv_gates_kernel", 80, 2, CONV | {"OVERLAP": 0}),
    "conv_gates_overlap": ("_conv_gates_kernel", "conv_gates_kernel", 90, 2, CONV | {"OVERLAP": 1}),
    "full_state": ("_full_state_kernel", "full_state_step_kernel", 90, 1, STATE),
    "replay_ssm": ("_replay_ssm_kernel", "replay_ssm_step_kernel", 90, 1, STATE | {"T": 6}),
}
STACK = {"one_record": 16, "records": 16, "deep": 16, "layer": 48}
"""Bytes of stack that are allowed; none elsewhere. A tile's projections take half of the registers."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Stack bytes and shared memory of every kernel, compiled in a process of its own: here they may be interpreted."""
    folder = tmp_path_factory.mktemp("kernels")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILE, json.dumps(KERNELS)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    results = {}
    for line in done.stdout.splitlines():
        case, shared = line.split()
        dump = [cuobjdump, "--dump-resource-usage", f"{case}.cubin"]
        usage = subprocess.run(dump, cwd=folder, capture_output=True, text=True, check=True).stdout
        found = re.search(KERNELS[case][1] + r":\s+REG:\d+ STACK:(\d+)", usage)
        assert found is not None, usage
        results[case] = int(found[1]), int(shared)
    return results


@pytest.mark.parametrize("case", KERNELS)
def test_compiles(case: str, compiled: dict[str, tuple[int, int]]) -> None:
    stack, shared = compiled[case]
    assert stack <= STACK.get(case, 0)
    # Two programs share a multiprocessor, which has 163 KiB on sm_80 and 227 on newer ones.
    assert shared <= (81 if KERNELS[case][2] == 80 else 113) * 1024

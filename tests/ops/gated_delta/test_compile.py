"""The Hopper kernels compile for sm_90 without a GPU, into few enough registers and, where promised, without spills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]

COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from onela.ops.gated_delta._replay_hopper_kernel import gated_delta_replay_hopper_kernel as kernel

K, V, T, NW, RING, raw, delta, out = [int(x) if x.isdigit() else x for x in sys.argv[1:]]
sizes = dict(H=4, HV=8, K=K, V=V, T=T, BPAD=32, NW=NW, RING=RING, RAW=raw == "raw", WRITE=True,
             NORM=V == 128 and T == 5, OVERLAP=True)
types = dict(p_q="*bf16", p_k="*bf16", p_v="*bf16", p_g="*fp32", p_beta="*fp32", p_state="*bf16", p_records_g="*fp32",
             p_records_delta=delta, p_records_k="*bf16", p_slots="*i32", p_ancestors="*i32", p_cu_rows="*i32",
             p_prompts="*i32", p_z="*bf16", p_norm_weight="*bf16", p_o=out, scale="fp32", norm_eps="fp32")
names = kernel.arg_names
signature = {name: "constexpr" if name in sizes else types.get(name, "i32") for name in names}
aligned = [(i,) for i, name in enumerate(names) if name.startswith("p_") or name in ("s_q", "s_k", "s_v", "s_z")]
source = GluonASTSource(
    kernel,
    signature,
    {(names.index(name),): value for name, value in sizes.items()},
    {at: [["tt.divisibility", 16]] for at in aligned},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": NW})
sys.stdout.write(str(compiled.metadata.shared))
open("kernel.cubin", "wb").write(compiled.asm["cubin"])
"""

COMPILE_LAYER = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from onela.ops.gated_delta._layer_step_hopper_kernel import gated_delta_layer_step_hopper_kernel as kernel

T, RING, delta = [int(x) if x.isdigit() else x for x in sys.argv[1:]]
sizes = dict(H=4, HV=8, T=T, BPAD=32, NW=4, RING=RING, OVERLAP=True)
types = {name: "*bf16" for name in kernel.arg_names if name.startswith("p_")}
types |= dict(p_A_log="*fp32", p_dt_bias="*fp32", p_records_g="*fp32", p_records_delta=delta, p_slots="*i32",
              p_ancestors="*i32", p_cu_rows="*i32", p_prompts="*i32", p_depths="*i32", scale="fp32", norm_eps="fp32")
names = kernel.arg_names
signature = {name: "constexpr" if name in sizes else types.get(name, "i32") for name in names}
aligned = [(i,) for i, name in enumerate(names) if name.startswith("p_") or name in ("s_x", "s_z")]
source = GluonASTSource(
    kernel,
    signature,
    {(names.index(name),): value for name, value in sizes.items()},
    {at: [["tt.divisibility", 16]] for at in aligned},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
sys.stdout.write(str(compiled.metadata.shared))
open("kernel.cubin", "wb").write(compiled.asm["cubin"])
"""

CASES = [
    # K, V, T, warps, ring, key, delta, output; stack bytes allowed, shared memory allowed
    ("128 128 0 4 6 raw *bf16 *bf16", 0, 113),
    pytest.param("128 128 5 4 6 raw *bf16 *bf16", 0, 113, marks=pytest.mark.slow),
    pytest.param("128 256 3 8 10 given *fp32 *fp32", 0, 227, marks=pytest.mark.slow),
    pytest.param("256 128 5 8 6 raw *bf16 *bf16", 40, 227, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("case", "stack", "shared_kib"), CASES)
def test_compiles_for_sm_90(case: str, stack: int, shared_kib: int, tmp_path: Path) -> None:
    check(COMPILE, case, stack, shared_kib, warps=int(case.split()[3]), tmp_path=tmp_path)


LAYER_CASES = [
    # T, ring, delta; stack bytes allowed
    ("0 4 *bf16", 40),
    pytest.param("3 5 *bf16", 40, marks=pytest.mark.slow),
    pytest.param("5 5 *fp32", 100, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("case", "stack"), LAYER_CASES)
def test_layer_step_compiles_for_sm_90(case: str, stack: int, tmp_path: Path) -> None:
    """Two programs fit on a multiprocessor: each takes half of its registers and of its shared memory."""
    registers = check(COMPILE_LAYER, case, stack, 113, warps=4, tmp_path=tmp_path)
    assert 2 * registers * 32 * 4 <= 65536


def check(script: str, case: str, stack: int, shared_kib: int, *, warps: int, tmp_path: Path) -> int:
    """Compile; hold spills, shared memory and registers to their limits; return the registers of a thread."""
    # A process of its own: here kernels may be under the interpreter.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", script, *case.split()]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) <= shared_kib * 1024
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [cuobjdump, "--dump-resource-usage", "kernel.cubin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    registers, stack_used = int(found[1]), int(found[2])
    assert stack_used <= stack
    assert registers * 32 * warps <= 65536
    return registers

"""Compiles kernels for a GPU that is not there, in a process of its own, and prints what they take.

    python compile_only.py 'JOBS'

JOBS is a Python literal, a list of (module, kernel, compute capability, warps, types, constants);
`{"desc": (block, layout arguments)}` among the types stands for a TMA descriptor of bf16, or of fp32 or float8 where an
element has 32 or 8 bits. What is in neither is int32.
Prints stack bytes, registers and shared memory, a line per kernel.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


Job = tuple[str, str, int, int, dict, dict]


def resources(
    module: str, kernel: str, capability: int, warps: int, types: dict, constants: dict
) -> list[int]:
    """Stack bytes, registers of a thread and shared memory of a kernel compiled for `capability`."""
    return resources_of_all([(module, kernel, capability, warps, types, constants)])[0]


def resources_of_all(jobs: list[Job]) -> list[list[int]]:
    """The same of several kernels, in one process."""
    # A process of its own: here kernels may be under the interpreter.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, repr(jobs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [[int(number) for number in line.split()] for line in done.stdout.splitlines()]


def compile_one(module: str, name: str, capability: int, warps: int, types: dict, constants: dict) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    source_type = ASTSource
    for argument, given in types.items():
        if not isinstance(given, str):
            from triton.experimental.gluon import language as gl
            from triton.experimental.gluon._runtime import GluonASTSource

            block, layout = given
            element = {32: "fp32", 16: "bf16", 8: "fp8e4nv"}[layout["element_bitwidth"]]
            types[argument] = f"tensordesc<{element}{block!r},{gl.NVMMASharedLayout(**layout)!r}>"
            source_type = GluonASTSource
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [
        i for i, n in enumerate(names) if signature[n].startswith("*") or n.startswith(("stride", "s_"))
    ]
    source = source_type(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = Path(os.environ.get("TMPDIR", "/tmp")) / f"{name}-{os.getpid()}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    try:
        command = [cuobjdump, "--dump-resource-usage", cubin]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        cubin.unlink()
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return f"{found[2]} {found[1]} {compiled.metadata.shared}"


def main() -> None:
    for job in ast.literal_eval(sys.argv[1]):
        print(compile_one(*job))


if __name__ == "__main__":
    main()

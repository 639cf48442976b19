"""Kernels are compiled together, none is launched meanwhile, and what they would have written is zeros."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from onela.ops.compile_ahead import Compilations, _Zeros, compile_ahead
from tests.ops.compile_only import ROOT

SCRIPT = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class Absent:
    # A GPU that kernels can be compiled for: whatever is launched on it fails.
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


driver.set_active(Absent())
from onela.ops.compile_ahead import compile_ahead
from onela.ops.norm.kernels import swiglu_kernel, swiglu_triton

seen = []


def forward(dtype):
    x = torch.ones(4, 512, dtype=dtype)
    seen.append(swiglu_triton(x))
    seen.append(swiglu_triton(x))


def broken():
    raise ValueError("no such layer")


print(compile_ahead([lambda: forward(torch.float32), lambda: forward(torch.bfloat16)], threads=2))
print(len(swiglu_kernel.device_caches[0][0]), all((o == 0).all().item() for o in seen))
print(compile_ahead([lambda: forward(torch.float16), broken], threads=2))
"""


def test_kernels_are_compiled_and_not_launched(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    # One per dtype, each known to Triton afterwards; an error ends what is looked for, not what was found.
    assert done.stdout.split("\n")[:3] == ["2", "2 True", "1"]
    assert len(list(tmp_path.rglob("swiglu_kernel.cubin"))) == 3


def test_new_tensors_hold_zeros() -> None:
    with _Zeros():
        x = torch.empty(1000)
        made = [x, x.new_empty(1000), torch.empty_like(x), torch.empty(10, 100, dtype=torch.int64)]
        assert all(bool((tensor == 0).all()) for tensor in made)
        assert bool((torch.full((3,), 2.0) + x[:3] == 2).all())


def test_a_kernel_that_is_tuned_is_compiled_at_once_and_launched() -> None:
    kept: list[str] = []
    calls = "def call(submit):\n    return submit('key', lambda: 'kernel', keep)\n"
    tuner: dict[str, object] = {"keep": kept.append}
    exec(compile(calls, "/triton/runtime/autotuner.py", "exec"), tuner)
    other: dict[str, object] = {"keep": kept.append}
    exec(compile(calls, "/triton/runtime/jit.py", "exec"), other)
    with ThreadPoolExecutor(1) as executor:
        compilations = Compilations(executor)
        assert tuner["call"](compilations.submit) == "kernel"  # type: ignore[operator]
        assert kept == ["kernel"]
        for _ in range(2):  # the same one is compiled once
            assert other["call"](compilations.submit) is None  # type: ignore[operator]
        assert compilations.finish() == 1
    assert kept == ["kernel", "kernel"]


def test_a_triton_that_cannot_be_asked_prevents_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", None)
    assert compile_ahead([lambda: pytest.fail("it would be launched")], threads=1) == 0

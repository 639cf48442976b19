"""The way the benchmark drives the peers, held against stand-ins that do what the peers' documents say."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bench.operator import Case
from bench.peers import PEERS, NotTakenError, largest_error, make_inputs
from onela.ops.gated_delta.reference import full_state_step_ref, gated_delta_gates

CASE = Case(R=2, W=5, H=2, HV=4, K=128, V=128, O=5)


def step(q, k, v, g, beta, states: Tensor, read: Tensor, write: Tensor) -> Tensor:
    """One token of every row, on states [V, K]."""
    return full_state_step_ref(
        q, k, v, g, beta, states=states, recurrent_state=states, read_rows=read, write_rows=write,
        row_prompts=torch.zeros_like(read),
    )  # fmt: skip


def own(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


def fla(q, k, v, *, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):
    """States [N, HV, K, V] in, new ones out; rows are sequences of one token."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    states = initial_state.transpose(-1, -2).contiguous()
    rows = [x[:, 0] for x in (q, k, v, g, beta)]
    o = step(*rows, states, own(len(q)), own(len(q)))
    return o[:, None], states.transpose(-1, -2).contiguous()


def vllm(
    q, k, v, *, g, beta, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, use_qk_l2norm_in_kernel,
    num_accepted_tokens=None,
):  # fmt: skip
    """Packed rows; the pool is updated in place. With accepted tokens: read the last of them, write the first."""
    assert inplace_final_state
    assert use_qk_l2norm_in_kernel
    assert cu_seqlens.tolist() == list(range(q.shape[1] + 1))
    read = write = ssm_state_indices
    if num_accepted_tokens is not None:
        read = ssm_state_indices.gather(1, num_accepted_tokens[:, None].long() - 1)[:, 0]
        write = ssm_state_indices[:, 0]
    states = initial_state.transpose(-1, -2).contiguous()
    o = step(*(x[0] for x in (q, k, v, g, beta)), states, read.contiguous(), write.contiguous())
    initial_state.copy_(states.transpose(-1, -2))
    return o[None], initial_state


def sglang(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel
):  # fmt: skip
    HV, V, K = initial_state.shape[1:]
    H = (mixed_qkv.shape[1] - HV * V) // (2 * K)
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=1)
    g, beta = gated_delta_gates(a, b, A_log=A_log, dt_bias=dt_bias)
    rows = (q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V)), g, beta)
    out.copy_(step(*rows, initial_state, ssm_state_indices, ssm_state_indices)[:, None])
    return out, initial_state


def flashinfer(
    q, k, v, state, A_log, a, dt_bias, b, use_qk_l2norm, initial_state=None, initial_state_indices=None,
    output_state_indices=None,
):  # fmt: skip
    g, beta = gated_delta_gates(a[:, 0], b[:, 0], A_log=A_log, dt_bias=dt_bias)
    pool = state if initial_state is None else initial_state
    read = own(len(q)) if initial_state is None else initial_state_indices
    write = own(len(q)) if initial_state is None else output_state_indices
    assert initial_state is None or (read > 0).all()
    return step(q[:, 0], k[:, 0], v[:, 0], g, beta, pool, read, write)[:, None], pool


STAND_INS = {
    "fla": ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", fla),
    "vllm": ("vllm.model_executor.layers.fla.ops", "fused_recurrent_gated_delta_rule", vllm),
    "sglang": (
        "sglang.srt.layers.attention.fla.fused_recurrent",
        "fused_recurrent_gated_delta_rule_packed_decode",
        sglang,
    ),
    "flashinfer": ("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose", flashinfer),
}


def install(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    path, name, function = STAND_INS[package]
    for depth in range(path.count(".") + 1):
        part = path.rsplit(".", depth)[0]
        module = ModuleType(part)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, part, module)
    monkeypatch.setattr(sys.modules[path], name, function, raising=False)


@pytest.mark.parametrize(
    ("name", "dtype", "key_first"),
    [
        ("fla", torch.float32, True),
        ("vllm", torch.float32, True),
        ("vllm_read_parent", torch.float32, True),
        ("vllm_read_parent", torch.bfloat16, True),
        ("sglang", torch.float32, False),
        ("flashinfer", torch.float32, False),
        ("flashinfer_read_parent", torch.bfloat16, False),
    ],
)
def test_a_peer_is_driven_as_its_documents_say(
    name: str, dtype: torch.dtype, key_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, name.split("_", 1)[0])
    limit = 5e-3 if dtype == torch.float32 else 2e-2
    assert largest_error(PEERS[name], CASE, dtype, key_first, device="cpu") < limit
    if not name.startswith("flashinfer") and name != "fla":
        assert largest_error(PEERS[name], CASE, dtype, not key_first, device="cpu") > 2 * limit


def test_a_call_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays the calls many times over: only the first call's states must be as they were."""
    install(monkeypatch, "fla")
    calls = PEERS["fla"](make_inputs(CASE, torch.float32, "cpu"), True)
    assert all(
        torch.equal(first, second) for first, second in zip([c() for c in calls], [c() for c in calls])
    )


def test_absent_and_changed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(CASE, torch.float32, "cpu")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError):
        PEERS["vllm"](inputs, True)
    install(monkeypatch, "sglang")
    monkeypatch.delattr(sys.modules[STAND_INS["sglang"][0]], STAND_INS["sglang"][1])
    with pytest.raises(NotTakenError, match="packed_decode"):
        PEERS["sglang"](inputs, True)
    install(monkeypatch, "flashinfer")
    with pytest.raises(NotTakenError, match="128"):
        PEERS["flashinfer_read_parent"](inputs, False)

"""The way the benchmark drives the peers, held against stand-ins that do what the peers' documents say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bench.operator import Case
from bench.peers import (
    FLA_IN_SGLANG,
    FLA_IN_VLLM,
    PEERS,
    SPEC_DECODE_IN_SGLANG,
    NotTakenError,
    largest_error,
    make_inputs,
    public,
)
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
    num_accepted_tokens,
):  # fmt: skip
    """Packed rows; the pool is updated in place: the last accepted token's state is read, the first's written. What
    row 0 belongs to is padding."""
    assert inplace_final_state
    assert use_qk_l2norm_in_kernel
    assert cu_seqlens.tolist() == list(range(q.shape[1] + 1))
    assert (ssm_state_indices > 0).all()
    read = ssm_state_indices.gather(1, num_accepted_tokens[:, None].long() - 1)[:, 0]
    write = ssm_state_indices[:, 0]
    o = step(*(x[0] for x in (q, k, v, g, beta)), initial_state, read.contiguous(), write.contiguous())
    return o[None], initial_state


def packed_decode(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel
):  # fmt: skip
    assert use_qk_l2norm_in_kernel
    assert (ssm_state_indices > 0).all()
    HV, V, K = initial_state.shape[1:]
    assert scale == K**-0.5
    H = (mixed_qkv.shape[1] - HV * V) // (2 * K)
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=1)
    g, beta = gated_delta_gates(a, b, A_log=A_log, dt_bias=dt_bias)
    rows = (q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V)), g, beta)
    out.copy_(step(*rows, initial_state, ssm_state_indices, ssm_state_indices)[:, None])
    return out, initial_state


def update(
    q, k, v, *, g, beta, initial_state_source, initial_state_indices, use_qk_l2norm_in_kernel, disable_state_update,
    intermediate_states_buffer, intermediate_state_indices, cache_steps,
):  # fmt: skip
    """States are read from one pool; those after each of the row's tokens, here one, are written to the other."""
    assert use_qk_l2norm_in_kernel
    assert disable_state_update
    assert intermediate_states_buffer.shape[1] == cache_steps == q.shape[1] == 1
    states = initial_state_source[initial_state_indices.long()]
    o = step(*(x[:, 0] for x in (q, k, v, g, beta)), states, own(len(q)), own(len(q)))
    intermediate_states_buffer[intermediate_state_indices.long(), 0] = states
    return o[:, None]


def spec_decode(
    q, k, v, a, b, A_log, dt_bias, *, checkpoint_state, d_cache, k_cache, g_cache, rawv_cache, rawk_cache, beta_cache,
    out, query_start_loc, ssm_state_indices, replay_indices, write_pos, cache_base, is_flush, max_cache_len,
    max_spec_len, launch_mode,
):  # fmt: skip
    """A row's records, replayed on its checkpoint, and one more token, whose record is added to them."""
    assert rawv_cache is rawk_cache is beta_cache is None
    assert launch_mode == "verify"
    assert not is_flush.any()
    assert not cache_base.any()
    assert max_spec_len == 1
    assert query_start_loc.tolist() == list(range(len(q) + 1))
    assert (ssm_state_indices > 0).all()
    assert torch.equal(replay_indices, own(len(q)))
    t = int(write_pos[0])
    assert (write_pos == t).all()
    assert t < max_cache_len == d_cache.shape[2] == k_cache.shape[2] == g_cache.shape[2]
    repeat = v.shape[1] // k.shape[1]
    g, beta = gated_delta_gates(a, b, A_log=A_log, dt_bias=dt_bias)
    states = checkpoint_state[ssm_state_indices.long()].float()
    for i in range(t):
        key = k_cache[:, :, i].float().repeat_interleave(repeat, 1)
        states = states * g_cache[:, :, i, None, None].exp()
        states += d_cache[:, :, i, :, None].float() * key[:, :, None]
    key = torch.nn.functional.normalize(k.float(), dim=-1)
    wide = key.repeat_interleave(repeat, 1)
    decayed = states * g[:, :, None, None].exp()
    d_cache[:, :, t] = beta[:, :, None] * (v.float() - (decayed @ wide[..., None])[..., 0])
    k_cache[:, :, t] = key
    g_cache[:, :, t] = g
    return out.copy_(step(q, k, v, g, beta, states, own(len(q)), own(len(q))))


def flashinfer(
    q, k, v, state, A_log, a, dt_bias, b, use_qk_l2norm, initial_state=None, initial_state_indices=None,
    output_state_indices=None,
):  # fmt: skip
    assert use_qk_l2norm
    g, beta = gated_delta_gates(a[:, 0], b[:, 0], A_log=A_log, dt_bias=dt_bias)
    pool = state if initial_state is None else initial_state
    read = own(len(q)) if initial_state is None else initial_state_indices
    write = own(len(q)) if initial_state is None else output_state_indices
    assert initial_state is None or (read > 0).all()
    return step(q[:, 0], k[:, 0], v[:, 0], g, beta, pool, read, write)[:, None], pool


STAND_INS = {
    "fla": ("fla.ops.gated_delta_rule", {"fused_recurrent_gated_delta_rule": fla}),
    "vllm": (
        FLA_IN_VLLM[0],
        {
            "fused_recurrent_gated_delta_rule": vllm,
            "fused_recurrent_gated_delta_rule_packed_decode": packed_decode,
        },
    ),
    "sglang": (
        FLA_IN_SGLANG[0],
        {
            "fused_recurrent_gated_delta_rule_packed_decode": packed_decode,
            "fused_recurrent_gated_delta_rule_update": update,
        },
    ),
    "flashinfer": ("flashinfer.gdn_decode", {"gated_delta_rule_decode_pretranspose": flashinfer}),
}


def install(monkeypatch: pytest.MonkeyPatch, package: str, path: str | None = None) -> None:
    if package == "sglang":
        put(monkeypatch, SPEC_DECODE_IN_SGLANG, {"gdn_replayssm_spec_decode": spec_decode})
    first, functions = STAND_INS[package]
    put(monkeypatch, path or first, functions)


def put(monkeypatch: pytest.MonkeyPatch, path: str, functions: dict[str, Callable]) -> None:
    for depth in range(path.count(".") + 1):
        part = path.rsplit(".", depth)[0]
        module = ModuleType(part)
        module.__path__ = []
        module.__spec__ = ModuleSpec(part, None)
        monkeypatch.setitem(sys.modules, part, module)
    for name, function in functions.items():
        monkeypatch.setattr(sys.modules[path], name, function, raising=False)


@pytest.mark.parametrize(
    ("name", "dtype", "key_first"),
    [
        ("fla", torch.float32, True),
        ("vllm", torch.float32, False),
        ("vllm", torch.bfloat16, False),
        ("vllm_read_parent", torch.float32, False),
        ("vllm_read_parent", torch.bfloat16, False),
        ("sglang", torch.float32, False),
        ("sglang_read_parent", torch.float32, False),
        ("sglang_read_parent", torch.bfloat16, False),
        ("sglang_replay_ssm", torch.float32, False),
        ("sglang_replay_ssm", torch.bfloat16, False),
        ("sglang_replay_ssm_shared", torch.float32, False),
        ("sglang_replay_ssm_shared", torch.bfloat16, False),
        ("flashinfer", torch.float32, False),
        ("flashinfer_read_parent", torch.float32, False),
        ("flashinfer_read_parent", torch.bfloat16, False),
    ],
)
def test_a_peer_is_driven_as_its_documents_say(
    name: str, dtype: torch.dtype, key_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, name.split("_", 1)[0])
    limit = 5e-3 if dtype == torch.float32 else 2e-2
    error = largest_error(PEERS[name], CASE, dtype, key_first, device="cpu")
    assert error < limit
    if name in ("vllm", "vllm_read_parent", "sglang", "sglang_read_parent"):
        # Raw gates are drawn anew each time: 200 times and more were seen.
        assert largest_error(PEERS[name], CASE, dtype, not key_first, device="cpu") > 50 * error


@pytest.mark.parametrize("name", ["vllm_read_parent", "sglang", "sglang_read_parent"])
def test_rows_past_the_grid_come_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows of four heads, at most twelve programs."""
    install(monkeypatch, name.split("_", 1)[0])
    monkeypatch.setattr("bench.peers.MAX_GRID", 12)
    assert [(x.start, x.stop) for x in make_inputs(CASE, torch.float32, "cpu").parts()] == [
        (0, 2), (2, 5), (5, 7), (7, 10),
    ]  # fmt: skip
    assert largest_error(PEERS[name], CASE, torch.float32, False, device="cpu") < 5e-3


def test_the_older_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "sglang", FLA_IN_SGLANG[1])
    assert public(FLA_IN_SGLANG, "fused_recurrent_gated_delta_rule_packed_decode") is packed_decode


def test_a_call_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays the calls many times over: only the first call's states must be as they were."""
    install(monkeypatch, "fla")
    calls = PEERS["fla"](make_inputs(CASE, torch.float32, "cpu"), True)
    assert all(
        torch.equal(first, second) for first, second in zip([c() for c in calls], [c() for c in calls])
    )


def test_absent_and_changed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(CASE, torch.float32, "cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="vllm is not installed"):
        PEERS["vllm"](inputs, True)
    monkeypatch.undo()
    install(monkeypatch, "sglang")
    monkeypatch.delattr(sys.modules[FLA_IN_SGLANG[0]], "fused_recurrent_gated_delta_rule_packed_decode")
    with pytest.raises(NotTakenError, match=r"kernels.*packed_decode.*; sglang\.srt.*ModuleNotFoundError"):
        PEERS["sglang"](inputs, True)
    install(monkeypatch, "flashinfer")
    narrow = make_inputs(Case(R=1, W=2, H=2, HV=2, K=64, V=64, O=3), torch.float32, "cpu")
    with pytest.raises(NotTakenError, match="128"):
        PEERS["flashinfer_read_parent"](narrow, False)

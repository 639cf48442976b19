"""The other ways to hold a beam's state, as arms of the operator benchmark: FullState and ReplaySSM."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.operator import Calls, Problem, arm


def row_prompts(problem: Problem) -> Tensor:
    case = problem.case
    return torch.arange(case.R, dtype=torch.int32, device=problem.state.device).repeat_interleave(case.W)


def full_state_calls(
    problem: Problem, out_dtype: torch.dtype | None, dtype: torch.dtype, *, copy: bool
) -> Calls:
    """Two pools of N states. With `copy` the survivors' states are copied across and updated in place; without, a beam
    reads its parent's row in one pool and writes its own in the other. The prompt's state is of the pools' dtype, as it
    lies in the same pool elsewhere: in fp32 it would be most of what the first call reads from the L2 cache."""
    from onela.ops.gated_delta.full_state import full_state_step_triton, reorder_states

    case, device = problem.case, problem.state.device
    states = torch.empty(2 * case.N, case.HV, case.V, case.K, dtype=dtype, device=device)
    pools = states.split(case.N)
    own = torch.arange(case.N, dtype=torch.int32, device=device)
    nowhere = torch.full_like(own, -1)
    prompts = row_prompts(problem)
    prompt_state = problem.state.to(dtype)
    calls: Calls = []
    for t in range(problem.calls):
        rows = (problem.q[t], problem.k[t], problem.v[t], problem.g[t], problem.beta[t])
        here = t % 2
        write = own + here * case.N
        if t == 0:
            read, parents = nowhere, None
        else:
            parents = problem.parents[t - 1]
            read = write if copy else parents + (1 - here) * case.N

        def call(rows=rows, here=here, read=read, write=write, parents=parents) -> Tensor:
            if copy and parents is not None:
                reorder_states(pools[1 - here], parents, out=pools[here])
            return full_state_step_triton(
                *rows,
                states=states,
                recurrent_state=prompt_state,
                read_rows=read,
                write_rows=write,
                row_prompts=prompts,
                out_dtype=out_dtype,
            )

        calls.append(call)
    return calls


@arm("full_state_copy")
def full_state_copy_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    return full_state_calls(problem, out_dtype, torch.float32, copy=True)


@arm("full_state_copy_bf16")
def full_state_copy_bf16_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    return full_state_calls(problem, out_dtype, torch.bfloat16, copy=True)


@arm("full_state_read_parent")
def full_state_read_parent_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    return full_state_calls(problem, out_dtype, torch.float32, copy=False)


@arm("full_state_read_parent_bf16")
def full_state_read_parent_bf16_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    return full_state_calls(problem, out_dtype, torch.bfloat16, copy=False)


def replay_ssm_calls(
    problem: Problem, out_dtype: torch.dtype | None, dtype: torch.dtype, *, shared: bool
) -> Calls:
    """Survivors' buffers are copied across two pools; their checkpoints equal the prompt's state, and stay in place."""
    from onela.ops.gated_delta.replay_ssm import replay_ssm_step_triton
    from onela.ops.indexing import copy_rows

    case, device = problem.case, problem.state.device
    N, T = case.N, problem.calls
    delta = getattr(torch, case.record_dtype)
    pools = [
        (
            torch.zeros(N, T, case.HV, device=device),
            torch.zeros(N, T, case.HV, case.V, dtype=delta, device=device),
            torch.zeros(N, T, case.H, case.K, dtype=torch.bfloat16, device=device),
        )
        for _ in range(2)
    ]
    own = torch.arange(N, dtype=torch.int32, device=device)
    prompts = row_prompts(problem)
    state = problem.state.to(dtype)
    checkpoints = state if shared else state[prompts.long()].contiguous()
    calls: Calls = []
    for t in range(T):
        rows = (problem.q[t], problem.k[t], problem.v[t], problem.g[t], problem.beta[t])
        parents = problem.parents[t - 1] if t else None
        depths = torch.full_like(own, t)

        def call(rows=rows, t=t, parents=parents, depths=depths) -> Tensor:
            buffers, old = pools[t % 2], pools[1 - t % 2]
            if parents is not None:
                for to, of in zip(buffers, old):
                    copy_rows(to, None, of, parents, parts=depths)
            return replay_ssm_step_triton(
                *rows,
                checkpoints=checkpoints,
                checkpoint_rows=prompts if shared else own,
                buffer_g=buffers[0],
                buffer_delta=buffers[1],
                buffer_k=buffers[2],
                rows=own,
                row_depths=depths,
                out_dtype=out_dtype,
            )

        calls.append(call)
    return calls


@arm("replay_ssm")
def replay_ssm_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    return replay_ssm_calls(problem, out_dtype, torch.float32, shared=False)


@arm("replay_ssm_shared")
def replay_ssm_shared_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    return replay_ssm_calls(problem, out_dtype, torch.float32, shared=True)


@arm("replay_ssm_bf16")
def replay_ssm_bf16_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    return replay_ssm_calls(problem, out_dtype, torch.bfloat16, shared=False)


@arm("replay_ssm_shared_bf16")
def replay_ssm_shared_bf16_arm(problem: Problem, out_dtype: torch.dtype | None) -> Calls:
    return replay_ssm_calls(problem, out_dtype, torch.bfloat16, shared=True)

"""The Hopper replay kernel against the reference in fp64, on the GPU it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onela.ops.gated_delta.reference import replay_step_ref, split_state
from onela.ops.norm.reference import gated_rms_norm_ref
from tests.ops.gated_delta.scenario import Sizes, empty_records, random_rows, random_state
from tests.ops.trees import grow_tree, step_index

pytest.importorskip("triton")
from onela.ops.gated_delta.replay_hopper import HopperConfig, launch_hopper, supports_hopper

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

WIDTHS = [[3, 37, 33, 70, 9, 31, 64], [1, 2, 300, 1], [5, 5, 64, 65, 129, 128, 40, 33]]
PROMPTS = [1, 2, 0]
CONFIGS = [HopperConfig(), HopperConfig(num_warps=8), HopperConfig(ring=5, splits=3, overlap=False)]
NINE = [
    (4, 4, 128, 128),
    (8, 8, 128, 128),
    (16, 16, 128, 128),
    (16, 32, 128, 128),
    (16, 64, 128, 128),
    (32, 32, 128, 256),
    (4, 8, 256, 256),
    (8, 8, 256, 512),
    (16, 16, 256, 128),
]


def compare(
    sizes: Sizes,
    level: list[int | None],
    *,
    record_dtype: torch.dtype = torch.float32,
    raw: bool = True,
    out_dtype: torch.dtype = torch.float32,
    config: HopperConfig | None = None,
    index_dtype: torch.dtype = torch.int32,
    strided: bool = False,
    write_records: bool = True,
    prompts: list[int] | None = None,
    norm: bool = False,
    **index_options: int,
) -> None:
    """One step in the kernel and in fp64: outputs, and every record, written or not."""
    device = torch.device("cuda")
    tree = grow_tree(WIDTHS)
    index, slots = step_index(tree, level, prompts or PROMPTS, device, **index_options)
    index = {name: tensor.to(index_dtype) for name, tensor in index.items()}
    rows: dict[str, Any] = random_rows(len(slots), sizes, torch.bfloat16, device)
    if strided:
        fused = torch.cat([rows[name].flatten(1) for name in "qkv"], dim=1)
        parts = fused.split([rows[name][0].numel() for name in "qkv"], dim=1)
        rows |= {name: part.unflatten(1, rows[name].shape[1:]) for name, part in zip("qkv", parts)}
    state = split_state(random_state(3, sizes, torch.float32, device))
    old = random_rows(tree.num_slots, sizes, torch.bfloat16, device, seed=11)
    records = {
        "records_g": old["g"],
        "records_delta": (old["v"].float() * old["k"].float().norm(dim=-1).mean() ** -2).to(record_dtype),
        "records_k": old["k"],
    }
    unread = torch.ones(tree.num_slots, dtype=torch.bool, device=device)
    unread[index["ancestors"][index["ancestors"] >= 0].long()] = False
    nan = empty_records(tree.num_slots, sizes, record_dtype, device, k_dtype=torch.bfloat16)
    for name, tensor in records.items():
        tensor[unread] = nan[name][unread].to(tensor.dtype)
    live = index["slots"] >= 0
    if raw:
        records["records_k"][index["slots"][live].long()] = rows["k"][live]
        rows["k"] = None
    exact = {name: tensor.double() for name, tensor in records.items()}
    given = {name: tensor.clone() for name, tensor in records.items()}
    wide = {name: None if x is None else x.double() for name, x in rows.items()}
    expected = replay_step_ref(**wide, recurrent_state=state.double().sum(-3), **exact, **index)
    assert supports_hopper(
        **rows,
        recurrent_state=state,
        **given,
        ancestors=index["ancestors"],
        prompts=index["prompts"],
        out_dtype=out_dtype,
    )
    gate = None
    if norm:
        z, weight = (random_rows(len(slots), sizes, torch.bfloat16, device, seed=7)["v"], rows["v"][0, 0] + 1)
        gate = (z.flatten(1), weight.contiguous(), 1e-6)
        expected = gated_rms_norm_ref(expected.float(), z, weight, eps=1e-6).double()
    o = launch_hopper(
        **rows,
        recurrent_state=state,
        **given,
        **index,
        norm=gate,
        out_dtype=out_dtype,
        config=config,
        write_records=write_records,
    )
    # fp32 sums of up to a few hundred terms of size one; then one rounding where the result is stored.
    fp32 = {"rtol": 2e-5, "atol": 2e-5}
    bf16 = {"rtol": 2**-8, "atol": 2e-5}
    # Under the norm three values are rounded one after the other.
    limit = {"rtol": 2**-6, "atol": 1e-3} if norm else fp32 if out_dtype == torch.float32 else bf16
    torch.testing.assert_close(o.double(), expected, **limit)
    for name, tensor in given.items():
        wanted = exact[name] if write_records else records[name].double()
        rounded = bf16 if record_dtype == torch.bfloat16 and name == "records_delta" else fp32
        torch.testing.assert_close(tensor.double(), wanted, equal_nan=True, **rounded)


@pytest.mark.parametrize("config", CONFIGS, ids=["tiles of 32", "tiles of 64", "three programs"])
@pytest.mark.parametrize("level", [[0, 0, 0], [1, 1, 1], [2, 2, 2], [6, 3, 7], [0, None, 5], [None, 1, 2]])
def test_ragged_rows_and_depths(level: list[int | None], config: HopperConfig) -> None:
    sizes = Sizes(H=2, HV=4, K=128, V=128)
    compare(sizes, level, config=config, tail=3, pad_every=7)
    compare(sizes, level, config=config, raw=False, record_dtype=torch.bfloat16, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("sizes", NINE, ids=str)
def test_geometries(sizes: tuple[int, int, int, int]) -> None:
    compare(Sizes(*sizes), [4, 3, 5], tail=1)
    compare(Sizes(*sizes), [0, 0, 1], raw=False, record_dtype=torch.bfloat16)


def test_more_columns_than_depth() -> None:
    compare(Sizes(H=2, HV=2, K=128, V=128), [1, 1, 0], extra_depth=3)


def test_strided_rows_and_long_indices() -> None:
    compare(Sizes(H=2, HV=4, K=128, V=256), [3, 3, 3], strided=True, raw=False, index_dtype=torch.int64)


def test_without_records() -> None:
    compare(Sizes(H=2, HV=2, K=128, V=128), [2, 2, 2], write_records=False)


@pytest.mark.parametrize("level", [[0, 0, 0], [1, 1, 1], [6, 3, 7]])
def test_gated_norm(level: list[int | None]) -> None:
    sizes = Sizes(H=2, HV=4, K=128, V=128)
    compare(sizes, level, norm=True, out_dtype=torch.bfloat16, tail=3, pad_every=7)


def test_prompt_pad() -> None:
    compare(Sizes(H=2, HV=2, K=128, V=128), [2, 2, 2], prompts=[1, -1, 0], raw=False)


def test_all_padding() -> None:
    compare(Sizes(H=2, HV=2, K=128, V=128), [None, None, None], tail=70)


def test_padding_rows_do_not_let_their_nan_out() -> None:
    sizes, device = Sizes(H=2, HV=2, K=128, V=128), torch.device("cuda")
    tree = grow_tree(WIDTHS)
    index, slots = step_index(tree, [2, 1, 2], PROMPTS, device, tail=3, pad_every=4)
    rows = random_rows(len(slots), sizes, torch.bfloat16, device)
    for tensor in rows.values():
        tensor[index["slots"] < 0] = float("nan")
    records = empty_records(tree.num_slots, sizes, torch.float32, device, k_dtype=torch.bfloat16)
    for tensor in records.values():
        tensor[index["ancestors"][index["ancestors"] >= 0].long()] = 0.5
    state = split_state(random_state(3, sizes, torch.float32, device))
    o = launch_hopper(**rows, recurrent_state=state, **records, **index)
    assert (o[index["slots"] < 0] == 0).all()
    assert o.isfinite().all()
    assert all(
        tensor[index["slots"][index["slots"] >= 0].long()].isfinite().all() for tensor in records.values()
    )


def test_rows_do_not_depend_on_each_other() -> None:
    """The same row alone and in a crowd gives the same bits."""
    sizes, device = Sizes(H=2, HV=2, K=128, V=128), torch.device("cuda")
    rows = random_rows(200, sizes, torch.bfloat16, device)
    state = split_state(random_state(1, sizes, torch.float32, device))

    def run(at: slice) -> Tensor:
        some = {name: x[at].contiguous() for name, x in rows.items()}
        n = some["q"].shape[0]
        index = {
            "slots": torch.arange(n, dtype=torch.int32, device=device),
            "ancestors": torch.empty(n, 0, dtype=torch.int32, device=device),
            "cu_rows": torch.tensor([0, n], dtype=torch.int32, device=device),
            "prompts": torch.zeros(1, dtype=torch.int32, device=device),
            "depths": torch.zeros(1, dtype=torch.int32, device=device),
        }
        records = empty_records(n, sizes, torch.bfloat16, device)
        records["records_g"] = records["records_g"].float()
        return launch_hopper(**some, recurrent_state=state, **records, **index, out_dtype=torch.float32)

    whole = run(slice(None))
    assert torch.equal(whole[17:18], run(slice(17, 18)))
    assert torch.equal(whole[150:199], run(slice(150, 199)))


def test_layer_step_takes_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that one launch does not take: the fused step against its reference, twice through this kernel."""
    from onela.ops.gated_delta import replay_hopper
    from tests.ops.gated_delta.test_layer_step import compare as compare_layer

    taken = []
    launch = replay_hopper.launch_hopper
    monkeypatch.setattr(replay_hopper, "launch_hopper", lambda *a, **k: taken.append(1) or launch(*a, **k))
    sizes, device = Sizes(H=2, HV=4, K=256, V=256), torch.device("cuda")
    compare_layer(sizes, device, dtype=torch.bfloat16, record_dtype=torch.bfloat16, split=True)
    assert len(taken) == 2

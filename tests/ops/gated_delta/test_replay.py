"""The portable replay kernel against its reference, on whichever device there is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops.gated_delta._launch import ReplayConfig
from onela.ops.gated_delta.reference import replay_step_ref, split_state
from onela.ops.gated_delta.replay import choose_replay, launch_replay, replay_step_triton
from onela.ops.indexing import PAD
from tests.ops.gated_delta.scenario import Sizes, empty_records, random_rows, random_state
from tests.ops.trees import Tree, grow_tree, step_index
from tests.tolerances import REPLAY

# Triton's interpreter turns scalars into loop bounds in a way that numpy 1.25 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

WIDTHS = [[3, 37, 33], [1, 2], [5, 5, 64]]
PROMPTS = [1, 2, 0]


def filled_records(
    tree: Tree, sizes: Sizes, dtype: torch.dtype, k_dtype: torch.dtype, device
) -> dict[str, Tensor]:
    """Plausible records everywhere, as if earlier steps had written them."""
    rows = random_rows(tree.num_slots, sizes, torch.float32, device, seed=11)
    return {
        "records_g": rows["g"],
        "records_delta": (rows["v"] * rows["k"].norm(dim=-1).mean() ** -2).to(dtype),
        "records_k": rows["k"].to(k_dtype),
    }


def compare(
    tree: Tree,
    level: list[int | None],
    prompts: list[int],
    sizes: Sizes,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    record_dtype: torch.dtype = torch.float32,
    split: bool = False,
    key_is_record: bool = False,
    config: ReplayConfig | None = None,
    index_options: dict | None = None,
    index_dtype: torch.dtype = torch.int32,
    strided: bool = False,
    out_dtype: torch.dtype | None = torch.float32,
    tolerance: str = "fp32",
) -> Tensor:
    """Run both, compare outputs and every record, written or not; return the kernel's output."""
    index, slots = step_index(tree, level, prompts, device, **(index_options or {}))
    index = {name: tensor.to(index_dtype) for name, tensor in index.items()}
    rows = random_rows(len(slots), sizes, dtype, device)
    if strided:
        q, k, v = (rows[name].flatten(1) for name in "qkv")
        fused = torch.cat([q, k, v], dim=1)
        parts = fused.split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
        rows |= {name: part.unflatten(1, rows[name].shape[1:]) for name, part in zip("qkv", parts)}
        gates = torch.cat([rows["g"], rows["beta"]], dim=1)
        rows |= {"g": gates[:, : sizes.HV], "beta": gates[:, sizes.HV :]}
    state = random_state(3, sizes, torch.float32, device)
    state = split_state(state) if split else state
    wanted = filled_records(tree, sizes, record_dtype, dtype, device)
    if key_is_record:
        live = index["slots"] >= 0
        wanted["records_k"][index["slots"][live].long()] = rows["k"][live]
        rows["k"] = None
    given = {name: tensor.clone() for name, tensor in wanted.items()}
    o_ref = replay_step_ref(**rows, recurrent_state=state, **wanted, **index, out_dtype=out_dtype)
    o = launch_replay(
        **rows, recurrent_state=state, **given, **index, scale=None, out_dtype=out_dtype, config=config
    )
    assert o.dtype == o_ref.dtype
    torch.testing.assert_close(o, o_ref, **REPLAY["bf16" if o.dtype == torch.bfloat16 else tolerance])
    for name in given:
        limit = REPLAY["bf16" if given[name].dtype == torch.bfloat16 else tolerance]
        torch.testing.assert_close(given[name], wanted[name], **limit)
    return o


@pytest.fixture(scope="module")
def tree() -> Tree:
    return grow_tree(WIDTHS, seed=5)


@pytest.mark.parametrize("level", [[0, 0, 0], [1, 1, 1], [2, None, 2], [2, 0, 1]])
@pytest.mark.parametrize("stages", [1, 2])
def test_ragged_widths_and_depths(tree, level, stages, device):
    config = ReplayConfig(block_w=16, block_v=64, stages=stages)
    compare(tree, level, PROMPTS, Sizes(), device, config=config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("record_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("key_is_record", [False, True])
def test_dtypes(tree, dtype, record_dtype, split, key_is_record, device):
    compare(
        tree,
        [2, 1, 1],
        PROMPTS,
        Sizes(),
        device,
        dtype=dtype,
        record_dtype=record_dtype,
        split=split,
        key_is_record=key_is_record,
        tolerance="split" if not split else "fp32",
    )


@pytest.mark.parametrize(
    ("K", "V"),
    [(32, 32), (64, 32), (32, 64), (128, 128), (128, 256), (256, 128), (32, 512), (512, 32), (16, 16)],
)
def test_head_sizes(K, V, device):
    tree = grow_tree([[3, 5]], seed=1)
    compare(tree, [1], [2], Sizes(H=1, HV=2, K=K, V=V), device)


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (1, 4), (2, 6)])
def test_head_counts(tree, H, HV, device):
    compare(tree, [1, 1, 1], PROMPTS, Sizes(H=H, HV=HV, K=32, V=32), device)


def test_padding_rows_and_rows_behind_the_last_request(tree, device):
    options = {"tail": 7, "pad_every": 3, "extra_depth": 3}
    o = compare(tree, [2, 1, 2], PROMPTS, Sizes(), device, index_options=options)
    assert (o[-7:] == 0).all()
    assert (o[1] == 0).all()
    assert (o[0] != 0).any()


@pytest.mark.parametrize("block_w", [16, 32])
def test_trees_deeper_than_a_tile(block_w, device):
    """Requests of 40, 1 and 17 ancestors side by side: slots are read one after the other."""
    tree = grow_tree([[3, 5] * 20 + [19], [2, 4], [6] * 18], seed=3)
    config = ReplayConfig(block_w=block_w, block_v=32)
    sizes = Sizes(H=1, HV=2, K=32, V=32)
    compare(
        tree, [40, 1, 17], PROMPTS, sizes, device, config=config, index_options={"pad_every": 5, "tail": 3}
    )


def test_all_padding(tree, device):
    o = compare(tree, [2, None, None], [PAD, PAD, PAD], Sizes(), device)
    assert o.shape[0] == 33
    assert (o == 0).all()


def test_empty_batch(tree, device):
    o = compare(tree, [None, None, None], PROMPTS, Sizes(), device)
    assert o.shape == (0, 4, 64)


def test_padding_rows_do_not_let_their_nan_out(tree, device):
    sizes = Sizes()
    index, slots = step_index(tree, [2, 1, 2], PROMPTS, device, tail=3, pad_every=4)
    rows = random_rows(len(slots), sizes, torch.bfloat16, device)
    for tensor in rows.values():
        tensor[index["slots"] < 0] = float("nan")
    records = filled_records(tree, sizes, torch.bfloat16, torch.bfloat16, device)
    o = replay_step_triton(
        **rows, recurrent_state=random_state(3, sizes, torch.float32, device), **records, **index
    )
    assert (o[index["slots"] < 0] == 0).all()
    assert not o.isnan().any()
    assert not any(tensor.isnan().any() for tensor in records.values())


def test_slots_never_written_are_never_read(device):
    """Two steps over NaN records: only what step 0 wrote may reach step 1."""
    tree, sizes = grow_tree([[4, 9], [2, 17]], seed=8), Sizes()
    records = empty_records(tree.num_slots, sizes, torch.float32, device, k_dtype=torch.bfloat16)
    state = random_state(3, sizes, torch.float32, device)
    for step in range(2):
        index, slots = step_index(tree, [step, step], [0, 2], device, extra_depth=2)
        rows = random_rows(len(slots), sizes, torch.bfloat16, device, seed=step)
        o = replay_step_triton(**rows, recurrent_state=state, **records, **index)
        assert not o.isnan().any()
    written = records["records_g"].isfinite().all(-1)
    assert written.sum() == 4 + 9 + 2 + 17


def test_strided_rows_and_int64_indices(tree, device):
    compare(tree, [2, 1, 1], PROMPTS, Sizes(), device, strided=True, index_dtype=torch.int64)


def test_output_dtype_follows_v(tree, device):
    o = compare(tree, [1, 1, 1], PROMPTS, Sizes(), device, out_dtype=None)
    assert o.dtype == torch.bfloat16


def test_scale(tree, device):
    sizes = Sizes()
    index, slots = step_index(tree, [1, 1, 1], PROMPTS, device)
    rows = random_rows(len(slots), sizes, torch.bfloat16, device)
    state = random_state(3, sizes, torch.float32, device)
    out = {}
    for scale in (None, 0.5):
        records = filled_records(tree, sizes, torch.float32, torch.bfloat16, device)
        out[scale] = replay_step_triton(
            **rows, recurrent_state=state, **records, **index, scale=scale, out_dtype=torch.float32
        )
    torch.testing.assert_close(out[0.5], out[None] * (0.5 * sizes.K**0.5), **REPLAY["fp32"])


def test_a_row_does_not_depend_on_its_batch(tree, device):
    """The same beam among others and in its place among padding, bit for bit; on a GPU wherever it stands."""
    sizes = Sizes()
    index, slots = step_index(tree, [2, 1, 2], PROMPTS, device)
    rows = random_rows(len(slots), sizes, torch.bfloat16, device)
    state = random_state(3, sizes, torch.float32, device)
    config = choose_replay(sizes.K, sizes.V, torch.bfloat16, device)

    def run(rows: dict, index: dict) -> Tensor:
        records = filled_records(tree, sizes, torch.float32, torch.bfloat16, device)
        return launch_replay(
            **rows,
            recurrent_state=state,
            **records,
            **index,
            scale=None,
            out_dtype=torch.float32,
            config=config,
        )

    o = run(rows, index)
    n = 7
    alone = {
        "slots": index["slots"][n : n + 1],
        "ancestors": index["ancestors"][n : n + 1],
        "cu_rows": index["cu_rows"].new_tensor([0, 1]),
        "prompts": index["prompts"][:1],
        "depths": index["depths"][:1],
    }
    among_padding = index["slots"].new_full(index["slots"].shape, -1)
    among_padding[n] = index["slots"][n]
    others = random_rows(len(slots) + 1, sizes, torch.bfloat16, device)
    replaced = {name: others[name][1:].clone() for name in rows}
    for name, x in rows.items():
        replaced[name][n] = x[n]
    assert torch.equal(run(replaced, {**index, "slots": among_padding})[n], o[n])
    o_alone = run({name: x[n : n + 1] for name, x in rows.items()}, alone)[0]
    if device.type == "cuda":
        assert torch.equal(o_alone, o[n])
    else:
        # The interpreter's products are NumPy's, and on some processors its BLAS sums a row by its place in the tile.
        torch.testing.assert_close(o_alone, o[n], rtol=1e-5, atol=1e-6)


def test_refusals(tree, device):
    sizes = Sizes()
    index, slots = step_index(tree, [1, 1, 1], PROMPTS, device)
    rows = random_rows(len(slots), sizes, torch.bfloat16, device)
    records = filled_records(tree, sizes, torch.bfloat16, torch.bfloat16, device)
    good = {**rows, "recurrent_state": random_state(3, sizes, torch.float32, device), **records, **index}

    def refused(error: type[Exception], match: str, **changed: Tensor) -> None:
        with pytest.raises(error, match=match):
            replay_step_triton(**(good | changed))

    refused(ShapeError, r"slots: expected shape \[44\], got \[43\]", slots=index["slots"][1:])
    refused(ShapeError, "cu_rows", cu_rows=index["cu_rows"][1:])
    refused(ShapeError, "beta", beta=rows["beta"][:, :1])
    refused(ShapeError, "records_k", records_k=records["records_k"][:, :1])
    turned = records["records_delta"].transpose(0, 1).contiguous().transpose(0, 1)
    refused(ShapeError, "records_delta: expected a contiguous", records_delta=turned)
    refused(DtypeError, "ancestors", ancestors=index["ancestors"].float())
    refused(DtypeError, "recurrent_state", recurrent_state=good["recurrent_state"].bfloat16())
    refused(DtypeError, "q: expected bfloat16", q=rows["q"].double())
    refused(ShapeError, "K: expected a power of two", q=rows["q"][..., :24], k=rows["k"][..., :24])

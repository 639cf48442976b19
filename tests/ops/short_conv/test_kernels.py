"""The convolution's step kernel against its reference: outputs, and every record, written or not."""

from __future__ import annotations

import pytest
import torch

from onela.ops.short_conv import short_conv_step_ref
from tests.ops.trees import SHAPES, random_tree
from tests.tolerances import ROWS

pytest.importorskip("triton")
from onela.ops.short_conv.kernels import short_conv_step_triton


@pytest.mark.parametrize("widths", SHAPES)
@pytest.mark.parametrize("kernel_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "round_sum"), [(10, False), (1030, False), (10, True)])
def test_a_step_equals_the_reference(
    widths: list[list[int]],
    kernel_size: int,
    dtype: torch.dtype,
    channels: int,
    round_sum: bool,
    device: torch.device,
) -> None:
    prompts = [(3 * i + 1) % 5 if i else -1 for i in range(len(widths), 0, -1)]
    tree = random_tree(widths, dead=0.2, prompts=prompts)
    index = {name: tensor.to(device) for name, tensor in tree.index.items()}
    # Rows past the last request, as a padded batch has them.
    index["slots"] = torch.cat([index["slots"], index["slots"].new_full((3,), -1)])
    index["ancestors"] = torch.cat(
        [index["ancestors"], index["ancestors"].new_full((3, index["ancestors"].shape[1]), -1)]
    )
    N = index["slots"].shape[0]
    weight = torch.randn(channels, kernel_size).to(device, dtype)
    conv_state = torch.randn(5, channels, kernel_size - 1).to(device, dtype)
    x = torch.randn(N, channels + 6).to(device, dtype)[:, 2:-4]
    own = torch.randn(tree.num_slots, channels).to(device, dtype)
    expected = own.clone()
    index["round_sum"] = round_sum
    y = short_conv_step_triton(x, weight, conv_state=conv_state, records_x=own, **index)
    wanted = short_conv_step_ref(x, weight, conv_state=conv_state, records_x=expected, **index)
    torch.testing.assert_close(y, wanted, **ROWS["fp32" if dtype == torch.float32 else "bf16"])
    assert torch.equal(own, expected)

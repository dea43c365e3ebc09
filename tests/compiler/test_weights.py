"""gather_weights: one memory, one copy of each weight, everything else as it was."""

import torch

from headway.compiler.program import Call
from headway.compiler.weights import gather_weights
from headway.kernels.memory import ALIGNMENT_BYTES


def test_each_weight_is_copied_once_and_in_order() -> None:
    tied, other = (torch.randint(0, 255, (3, 5, size), dtype=torch.uint8) for size in (7, 11))
    calls = [
        Call("embedding", {"weight": tied, "scale": 1.0}),
        Call("rms_norm", {"weight": torch.ones(4)}),
        Call("linear", {"weight": other, "bias": None}),
        Call("output_head", {"weight": tied}),
    ]
    gathered = gather_weights(calls)
    assert [call.kernel for call in gathered] == [call.kernel for call in calls]
    assert gathered[1] is calls[1]
    assert gathered[2].arguments["bias"] is None
    first, second, third = (gathered[index].arguments["weight"] for index in (0, 2, 3))
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert torch.equal(first, tied)
    assert torch.equal(second, other)
    assert third is first
    assert second.data_ptr() - first.data_ptr() == -(-tied.nbytes // ALIGNMENT_BYTES) * 64

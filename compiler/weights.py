"""gather_weights: the packed weights of all calls in one memory, in the order in which a step reads them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from headway.compiler.program import Call
from headway.kernels.memory import gather

_ARGUMENT = "weight"
_PRODUCTS = ("linear", "output_head", "embedding")


def gather_weights(calls: Sequence[Call]) -> list[Call]:
    """Copy each packed weight once, and have the calls read the copies.

    What passes joined or interleaved has its only copy here, so their own memory is given back.
    """
    weights = {weight.data_ptr(): weight for call in calls if (weight := _weight(call)) is not None}
    copies = dict(zip(weights, gather(list(weights.values())), strict=True))

    def reading(call: Call) -> Call:
        weight = _weight(call)
        if weight is None:
            return call
        return replace(call, arguments={**call.arguments, _ARGUMENT: copies[weight.data_ptr()]})

    return [reading(call) for call in calls]


def _weight(call: Call) -> torch.Tensor | None:
    weight = call.arguments[_ARGUMENT] if call.kernel in _PRODUCTS else None
    assert weight is None or isinstance(weight, torch.Tensor)
    return weight

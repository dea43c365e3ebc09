"""rms_norm and layer_norm: native bodies against plain torch."""

import pytest
import torch

from headway.kernels.cpu.library import Team
from headway.kernels.norm import layer_norm, rms_norm


@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 577])
@pytest.mark.parametrize("outer", [(1,), (5,), (3, 4)])
def test_norms(team: Team, outer: tuple[int, ...], width: int) -> None:
    torch.manual_seed(1)
    # A part of wider rows, as the heads of a fused product are.
    x = torch.randn(*outer, width + 3)[..., 2 : 2 + width] + 1
    weight, bias = torch.randn(width), torch.randn(width)
    whole, expected = torch.full((*outer, width + 2), 7.0), torch.empty(*outer, width)
    out = whole[..., 1:-1]
    for result, body in ((out, team), (expected, None)):
        rms_norm(x, weight, 1e-5, out=result, team=body)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    for arguments in [(weight, bias), (weight, None), (None, None)]:
        for result, body in ((out, team), (expected, None)):
            layer_norm(x, *arguments, 1e-5, out=result, team=body)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert (whole[..., 0] == 7).all()
    assert (whole[..., -1] == 7).all()


def test_in_place_and_alone_gives_the_same_bits(team: Team) -> None:
    x, weight, out = torch.randn(7, 577), torch.randn(577), torch.empty(7, 577)
    rms_norm(x, weight, 1e-6, out=out, team=team)
    alone = x[3:4].clone()
    rms_norm(alone, weight, 1e-6, out=alone, team=team)
    assert torch.equal(alone, out[3:4])


def test_wrong_shapes_are_named() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="alike"):
        rms_norm(x, torch.ones(8), 1e-5, out=torch.zeros(2, 7))
    with pytest.raises(ValueError, match="must be \\[8\\] each"):
        rms_norm(x, torch.ones(7), 1e-5, out=x)
    with pytest.raises(ValueError, match="float32"):
        rms_norm(x.double(), torch.ones(8), 1e-5, out=x)
    with pytest.raises(ValueError, match="gaps"):
        layer_norm(torch.zeros(8, 2).T, None, None, 1e-5, out=x)

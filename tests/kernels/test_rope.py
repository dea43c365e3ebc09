"""rope: the native body against plain torch and against a rotation by hand."""

import math

import pytest
import torch

from headway.kernels.cpu.library import Team
from headway.kernels.rope import rope


@pytest.mark.parametrize(
    ("size", "rotary"), [(64, 64), (80, 20), (16, 16), (6, 4), (34, 2), (5, 0)]
)
def test_rotations(team: Team, size: int, rotary: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 3, size + 2)[..., 1:-1]
    angles = torch.randn(5, rotary + 3)[:, :rotary]
    cos, sin = angles.cos(), angles.sin()
    expected = torch.empty(5, 3, size)
    rope(x, cos, sin, out=expected)
    whole = torch.full((5, 4, size + 1), 7.0)
    rope(x, cos, sin, out=whole[:, :3, :size], team=team)
    assert torch.equal(whole[:, :3, :size], expected)
    assert (whole[:, 3] == 7).all()
    assert (whole[..., size] == 7).all()
    rope(x, cos, sin, out=x, team=team)
    assert torch.equal(x, expected)


def test_the_example(team: Team) -> None:
    x, out = torch.tensor([[[3.0, 5.0, 7.0, 9.0]]]), torch.empty(1, 1, 4)
    for body in (None, team):
        rope(x, torch.zeros(1, 2), torch.ones(1, 2), out=out, team=body)
        assert out.tolist() == [[[-5.0, 3.0, 7.0, 9.0]]]


def test_a_quarter_turn_keeps_lengths(team: Team) -> None:
    x, out = torch.ones(1, 1, 2), torch.empty(1, 1, 2)
    angle = torch.full((1, 2), math.pi / 4)
    rope(x, angle.cos(), angle.sin(), out=out, team=team)
    torch.testing.assert_close(out[0, 0], torch.tensor([0.0, math.sqrt(2)]))


def test_wrong_shapes_are_named() -> None:
    x, angles = torch.zeros(2, 3, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="twice"):
        rope(x, angles[:1], angles, out=x)
    with pytest.raises(ValueError, match="an even number"):
        rope(x, angles[:, :3], angles[:, :3], out=x)
    with pytest.raises(ValueError, match="float32"):
        rope(x.double(), angles, angles, out=x)
    with pytest.raises(ValueError, match="gaps"):
        rope(x, torch.zeros(8, 2).T, angles, out=x)

"""rope: the native body against plain torch and against a rotation by hand."""

import math

import pytest
import torch

from headway.kernels.attention import CACHE_TYPES, write_kv
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


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_rotating_and_writing_at_once(team: Team, dtype: torch.dtype) -> None:
    """rope_write_kv is rope of queries and keys and then write_kv, to the bit."""
    torch.manual_seed(2)
    query, key, value = (torch.randn(5, heads, 18)[..., 1:-1] for heads in (6, 2, 2))
    angles = torch.randn(5, 12)
    cos, sin, slots = angles.cos(), angles.sin(), torch.tensor([8, 0, 3, 4, 1])
    caches, scales = torch.full((2, 2, 9, 2, 16), 7.0).to(dtype), torch.full((2, 2, 9, 2), 7.0)
    used = scales if dtype == torch.int8 else [[None, None]] * 2
    turned_query, turned_key = torch.empty(5, 6, 16), torch.empty(5, 2, 16)
    rope(query, cos, sin, out=turned_query)
    rope(key, cos, sin, out=turned_key)
    write_kv(turned_key, value, *caches[0], slots, key_scales=used[0][0], value_scales=used[0][1])
    arguments = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        arguments |= {name: x, f"{name}_stride": x.stride(0), f"{name}_head_stride": x.stride(1)}
    team.call(
        "rope_write_kv",
        **arguments,
        cos=cos,
        sin=sin,
        angle_stride=12,
        key_cache=caches[1, 0],
        value_cache=caches[1, 1],
        key_scales=used[1][0],
        value_scales=used[1][1],
        cache_type=CACHE_TYPES[dtype],
        slot_stride=32,
        slots=slots,
        num_rows=5,
        num_heads=6,
        num_groups=2,
        head_size=16,
        rotary_size=12,
    )
    assert torch.equal(query, turned_query)
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(scales[0], scales[1])

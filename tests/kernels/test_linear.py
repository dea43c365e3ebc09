"""Products with packed weights: the native bodies bit for bit against the order they promise."""

from functools import lru_cache

import pytest
import torch

from headway.kernels.cpu.library import Team
from headway.kernels.linear import (
    Activation,
    QuantisedRows,
    embedding,
    linear,
    output_head,
    quantise_rows,
)
from headway.kernels.pack import unpack
from headway.kernels.packed import FORMATS, LANES, FormatName, PackedWeight
from headway.kernels.reference import linear as reference
from packed_weights import random_weight

QUANTISED = [name for name, form in FORMATS.items() if form.scale_bytes]
NUM_ROWS = (1, 2, 3, 5, 8, 9, 12, 13, 17, 24, 25, 31, 64, 65, 130)
SHAPES = [(41, 100), (16, 577)]
"""Outputs and inputs: no multiples of a panel or a block; more blocks than are unpacked at a time."""
CASES = [(name, False) for name in FORMATS] + [(name, True) for name in QUANTISED]


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """A product of floats is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


@lru_cache
def random_rows(num_inputs: int, num_rows: int = max(NUM_ROWS)) -> torch.Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(3))


def block_scales(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and minimums by block: [N, blocks] each; the minimums are zeros if there are none."""
    form = FORMATS[weight.format]
    scale_type = torch.float16 if form.scale_bytes == 2 else torch.float32
    ends = [LANES * form.scale_bytes * count for count in (1, 2)]
    step, minimum = (
        weight.data[..., end - ends[0] : end].contiguous().view(scale_type).float() for end in ends
    )
    if not form.has_minimum:
        minimum = torch.zeros_like(step)
    return tuple(  # type: ignore[return-value]  # two of them
        part.transpose(1, 2).flatten(0, 1)[: weight.num_outputs] for part in (step, minimum)
    )


def promised_int8(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """What kernels/linear.py says a product of quantised rows is, with the rows' own words."""
    block = FORMATS[weight.format].block
    scales = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    scales = scales.abs().amax(dim=2) / 127
    step, minimum = block_scales(weight)
    num_blocks = step.shape[1]
    whole = torch.zeros(len(x), num_blocks * block)
    codes = x / scales.repeat_interleave(32, dim=1)[:, : x.shape[1]]
    whole[:, : x.shape[1]] = codes.round()
    values = torch.zeros(weight.num_outputs, num_blocks * block)
    values[:, : weight.num_inputs] = unpack(weight)
    y = torch.zeros(len(x), weight.num_outputs)
    for b in range(num_blocks):
        inputs = slice(b * block, (b + 1) * block)
        q, scale = whole[:, inputs], scales[:, b * block // 32, None]
        d, m = step[:, b], minimum[:, b]
        levels = ((values[:, inputs] - m[:, None]) / d[:, None]).round()
        levels[:, max(0, weight.num_inputs - b * block) :] = 0
        y = fma(q @ levels.T, d * scale, y)
        if FORMATS[weight.format].has_minimum:
            y = fma(m.expand_as(y), scale * q.sum(dim=1, keepdim=True), y)
    return y


def promised_float(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    values, y = unpack(weight), torch.zeros(len(x), weight.num_outputs)
    for k in range(weight.num_inputs):
        y = fma(x[:, k, None], values[:, k], y)
    return y


@lru_cache
def promised(name: FormatName, int8: bool, num_outputs: int, num_inputs: int) -> torch.Tensor:
    weight, x = random_weight(name, num_outputs, num_inputs), random_rows(num_inputs)
    return promised_int8(x, weight) if int8 else promised_float(x, weight)


@pytest.mark.parametrize(("name", "int8"), CASES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_bits_do_not_depend_on_rows_threads_or_level(
    team: Team, name: FormatName, int8: bool, num_outputs: int, num_inputs: int
) -> None:
    weight = random_weight(name, num_outputs, num_inputs)
    expected = promised(name, int8, num_outputs, num_inputs)
    for num_rows in NUM_ROWS:
        x = random_rows(num_inputs)[:num_rows]
        rows = quantise_rows(x, team=team) if int8 else x
        assert torch.equal(linear(rows, weight, team=team), expected[:num_rows]), num_rows


@pytest.mark.parametrize(("name", "int8"), CASES)
def test_reference_agrees(name: FormatName, int8: bool) -> None:
    weight, x = random_weight(name, 41, 100), random_rows(100)[:9]
    rows = quantise_rows(x) if int8 else x
    expected = promised(name, int8, 41, 100)[:9]
    torch.testing.assert_close(linear(rows, weight), expected, rtol=0, atol=3e-6)


def test_rounding_to_int8_is_close_to_the_product_of_floats(team: Team) -> None:
    weight, x = random_weight("q8", 33, 577), random_rows(577)[:5]
    rounded = linear(quantise_rows(x, team=team), weight, team=team)
    whole = linear(x, weight, team=team)
    error = (rounded - whole).norm() / whole.norm()
    assert 0.001 < error < 0.02


def poisoned(num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A frame of NaN and the part of it that may be written."""
    frame = torch.full((num_rows + 2, width + 5), float("nan"))
    return frame, frame[1:-1, 2 : width + 2]


def assert_frame(frame: torch.Tensor, inner: torch.Tensor) -> None:
    assert not inner.isnan().any()
    assert int(frame.isnan().sum()) == frame.numel() - inner.numel()


@pytest.mark.parametrize(("name", "int8"), [("f32", False), ("bf16", False), ("q4_1", True)])
@pytest.mark.parametrize("num_rows", [1, 9, 130])
def test_bias_residual_and_strides(team: Team, name: FormatName, int8: bool, num_rows: int) -> None:
    weight = random_weight(name, 41, 100)
    wide = torch.full((num_rows, 111), float("nan"))
    x = wide[:, 3:103].copy_(random_rows(100)[:num_rows])
    rows = quantise_rows(x, team=team) if int8 else x
    bias = torch.randn(41, generator=torch.Generator().manual_seed(1))
    frame, out = poisoned(num_rows, 41)
    expected = promised(name, int8, 41, 100)[:num_rows] + bias
    linear(rows, weight, bias=bias, out=out, team=team)
    assert torch.equal(out, expected)
    assert_frame(frame, out)
    linear(rows, weight, bias=bias, residual=out, out=out, team=team)
    assert torch.equal(out, expected + expected)
    assert_frame(frame, out)


@pytest.mark.parametrize(("name", "int8"), [("f32", False), ("q6_k", True)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated(team: Team, name: FormatName, int8: bool, activation: Activation) -> None:
    weight, x = random_weight(name, 96, 100), 3 * random_rows(100)[:17]
    rows = quantise_rows(x, team=team) if int8 else x
    bias = torch.randn(96, generator=torch.Generator().manual_seed(1))
    frame, out = poisoned(17, 48)
    linear(rows, weight, bias=bias, activation=activation, out=out, team=team)
    assert_frame(frame, out)
    expected = linear(rows, weight, bias=bias, activation=activation)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=5e-5)
    alone = linear(
        quantise_rows(x[:1], team=team) if int8 else x[:1],
        weight,
        bias=bias,
        activation=activation,
        team=team,
    )
    assert torch.equal(alone, out[:1])


def test_gates_and_what_they_scale_lie_in_turn() -> None:
    weight, x = random_weight("f32", 64, 10), random_rows(10)[:2]
    z = x @ unpack(weight).T
    y = linear(x, weight, activation="silu")
    assert y[1, 16 + 5].item() == pytest.approx(
        float(torch.nn.functional.silu(z[1, 32 + 5]) * z[1, 32 + 16 + 5]), rel=1e-5
    )


def valid_parts(rows: QuantisedRows) -> list[torch.Tensor]:
    """All that is defined: codes, scales and sums of the rows there are, scales of the others."""
    data = rows.data
    scales = data[..., 512:640].contiguous().view(torch.float32)
    parts = [scales]
    for group, held in enumerate(data):
        count = min(16, rows.num_rows - 16 * group)
        parts += [held[:, : 32 * count], held[:, 640 : 640 + 4 * count]]
        parts += [held[:, 704 : 704 + 4 * count]]
    return parts


@pytest.mark.parametrize(
    ("num_rows", "num_inputs"), [(1, 1), (3, 31), (17, 47), (33, 96), (16, 64)]
)
def test_quantised_rows_are_the_reference_s(team: Team, num_rows: int, num_inputs: int) -> None:
    x = random_rows(num_inputs)[:num_rows] * torch.logspace(-3, 3, num_rows)[:, None]
    x = torch.nn.functional.pad(x, (1, 2), value=float("nan"))[:, 1:-2]
    native, expected = quantise_rows(x, team=team), quantise_rows(x)
    for mine, other in zip(valid_parts(native), valid_parts(expected), strict=True):
        assert torch.equal(mine, other)
    index = torch.tensor([num_rows - 1, 0, num_rows - 1])
    taken = valid_parts(quantise_rows(x, index=index, team=team))
    for mine, other in zip(taken, valid_parts(quantise_rows(x[index])), strict=True):
        assert torch.equal(mine, other)


def test_the_example_of_quantised_rows(team: Team) -> None:
    x = torch.zeros(18, 40)
    x[17, 32:34] = torch.tensor([2.54, -1.27])
    for body in (None, team):
        data = quantise_rows(x, team=body).data.flatten()
        block = (1 * 2 + 1) * 768
        assert data.view(torch.int8)[block + 32 : block + 34].tolist() == [127, -64]
        assert data[block + 512 : block + 576].view(torch.float32)[1] == torch.tensor(2.54) / 127
        assert data[block + 640 : block + 704].view(torch.int32)[1] == 63


def test_odd_inputs_of_rounding(team: Team) -> None:
    x = torch.zeros(5, 64)
    x[0, 3] = 1e-44
    x[1, :2] = torch.tensor([2.5e-43, -2.5e-43])
    x[2, 40] = float("nan")
    x[3, 5] = float("inf")
    weight = random_weight("q4_1", 16, 64)
    native, expected = quantise_rows(x, team=team), quantise_rows(x)
    for part in (slice(0, 32 * 2), slice(32 * 4, 32 * 5)):
        assert torch.equal(native.data[..., part], expected.data[..., part])
    y = linear(native, weight, team=team)
    assert y[2:4].isnan().all()
    assert torch.equal(y[4], torch.zeros(16))
    assert y[:2].abs().max() < 1e-40


HEADS = [("q4_1", True), ("q6_k", True), ("bf16", False)]


@pytest.mark.parametrize(("name", "int8"), HEADS)
@pytest.mark.parametrize("num_rows", [1, 5, 17, 130])
def test_output_head(team: Team, name: FormatName, int8: bool, num_rows: int) -> None:
    weight, x = random_weight(name, 1003, 64), 4 * random_rows(64)[:num_rows]
    bias = torch.randn(1003, generator=torch.Generator().manual_seed(1))
    rows = quantise_rows(x, team=team) if int8 else x
    head = output_head(
        rows, weight, bias=bias, num_top=5, with_logits=True, with_log_sums=True, team=team
    )
    assert head.logits is not None
    assert head.log_sums is not None
    assert torch.equal(head.logits, linear(rows, weight, bias=bias, team=team))
    values, indices = reference.top(head.logits, 5)
    assert torch.equal(head.values, values)
    assert torch.equal(head.indices, indices)
    expected = torch.logsumexp(head.logits.double(), dim=1)
    torch.testing.assert_close(head.log_sums.double(), expected, rtol=1e-6, atol=1e-6)
    last = x[-1:]
    alone = output_head(
        quantise_rows(last, team=team) if int8 else last,
        weight,
        bias=bias,
        with_log_sums=True,
        team=team,
    )
    assert alone.log_sums is not None
    assert alone.logits is None
    assert torch.equal(alone.log_sums, head.log_sums[-1:])
    assert torch.equal(alone.values, head.values[-1:, :1])
    assert torch.equal(alone.indices, head.indices[-1:, :1])


@pytest.mark.parametrize("num_top", [0, 1, 64])
def test_as_many_best_as_asked_for(team: Team, num_top: int) -> None:
    weight, x = random_weight("f32", 300, 16), random_rows(16)[:3]
    head = output_head(x, weight, num_top=num_top, with_logits=True, team=team)
    assert head.logits is not None
    values, indices = reference.top(head.logits, num_top)
    assert torch.equal(head.values, values)
    assert torch.equal(head.indices, indices)


def test_softcap(team: Team) -> None:
    weight, x = random_weight("f32", 50, 16), 20 * random_rows(16)[:3]
    native = output_head(x, weight, softcap=30.0, with_logits=True, team=team)
    expected = output_head(x, weight, softcap=30.0, with_logits=True)
    assert native.logits is not None
    assert expected.logits is not None
    assert native.logits.abs().max() > 20
    torch.testing.assert_close(native.logits, expected.logits, rtol=1e-5, atol=1e-5)


def identity_head(logits: torch.Tensor, team: Team | None) -> tuple[list[float], list[int], float]:
    """The head of a model whose logits are these: one input that is 1."""
    padded = torch.zeros(-(-len(logits) // LANES) * LANES)
    padded[: len(logits)] = logits
    data = padded.view(torch.uint8).view(-1, 1, 4 * LANES)
    weight = PackedWeight("f32", len(logits), 1, data)
    head = output_head(torch.ones(1, 1), weight, num_top=3, with_log_sums=True, team=team)
    assert head.log_sums is not None
    return head.values[0].tolist(), head.indices[0].tolist(), float(head.log_sums)


def test_ties_infinities_and_nan(team: Team) -> None:
    logits = torch.zeros(700)
    logits[[650, 300, 20]] = 5.0
    for body in (None, team):
        assert identity_head(logits, body)[:2] == ([5.0] * 3, [20, 300, 650])
        hidden = torch.full((700,), -float("inf"))
        values, indices, log_sum = identity_head(hidden, body)
        assert (values, indices, log_sum) == ([-float("inf")] * 3, [0, 1, 2], -float("inf"))
        hidden[512] = 2.0
        values, indices, log_sum = identity_head(hidden, body)
        assert (values[0], indices) == (2.0, [512, 0, 1])
        assert log_sum == pytest.approx(2.0)
        broken = logits.clone()
        broken[[690, 40]] = float("nan")
        values, indices, log_sum = identity_head(broken, body)
        assert values[0] != values[0]
        assert indices == [40, 690, 20]
        assert log_sum != log_sum


@pytest.mark.parametrize("name", list(FORMATS))
def test_embedding(team: Team, name: FormatName) -> None:
    weight = random_weight(name, 41, 100)
    ids = torch.tensor([40, 0, 17, 17])
    for body in (None, team):
        rows = embedding(ids, weight, scale=1.5, team=body)
        assert torch.equal(rows, unpack(weight)[ids] * 1.5)


def test_no_rows(team: Team) -> None:
    weight, x = random_weight("q4_1", 41, 100), torch.empty(0, 100)
    assert linear(quantise_rows(x, team=team), weight, team=team).shape == (0, 41)
    assert output_head(x, weight, team=team).indices.shape == (0, 1)


def test_refusals() -> None:
    weight, x = random_weight("q4_1", 41, 100), random_rows(100)[:2]
    with pytest.raises(ValueError, match="x has 99 inputs, the weight 100"):
        linear(x[:, 1:], weight)
    with pytest.raises(ValueError, match="unit stride in a row"):
        linear(x.T.contiguous().T, weight)
    with pytest.raises(ValueError, match="quantised weight, got bf16"):
        linear(quantise_rows(x), random_weight("bf16", 41, 100))
    with pytest.raises(ValueError, match=r"bias must be \[41\]"):
        linear(x, weight, bias=torch.zeros(40))
    with pytest.raises(ValueError, match=r"out must be \[2, 41\]"):
        linear(x, weight, out=torch.empty(2, 40))
    with pytest.raises(ValueError, match="multiples of 32"):
        linear(x, weight, activation="silu")
    with pytest.raises(ValueError, match="num_top is 65; allowed are 0 to 41"):
        output_head(x, weight, num_top=65)
    with pytest.raises(ValueError, match="the weight has rows 0 to 40"):
        embedding(torch.tensor([41]), weight)
    with pytest.raises(ValueError, match="ids must be"):
        embedding(torch.tensor([1.0]), weight)
    with pytest.raises(ValueError, match="index must be"):
        quantise_rows(x, index=torch.tensor([0.5]))

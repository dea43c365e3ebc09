"""A file of packed weights gives back what was written, at aligned addresses, or says it is damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.engine.errors import ModelLoadError
from headway.engine.models.packed_file import PlannedWeight, read_weights, write_weights
from headway.kernels.pack import pack
from headway.kernels.packed import PackedWeight


def matrix(num_outputs: int, num_inputs: int) -> torch.Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(0))


# Odd sizes: q8 panels of three blocks and these floats do not end at multiples of 64 bytes.
WEIGHTS = {
    "a.weight": pack(matrix(5, 70), "q8"),
    "a.bias": torch.linspace(-1, 1, 5),
    "b.weight": pack(matrix(50, 33), "q4_1"),
    "norm.weight": torch.linspace(0, 1, 7).bfloat16(),
    "c.weight": pack(matrix(3, 7), "q8"),
    "c.count": torch.tensor(7),
}


def plan() -> dict[str, PlannedWeight]:
    made: dict[str, PlannedWeight] = {}
    for name, weight in WEIGHTS.items():
        if isinstance(weight, PackedWeight):
            shape = (weight.num_outputs, weight.num_inputs)
            made[name] = PlannedWeight(shape, weight.format, lambda weight=weight: weight)
        else:
            kind = weight.dtype
            made[name] = PlannedWeight(tuple(weight.shape), kind, lambda weight=weight: weight)
    return made


def test_weights_come_back_where_kernels_can_read_them(tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    write_weights(tmp_path / "w", plan(), lambda *stage: stages.append(stage))
    found = read_weights(tmp_path / "w")
    assert found.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        read = found[name]
        if isinstance(weight, PackedWeight):
            assert isinstance(read, PackedWeight)
            assert (read.format, read.num_outputs, read.num_inputs) == (
                weight.format,
                weight.num_outputs,
                weight.num_inputs,
            )
            assert torch.equal(read.data, weight.data)
            assert read.data.data_ptr() % 64 == 0
        else:
            assert isinstance(read, torch.Tensor)
            assert read.dtype == weight.dtype
            assert torch.equal(read, weight)
            assert read.data_ptr() % 64 == 0
    assert [stage for stage, _, _ in stages] == ["pack"] * len(WEIGHTS)
    assert stages[-1][1] == stages[-1][2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:30],
        lambda data: b"",
        lambda data: data.replace(b'"packed"', b'"hacked"'),
        lambda data: data.replace(b'\\"q8\\", 5, 70', b'\\"q8\\", 5, "" '),
    ],
    ids=["cut", "cut in the header", "empty", "not packed", "no size"],
)
def test_a_damaged_file_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    write_weights(tmp_path / "w", plan(), lambda *stage: None)
    data = (tmp_path / "w").read_bytes()
    assert damage(data) != data
    (tmp_path / "w").write_bytes(damage(data))
    with pytest.raises(ModelLoadError, match="is not a whole file of packed weights"):
        read_weights(tmp_path / "w")

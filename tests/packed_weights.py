"""Random packed weights of every format, from codes and scales."""

import torch

from headway.kernels.packed import FORMATS, LANES, FormatName, PackedWeight


def random_weight(
    name: FormatName, num_outputs: int, num_inputs: int, seed: int = 0
) -> PackedWeight:
    """Values of about unit variance over sqrt(num_inputs); padding is zeros, as packed.py has it."""
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    num_panels, num_blocks = -(-num_outputs // LANES), -(-num_inputs // form.block)
    rows, columns = num_panels * LANES, num_blocks * form.block
    if not form.scale_bytes:
        matrix = torch.zeros(rows, columns)
        matrix[:num_outputs, :num_inputs] = (
            torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
        )
        lanes = matrix.view(num_panels, LANES, num_blocks, form.block).transpose(1, 2)
        lanes = lanes.transpose(2, 3) if form.block == 1 else lanes.bfloat16()
        data = lanes.contiguous().view(torch.uint8)
        return PackedWeight(name, num_outputs, num_inputs, data.view(num_panels, num_blocks, -1))
    most = 15 if form.code_bits == 4 else 63 if form.block == 16 else 255
    codes = torch.randint(0, most + 1, (rows, columns), generator=generator)
    codes[num_outputs:] = form.zero
    codes[:, num_inputs:] = form.zero
    scale_type = torch.float16 if form.scale_bytes == 2 else torch.float32
    steps = torch.rand(rows, num_blocks, generator=generator) + 0.5
    # Steps of GGUF's float32 formats have few bits, so that step * code is exact.
    steps = (steps * 4 / (most * num_inputs**0.5)).half().to(scale_type)
    scales = [steps]
    if form.has_minimum:
        offset = 0.5 + torch.rand(rows, num_blocks, generator=generator)
        scales.append((-steps.float() * most / 2 * offset).to(scale_type))
    return pack_codes(name, num_outputs, num_inputs, codes.to(torch.uint8), scales)


def pack_codes(
    name: FormatName,
    num_outputs: int,
    num_inputs: int,
    codes: torch.Tensor,
    scales: list[torch.Tensor],
) -> PackedWeight:
    """codes: [N padded, K padded] uint8; scales: steps and minimums, [N padded, blocks] each."""
    form = FORMATS[name]
    num_panels, num_blocks = codes.shape[0] // LANES, codes.shape[1] // form.block
    groups = codes.view(num_panels, LANES, num_blocks, form.block // 4, 4).permute(0, 2, 3, 1, 4)
    if form.code_bits == 4:
        half = form.block // 8
        groups = groups[:, :, :half] | groups[:, :, half:] << 4
    parts = [
        part.view(num_panels, LANES, num_blocks).transpose(1, 2).contiguous().view(torch.uint8)
        for part in scales
    ]
    parts.append(groups.reshape(num_panels, num_blocks, -1))
    data = torch.cat(parts, dim=2)
    return PackedWeight(name, num_outputs, num_inputs, data)

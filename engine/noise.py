"""Counter-based Gumbel noise: a pure function of (seed, position, token id), the coin of every draw.

argmax_v [log p_v + G(v)] is a sample of p (Gumbel's trick; Maddison et al., "A* Sampling", 2014). As
the noise has no state, a token drawn at a position is the same in any batch, tree or order of work.
R rows, V vocabulary, C candidates.
"""

from collections.abc import Sequence as Seq
from functools import lru_cache

import torch

_MASK_64 = (1 << 64) - 1
_LARGEST_W = 1.0 - 2.0**-24


def gumbel(
    seeds: Seq[int], positions: Seq[int], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Draw the noise of every token: [R, V] float32, always finite, row i at (seeds[i], positions[i]).

    A row does not depend on the other rows. Seeds are taken modulo 2**64. The recipe, in unsigned
    integers that wrap around; `>>` shifts zeros in:

        mix64(z)   z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;  z = (z ^ z >> 27) * 0x94D049BB133111EB
                   z ^ z >> 31                  (the finaliser of SplitMix64, Steele et al. 2014)
        key        mix64(mix64(seed + g) + g * (position + 1)),   g = 0x9E3779B97F4A7C15
        x          (v * (key >> 32 | 1)) ^ (key & 0xFFFFFFFF)     in 32 bits, v the token id
        x          x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
                                                (constants of lowbias32, Wellons 2018)
        w          min((float32(x) + 0.5) * 2**-32, 1 - 2**-24)   each step rounded to float32
        G          -log(-log1p(-w))                               between -2.82 and 22.88

    The small end of w, which makes large G, keeps all 32 bits. Within a row no two tokens share x.

    Example: seed 7, position 3, token 5: key 0x9AAF21D8296E1E3D, x 0xA5A2D1FF, G -0.0405003.
    """
    return _noise(seeds, positions, _all_token_ids(vocab_size, device))


def gumbel_at(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Draw the noise of some tokens only: token_ids [C] integer -> [C] float32, as in `gumbel`."""
    return _noise([seed], [position], token_ids.to(torch.int32))[0]


def row_key(seed: int, position: int) -> int:
    """Mix a seed and a position into the 64-bit key of a row of noise."""
    golden = 0x9E3779B97F4A7C15
    return _mix64(_mix64(seed + golden) + golden * (position + 1))


def _mix64(z: int) -> int:
    z &= _MASK_64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK_64
    return z ^ z >> 31


@lru_cache(maxsize=8)
def _all_token_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(vocab_size, dtype=torch.int32, device=device)


def _noise(seeds: Seq[int], positions: Seq[int], token_ids: torch.Tensor) -> torch.Tensor:
    """[C] int32 token ids -> [R, C] float32. In place throughout: fresh memory costs more than sums."""
    keys = [row_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    words = [(_signed(key >> 32 | 1), _signed(key)) for key in keys]
    multiplier, offset = torch.tensor(words, dtype=torch.int32, device=token_ids.device).T[
        ..., None
    ]
    x = token_ids * multiplier  # [R, C]
    x.bitwise_xor_(offset)
    shifted = torch.empty_like(x)
    _xor_shift(x, 16, shifted)
    x.mul_(_signed(0x7FEB352D))
    _xor_shift(x, 15, shifted)
    x.mul_(_signed(0x846CA68B))
    _xor_shift(x, 16, shifted)
    minus_w = x.view(torch.uint32).to(torch.float32).add_(0.5).mul_(-(2.0**-32))
    noise: torch.Tensor = minus_w.clamp_(min=-_LARGEST_W).log1p_().neg_().log_().neg_()
    return noise


def _xor_shift(x: torch.Tensor, bits: int, shifted: torch.Tensor) -> None:
    """x ^= x >> bits without sign: torch shifts int32 with the sign, so its copies are masked off."""
    torch.bitwise_right_shift(x, bits, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_((1 << 32 - bits) - 1))


def _signed(word: int) -> int:
    """The low 32 bits of `word` as a signed 32-bit number."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word

// Quantised rows times a panel with AVX-512 VNNI: four products of bytes a lane and instruction.
#pragma once

#include "linear.h"

namespace headway {

constexpr int kMostDotRows = 8;

// The codes of four inputs, or of two times four where a byte holds two codes.
struct Codes {
    __m512i first, second;
};
template <int kFormat>
HEADWAY_INLINE inline Codes load_codes(const uint8_t* at) {
    __m512i bytes = _mm512_loadu_si512(at);
    if constexpr (kFormats[kFormat].code_bits == 8) return {bytes, bytes};
    __m512i mask = _mm512_set1_epi8(15);
    return {_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask)};
}

// The zero point's part of a block's sums.
template <int kFormat>
HEADWAY_INLINE inline __m512i zero_part(const RowBlock& block, int row, int64_t b) {
    static constexpr Format kForm = kFormats[kFormat];
    int32_t sum = block.sums[row];
    if constexpr (kForm.block < kBlock) {
        sum = block.first_sums[row];
        if (b % 2) sum = block.sums[row] - sum;
    }
    return _mm512_mullo_epi32(_mm512_set1_epi32(sum), _mm512_set1_epi32(kForm.zero));
}

// out[r][lane] = sum over blocks, in order, of scale_r * (d * dot + m * sum_r), for kRows rows of a
// group from row `first` on.
template <int kFormat, int kRows>
void dot_rows(const RowBlock* rows, int first, const uint8_t* panel, int64_t num_blocks,
              float* out) {
    static constexpr Format kForm = kFormats[kFormat];
    constexpr int kGroups = kForm.block / 4, kPerScale = kBlock / kForm.block;
    constexpr int kStored = kGroups * kForm.code_bits / 8;
    constexpr bool kTwoChains = kRows <= 4;
    Floats sums[kRows];
    unrolled<kRows>([&](auto r) HEADWAY_INLINE { sums[r] = zeros(); });
    for (int64_t b = 0; b < num_blocks; ++b, panel += kForm.block_bytes()) {
        prefetch_block<kForm.block_bytes()>(panel);
        const RowBlock& block = rows[b / kPerScale];
        const int8_t* inputs = block.codes[first] + b % kPerScale * kForm.block;
        // All rows take a step before any takes the next: an addition waits five cycles for the last.
        __m512i dots[kRows], others[kRows];
        unrolled<kRows>(
            [&](auto r) HEADWAY_INLINE { dots[r] = others[r] = _mm512_setzero_si512(); });
        unrolled<kStored>([&](auto j) HEADWAY_INLINE {
            Codes codes = load_codes<kFormat>(panel + kForm.codes_at() + 64 * j);
            unrolled<kRows>([&](auto r) HEADWAY_INLINE {
                auto x = reinterpret_cast<const int32_t*>(inputs + kBlock * r);
                __m512i& dot = kTwoChains && j % 2 ? others[r] : dots[r];
                dot = _mm512_dpbusd_epi32(dot, codes.first, _mm512_set1_epi32(x[j]));
                if constexpr (kStored < kGroups) {
                    __m512i& next = kTwoChains && j % 2 == 0 ? others[r] : dots[r];
                    next = _mm512_dpbusd_epi32(next, codes.second, _mm512_set1_epi32(x[j + kStored]));
                }
            });
        });
        Floats step = load_scales<kFormat>(panel);
        Floats minimum = zeros();
        if constexpr (kForm.has_minimum)
            minimum = load_scales<kFormat>(panel + kForm.scales_bytes());
        unrolled<kRows>([&](auto r) HEADWAY_INLINE {
            if constexpr (kTwoChains) dots[r] = _mm512_add_epi32(dots[r], others[r]);
            if constexpr (kForm.zero != 0)
                dots[r] = _mm512_sub_epi32(dots[r], zero_part<kFormat>(block, first + r, b));
            Floats scale = step * splat(block.scales[first + r]);
            sums[r] = fma(to_floats(Ints{dots[r]}), scale, sums[r]);
            if constexpr (kForm.has_minimum)
                sums[r] = fma(minimum, splat(block.scaled_sums[first + r]), sums[r]);
        });
    }
    unrolled<kRows>([&](auto r) HEADWAY_INLINE { store(out + kLanes * r, sums[r]); });
}

}  // namespace headway

// Quantised rows times a panel with AVX-512 VNNI: four products of bytes a lane and instruction.
#pragma once

#include "linear.h"

namespace headway {

constexpr int kMostDotRows = 12;

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

// The zero point's part of a block's sums, which starts them.
template <int kFormat>
HEADWAY_INLINE inline __m512i start_of_dot(const int32_t* half_sums, int64_t block) {
    static constexpr Format kForm = kFormats[kFormat];
    if constexpr (kForm.zero == 0) return _mm512_setzero_si512();
    if constexpr (kForm.block == kBlock / 2) return _mm512_set1_epi32(-kForm.zero * half_sums[block]);
    return _mm512_set1_epi32(-kForm.zero * (half_sums[2 * block] + half_sums[2 * block + 1]));
}

// sums[r][lane] = sum over blocks, in order, of scale_r * (d * dot + m * sum_r).
template <int kFormat, int kRows>
void dot_rows(const Product& product, const RowLayout& layout, const uint8_t* panel,
              int64_t first_row, float* out) {
    static constexpr Format kForm = kFormats[kFormat];
    constexpr int kGroups = kForm.block / 4, kPerScale = kBlock / kForm.block;
    constexpr int kStored = kGroups * kForm.code_bits / 8;
    constexpr bool kTwoChains = kRows <= 4;
    const char* rows[kRows];
    Floats sums[kRows];
    unrolled<kRows>([&](auto r) HEADWAY_INLINE {
        rows[r] = static_cast<const char*>(product.x) + product.row(first_row + r) * product.x_stride;
        sums[r] = zeros();
    });
    int64_t num_blocks = ceil_div(product.num_inputs, kForm.block);
    for (int64_t b = 0; b < num_blocks; ++b, panel += kForm.block_bytes()) {
        if constexpr (kRows <= kPrefetchRows) prefetch_block<kForm.block_bytes()>(panel);
        // All rows take a step before any takes the next: an addition waits five cycles for the last.
        __m512i dots[kRows], others[kRows];
        unrolled<kRows>([&](auto r) HEADWAY_INLINE {
            auto half_sums = reinterpret_cast<const int32_t*>(rows[r] + layout.half_sums_at);
            dots[r] = start_of_dot<kFormat>(half_sums, b);
            others[r] = _mm512_setzero_si512();
        });
        unrolled<kStored>([&](auto j) HEADWAY_INLINE {
            Codes codes = load_codes<kFormat>(panel + kForm.codes_at() + 64 * j);
            unrolled<kRows>([&](auto r) HEADWAY_INLINE {
                auto x = reinterpret_cast<const int32_t*>(rows[r] + b * kForm.block);
                __m512i& dot = kTwoChains && j % 2 ? others[r] : dots[r];
                dot = _mm512_dpbusd_epi32(dot, codes.first, _mm512_set1_epi32(x[j]));
                if constexpr (kStored < kGroups) {
                    __m512i& next = kTwoChains && j % 2 == 0 ? others[r] : dots[r];
                    __m512i inputs = _mm512_set1_epi32(x[j + kStored]);
                    next = _mm512_dpbusd_epi32(next, codes.second, inputs);
                }
            });
        });
        Floats step = load_scales<kFormat>(panel);
        Floats minimum = zeros();
        if constexpr (kForm.has_minimum)
            minimum = load_scales<kFormat>(panel + kForm.scales_bytes());
        unrolled<kRows>([&](auto r) HEADWAY_INLINE {
            auto scales = reinterpret_cast<const float*>(rows[r] + layout.scales_at);
            auto scaled_sums = reinterpret_cast<const float*>(rows[r] + layout.scaled_sums_at);
            if constexpr (kTwoChains) dots[r] = _mm512_add_epi32(dots[r], others[r]);
            sums[r] = fma(to_floats(Ints{dots[r]}), step * splat(scales[b / kPerScale]), sums[r]);
            if constexpr (kForm.has_minimum)
                sums[r] = fma(minimum, splat(scaled_sums[b]), sums[r]);
        });
    }
    unrolled<kRows>([&](auto r) HEADWAY_INLINE { store(out + kLanes * r, sums[r]); });
}

}  // namespace headway

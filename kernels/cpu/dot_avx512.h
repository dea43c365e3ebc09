// Quantised rows times a panel with AVX-512 VNNI: four products of bytes a lane and instruction.
#pragma once

#include "linear.h"

namespace headway {

constexpr int kMostDotRows = 8;

// The codes of a block as bytes: one vector for each four inputs.
template <int kFormat>
inline void load_codes(const uint8_t* at, __m512i (&codes)[kFormats[kFormat].block / 4]) {
    constexpr int kGroups = kFormats[kFormat].block / 4;
    if constexpr (kFormats[kFormat].code_bits == 8) {
        for (int j = 0; j < kGroups; ++j) codes[j] = _mm512_loadu_si512(at + 64 * j);
    } else {
        __m512i mask = _mm512_set1_epi8(15);
        for (int j = 0; j < kGroups / 2; ++j) {
            __m512i both = _mm512_loadu_si512(at + 64 * j);
            codes[j] = _mm512_and_si512(both, mask);
            codes[j + kGroups / 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        }
    }
}

// sums[r][lane] = sum over blocks, in order, of scale_r * (d * dot + m * sum_r).
template <int kFormat, int kRows>
void dot_rows(const Product& product, const RowLayout& layout, const uint8_t* panel,
              int64_t first_row, float* out) {
    constexpr Format kForm = kFormats[kFormat];
    constexpr int kGroups = kForm.block / 4, kPerScale = kBlock / kForm.block;
    const char* rows[kRows];
    for (int r = 0; r < kRows; ++r)
        rows[r] = static_cast<const char*>(product.x) + product.row(first_row + r) * product.x_stride;
    Floats sums[kRows];
    for (auto& sum : sums) sum = zeros();
    int64_t num_blocks = ceil_div(product.num_inputs, kForm.block);
    for (int64_t b = 0; b < num_blocks; ++b, panel += kForm.block_bytes()) {
        __m512i codes[kGroups];
        load_codes<kFormat>(panel + kForm.codes_at(), codes);
        Floats step = load_scales<kFormat>(panel);
        Floats minimum = zeros();
        if constexpr (kForm.has_minimum)
            minimum = load_scales<kFormat>(panel + kForm.scales_bytes());
        for (int r = 0; r < kRows; ++r) {
            auto x = reinterpret_cast<const int32_t*>(rows[r] + b * kForm.block);
            auto half_sums = reinterpret_cast<const int32_t*>(rows[r] + layout.half_sums_at);
            auto scales = reinterpret_cast<const float*>(rows[r] + layout.scales_at);
            auto scaled_sums = reinterpret_cast<const float*>(rows[r] + layout.scaled_sums_at);
            int32_t start = 0;
            if constexpr (kForm.zero != 0) {
                int32_t sum = half_sums[b * 2 / kPerScale];
                if constexpr (kPerScale == 1) sum += half_sums[2 * b + 1];
                start = -kForm.zero * sum;
            }
            __m512i dot = _mm512_set1_epi32(start), other = _mm512_setzero_si512();
            for (int j = 0; j < kGroups; j += 2) {
                dot = _mm512_dpbusd_epi32(dot, codes[j], _mm512_set1_epi32(x[j]));
                other = _mm512_dpbusd_epi32(other, codes[j + 1], _mm512_set1_epi32(x[j + 1]));
            }
            Floats whole = to_floats(Ints{_mm512_add_epi32(dot, other)});
            sums[r] = fma(whole, step * splat(scales[b / kPerScale]), sums[r]);
            if constexpr (kForm.has_minimum)
                sums[r] = fma(minimum, splat(scaled_sums[b]), sums[r]);
        }
    }
    for (int r = 0; r < kRows; ++r) store(out + kLanes * r, sums[r]);
}

}  // namespace headway

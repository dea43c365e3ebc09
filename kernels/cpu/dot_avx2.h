// Quantised rows times a panel with AVX2: products of bytes summed in 16 bits, then in 32.
#pragma once

#include "linear.h"

namespace headway {

constexpr int kMostDotRows = 4;

// Sums of a block's products, before the zero point, for 8 outputs. `codes` points at their bytes
// of the first group; a group is 64 bytes further.
//
// vpmaddubsw adds two products of an unsigned and a signed byte in 16 bits, and saturates. With
// codes to 15, eight such pairs reach 8 * 2 * 15 * 127 = 30480 and fit; so 8-bit codes go by halves.
template <int kFormat>
inline __m256i dot_block(const uint8_t* codes, const int32_t* x) {
    constexpr Format kForm = kFormats[kFormat];
    constexpr int kGroups = kForm.block / 4;
    __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
    constexpr int kStored = kForm.code_bits == 4 ? kGroups / 2 : kGroups;
    for (int j = 0; j < kStored; ++j) {
        __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * j));
        __m256i first = _mm256_and_si256(both, mask);
        __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        int32_t x_second = kForm.code_bits == 4 ? x[j + kGroups / 2] : x[j];
        low = _mm256_add_epi16(low, _mm256_maddubs_epi16(first, _mm256_set1_epi32(x[j])));
        high = _mm256_add_epi16(high, _mm256_maddubs_epi16(second, _mm256_set1_epi32(x_second)));
    }
    if constexpr (kForm.code_bits == 4) return _mm256_madd_epi16(_mm256_add_epi16(low, high), ones);
    return _mm256_add_epi32(_mm256_madd_epi16(low, ones),
                            _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
}

template <int kFormat, int kRows>
void dot_rows(const Product& product, const RowLayout& layout, const uint8_t* panel,
              int64_t first_row, float* out) {
    constexpr Format kForm = kFormats[kFormat];
    constexpr int kPerScale = kBlock / kForm.block;
    const char* rows[kRows];
    for (int r = 0; r < kRows; ++r)
        rows[r] = static_cast<const char*>(product.x) + product.row(first_row + r) * product.x_stride;
    Floats sums[kRows];
    for (auto& sum : sums) sum = zeros();
    int64_t num_blocks = ceil_div(product.num_inputs, kForm.block);
    for (int64_t b = 0; b < num_blocks; ++b, panel += kForm.block_bytes()) {
        Floats step = load_scales<kFormat>(panel);
        Floats minimum = zeros();
        if constexpr (kForm.has_minimum)
            minimum = load_scales<kFormat>(panel + kForm.scales_bytes());
        for (int r = 0; r < kRows; ++r) {
            auto x = reinterpret_cast<const int32_t*>(rows[r] + b * kForm.block);
            auto half_sums = reinterpret_cast<const int32_t*>(rows[r] + layout.half_sums_at);
            auto scales = reinterpret_cast<const float*>(rows[r] + layout.scales_at);
            auto scaled_sums = reinterpret_cast<const float*>(rows[r] + layout.scaled_sums_at);
            const uint8_t* codes = panel + kForm.codes_at();
            Ints dot{dot_block<kFormat>(codes, x), dot_block<kFormat>(codes + 32, x)};
            if constexpr (kForm.zero != 0) {
                int32_t sum = half_sums[b * 2 / kPerScale];
                if constexpr (kPerScale == 1) sum += half_sums[2 * b + 1];
                dot = dot - splat(kForm.zero * sum);
            }
            sums[r] = fma(to_floats(dot), step * splat(scales[b / kPerScale]), sums[r]);
            if constexpr (kForm.has_minimum)
                sums[r] = fma(minimum, splat(scaled_sums[b]), sums[r]);
        }
    }
    for (int r = 0; r < kRows; ++r) store(out + kLanes * r, sums[r]);
}

}  // namespace headway

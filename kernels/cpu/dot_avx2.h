// Quantised rows times a panel with AVX2: products of bytes summed in 16 bits, then in 32.
//
// vpmaddubsw adds two products of an unsigned and a signed byte in 16 bits, and saturates. With
// codes to 15, eight such pairs reach 8 * 2 * 15 * 127 = 30480 and fit; so 8-bit codes go by halves.
#pragma once

#include "linear.h"

namespace headway {

constexpr int kMostDotRows = 8;

HEADWAY_INLINE inline __m256i add_products(__m256i sum, __m256i codes, int32_t inputs) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, _mm256_set1_epi32(inputs)));
    // Else gcc makes a tree of the additions, whose leaves find no registers.
    asm("" : "+x"(sum));
    return sum;
}

// dots[r] = sums of a block's products, before the zero point, for 8 outputs. `codes` points at
// their bytes of the first group, a group is 64 bytes further; `inputs` at those of the first row.
template <int kFormat, int kRows>
HEADWAY_INLINE inline void dot_block(const uint8_t* codes, const int8_t* inputs,
                                     __m256i (&dots)[kRows]) {
    static constexpr Format kForm = kFormats[kFormat];
    constexpr bool kPaired = kForm.code_bits == 4;
    constexpr int kStored = kForm.block / (kPaired ? 8 : 4);
    __m256i mask = _mm256_set1_epi8(15);
    __m256i highs[kRows];
    unrolled<kRows>(
        [&](auto r) HEADWAY_INLINE { dots[r] = highs[r] = _mm256_setzero_si256(); });
    unrolled<kStored>([&](auto j) HEADWAY_INLINE {
        __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * j));
        __m256i first = _mm256_and_si256(both, mask);
        __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        unrolled<kRows>([&](auto r) HEADWAY_INLINE {
            auto x = reinterpret_cast<const int32_t*>(inputs + kBlock * r);
            dots[r] = add_products(dots[r], first, x[j]);
            if constexpr (kPaired)
                dots[r] = add_products(dots[r], second, x[j + kStored]);
            else
                highs[r] = add_products(highs[r], second, x[j]);
        });
    });
    unrolled<kRows>([&](auto r) HEADWAY_INLINE {
        dots[r] = _mm256_madd_epi16(dots[r], _mm256_set1_epi16(1));
        if constexpr (!kPaired) {
            __m256i sixteenfold = _mm256_madd_epi16(highs[r], _mm256_set1_epi16(16));
            dots[r] = _mm256_add_epi32(dots[r], sixteenfold);
        }
    });
}

template <int kFormat>
HEADWAY_INLINE inline __m256 load_half_scales(const uint8_t* scales, int half) {
    if constexpr (kFormats[kFormat].scale_bytes == 2)
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales) + half));
    else
        return _mm256_loadu_ps(reinterpret_cast<const float*>(scales) + 8 * half);
}

// sums[r] += scale_r * (d * dot + m * sum_r), for 8 of a block's outputs.
template <int kFormat, int kRows>
HEADWAY_INLINE inline void add_block(const RowBlock& rows, int first, const uint8_t* block,
                                     int64_t b, int half, __m256 (&sums)[kRows]) {
    static constexpr Format kForm = kFormats[kFormat];
    __m256i dots[kRows];
    const int8_t* inputs = rows.codes[first] + b * kForm.block % kBlock;
    dot_block<kFormat, kRows>(block + kForm.codes_at() + 32 * half, inputs, dots);
    __m256 step = load_half_scales<kFormat>(block, half), minimum = _mm256_setzero_ps();
    if constexpr (kForm.has_minimum)
        minimum = load_half_scales<kFormat>(block + kForm.scales_bytes(), half);
    unrolled<kRows>([&](auto r) HEADWAY_INLINE {
        if constexpr (kForm.zero != 0) {
            int32_t sum = rows.sums[first + r];
            if constexpr (kForm.block < kBlock)
                sum = b % 2 ? sum - rows.first_sums[first + r] : rows.first_sums[first + r];
            dots[r] = _mm256_sub_epi32(dots[r], _mm256_set1_epi32(kForm.zero * sum));
        }
        __m256 scale = _mm256_mul_ps(step, _mm256_set1_ps(rows.scales[first + r]));
        sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, sums[r]);
        if constexpr (kForm.has_minimum) {
            __m256 scaled_sum = _mm256_set1_ps(rows.scaled_sums[first + r]);
            sums[r] = _mm256_fmadd_ps(minimum, scaled_sum, sums[r]);
        }
    });
}

// out[r][lane] = sum over blocks, in order, of scale_r * (d * dot + m * sum_r), for kRows rows of a
// group from row `first` on.
template <int kFormat, int kRows>
void dot_rows(const RowBlock* rows, int first, const uint8_t* panel, int64_t num_blocks,
              float* out) {
    static constexpr Format kForm = kFormats[kFormat];
    __m256 sums[2][kRows];
    unrolled<kRows>(
        [&](auto r) HEADWAY_INLINE { sums[0][r] = sums[1][r] = _mm256_setzero_ps(); });
    for (int64_t b = 0; b < num_blocks; ++b, panel += kForm.block_bytes()) {
        prefetch_block<kForm.block_bytes()>(panel);
        const RowBlock& block = rows[b * kForm.block / kBlock];
#pragma GCC unroll 1
        for (int half = 0; half < 2; ++half) {
            // Inputs are loaded again: sixteen registers cannot hold them for the other half.
            asm volatile("" ::: "memory");
            add_block<kFormat, kRows>(block, first, panel, b, half, sums[half]);
        }
    }
    unrolled<kRows>([&](auto r) HEADWAY_INLINE {
        _mm256_storeu_ps(out + kLanes * r, sums[0][r]);
        _mm256_storeu_ps(out + kLanes * r + 8, sums[1][r]);
    });
}

}  // namespace headway

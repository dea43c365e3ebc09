// Rows of floats times a panel: one fused multiply-add for each input, in order of the inputs.
#pragma once

#include <algorithm>

#include "linear.h"

namespace headway {

// The values of a block of a quantised format: to[input][output].
template <int kFormat>
void expand_block(const uint8_t* block, float* to) {
    static constexpr Format kForm = kFormats[kFormat];
    Floats step = load_scales<kFormat>(block);
    Floats minimum = kForm.has_minimum ? load_scales<kFormat>(block + kForm.scales_bytes()) : zeros();
    auto value = [&](Ints code) {
        if constexpr (kForm.has_minimum) return fma(step, to_floats(code), minimum);
        return step * to_floats(code - splat(kForm.zero));
    };
    constexpr int kGroups = kForm.block * kForm.code_bits / 32;
    Ints mask = splat((1 << kForm.code_bits) - 1);
    for (int j = 0; j < kGroups; ++j) {
        Ints codes = load(reinterpret_cast<const int32_t*>(block + kForm.codes_at()) + kLanes * j);
        for (int i = 0; i < 4; ++i) {
            store(to + kLanes * (4 * j + i), value(codes & mask));
            if constexpr (kForm.code_bits == 4)
                store(to + kLanes * (4 * (j + kGroups) + i), value(shift_right<4>(codes) & mask));
            codes = shift_right<8>(codes);
        }
    }
}

// Registers hold the sums of so many rows, and of two panels where they are many.
#if defined(__AVX512F__)
constexpr int kMostFloatRows = 8, kMostFloatPanels = 2;
#else
constexpr int kMostFloatRows = 6, kMostFloatPanels = 1;
#endif

template <int kRows, int kPanels>
struct FloatSums {
    Floats at[kRows][kPanels];
};

// sums += inputs first .. first + count of the rows times `count` inputs of each panel.
template <int kRows, int kPanels>
HEADWAY_INLINE inline void add_inputs(const float* const (&rows)[kRows], int64_t first,
                                      const float* const (&weights)[kPanels], int64_t count,
                                      FloatSums<kRows, kPanels>& sums) {
    for (int64_t k = 0; k < count; ++k) {
        Floats weight[kPanels];
        unrolled<kPanels>(
            [&](auto p) HEADWAY_INLINE { weight[p] = load(weights[p] + kLanes * k); });
        unrolled<kRows>([&](auto r) HEADWAY_INLINE {
            Floats x = splat(rows[r][first + k]);
            unrolled<kPanels>([&](auto p) HEADWAY_INLINE {
                sums.at[r][p] = fma(x, weight[p], sums.at[r][p]);
            });
        });
    }
}

// The same for bf16 weights, which lie in pairs of inputs; after the last there may be padding.
template <int kRows, int kPanels>
HEADWAY_INLINE inline void add_pairs(const float* const (&rows)[kRows], int64_t num_inputs,
                                     const uint8_t* panel, int64_t panel_bytes,
                                     FloatSums<kRows, kPanels>& sums) {
    Ints second_half = splat(static_cast<int32_t>(0xffff0000));
    for (int64_t k = 0; k < num_inputs; k += 2, panel += 4 * kLanes) {
        Floats first[kPanels], second[kPanels];
        unrolled<kPanels>([&](auto p) HEADWAY_INLINE {
            Ints pair = load(reinterpret_cast<const int32_t*>(panel + p * panel_bytes));
            first[p] = floats_of_bits(shift_left<16>(pair));
            second[p] = floats_of_bits(pair & second_half);
        });
        unrolled<kRows>([&](auto r) HEADWAY_INLINE {
            Floats x = splat(rows[r][k]);
            unrolled<kPanels>([&](auto p) HEADWAY_INLINE {
                sums.at[r][p] = fma(x, first[p], sums.at[r][p]);
            });
        });
        if (k + 1 == num_inputs) break;
        unrolled<kRows>([&](auto r) HEADWAY_INLINE {
            Floats x = splat(rows[r][k + 1]);
            unrolled<kPanels>([&](auto p) HEADWAY_INLINE {
                sums.at[r][p] = fma(x, second[p], sums.at[r][p]);
            });
        });
    }
}

// How the inputs of a panel come to be floats.
enum FloatKind { kAsTheyAre, kInPairs, kExpanded };

// out[p][r][lane], where panels are `panel_bytes` and their sums kRowChunk rows apart. Quantised
// formats share one loop, and `expand` makes floats of a block.
template <FloatKind kKind, int kRows, int kPanels>
void float_rows(const Product& product, const uint8_t* panel, int64_t panel_bytes,
                int64_t first_row, void (*expand)(const uint8_t* block, float* to), float* out) {
    const float* rows[kRows];
    FloatSums<kRows, kPanels> sums;
    unrolled<kRows>([&](auto r) HEADWAY_INLINE {
        rows[r] = product.float_row(first_row + r);
        unrolled<kPanels>([&](auto p) HEADWAY_INLINE { sums.at[r][p] = zeros(); });
    });
    if constexpr (kKind == kAsTheyAre) {
        const float* weights[kPanels];
        unrolled<kPanels>([&](auto p) HEADWAY_INLINE {
            weights[p] = reinterpret_cast<const float*>(panel + p * panel_bytes);
        });
        add_inputs<kRows, kPanels>(rows, 0, weights, product.num_inputs, sums);
    } else if constexpr (kKind == kInPairs) {
        add_pairs<kRows, kPanels>(rows, product.num_inputs, panel, panel_bytes, sums);
    } else {
        alignas(64) float values[kPanels][kBlock * kLanes];
        const float* weights[kPanels];
        unrolled<kPanels>([&](auto p) HEADWAY_INLINE { weights[p] = values[p]; });
        const Format& format = kFormats[product.format];
        for (int64_t k = 0; k < product.num_inputs; k += format.block) {
            for (int p = 0; p < kPanels; ++p) expand(panel + p * panel_bytes, values[p]);
            int64_t count = std::min<int64_t>(format.block, product.num_inputs - k);
            add_inputs<kRows, kPanels>(rows, k, weights, count, sums);
            panel += format.block_bytes();
        }
    }
    unrolled<kRows>([&](auto r) HEADWAY_INLINE {
        unrolled<kPanels>([&](auto p) HEADWAY_INLINE {
            store(out + (p * kRowChunk + r) * kLanes, sums.at[r][p]);
        });
    });
}

}  // namespace headway

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

// sums += rows[first .. first + count] times `count` inputs of 16 outputs.
template <int kRows>
HEADWAY_INLINE inline void add_inputs(const float* const (&rows)[kRows], int64_t first, const float* weights,
                       int64_t count, Floats (&sums)[kRows]) {
    for (int64_t k = 0; k < count; ++k) {
        Floats weight = load(weights + kLanes * k);
        unrolled<kRows>([&](auto r) HEADWAY_INLINE {
            sums[r] = fma(splat(rows[r][first + k]), weight, sums[r]);
        });
    }
}

template <int kFormat, int kRows>
void float_rows(const Product& product, const uint8_t* panel, int64_t first_row, float* out) {
    static constexpr Format kForm = kFormats[kFormat];
    const float* rows[kRows];
    Floats sums[kRows];
    unrolled<kRows>([&](auto r) HEADWAY_INLINE {
        rows[r] = product.float_row(first_row + r);
        sums[r] = zeros();
    });
    if constexpr (kFormat == kF32) {
        add_inputs<kRows>(rows, 0, reinterpret_cast<const float*>(panel), product.num_inputs, sums);
    } else if constexpr (kFormat == kBf16) {
        for (int64_t k = 0; k < product.num_inputs; k += 2, panel += kForm.block_bytes()) {
            Ints pair = load(reinterpret_cast<const int32_t*>(panel));
            float weights[2 * kLanes];
            store(weights, floats_of_bits(shift_left<16>(pair)));
            store(weights + kLanes, floats_of_bits(pair & splat(static_cast<int32_t>(0xffff0000))));
            add_inputs<kRows>(rows, k, weights, std::min<int64_t>(2, product.num_inputs - k), sums);
        }
    } else {
        alignas(64) float weights[kForm.block * kLanes];
        for (int64_t k = 0; k < product.num_inputs; k += kForm.block, panel += kForm.block_bytes()) {
            expand_block<kFormat>(panel, weights);
            int64_t count = std::min<int64_t>(kForm.block, product.num_inputs - k);
            add_inputs<kRows>(rows, k, weights, count, sums);
        }
    }
    unrolled<kRows>([&](auto r) HEADWAY_INLINE { store(out + kLanes * r, sums[r]); });
}

}  // namespace headway

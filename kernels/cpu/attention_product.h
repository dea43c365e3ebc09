// The product inside attention: a few rows with a packed matrix.
#pragma once

#include <cstdint>

#include "vec.h"

namespace headway {

constexpr int kRows = 6;  // rows of a product at most: their sums fill the registers
#if defined(__AVX512F__)
constexpr int kVectors = 4;  // of 16 columns
#else
constexpr int kVectors = 1;
#endif

// c[r][j] = sum over k of a[r][k] * b[k][j], added up in order of k with one rounding a step,
// whatever the shape of the block: so an element's bits depend on its row and its column alone.
template <int kNumRows, int kNumVectors>
void product_block(const float* const* a, const float* b, int64_t b_stride, int64_t num_inner,
                   float* c, int64_t c_stride) {
    Floats sum[kNumRows][kNumVectors];
    for (auto& row : sum)
        for (Floats& each : row) each = zeros();
    for (int64_t k = 0; k < num_inner; ++k) {
        Floats column[kNumVectors];
        for (int j = 0; j < kNumVectors; ++j) column[j] = load(b + k * b_stride + j * kLanes);
        for (int r = 0; r < kNumRows; ++r) {
            Floats x = splat(a[r][k]);
            for (int j = 0; j < kNumVectors; ++j) sum[r][j] = fma(x, column[j], sum[r][j]);
        }
    }
    for (int r = 0; r < kNumRows; ++r)
        for (int j = 0; j < kNumVectors; ++j) store(c + r * c_stride + j * kLanes, sum[r][j]);
}

template <int kNumRows>
void product_rows(const float* const* a, const float* b, int64_t b_stride, int64_t num_inner,
                  int64_t num_vectors, float* c, int64_t c_stride) {
    int64_t at = 0;
    for (; at + kVectors <= num_vectors; at += kVectors)
        product_block<kNumRows, kVectors>(a, b + at * kLanes, b_stride, num_inner, c + at * kLanes,
                                          c_stride);
    for (; at < num_vectors; ++at)
        product_block<kNumRows, 1>(a, b + at * kLanes, b_stride, num_inner, c + at * kLanes,
                                   c_stride);
}

// Up to kRows rows by 16 * num_vectors columns.
inline void product(int64_t num_rows, const float* const* a, const float* b, int64_t b_stride,
                    int64_t num_inner, int64_t num_vectors, float* c, int64_t c_stride) {
    switch (num_rows) {
        case 1: return product_rows<1>(a, b, b_stride, num_inner, num_vectors, c, c_stride);
        case 2: return product_rows<2>(a, b, b_stride, num_inner, num_vectors, c, c_stride);
        case 3: return product_rows<3>(a, b, b_stride, num_inner, num_vectors, c, c_stride);
        case 4: return product_rows<4>(a, b, b_stride, num_inner, num_vectors, c, c_stride);
        case 5: return product_rows<5>(a, b, b_stride, num_inner, num_vectors, c, c_stride);
        default: return product_rows<6>(a, b, b_stride, num_inner, num_vectors, c, c_stride);
    }
}

}  // namespace headway

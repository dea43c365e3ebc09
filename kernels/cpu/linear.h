// What the products share: formats of weights, quantised rows, and the sums of one panel.
//
// kernels/packed.py describes the weights, kernels/linear.py the rows.
#pragma once

#include <cstdint>

#include "vec.h"

namespace headway {

enum FormatNumber { kF32, kBf16, kQ4_0, kQ4_1, kQ8, kQ4K, kQ8_1, kQ8K, kQ6K, kNumFormats };

// A row of the table in kernels/packed.py.
struct Format {
    int code_bits, block, zero, scale_bytes;
    bool has_minimum;

    constexpr int scales_bytes() const { return kLanes * scale_bytes; }
    constexpr int codes_at() const { return scales_bytes() * (has_minimum ? 2 : 1); }
    constexpr int block_bytes() const { return codes_at() + kLanes * block * code_bits / 8; }
};

constexpr Format kFormats[kNumFormats] = {
    {32, 1, 0, 0, false},  // f32
    {16, 2, 0, 0, false},  // bf16
    {4, 32, 8, 2, false},  // q4_0
    {4, 32, 0, 2, true},   // q4_1
    {8, 32, 128, 2, false},  // q8
    {4, 32, 0, 4, true},   // q4_k
    {8, 32, 0, 2, true},   // q8_1
    {8, 32, 0, 4, true},   // q8_k
    {8, 16, 32, 4, false},  // q6_k
};

// Inputs of a quantised row that share a scale, and rows that lie together.
constexpr int kBlock = 32, kGroup = 16;

// A block of 16 quantised rows.
struct RowBlock {
    int8_t codes[kGroup][kBlock];
    float scales[kGroup];
    float scaled_sums[kGroup];
    int32_t sums[kGroup];
    int32_t first_sums[kGroup];  // of the first 16 codes
};
static_assert(sizeof(RowBlock) == 768, "as in kernels/linear.py");

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The leading arguments of every product.
struct Product {
    const void* x;
    int64_t x_stride;      // in floats
    const int64_t* index;  // row r is row index[r] of x; null: row r
    int64_t num_rows;
    int64_t quantised;  // whether x holds quantised rows; then it has no stride and no index
    const uint8_t* weight;
    int64_t format;
    int64_t num_outputs, num_inputs;

    int64_t num_panels() const { return ceil_div(num_outputs, kLanes); }
    const float* float_row(int64_t r) const {
        return static_cast<const float*>(x) + (index ? index[r] : r) * x_stride;
    }
    const RowBlock* group(int64_t r) const {
        return static_cast<const RowBlock*>(x) + r / kGroup * ceil_div(num_inputs, kBlock);
    }
};

// Rows that are taken through one panel before the next: their sums stay in the first cache. A
// multiple of kGroup.
constexpr int64_t kRowChunk = 128;

// Panels that are taken together where that is faster.
constexpr int64_t kPanelChunk = 2;

// The sums of a chunk.
struct alignas(64) ChunkSums {
    float at[kPanelChunk][kRowChunk * kLanes];
};

// sums.at[p][r kLanes + lane] = row first_row + r times output 16 (panel + p) + lane, for num_panels
// <= kPanelChunk and num_rows <= kRowChunk.
void chunk_sums(const Product& product, int64_t panel, int64_t num_panels, int64_t first_row,
                int64_t num_rows, ChunkSums& sums);

// Asks for what lies further on, over the panel's end into the next: far ahead into the second cache,
// which waits for more lines at a time, and nearer into the first. The hardware's own prefetching
// stops at each page of 4 KiB.
template <int kBytes>
HEADWAY_INLINE inline void prefetch_block(const uint8_t* block) {
    constexpr int kFar = 4096, kNear = 512;
    for (int at = 0; at < kBytes; at += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(block + kFar + at), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(block + kNear + at), _MM_HINT_T0);
    }
}

// The steps d (at = 0) or the minimums (at = scales_bytes) of 16 outputs.
template <int kFormat>
HEADWAY_INLINE inline Floats load_scales(const uint8_t* at) {
    if constexpr (kFormats[kFormat].scale_bytes == 2)
        return load_half(reinterpret_cast<const uint16_t*>(at));
    else
        return load(reinterpret_cast<const float*>(at));
}

}  // namespace headway

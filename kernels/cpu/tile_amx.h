// Quantised rows times a panel with AMX: the sums of 16 rows and 16 outputs in one instruction.
//
// Scales change with each block, so a tile's sums of one block leave for the vector unit before the
// next block; there they meet the same operations in the same order as in dot_avx512.h.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "dot_avx512.h"
#include "linear.h"

namespace headway {

// Fewer rows than this are not worth a tile, nor are up to so many left after full tiles.
constexpr int kLeastTileRows = 13, kMostLeftRows = 8;
// Blocks whose codes are unpacked at a time, for all rows: they stay in the first cache.
constexpr int kTileBlocks = 16;

// Linux gives a process tiles on request.
inline bool request_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// gcc's intrinsics take a tile's number only as a literal.
#define SUMS_TILE 0
#define ROWS_TILE 1
#define CODES_TILE 2

// gcc's intrinsics do not say that they read memory, so stores before them could be left out.
HEADWAY_INLINE inline void finish_stores() { asm volatile("" ::: "memory"); }

// The shapes of the tiles: sums [16, 16] int32, rows [16, block], codes [block / 4, 16, 4] bytes.
template <int kFormat>
void configure_tiles() {
    static constexpr Format kForm = kFormats[kFormat];
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, kForm.block, 64};
        uint8_t num_rows[16] = {kGroup, kGroup, kForm.block / 4};
    } config;
    finish_stores();
    _tile_loadconfig(&config);
}

// The codes of `count` blocks, less the zero point, as signed or else as unsigned bytes.
template <int kFormat>
void unpack_blocks(const uint8_t* block, int64_t count, uint8_t* to) {
    static constexpr Format kForm = kFormats[kFormat];
    constexpr int kGroups = kForm.block / 4, kStored = kGroups * kForm.code_bits / 8;
    __m512i zero = _mm512_set1_epi8(static_cast<char>(kForm.zero));
    for (int64_t b = 0; b < count; ++b, block += kForm.block_bytes(), to += 64 * kGroups)
        unrolled<kStored>([&](auto j) HEADWAY_INLINE {
            Codes codes = load_codes<kFormat>(block + kForm.codes_at() + 64 * j);
            _mm512_store_si512(to + 64 * j, _mm512_sub_epi8(codes.first, zero));
            if constexpr (kStored < kGroups)
                _mm512_store_si512(to + 64 * (j + kStored), _mm512_sub_epi8(codes.second, zero));
        });
}

// to[r][lane] = the sums of block b, whose codes are unpacked.
template <int kFormat>
HEADWAY_INLINE inline void multiply_tile(const RowBlock* rows, int64_t b, const uint8_t* codes,
                                         int32_t* to) {
    static constexpr Format kForm = kFormats[kFormat];
    const RowBlock& block = rows[b * kForm.block / kBlock];
    _tile_loadd(ROWS_TILE, block.codes[0] + b * kForm.block % kBlock, kBlock);
    _tile_loadd(CODES_TILE, codes, 64);
    _tile_zero(SUMS_TILE);
    if constexpr (kForm.has_minimum)
        _tile_dpbsud(SUMS_TILE, ROWS_TILE, CODES_TILE);
    else
        _tile_dpbssd(SUMS_TILE, ROWS_TILE, CODES_TILE);
    _tile_stored(SUMS_TILE, to, 64);
}

template <int kFormat>
HEADWAY_INLINE inline void add_tile(const RowBlock& rows, const uint8_t* block,
                                    const int32_t* dots, Floats (&sums)[kGroup]) {
    static constexpr Format kForm = kFormats[kFormat];
    Floats step = load_scales<kFormat>(block), minimum = zeros();
    if constexpr (kForm.has_minimum) minimum = load_scales<kFormat>(block + kForm.scales_bytes());
    unrolled<kGroup>([&](auto r) HEADWAY_INLINE {
        Floats scale = step * splat(rows.scales[r]);
        sums[r] = fma(to_floats(load(dots + kLanes * r)), scale, sums[r]);
        if constexpr (kForm.has_minimum)
            sums[r] = fma(minimum, splat(rows.scaled_sums[r]), sums[r]);
    });
}

// Adds `count` blocks from block `first` on to the sums of a group.
template <int kFormat>
void add_blocks(const RowBlock* rows, int64_t first, int64_t count, const uint8_t* block,
                const uint8_t* codes, float* out) {
    static constexpr Format kForm = kFormats[kFormat];
    alignas(64) int32_t dots[2][kGroup * kLanes];
    Floats sums[kGroup];
    unrolled<kGroup>([&](auto r) HEADWAY_INLINE { sums[r] = load(out + kLanes * r); });
    // One block's tile is under way while the last one's sums are scaled.
    multiply_tile<kFormat>(rows, first, codes, dots[0]);
    for (int64_t b = 0; b < count; ++b, block += kForm.block_bytes()) {
        if (b + 1 < count) {
            codes += kLanes * kForm.block;
            multiply_tile<kFormat>(rows, first + b + 1, codes, dots[(b + 1) % 2]);
        }
        add_tile<kFormat>(rows[(first + b) * kForm.block / kBlock], block, dots[b % 2], sums);
    }
    unrolled<kGroup>([&](auto r) HEADWAY_INLINE { store(out + kLanes * r, sums[r]); });
}

// The sums of a panel, from the first row of a group on, for whole groups: rows that are not there have
// scales of zero.
template <int kFormat>
void tile_panel(const Product& product, const uint8_t* panel, int64_t first_row, int64_t num_rows,
                float* sums) {
    static constexpr Format kForm = kFormats[kFormat];
    alignas(64) uint8_t codes[kTileBlocks * kLanes * kForm.block];
    int64_t num_blocks = ceil_div(product.num_inputs, kForm.block);
    std::memset(sums, 0, ceil_div(num_rows, kGroup) * kGroup * kLanes * sizeof(float));
    configure_tiles<kFormat>();
    for (int64_t b = 0; b < num_blocks; b += kTileBlocks) {
        const uint8_t* block = panel + b * kForm.block_bytes();
        int64_t count = std::min<int64_t>(kTileBlocks, num_blocks - b);
        unpack_blocks<kFormat>(block, count, codes);
        finish_stores();
        for (int64_t r = 0; r < num_rows; r += kGroup)
            add_blocks<kFormat>(product.group(first_row + r), b, count, block, codes,
                                sums + r * kLanes);
    }
    _tile_release();
}

}  // namespace headway

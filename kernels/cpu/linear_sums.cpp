// chunk_sums: picks the loop for a format, a kind of rows and a number of rows.
#include <algorithm>
#include <utility>

#include "float_rows.h"
#include "linear.h"
#if defined(__AMX_INT8__)
#include "tile_amx.h"
#elif defined(__AVX512VNNI__)
#include "dot_avx512.h"
#else
#include "dot_avx2.h"
#endif

namespace headway {
namespace {

#if defined(__AMX_INT8__)
const bool has_tiles = request_tiles();
#endif

using DotLoop = void (*)(const RowBlock* rows, int first, const uint8_t* panel, int64_t num_blocks,
                         float* out);
using Expand = void (*)(const uint8_t* block, float* to);
using FloatLoop = void (*)(const Product&, const uint8_t* panel, int64_t panel_bytes,
                           int64_t first_row, Expand expand, float* out);

// loops[n - 1] takes n rows.
template <int kFormat, int... kCounts>
DotLoop dot_loop(int64_t num_rows, std::integer_sequence<int, kCounts...>) {
    constexpr DotLoop kLoops[] = {dot_rows<kFormat, kCounts + 1>...};
    return kLoops[num_rows - 1];
}
template <FloatKind kKind, int kPanels, int... kCounts>
FloatLoop float_loop(int64_t num_rows, std::integer_sequence<int, kCounts...>) {
    constexpr FloatLoop kLoops[] = {float_rows<kKind, kCounts + 1, kPanels>...};
    return kLoops[num_rows - 1];
}

// work(begin, end) for parts of nearly equal size, none above `most`.
template <typename Work>
void in_parts(int64_t count, int64_t most, Work work) {
    int64_t num_parts = ceil_div(count, most);
    for (int64_t part = 0; part < num_parts; ++part)
        work(part * count / num_parts, (part + 1) * count / num_parts);
}

constexpr Expand kExpand[kNumFormats] = {
    nullptr,           nullptr,            expand_block<kQ4_0>, expand_block<kQ4_1>,
    expand_block<kQ8>, expand_block<kQ4K>, expand_block<kQ8_1>, expand_block<kQ8K>,
    expand_block<kQ6K>,
};

template <FloatKind kKind, int kPanels>
void float_panels(const Product& product, const uint8_t* panel, int64_t panel_bytes,
                  int64_t first_row, int64_t num_rows, float* sums) {
    in_parts(num_rows, kMostFloatRows, [&](int64_t begin, int64_t end) {
        auto counts = std::make_integer_sequence<int, kMostFloatRows>();
        FloatLoop loop = float_loop<kKind, kPanels>(end - begin, counts);
        Expand expand = kExpand[product.format];
        loop(product, panel, panel_bytes, first_row + begin, expand, sums + begin * kLanes);
    });
}

template <FloatKind kKind>
void float_chunk(const Product& product, const uint8_t* panel, int64_t panel_bytes,
                 int64_t num_panels, int64_t first_row, int64_t num_rows, ChunkSums& sums) {
    if (num_panels == kMostFloatPanels) {
        float_panels<kKind, kMostFloatPanels>(product, panel, panel_bytes, first_row, num_rows,
                                              sums.at[0]);
        return;
    }
    for (int64_t p = 0; p < num_panels; ++p)
        float_panels<kKind, 1>(product, panel + p * panel_bytes, panel_bytes, first_row, num_rows,
                               sums.at[p]);
}

template <int kFormat>
void dot_panel(const Product& product, const uint8_t* panel, int64_t first_row, int64_t num_rows,
               float* sums) {
#if defined(__AMX_INT8__)
    int64_t num_left = num_rows % kGroup;
    if (num_rows >= kLeastTileRows && has_tiles) {
        int64_t num_tiled = num_left <= kMostLeftRows ? num_rows - num_left : num_rows;
        tile_panel<kFormat>(product, panel, first_row, num_tiled, sums);
        first_row += num_tiled;
        num_rows -= num_tiled;
        sums += num_tiled * kLanes;
    }
#endif
    int64_t num_blocks = ceil_div(product.num_inputs, kFormats[kFormat].block);
    for (int64_t group = 0; group < num_rows; group += kGroup) {
        const RowBlock* rows = product.group(first_row + group);
        int64_t in_group = std::min<int64_t>(kGroup, num_rows - group);
        in_parts(in_group, kMostDotRows, [&](int64_t begin, int64_t end) {
            auto counts = std::make_integer_sequence<int, kMostDotRows>();
            DotLoop loop = dot_loop<kFormat>(end - begin, counts);
            float* out = sums + (group + begin) * kLanes;
            loop(rows, static_cast<int>(begin), panel, num_blocks, out);
        });
    }
}

template <int kFormat>
void dot_chunk(const Product& product, const uint8_t* panel, int64_t panel_bytes,
               int64_t num_panels, int64_t first_row, int64_t num_rows, ChunkSums& sums) {
    for (int64_t p = 0; p < num_panels; ++p)
        dot_panel<kFormat>(product, panel + p * panel_bytes, first_row, num_rows, sums.at[p]);
}

using ChunkLoop = void (*)(const Product&, const uint8_t* panel, int64_t panel_bytes,
                           int64_t num_panels, int64_t first_row, int64_t num_rows, ChunkSums&);

ChunkLoop float_chunk_of(int64_t format) {
    if (format == kF32) return float_chunk<kAsTheyAre>;
    return format == kBf16 ? float_chunk<kInPairs> : float_chunk<kExpanded>;
}

// Rows are quantised only for weights that are.
constexpr ChunkLoop kDotChunks[kNumFormats] = {
    nullptr,         nullptr,          dot_chunk<kQ4_0>, dot_chunk<kQ4_1>, dot_chunk<kQ8>,
    dot_chunk<kQ4K>, dot_chunk<kQ8_1>, dot_chunk<kQ8K>,  dot_chunk<kQ6K>,
};

}  // namespace

void chunk_sums(const Product& product, int64_t panel, int64_t num_panels, int64_t first_row,
                int64_t num_rows, ChunkSums& sums) {
    const Format& format = kFormats[product.format];
    int64_t panel_bytes = ceil_div(product.num_inputs, format.block) * format.block_bytes();
    const uint8_t* at = product.weight + panel * panel_bytes;
    ChunkLoop loop =
        product.quantised ? kDotChunks[product.format] : float_chunk_of(product.format);
    loop(product, at, panel_bytes, num_panels, first_row, num_rows, sums);
}

}  // namespace headway

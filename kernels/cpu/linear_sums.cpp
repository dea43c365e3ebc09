// panel_sums: picks the loop for a format, a kind of rows and a number of rows.
#include <utility>

#include "float_rows.h"
#include "linear.h"
#if defined(__AVX512VNNI__)
#include "dot_avx512.h"
#else
#include "dot_avx2.h"
#endif

namespace headway {
namespace {

constexpr int kMostFloatRows = 8;

using TileLoop = void (*)(const Product&, const RowLayout&, const uint8_t* panel, int64_t first_row,
                          float* out);

template <int kFormat, int kRows>
void float_tile(const Product& product, const RowLayout&, const uint8_t* panel, int64_t first_row,
                float* out) {
    float_rows<kFormat, kRows>(product, panel, first_row, out);
}

// loops[n - 1] takes n rows.
template <int kFormat, int... kCounts>
TileLoop dot_loop(int64_t num_rows, std::integer_sequence<int, kCounts...>) {
    constexpr TileLoop kLoops[] = {dot_rows<kFormat, kCounts + 1>...};
    return kLoops[num_rows - 1];
}
template <int kFormat, int... kCounts>
TileLoop float_loop(int64_t num_rows, std::integer_sequence<int, kCounts...>) {
    constexpr TileLoop kLoops[] = {float_tile<kFormat, kCounts + 1>...};
    return kLoops[num_rows - 1];
}

// Rows in tiles of nearly equal size, none above the most that a loop takes.
template <int kMost, typename Choose>
void in_tiles(const Product& product, const uint8_t* panel, int64_t first_row, int64_t num_rows,
              float* sums, Choose choose) {
    RowLayout layout(product.num_inputs);
    int64_t num_tiles = ceil_div(num_rows, kMost);
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        int64_t begin = tile * num_rows / num_tiles, end = (tile + 1) * num_rows / num_tiles;
        choose(end - begin)(product, layout, panel, first_row + begin, sums + begin * kLanes);
    }
}

using PanelLoop = void (*)(const Product&, const uint8_t* panel, int64_t first_row,
                           int64_t num_rows, float* sums);

template <int kFormat>
void float_panel(const Product& product, const uint8_t* panel, int64_t first_row, int64_t num_rows,
                 float* sums) {
    in_tiles<kMostFloatRows>(product, panel, first_row, num_rows, sums, [](int64_t count) {
        return float_loop<kFormat>(count, std::make_integer_sequence<int, kMostFloatRows>());
    });
}

template <int kFormat>
void dot_panel(const Product& product, const uint8_t* panel, int64_t first_row, int64_t num_rows,
               float* sums) {
    in_tiles<kMostDotRows>(product, panel, first_row, num_rows, sums, [](int64_t count) {
        return dot_loop<kFormat>(count, std::make_integer_sequence<int, kMostDotRows>());
    });
}

constexpr PanelLoop kFloatPanels[kNumFormats] = {
    float_panel<kF32>,  float_panel<kBf16>, float_panel<kQ4_0>, float_panel<kQ4_1>,
    float_panel<kQ8>,   float_panel<kQ4K>,  float_panel<kQ8_1>, float_panel<kQ8K>,
    float_panel<kQ6K>,
};
// Rows are quantised only for weights that are.
constexpr PanelLoop kDotPanels[kNumFormats] = {
    nullptr,         nullptr,         dot_panel<kQ4_0>, dot_panel<kQ4_1>, dot_panel<kQ8>,
    dot_panel<kQ4K>, dot_panel<kQ8_1>, dot_panel<kQ8K>, dot_panel<kQ6K>,
};

}  // namespace

void panel_sums(const Product& product, int64_t panel, int64_t first_row, int64_t num_rows,
                float* sums) {
    const Format& format = kFormats[product.format];
    int64_t panel_bytes = ceil_div(product.num_inputs, format.block) * format.block_bytes();
    const uint8_t* at = product.weight + panel * panel_bytes;
    const auto& loops = product.quantised ? kDotPanels : kFloatPanels;
    loops[product.format](product, at, first_row, num_rows, sums);
}

}  // namespace headway

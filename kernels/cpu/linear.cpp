// quantise_rows and linear: see kernels/linear.py for the contracts.
#include "linear.h"

#include <algorithm>
#include <limits>

#include "math.h"
#include "team.h"

namespace headway {
namespace {

struct QuantiseRows {
    const float* x;
    int64_t x_stride;
    const int64_t* index;
    int64_t num_rows, num_inputs;
    RowBlock* out;
};

// Sixteen inputs, zeros beyond the row's end.
Floats load_inputs(const float* row, int64_t first, int64_t num_inputs) {
    int64_t left = std::clamp<int64_t>(num_inputs - first, 0, kLanes);
    return left ? load(row + first, first_lanes(left)) : zeros();
}

// NaN where an input is, so that the outputs are too.
float block_scale(Floats a, Floats b) {
    float scale = max_lanes(max(abs(a), abs(b))) / 127.0f;
    bool has_nan = bits_of((a <= a) & (b <= b)) != 0xffff;
    return has_nan ? std::numeric_limits<float>::quiet_NaN() : scale;
}

Ints codes_of(Floats x, float scale) {
    if (scale == 0.0f) return splat(0);
    // A step that is no normal number is coarse: a quotient can pass 127.
    return to_ints(min(splat(127.0f), max(splat(-127.0f), x / splat(scale))));
}

void quantise_row(const float* row, int64_t num_inputs, int64_t b, int r, RowBlock& out) {
    Floats first = load_inputs(row, b * kBlock, num_inputs);
    Floats second = load_inputs(row, b * kBlock + kLanes, num_inputs);
    float scale = block_scale(first, second);
    Ints first_codes = codes_of(first, scale), second_codes = codes_of(second, scale);
    store_bytes(out.codes[r], first_codes);
    store_bytes(out.codes[r] + kLanes, second_codes);
    out.first_sums[r] = sum_lanes(first_codes);
    out.sums[r] = out.first_sums[r] + sum_lanes(second_codes);
    out.scales[r] = scale;
    out.scaled_sums[r] = scale * static_cast<float>(out.sums[r]);
}

void quantise_rows(const void* words, Thread& thread) {
    const QuantiseRows& args = *static_cast<const QuantiseRows*>(words);
    int64_t num_blocks = ceil_div(args.num_inputs, kBlock);
    int64_t total = ceil_div(args.num_rows, kGroup) * num_blocks;
    int64_t begin = total * thread.index / thread.count;
    int64_t end = total * (thread.index + 1) / thread.count;
    for (int64_t at = begin; at < end; ++at) {
        RowBlock& block = args.out[at];
        int64_t first = at / num_blocks * kGroup;
        int num_rows = static_cast<int>(std::min<int64_t>(kGroup, args.num_rows - first));
        for (int r = 0; r < num_rows; ++r) {
            int64_t row = args.index ? args.index[first + r] : first + r;
            quantise_row(args.x + row * args.x_stride, args.num_inputs, at % num_blocks, r, block);
        }
        for (int r = num_rows; r < kGroup; ++r) block.scales[r] = block.scaled_sums[r] = 0.0f;
    }
}

struct Linear {
    Product product;
    float* out;
    int64_t out_stride;
    const float* bias;
    const float* residual;
    int64_t residual_stride;
    int64_t activation;
};

enum Activation { kNone, kSilu, kGeluTanh, kGelu };

Floats activate(int64_t activation, Floats x) {
    if (activation == kSilu) return silu(x);
    if (activation == kGeluTanh) return gelu_tanh(x);
    return gelu(x);
}

// One panel of plain outputs.
void finish_panel(const Linear& args, int64_t panel, int64_t first_row, int64_t num_rows,
                  const float* sums) {
    int64_t column = panel * kLanes;
    Mask mask = first_lanes(std::min<int64_t>(kLanes, args.product.num_outputs - column));
    Floats bias = args.bias ? load(args.bias + column, mask) : zeros();
    for (int64_t r = 0; r < num_rows; ++r) {
        Floats y = load(sums + r * kLanes);
        if (args.bias) y = y + bias;
        int64_t row = first_row + r;
        if (args.residual)
            y = y + load(args.residual + row * args.residual_stride + column, mask);
        store(args.out + row * args.out_stride + column, y, mask);
    }
}

// A panel of gates and one of the values that they scale.
void finish_gated(const Linear& args, int64_t pair, int64_t first_row, int64_t num_rows,
                  const float* gates, const float* ups) {
    Floats gate_bias = zeros(), up_bias = zeros();
    if (args.bias) {
        gate_bias = load(args.bias + 2 * pair * kLanes);
        up_bias = load(args.bias + (2 * pair + 1) * kLanes);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        Floats gate = load(gates + r * kLanes), up = load(ups + r * kLanes);
        if (args.bias) {
            gate = gate + gate_bias;
            up = up + up_bias;
        }
        float* out = args.out + (first_row + r) * args.out_stride + pair * kLanes;
        store(out, activate(args.activation, gate) * up);
    }
}

void multiply_panels(const Linear& args, int64_t begin, int64_t end) {
    ChunkSums sums;
    for (int64_t row = 0; row < args.product.num_rows; row += kRowChunk) {
        int64_t num_rows = std::min(kRowChunk, args.product.num_rows - row);
        for (int64_t panel = begin; panel < end; panel += kPanelChunk) {
            int64_t num_panels = std::min(kPanelChunk, end - panel);
            chunk_sums(args.product, panel, num_panels, row, num_rows, sums);
            if (args.activation != kNone) {
                finish_gated(args, panel / 2, row, num_rows, sums.at[0], sums.at[1]);
                continue;
            }
            for (int64_t p = 0; p < num_panels; ++p)
                finish_panel(args, panel + p, row, num_rows, sums.at[p]);
        }
    }
}

void linear(const void* words, Thread& thread) {
    const Linear& args = *static_cast<const Linear*>(words);
    int64_t num_panels = args.product.num_panels();
    // Long runs of memory first, then ever shorter ones, which even out threads that were held up.
    // Pairs, since gates come with what they scale.
    for (int64_t begin = 0;;) {
        int64_t pairs = std::clamp<int64_t>((num_panels - begin) / (8 * thread.count), 1, 32);
        begin = thread.take(2 * pairs);
        if (begin >= num_panels) return;
        multiply_panels(args, begin, std::min(num_panels, begin + 2 * pairs));
    }
}

static_assert(num_fields<QuantiseRows>() == 6);
const Registration quantise_registration(
    "quantise_rows", "x:p x_stride:i index:p num_rows:i num_inputs:i out:p", quantise_rows);

static_assert(num_fields<Linear>() == 15);
const Registration linear_registration(
    "linear",
    "x:p x_stride:i index:p num_rows:i quantised:i weight:p format:i num_outputs:i num_inputs:i "
    "out:p out_stride:i bias:p residual:p residual_stride:i activation:i",
    linear);

}  // namespace
}  // namespace headway

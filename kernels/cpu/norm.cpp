// rms_norm and layer_norm: see kernels/norm.py for the contracts.
#include <cmath>

#include "team.h"
#include "vec.h"

namespace headway {
namespace {

// One order of additions whatever the number of threads: 16 partial sums, then a tree over them.
float sum(const float* x, int64_t width) {
    Floats partial = zeros();
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) partial = partial + load(x + i);
    return sum_lanes(partial + load(x + i, first_lanes(width - i)));
}

float sum_of_squares(const float* x, float center, int64_t width) {
    Floats partial = zeros(), middle = splat(center);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        Floats value = load(x + i) - middle;
        partial = fma(value, value, partial);
    }
    Mask rest = first_lanes(width - i);
    Floats value = select(rest, load(x + i, rest) - middle, zeros());
    return sum_lanes(fma(value, value, partial));
}

// out = f(x, i) for each register of elements, i the first of them.
template <typename F>
void each(const float* x, int64_t width, float* out, F f) {
    for (int64_t i = 0; i < width; i += kLanes) {
        Mask lanes = first_lanes(width - i < kLanes ? width - i : kLanes);
        store(out + i, f(load(x + i, lanes), i, lanes), lanes);
    }
}

struct RmsNorm {
    const float* x;
    int64_t x_stride, x_inner_stride;
    const float* weight;
    double epsilon;
    float* out;
    int64_t out_stride, out_inner_stride;
    int64_t num_rows, num_inner, width;
};

void rms_norm(const void* words, Thread& thread) {
    const RmsNorm& args = *static_cast<const RmsNorm*>(words);
    int64_t total = args.num_rows * args.num_inner;
    for (int64_t at = thread.index; at < total; at += thread.count) {
        int64_t row = at / args.num_inner, inner = at % args.num_inner;
        const float* x = args.x + row * args.x_stride + inner * args.x_inner_stride;
        float* out = args.out + row * args.out_stride + inner * args.out_inner_stride;
        float mean = sum_of_squares(x, 0.0f, args.width) / static_cast<float>(args.width);
        float scale = 1.0f / std::sqrt(mean + static_cast<float>(args.epsilon));
        each(x, args.width, out, [&](Floats value, int64_t i, Mask lanes) {
            return value * splat(scale) * load(args.weight + i, lanes);
        });
    }
}

struct LayerNorm {
    const float* x;
    int64_t x_stride, x_inner_stride;
    const float* weight;
    const float* bias;  // may be null, as may weight
    double epsilon;
    float* out;
    int64_t out_stride, out_inner_stride;
    int64_t num_rows, num_inner, width;
};

void layer_norm(const void* words, Thread& thread) {
    const LayerNorm& args = *static_cast<const LayerNorm*>(words);
    int64_t total = args.num_rows * args.num_inner;
    for (int64_t at = thread.index; at < total; at += thread.count) {
        int64_t row = at / args.num_inner, inner = at % args.num_inner;
        const float* x = args.x + row * args.x_stride + inner * args.x_inner_stride;
        float* out = args.out + row * args.out_stride + inner * args.out_inner_stride;
        float width = static_cast<float>(args.width);
        float mean = sum(x, args.width) / width;
        float variance = sum_of_squares(x, mean, args.width) / width;
        float scale = 1.0f / std::sqrt(variance + static_cast<float>(args.epsilon));
        each(x, args.width, out, [&](Floats value, int64_t i, Mask lanes) {
            value = (value - splat(mean)) * splat(scale);
            if (args.weight) value = value * load(args.weight + i, lanes);
            return args.bias ? value + load(args.bias + i, lanes) : value;
        });
    }
}

static_assert(num_fields<RmsNorm>() == 11);
const Registration rms_norm_registration(
    "rms_norm",
    "x:p x_stride:i x_inner_stride:i weight:p epsilon:d out:p "
    "out_stride:i out_inner_stride:i num_rows:i num_inner:i width:i",
    rms_norm);

static_assert(num_fields<LayerNorm>() == 12);
const Registration layer_norm_registration(
    "layer_norm",
    "x:p x_stride:i x_inner_stride:i weight:p bias:p epsilon:d out:p "
    "out_stride:i out_inner_stride:i num_rows:i num_inner:i width:i",
    layer_norm);

}  // namespace
}  // namespace headway

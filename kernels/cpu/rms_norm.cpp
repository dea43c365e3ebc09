// rms_norm: see kernels/norm.py for the contract.
#include <cmath>

#include "team.h"

namespace headway {
namespace {

struct RmsNorm {
    const float* x;
    int64_t x_stride, x_inner_stride;
    const float* weight;
    double epsilon;
    float* out;
    int64_t out_stride, out_inner_stride;
    int64_t num_rows, num_inner, width;
};

// One order of additions whatever the number of threads: 16 partial sums, then a tree over them.
float sum_of_squares(const float* x, int64_t width) {
    float partial[16] = {};
    int64_t i = 0;
    for (; i + 16 <= width; i += 16)
        for (int lane = 0; lane < 16; ++lane) partial[lane] += x[i + lane] * x[i + lane];
    for (int lane = 0; i < width; ++i, ++lane) partial[lane] += x[i] * x[i];
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) partial[lane] += partial[lane + half];
    return partial[0];
}

void rms_norm(const void* words, Thread& thread) {
    const RmsNorm& args = *static_cast<const RmsNorm*>(words);
    int64_t total = args.num_rows * args.num_inner;
    for (int64_t at = thread.index; at < total; at += thread.count) {
        int64_t row = at / args.num_inner, inner = at % args.num_inner;
        const float* x = args.x + row * args.x_stride + inner * args.x_inner_stride;
        float* out = args.out + row * args.out_stride + inner * args.out_inner_stride;
        float mean = sum_of_squares(x, args.width) / static_cast<float>(args.width);
        float scale = 1.0f / std::sqrt(mean + static_cast<float>(args.epsilon));
        for (int64_t i = 0; i < args.width; ++i) out[i] = x[i] * scale * args.weight[i];
    }
}

static_assert(num_fields<RmsNorm>() == 11);
const Registration registration("rms_norm",
                                "x:p x_stride:i x_inner_stride:i weight:p epsilon:d out:p "
                                "out_stride:i out_inner_stride:i num_rows:i num_inner:i width:i",
                                rms_norm);

}  // namespace
}  // namespace headway

// reduce and softmax over the last dimension: see kernels/reduce.py for the contracts.
#include <limits>

#include "math.h"
#include "team.h"

namespace headway {
namespace {

constexpr int kOuter = 4;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

enum Reduction : int64_t { kSum = 0, kMean = 1, kMaximum = 2 };

// 16 partial results, element i going to lane i % 16, then a tree over the lanes.
template <typename F>
float fold(const float* x, int64_t stride, int64_t width, float start, F f) {
    float partial[kLanes];
    for (float& value : partial) value = start;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane)
            partial[lane] = f(partial[lane], x[(i + lane) * stride]);
    for (int lane = 0; i < width; ++i, ++lane) partial[lane] = f(partial[lane], x[i * stride]);
    for (int half = kLanes / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            partial[lane] = f(partial[lane], partial[lane + half]);
    return partial[0];
}

float add(float x, float y) { return x + y; }
float larger(float x, float y) { return x > y || x != x ? x : y; }

struct Reduce {
    int64_t operation;
    const float* x;
    float* out;
    int64_t width, x_inner_stride;
    int64_t size[kOuter], x_stride[kOuter], out_stride[kOuter];
};

void reduce(const void* words, Thread& thread) {
    const Reduce& args = *static_cast<const Reduce*>(words);
    int64_t total = args.size[0] * args.size[1] * args.size[2] * args.size[3];
    for (int64_t at = thread.index; at < total; at += thread.count) {
        int64_t x_at = 0, out_at = 0;
        for (int64_t dim = kOuter - 1, rest = at; dim >= 0; rest /= args.size[dim], --dim) {
            x_at += rest % args.size[dim] * args.x_stride[dim];
            out_at += rest % args.size[dim] * args.out_stride[dim];
        }
        const float* x = args.x + x_at;
        float result = args.operation == kMaximum
                           ? fold(x, args.x_inner_stride, args.width, kLowest, larger)
                           : fold(x, args.x_inner_stride, args.width, 0.0f, add);
        if (args.operation == kMean) result /= static_cast<float>(args.width);
        args.out[out_at] = result;
    }
}

struct Softmax {
    const float* x;
    float* out;
    int64_t width, x_inner_stride, out_inner_stride;
    int64_t size[kOuter], x_stride[kOuter], out_stride[kOuter];
};

void softmax(const void* words, Thread& thread) {
    const Softmax& args = *static_cast<const Softmax*>(words);
    int64_t total = args.size[0] * args.size[1] * args.size[2] * args.size[3];
    for (int64_t at = thread.index; at < total; at += thread.count) {
        int64_t x_at = 0, out_at = 0;
        for (int64_t dim = kOuter - 1, rest = at; dim >= 0; rest /= args.size[dim], --dim) {
            x_at += rest % args.size[dim] * args.x_stride[dim];
            out_at += rest % args.size[dim] * args.out_stride[dim];
        }
        const float* x = args.x + x_at;
        float* out = args.out + out_at;
        int64_t step = args.out_inner_stride;
        float largest = fold(x, args.x_inner_stride, args.width, kLowest, larger);
        for (int64_t i = 0; i < args.width; i += kLanes) {
            int64_t count = args.width - i < kLanes ? args.width - i : kLanes;
            float room[kLanes] = {};
            for (int64_t j = 0; j < count; ++j) room[j] = x[(i + j) * args.x_inner_stride];
            store(room, exp(load(room) - splat(largest)));
            for (int64_t j = 0; j < count; ++j) out[(i + j) * step] = room[j];
        }
        float scale = 1.0f / fold(out, step, args.width, 0.0f, add);
        for (int64_t i = 0; i < args.width; ++i) out[i * step] *= scale;
    }
}

static_assert(num_fields<Reduce>() == 17);
const Registration reduce_registration(
    "reduce",
    "operation:i x:p out:p width:i x_inner_stride:i size0:i size1:i size2:i size3:i x_stride0:i "
    "x_stride1:i x_stride2:i x_stride3:i out_stride0:i out_stride1:i out_stride2:i out_stride3:i",
    reduce);

static_assert(num_fields<Softmax>() == 17);
const Registration softmax_registration(
    "softmax",
    "x:p out:p width:i x_inner_stride:i out_inner_stride:i size0:i size1:i size2:i size3:i "
    "x_stride0:i x_stride1:i x_stride2:i x_stride3:i out_stride0:i out_stride1:i out_stride2:i "
    "out_stride3:i",
    softmax);

}  // namespace
}  // namespace headway

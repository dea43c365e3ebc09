// rope: see kernels/rope.py for the contract.
#include "team.h"
#include "vec.h"

namespace headway {
namespace {

// The halves of the first `rotary` elements are the two coordinates; the rest is copied. Products
// and sums are rounded one by one, as the model's own code does. `out` may be `x`.
void rotate(const float* x, const float* cos, const float* sin, int64_t rotary,
            int64_t head_size, float* out) {
    int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
        Mask lanes = first_lanes(half - i < kLanes ? half - i : kLanes);
        Floats first = load(x + i, lanes), second = load(x + i + half, lanes);
        Floats low = first * load(cos + i, lanes) - second * load(sin + i, lanes);
        Floats high = second * load(cos + i + half, lanes) + first * load(sin + i + half, lanes);
        store(out + i, low, lanes);
        store(out + i + half, high, lanes);
    }
    if (out != x)
        for (int64_t i = rotary; i < head_size; ++i) out[i] = x[i];
}

struct Rope {
    const float* x;
    int64_t x_stride, x_head_stride;
    const float* cos;
    const float* sin;
    int64_t angle_stride;
    float* out;
    int64_t out_stride, out_head_stride;
    int64_t num_rows, num_heads, head_size, rotary_size;
};

void rope(const void* words, Thread& thread) {
    const Rope& args = *static_cast<const Rope*>(words);
    int64_t total = args.num_rows * args.num_heads;
    int64_t begin = total * thread.index / thread.count;
    int64_t end = total * (thread.index + 1) / thread.count;
    for (int64_t at = begin; at < end; ++at) {
        int64_t row = at / args.num_heads, head = at % args.num_heads;
        rotate(args.x + row * args.x_stride + head * args.x_head_stride,
               args.cos + row * args.angle_stride, args.sin + row * args.angle_stride,
               args.rotary_size, args.head_size,
               args.out + row * args.out_stride + head * args.out_head_stride);
    }
}

static_assert(num_fields<Rope>() == 13);
const Registration registration(
    "rope",
    "x:p x_stride:i x_head_stride:i cos:p sin:p angle_stride:i out:p out_stride:i "
    "out_head_stride:i num_rows:i num_heads:i head_size:i rotary_size:i",
    rope);

}  // namespace
}  // namespace headway

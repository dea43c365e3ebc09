// Rotating one head by the angles of its row.
#pragma once

#include <cstdint>

#include "vec.h"

namespace headway {

// The halves of the first `rotary` elements are the two coordinates; the rest is copied. Products
// and sums are rounded one by one, as the model's own code does. `out` may be `x`.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t rotary,
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

}  // namespace headway

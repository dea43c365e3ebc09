// The softmax inside attention: scores of a chunk become weights, and chunks are put together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention_product.h"
#include "kv_write.h"
#include "math.h"

namespace headway {

constexpr int64_t kChunk = 64;  // positions whose part of the softmax is computed alone

// exp(x) for x <= 0. Below exp(-64), which no sum with a 1 in it would notice, it is 0, since what
// follows is many times slower where numbers get too small to be normal.
inline Floats weight_of(Floats x) {
    const Floats lowest = splat(-64.0f), magic = splat(12582912.0f);
    Floats bounded = max(lowest, x);
    // Adding 1.5 * 2^23 leaves n, the nearest whole number, in the last bits.
    Floats shifted = fma(bounded, splat(0x1.715476p+0f), magic), n = shifted - magic;
    Floats r = fnma(n, splat(-0x1.05c61p-29f), fnma(n, splat(0x1.62e43p-1f), bounded));
    Ints power = bits_of(splat(1.0f) + expm1_reduced(r)) + shift_left<23>(bits_of(shifted));
    return select(x < lowest, zeros(), floats_of_bits(power));
}

// Turns the scores of lanes begin .. end - 1 of a chunk into weights, others into 0; returns the
// largest score and the sum of weights. A softcap of 0 is none.
inline std::pair<float, float> softmax_lanes(float* scores, int64_t begin, int64_t end, float scale,
                                             float softcap) {
    constexpr int kParts = kChunk / kLanes;
    const Floats lowest = splat(-__builtin_inff());
    bool all = begin == 0 && end == kChunk;
    Floats score[kParts];
    unrolled<kParts>([&](auto i) HEADWAY_INLINE {
        score[i] = load(scores + i * kLanes) * splat(scale);
        if (softcap > 0) score[i] = splat(softcap) * tanh(score[i] / splat(softcap));
        if (all) return;
        Mask before = first_lanes(std::clamp<int64_t>(begin - i * kLanes, 0, kLanes));
        Mask until = first_lanes(std::clamp<int64_t>(end - i * kLanes, 0, kLanes));
        score[i] = select(before, lowest, select(until, score[i], lowest));
    });
    float largest = max_lanes(max(max(score[0], score[1]), max(score[2], score[3])));
    unrolled<kParts>([&](auto i) HEADWAY_INLINE {
        score[i] = weight_of(score[i] - splat(largest));
        store(scores + i * kLanes, score[i]);
    });
    return {largest, sum_lanes((score[0] + score[1]) + (score[2] + score[3]))};
}

// The largest scores and the sums of weights of the queries of a block, a lane each.
struct Limits {
    float largest[kLanes], sum[kLanes];
};

// Parts that are being put together: a row of weighted sums for each query, and their limits.
struct States {
    float *sums, *largest, *sum_of_weights;
    int64_t width;

    // Puts the parts of queries first, first + 1, ... behind what they have: those in the mask
    // `rows`, of which those in `fresh` have nothing yet.
    void append(int64_t first, const float* block, const Limits& limits, unsigned rows,
                unsigned fresh) {
        Mask lanes = first_lanes(kRows);
        Floats old = load(largest + first, lanes), added = load(limits.largest);
        Floats old_sum = load(sum_of_weights + first, lanes), added_sum = load(limits.sum);
        Floats highest = max(old, added);
        Floats old_scale = weight_of(old - highest), scale = weight_of(added - highest);
        float old_scales[kLanes], scales[kLanes], highests[kLanes], sums_of_weights[kLanes];
        store(old_scales, old_scale);
        store(scales, scale);
        store(highests, highest);
        store(sums_of_weights, fma(old_sum, old_scale, added_sum * scale));
        for (; rows; rows &= rows - 1) {
            int i = __builtin_ctz(rows);
            bool is_fresh = fresh >> i & 1;
            largest[first + i] = is_fresh ? limits.largest[i] : highests[i];
            sum_of_weights[first + i] = is_fresh ? limits.sum[i] : sums_of_weights[i];
            float* state = sums + (first + i) * width;
            const float* part = block + i * width;
            if (is_fresh)
                std::memcpy(state, part, static_cast<size_t>(width) * 4);
            else
                for (int64_t at = 0; at < width; at += kLanes)
                    store(state + at, fma(load(state + at), splat(old_scales[i]),
                                          load(part + at) * splat(scales[i])));
        }
    }

    // out = the weighted mean of a query's values.
    void write(int64_t query, float* out, int64_t size) const {
        Floats scale = splat(1.0f / sum_of_weights[query]);
        for (int64_t at = 0; at < size; at += kLanes)
            store(out + at, load(sums + query * width + at) * scale, lanes_left(size - at));
    }
};

}  // namespace headway

// Storing one head's vector in a cache of float32, bfloat16 or int8.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace headway {

enum CacheType : int64_t { kCacheFloat32 = 0, kCacheBfloat16 = 1, kCacheInt8 = 2 };

inline Mask lanes_left(int64_t count) { return first_lanes(count < kLanes ? count : kLanes); }

inline int64_t cache_type_bytes(int64_t type) {
    return type == kCacheFloat32 ? 4 : type == kCacheBfloat16 ? 2 : 1;
}

// value = code * scale with scale = max|x| / 127; codes are x / scale, halves to even.
inline void store_int8(const float* x, int64_t size, int8_t* out, float* scale) {
    Floats largest = zeros();
    for (int64_t i = 0; i < size; i += kLanes)
        largest = max(abs(load(x + i, lanes_left(size - i))), largest);
    float step = max_lanes(largest) / 127.0f;
    *scale = step;
    for (int64_t i = 0; i < size; i += kLanes) {
        int8_t codes[kLanes] = {};
        if (step > 0.0f) store_bytes(codes, to_ints(load(x + i, lanes_left(size - i)) / splat(step)));
        std::memcpy(out + i, codes, static_cast<size_t>(size - i < kLanes ? size - i : kLanes));
    }
}

inline void store_bfloat16(const float* x, int64_t size, uint16_t* out) {
    for (int64_t i = 0; i < size; i += kLanes) {
        uint16_t rounded[kLanes];
        store_bfloat(rounded, load(x + i, lanes_left(size - i)));
        std::memcpy(out + i, rounded, static_cast<size_t>(size - i < kLanes ? size - i : kLanes) * 2);
    }
}

// One of the two caches of a layer: [slots, heads, size] without gaps between heads.
struct Cache {
    void* data;
    float* scales;  // [slots, heads], int8 only
    int64_t type, slot_stride, num_heads, head_size;

    void store(int64_t slot, int64_t head, const float* x) const {
        int64_t at = slot * slot_stride + head * head_size;
        if (type == kCacheInt8) {
            store_int8(x, head_size, static_cast<int8_t*>(data) + at,
                       scales + slot * num_heads + head);
        } else if (type == kCacheBfloat16) {
            store_bfloat16(x, head_size, static_cast<uint16_t*>(data) + at);
        } else {
            std::memcpy(static_cast<float*>(data) + at, x, static_cast<size_t>(head_size) * 4);
        }
    }
};

}  // namespace headway

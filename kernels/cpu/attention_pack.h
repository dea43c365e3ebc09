// Gathers the keys and values of up to 64 slots into float32 matrices that products read in order.
#pragma once

#include <cstdint>
#include <cstring>

#include "kv_write.h"
#include "vec.h"

namespace headway {

constexpr int64_t kColumns = 64;  // slots that a packed matrix holds

// Turns 16 rows of 16 into 16 columns of 16.
inline void transpose(Floats (&x)[kLanes]) {
#if defined(__AVX512F__)
    __m512 y[kLanes];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_ps(x[i].lanes, x[i + 1].lanes);
        y[i + 1] = _mm512_unpackhi_ps(x[i].lanes, x[i + 1].lanes);
    }
    __m512 z[kLanes];
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            z[i + 2 * j] = _mm512_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
            z[i + 2 * j + 1] = _mm512_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
        }
    // z[4 a + b] holds, in its quarter q, rows 4 a to 4 a + 3 of column 4 q + b.
    for (int b = 0; b < 4; ++b) {
        __m512 even01 = _mm512_shuffle_f32x4(z[b], z[4 + b], 0x88);
        __m512 odd01 = _mm512_shuffle_f32x4(z[b], z[4 + b], 0xdd);
        __m512 even23 = _mm512_shuffle_f32x4(z[8 + b], z[12 + b], 0x88);
        __m512 odd23 = _mm512_shuffle_f32x4(z[8 + b], z[12 + b], 0xdd);
        x[b].lanes = _mm512_shuffle_f32x4(even01, even23, 0x88);
        x[4 + b].lanes = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
        x[8 + b].lanes = _mm512_shuffle_f32x4(even01, even23, 0xdd);
        x[12 + b].lanes = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
    }
#else
    auto eight = [](__m256(&r)[8]) {
        __m256 y[8], z[8];
        for (int i = 0; i < 8; i += 2) {
            y[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            y[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int j = 0; j < 2; ++j) {
                z[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
                z[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
            }
        for (int b = 0; b < 4; ++b) {
            r[b] = _mm256_permute2f128_ps(z[b], z[4 + b], 0x20);
            r[4 + b] = _mm256_permute2f128_ps(z[b], z[4 + b], 0x31);
        }
    };
    __m256 corner[4][8];
    for (int i = 0; i < 8; ++i) {
        corner[0][i] = x[i].low;
        corner[1][i] = x[8 + i].low;
        corner[2][i] = x[i].high;
        corner[3][i] = x[8 + i].high;
    }
    for (auto& each : corner) eight(each);
    for (int i = 0; i < 8; ++i) {
        x[i] = {corner[0][i], corner[1][i]};
        x[8 + i] = {corner[2][i], corner[3][i]};
    }
#endif
}

// The keys or the values of one head: where they are and how they are stored.
template <int64_t kType>
struct CachedHead {
    static constexpr int64_t kBytes = kType == kCacheFloat32 ? 4 : kType == kCacheBfloat16 ? 2 : 1;
    static constexpr int64_t kPerWord = 4 / kBytes;  // elements in 32 bits

    const char* data;  // the head's first element in slot 0
    const float* scales;
    int64_t slot_stride, scale_stride, head_size;

    const char* row(int64_t slot) const { return data + slot * slot_stride * kBytes; }
    float scale(int64_t slot) const { return scales[slot * scale_stride]; }

    void prefetch(int64_t slot) const {
        for (int64_t at = 0; at < head_size * kBytes; at += 64) __builtin_prefetch(row(slot) + at);
    }

    // 64 bytes from element `at` of a row, zeros past the head's end.
    Floats words(const char* row, int64_t at) const {
        const char* from = row + at * kBytes;
        int64_t left = (head_size - at) * kBytes;
        if (left >= 64) return load(reinterpret_cast<const float*>(from));
        if (left % 4 == 0) return load(reinterpret_cast<const float*>(from), first_lanes(left / 4));
        float room[kLanes] = {};
        std::memcpy(room, from, static_cast<size_t>(left));
        return load(room);
    }

    // Element `index` of each of 16 words.
    static Floats element(Floats words, int64_t index) {
        if constexpr (kType == kCacheFloat32) return words;
        Ints bits = bits_of(words);
        if constexpr (kType == kCacheBfloat16)
            return floats_of_bits(index ? bits & splat(INT32_MIN >> 15) : shift_left<16>(bits));
        if (index == 0) bits = shift_left<24>(bits);
        if (index == 1) bits = shift_left<16>(bits);
        if (index == 2) bits = shift_left<8>(bits);
        return to_floats(shift_right<24>(bits));
    }

    // 16 elements from `at` of a row, zeros past the head's end.
    Floats elements(const char* row, int64_t at, Floats scale) const {
        const char* from = row + at * kBytes;
        char room[64] = {};
        if (kType != kCacheFloat32 && head_size - at < kLanes) {
            std::memcpy(room, from, static_cast<size_t>((head_size - at) * kBytes));
            from = room;
        }
        if constexpr (kType == kCacheFloat32) return words(row, at);
        if constexpr (kType == kCacheBfloat16)
            return load_bfloat(reinterpret_cast<const uint16_t*>(from));
        return load_bytes(reinterpret_cast<const int8_t*>(from)) * scale;
    }
};

// Packs lanes begin .. end - 1 of `slots` as columns: out[i][lane], i an element. Lanes beside them,
// up to multiples of 16, hold slots that may be read too. Rows are turned in words of 32 bits, which
// are taken apart afterwards: that is the fewest shuffles.
template <int64_t kType>
void pack_keys(const CachedHead<kType>& head, const int64_t* slots, int64_t begin, int64_t end,
               float* out) {
    constexpr int64_t kPerWord = CachedHead<kType>::kPerWord;
    for (int64_t lane = begin / kLanes * kLanes; lane < end; lane += kLanes) {
        const char* rows[kLanes];
        float scales[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            rows[i] = head.row(slots[lane + i]);
            if (kType == kCacheInt8) scales[i] = head.scale(slots[lane + i]);
        }
        for (int64_t at = 0; at < head.head_size; at += kLanes * kPerWord) {
            Floats x[kLanes];
            unrolled<kLanes>([&](auto i) HEADWAY_INLINE { x[i] = head.words(rows[i], at); });
            transpose(x);
            for (int64_t i = 0; i < kLanes; ++i)
                for (int64_t part = 0; part < kPerWord; ++part) {
                    int64_t element = at + i * kPerWord + part;
                    if (element >= head.head_size) break;
                    Floats value = head.element(x[i], part);
                    if (kType == kCacheInt8) value = value * load(scales);
                    store(out + element * kColumns + lane, value);
                }
        }
    }
}

// Packs the same lanes as rows: out[lane][i], with zeros up to a multiple of 16 elements.
template <int64_t kType>
void pack_values(const CachedHead<kType>& head, const int64_t* slots, int64_t begin, int64_t end,
                 float* out) {
    int64_t width = (head.head_size + kLanes - 1) / kLanes * kLanes;
    for (int64_t lane = begin; lane < end; ++lane) {
        const char* row = head.row(slots[lane]);
        Floats scale = splat(kType == kCacheInt8 ? head.scale(slots[lane]) : 1.0f);
        for (int64_t at = 0; at < width; at += kLanes)
            store(out + lane * width + at, head.elements(row, at, scale));
    }
}

}  // namespace headway

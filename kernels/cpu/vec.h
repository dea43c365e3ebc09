// Sixteen lanes of float or int32, the same on every level: one AVX-512 register or two of AVX2.
//
// Every operation is lane by lane and correctly rounded, and sums over lanes go in one order, so a
// body written with these gives the same bits at every level.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// gcc's own intrinsics pass an undefined register on purpose, and gcc 12 warns of it (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstdint>
#include <utility>

namespace headway {

#define HEADWAY_INLINE __attribute__((always_inline))

template <int... kIndices, typename Step>
HEADWAY_INLINE inline void unrolled_over(std::integer_sequence<int, kIndices...>, Step& step) {
    (step(std::integral_constant<int, kIndices>()), ...);
}

// step(0), step(1), ... written out, so that arrays indexed by it become registers: gcc 12 unrolls
// loops too late for that. Mark the lambda HEADWAY_INLINE.
template <int kCount, typename Step>
HEADWAY_INLINE inline void unrolled(Step step) {
    unrolled_over(std::make_integer_sequence<int, kCount>(), step);
}

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct Mask {
    __mmask16 bits;
};
struct Floats {
    __m512 lanes;
};
struct Ints {
    __m512i lanes;
};

// The first `count` lanes, 0 to 16.
inline Mask first_lanes(int64_t count) {
    return {static_cast<__mmask16>((1u << static_cast<unsigned>(count)) - 1u)};
}
inline unsigned bits_of(Mask mask) { return mask.bits; }
inline Mask operator&(Mask a, Mask b) { return {static_cast<__mmask16>(a.bits & b.bits)}; }
inline Mask operator|(Mask a, Mask b) { return {static_cast<__mmask16>(a.bits | b.bits)}; }

inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Floats load(const float* from, Mask mask) {
    return {_mm512_maskz_loadu_ps(mask.bits, from)};
}
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x.lanes); }
inline void store(float* to, Floats x, Mask mask) {
    _mm512_mask_storeu_ps(to, mask.bits, x.lanes);
}

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.lanes, b.lanes)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.lanes, b.lanes)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.lanes, b.lanes)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.lanes, b.lanes)}; }
// a * b + c, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)};
}
// c - a * b, rounded once.
inline Floats fnma(Floats a, Floats b, Floats c) {
    return {_mm512_fnmadd_ps(a.lanes, b.lanes, c.lanes)};
}
// Where either is NaN: b.
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.lanes, b.lanes)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.lanes, b.lanes)}; }
inline Floats sqrt(Floats x) { return {_mm512_sqrt_ps(x.lanes)}; }
// To the nearest integer, halves to even.
inline Floats round(Floats x) {
    return {_mm512_roundscale_ps(x.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline Mask operator<(Floats a, Floats b) {
    return {_mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_LT_OQ)};
}
inline Mask operator<=(Floats a, Floats b) {
    return {_mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_LE_OQ)};
}
// True for a > b and where either is NaN.
inline Mask not_at_most(Floats a, Floats b) {
    return {_mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_NLE_UQ)};
}
inline Floats select(Mask mask, Floats yes, Floats no) {
    return {_mm512_mask_blend_ps(mask.bits, no.lanes, yes.lanes)};
}

inline Ints splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints load(const int32_t* from) { return {_mm512_loadu_si512(from)}; }
inline void store(int32_t* to, Ints x) { _mm512_storeu_si512(to, x.lanes); }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.lanes, b.lanes)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.lanes, b.lanes)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.lanes, b.lanes)}; }
inline Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.lanes, b.lanes)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.lanes, b.lanes)}; }
template <int kCount>
Ints shift_left(Ints x) {
    return {_mm512_slli_epi32(x.lanes, kCount)};
}
template <int kCount>
Ints shift_right(Ints x) {  // arithmetic
    return {_mm512_srai_epi32(x.lanes, kCount)};
}
inline Mask operator==(Ints a, Ints b) { return {_mm512_cmpeq_epi32_mask(a.lanes, b.lanes)}; }
inline Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.lanes)}; }
inline Ints to_ints(Floats x) { return {_mm512_cvtps_epi32(x.lanes)}; }  // halves to even
inline Ints bits_of(Floats x) { return {_mm512_castps_si512(x.lanes)}; }
inline Floats floats_of_bits(Ints x) { return {_mm512_castsi512_ps(x.lanes)}; }

inline Floats load_half(const uint16_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline Floats load_bfloat(const uint16_t* from) {
    __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
inline Floats load_bytes(const int8_t* from) {
    __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x))};
}
// For values in int8's range.
inline void store_bytes(int8_t* to, Ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x.lanes));
}
inline void store_low_halves(uint16_t* to, Ints x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x.lanes));
}

inline __m256 low_half(Floats x) { return _mm512_castps512_ps256(x.lanes); }
inline __m256 high_half(Floats x) { return _mm512_extractf32x8_ps(x.lanes, 1); }
inline __m256i low_half(Ints x) { return _mm512_castsi512_si256(x.lanes); }
inline __m256i high_half(Ints x) { return _mm512_extracti64x4_epi64(x.lanes, 1); }

#else

struct Mask {
    __m256 low, high;
};
struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};

inline Mask first_lanes(int64_t count) {
    __m256i n = _mm256_set1_epi32(static_cast<int>(count));
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i next = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(n, lane)),
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, next))};
}
inline unsigned bits_of(Mask mask) {
    return static_cast<unsigned>(_mm256_movemask_ps(mask.low)) |
           static_cast<unsigned>(_mm256_movemask_ps(mask.high)) << 8;
}
inline Mask operator&(Mask a, Mask b) {
    return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)};
}
inline Mask operator|(Mask a, Mask b) {
    return {_mm256_or_ps(a.low, b.low), _mm256_or_ps(a.high, b.high)};
}

inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Floats load(const float* from, Mask mask) {
    return {_mm256_maskload_ps(from, _mm256_castps_si256(mask.low)),
            _mm256_maskload_ps(from + 8, _mm256_castps_si256(mask.high))};
}
inline void store(float* to, Floats x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}
inline void store(float* to, Floats x, Mask mask) {
    _mm256_maskstore_ps(to, _mm256_castps_si256(mask.low), x.low);
    _mm256_maskstore_ps(to + 8, _mm256_castps_si256(mask.high), x.high);
}

inline Floats operator+(Floats a, Floats b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Floats operator-(Floats a, Floats b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Floats operator*(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Floats operator/(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats max(Floats a, Floats b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Floats min(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Floats sqrt(Floats x) { return {_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }
inline Floats round(Floats x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, kMode), _mm256_round_ps(x.high, kMode)};
}

inline Mask operator<(Floats a, Floats b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
}
inline Mask operator<=(Floats a, Floats b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_LE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LE_OQ)};
}
inline Mask not_at_most(Floats a, Floats b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_NLE_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NLE_UQ)};
}
inline Floats select(Mask mask, Floats yes, Floats no) {
    return {_mm256_blendv_ps(no.low, yes.low, mask.low),
            _mm256_blendv_ps(no.high, yes.high, mask.high)};
}

inline Ints splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints load(const int32_t* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 8))};
}
inline void store(int32_t* to, Ints x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), x.high);
}
inline Ints operator+(Ints a, Ints b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline Ints operator-(Ints a, Ints b) {
    return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
inline Ints operator&(Ints a, Ints b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
inline Ints operator|(Ints a, Ints b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
inline Ints operator^(Ints a, Ints b) {
    return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
template <int kCount>
Ints shift_left(Ints x) {
    return {_mm256_slli_epi32(x.low, kCount), _mm256_slli_epi32(x.high, kCount)};
}
template <int kCount>
Ints shift_right(Ints x) {
    return {_mm256_srai_epi32(x.low, kCount), _mm256_srai_epi32(x.high, kCount)};
}
inline Mask operator==(Ints a, Ints b) {
    return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.low, b.low)),
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.high, b.high))};
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline Ints bits_of(Floats x) {
    return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}
inline Floats floats_of_bits(Ints x) {
    return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}

inline Floats load_half(const uint16_t* from) {
    auto at = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline Floats load_bfloat(const uint16_t* from) {
    auto at = reinterpret_cast<const __m128i*>(from);
    __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(at));
    __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
inline Floats load_bytes(const int8_t* from) {
    __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline void store_bytes(int8_t* to, Ints x) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words),
                                    _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
inline void store_low_halves(uint16_t* to, Ints x) {
    __m256i mask = _mm256_set1_epi32(0xffff);
    __m256i words =
        _mm256_packus_epi32(_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(words, 0xd8));
}

inline __m256 low_half(Floats x) { return x.low; }
inline __m256 high_half(Floats x) { return x.high; }
inline __m256i low_half(Ints x) { return x.low; }
inline __m256i high_half(Ints x) { return x.high; }

#endif

inline bool any(Mask mask) { return bits_of(mask) != 0; }

inline Floats abs(Floats x) { return floats_of_bits(bits_of(x) & splat(0x7fffffff)); }
inline Floats operator-(Floats x) { return floats_of_bits(bits_of(x) ^ splat(INT32_MIN)); }
// The magnitude of one with the sign of another.
inline Floats with_sign(Floats magnitude, Floats sign) {
    return floats_of_bits(bits_of(magnitude) | (bits_of(sign) & splat(INT32_MIN)));
}

// Lane i and lane i + 8, then i + 4, i + 2, i + 1.
inline float sum_lanes(Floats x) {
    __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// For lanes that are no NaN.
inline float max_lanes(Floats x) {
    __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline int32_t sum_lanes(Ints x) {
    __m256i eight = _mm256_add_epi32(low_half(x), high_half(x));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

// To bfloat16, halves to even; a NaN stays one.
inline void store_bfloat(uint16_t* to, Floats x) {
    Ints bits = bits_of(x);
    Ints odd = shift_right<16>(bits) & splat(1);
    Floats rounded = floats_of_bits(bits + odd + splat(0x7fff));
    Floats quiet = floats_of_bits(bits | splat(0x400000));
    store_low_halves(to, shift_right<16>(bits_of(select(x <= x, rounded, quiet))));
}

}  // namespace headway

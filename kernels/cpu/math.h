// Elementary functions of sixteen floats, the same bits at every level, within 2.5 ulp
// where the result is a normal number.
//
// Arguments are brought into a small interval (Cody and Waite, Software Manual for the Elementary
// Functions), where a polynomial of ours serves: least relative error, coefficients in float32.
#pragma once

#include "vec.h"

namespace headway {

// c0 + x (c1 + x (c2 + ...)).
template <int kCount>
inline Floats polynomial(Floats x, const float (&coefficients)[kCount]) {
    Floats sum = splat(coefficients[kCount - 1]);
    for (int i = kCount - 2; i >= 0; --i) sum = fma(sum, x, splat(coefficients[i]));
    return sum;
}

// 2^n for whole n of -126 to 127.
inline Floats power_of_two(Ints n) { return floats_of_bits(shift_left<23>(n + splat(127))); }

// x = n log 2 + r with |r| <= log 2 / 2.
struct ReducedExponent {
    Floats n, r;
};
inline ReducedExponent reduce_exponent(Floats x) {
    Floats n = round(x * splat(0x1.715476p+0f));
    Floats r = fnma(n, splat(0x1.62e43p-1f), x);
    return {n, fnma(n, splat(-0x1.05c61p-29f), r)};
}

// exp(r) - 1 for |r| <= log 2 / 2.
inline Floats expm1_reduced(Floats r) {
    constexpr float kTerms[] = {0.5f, 0x1.5554bp-3f, 0x1.555486p-5f, 0x1.122838p-7f,
                                0x1.6d995cp-10f};
    return fma(r * r, polynomial(r, kTerms), r);
}

// exp(-inf) is 0; overflow is inf; NaN stays.
inline Floats exp(Floats x) {
    x = min(splat(89.0f), max(splat(-104.0f), x));
    auto [n, r] = reduce_exponent(x);
    // In two steps, since 2^n itself may be no normal number.
    Ints whole = to_ints(n), half = shift_right<1>(whole);
    Floats y = splat(1.0f) + expm1_reduced(r);
    return y * power_of_two(half) * power_of_two(whole - half);
}

// 1 / (1 + exp(-x)).
inline Floats sigmoid(Floats x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

inline Floats tanh(Floats x) {
    // (e - 1) / (e + 1) with e = exp(2 |x|); 1 to rounding beyond 9.1.
    Floats twice = min(splat(18.2f), abs(x) + abs(x));
    auto [n, r] = reduce_exponent(twice);
    Floats power = power_of_two(to_ints(n));
    Floats e_minus_1 = fma(power, expm1_reduced(r), power - splat(1.0f));
    Floats y = e_minus_1 / (e_minus_1 + splat(2.0f));
    return select(x <= x, with_sign(y, x), x);
}

inline Floats erf(Floats x) {
    constexpr float kSmall[] = {0x1.20dd76p+0f, -0x1.812746p-2f,  0x1.ce2f14p-4f,  -0x1.b82ae2p-6f,
                                0x1.5638eep-8f, -0x1.bd92e4p-11f, 0x1.dd95e6p-14f, -0x1.5175d4p-17f};
    // -log(1 - erf(x)) on 0.94 to 4; beyond 4, erf is 1 to rounding.
    constexpr float kLarge[] = {-0x1.7954cp-13f, 0x1.212988p+0f, 0x1.443f6ep-1f,  0x1.bbbde6p-4f,
                                -0x1.9c23f8p-6f, 0x1.123d1ap-8f, -0x1.ca7a4p-12f, 0x1.65ef2cp-16f};
    Floats size = abs(x);
    Floats small = x * polynomial(x * x, kSmall);
    Floats tail = exp(-polynomial(min(size, splat(4.0f)), kLarge));
    Floats large = with_sign(splat(1.0f) - tail, x);
    return select(splat(0.94f) < size, large, small);
}

// x = n pi / 2 + r. Good to float32's last bits for |x| up to 2^20.
struct ReducedAngle {
    Ints n;
    Floats r;
};
inline ReducedAngle reduce_angle(Floats x) {
    Floats n = round(x * splat(0x1.45f306p-1f));
    Floats r = fnma(n, splat(0x1.921fb6p+0f), x);
    r = fnma(n, splat(-0x1.777a5cp-25f), r);
    return {to_ints(n), fnma(n, splat(-0x1.ee59dap-50f), r)};
}

// sin(r + quarter pi / 2) for |r| <= pi / 4.
inline Floats sine_of_quarter(Floats r, Ints quarter) {
    constexpr float kSine[] = {-0x1.555556p-3f, 0x1.111108p-7f, -0x1.a00f98p-13f, 0x1.6cd734p-19f};
    constexpr float kCosine[] = {0x1.555556p-5f, -0x1.6c16b8p-10f, 0x1.a0111cp-16f,
                                 -0x1.2429fap-22f};
    Floats square = r * r;
    Floats sine = fma(r * square, polynomial(square, kSine), r);
    Floats bend = fnma(splat(0.5f), square, splat(1.0f));
    Floats cosine = fma(square * square, polynomial(square, kCosine), bend);
    Floats y = select((quarter & splat(1)) == splat(0), sine, cosine);
    return floats_of_bits(bits_of(y) ^ shift_left<30>(quarter & splat(2)));
}

inline Floats sin(Floats x) {
    auto [n, r] = reduce_angle(x);
    return sine_of_quarter(r, n);
}
inline Floats cos(Floats x) {
    auto [n, r] = reduce_angle(x);
    return sine_of_quarter(r, n + splat(1));
}

// Absolute error within 2 ulp of the larger of |x| and the value.
inline Floats silu(Floats x) { return x / (splat(1.0f) + exp(-x)); }
inline Floats gelu(Floats x) {
    return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0x1.6a09e6p-1f)));
}
inline Floats gelu_tanh(Floats x) {
    Floats cube = fma(x * x * x, splat(0.044715f), x);
    return splat(0.5f) * x * (splat(1.0f) + tanh(cube * splat(0x1.988454p-1f)));
}

}  // namespace headway

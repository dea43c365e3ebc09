// pointwise: see kernels/pointwise.py for the contract and what each number stands for.
#include <cmath>
#include <cstring>

#include "math.h"
#include "team.h"

namespace headway {
namespace {

constexpr int kDims = 5;
constexpr int64_t kPiece = 256;  // elements that are worked on at a time

enum Type : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt64 = 2, kInt32 = 3, kBool = 4 };

struct Pointwise {
    int64_t operation;
    void* out;
    int64_t out_type;
    const void* a;  // null: the scalar
    int64_t a_type;
    const void* b;  // null: the scalar
    int64_t b_type;
    double scalar;
    int64_t size[kDims];  // the last one is the innermost
    int64_t out_stride[kDims], a_stride[kDims], b_stride[kDims];
};

int64_t type_bytes(int64_t type) {
    switch (type) {
        case kInt64: return 8;
        case kBfloat16: return 2;
        case kBool: return 1;
        default: return 4;
    }
}

template <typename T>
void widen(const char* from, int64_t stride, int64_t count, float* to) {
    const T* x = reinterpret_cast<const T*>(from);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(x[i * stride]);
}

// `count` elements as floats: where they are if that will do, else in `room`.
const float* reach(const char* from, int64_t type, int64_t stride, int64_t count, float* room) {
    switch (type) {
        case kInt64: widen<int64_t>(from, stride, count, room); break;
        case kInt32: widen<int32_t>(from, stride, count, room); break;
        case kBool: widen<uint8_t>(from, stride, count, room); break;
        case kBfloat16: {
            const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
            for (int64_t i = 0; i < count; ++i) {
                uint32_t bits = static_cast<uint32_t>(x[i * stride]) << 16;
                std::memcpy(room + i, &bits, 4);
            }
            break;
        }
        default:
            if (stride == 1) return reinterpret_cast<const float*>(from);
            widen<float>(from, stride, count, room);
    }
    return room;
}

// `from` has room for whole registers.
void unload(const float* from, int64_t count, char* to, int64_t type, int64_t stride) {
    if (type == kBfloat16) {
        uint16_t rounded[kPiece];
        for (int64_t i = 0; i < count; i += kLanes) store_bfloat(rounded + i, load(from + i));
        uint16_t* out = reinterpret_cast<uint16_t*>(to);
        for (int64_t i = 0; i < count; ++i) out[i * stride] = rounded[i];
    } else {
        float* out = reinterpret_cast<float*>(to);
        for (int64_t i = 0; i < count; ++i) out[i * stride] = from[i];
    }
}

Floats round_bfloat(Floats x) {
    uint16_t rounded[kLanes];
    store_bfloat(rounded, x);
    return load_bfloat(rounded);
}

template <typename F>
void each(const float* a, int64_t count, float* out, F f) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, f(load(a + i)));
    if (i == count) return;
    Mask rest = first_lanes(count - i);
    store(out + i, f(load(a + i, rest)), rest);
}

template <typename F>
void each(const float* a, const float* b, int64_t count, float* out, F f) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, f(load(a + i), load(b + i)));
    if (i == count) return;
    Mask rest = first_lanes(count - i);
    store(out + i, f(load(a + i, rest), load(b + i, rest)), rest);
}

// Whole and half exponents by products and roots, which round less than exp(y log x).
float power(float x, float y) {
    float size = std::fabs(y);
    if (size > 8.0f || size * 2 != std::floor(size * 2)) return std::pow(x, y);
    float result = size != std::floor(size) ? std::sqrt(x) : 1.0f;
    for (int i = 0; i < static_cast<int>(size); ++i) result *= x;
    return y < 0 ? 1.0f / result : result;
}

void compute(int64_t operation, const float* a, const float* b, int64_t n, float* out) {
    const Floats one = splat(1.0f);
    switch (operation) {
        case 0: each(a, n, out, [](Floats x) { return x; }); break;
        case 1: each(a, n, out, [](Floats x) { return -x; }); break;
        case 2: each(a, n, out, [](Floats x) { return abs(x); }); break;
        case 3: each(a, n, out, [](Floats x) { return x * x; }); break;
        case 4: each(a, n, out, [](Floats x) { return sqrt(x); }); break;
        case 5: each(a, n, out, [=](Floats x) { return one / sqrt(x); }); break;
        case 6: each(a, n, out, [=](Floats x) { return one / x; }); break;
        case 7: each(a, n, out, [](Floats x) { return max(zeros(), x); }); break;
        case 8: each(a, n, out, [](Floats x) { return exp(x); }); break;
        case 9: each(a, n, out, [](Floats x) { return tanh(x); }); break;
        case 10: each(a, n, out, [](Floats x) { return sigmoid(x); }); break;
        case 11: each(a, n, out, [](Floats x) { return silu(x); }); break;
        case 12: each(a, n, out, [](Floats x) { return gelu(x); }); break;
        case 13: each(a, n, out, [](Floats x) { return gelu_tanh(x); }); break;
        case 14: each(a, n, out, [](Floats x) { return sin(x); }); break;
        case 15: each(a, n, out, [](Floats x) { return cos(x); }); break;
        case 16: each(a, n, out, [](Floats x) { return round_bfloat(x); }); break;
        case 32: each(a, b, n, out, [](Floats x, Floats y) { return x + y; }); break;
        case 33: each(a, b, n, out, [](Floats x, Floats y) { return x - y; }); break;
        case 34: each(a, b, n, out, [](Floats x, Floats y) { return x * y; }); break;
        case 35: each(a, b, n, out, [](Floats x, Floats y) { return x / y; }); break;
        case 36:
            each(a, b, n, out, [](Floats x, Floats y) { return select(x <= x, max(x, y), x); });
            break;
        case 37:
            each(a, b, n, out, [](Floats x, Floats y) { return select(x <= x, min(x, y), x); });
            break;
        case 38:
            for (int64_t i = 0; i < n; ++i) out[i] = power(a[i], b[i]);
            break;
        case 39: each(a, b, n, out, [](Floats x, Floats y) { return silu(x) * y; }); break;
        case 40: each(a, b, n, out, [](Floats x, Floats y) { return gelu(x) * y; }); break;
        case 41: each(a, b, n, out, [](Floats x, Floats y) { return gelu_tanh(x) * y; }); break;
    }
}

// Neighbouring dimensions that every operand walks through in one stride become one.
void collapse(Pointwise& args) {
    int64_t* const strides[] = {args.out_stride, args.a_stride, args.b_stride};
    for (int dim = kDims - 2; dim >= 0; --dim) {
        int inner = dim + 1;
        bool joins = true;
        for (const int64_t* stride : strides)
            joins &= stride[dim] == stride[inner] * args.size[inner];
        if (args.size[inner] != 1 && args.size[dim] != 1 && !joins) continue;
        for (int64_t* stride : strides) {
            if (args.size[inner] == 1) stride[inner] = stride[dim];
            for (int outer = dim; outer > 0; --outer) stride[outer] = stride[outer - 1];
            stride[0] = 0;
        }
        args.size[inner] *= args.size[dim];
        for (int outer = dim; outer > 0; --outer) args.size[outer] = args.size[outer - 1];
        args.size[0] = 1;
    }
}

void pointwise(const void* words, Thread& thread) {
    Pointwise args = *static_cast<const Pointwise*>(words);
    collapse(args);
    float a_room[kPiece], b_room[kPiece], out_room[kPiece];
    for (float& value : a_room) value = static_cast<float>(args.scalar);
    for (float& value : b_room) value = static_cast<float>(args.scalar);
    int64_t width = args.size[kDims - 1], num_pieces = (width + kPiece - 1) / kPiece;
    int64_t num_rows = args.size[0] * args.size[1] * args.size[2] * args.size[3];
    int64_t total = num_rows * num_pieces;
    int64_t begin = total * thread.index / thread.count;
    int64_t end = total * (thread.index + 1) / thread.count;
    for (int64_t at = begin; at < end; ++at) {
        int64_t row = at / num_pieces, first = at % num_pieces * kPiece;
        int64_t count = width - first < kPiece ? width - first : kPiece;
        int64_t out_at = first * args.out_stride[kDims - 1], a_at = first * args.a_stride[kDims - 1],
                b_at = first * args.b_stride[kDims - 1];
        for (int dim = kDims - 2; dim >= 0; --dim) {
            int64_t index = row % args.size[dim];
            row /= args.size[dim];
            out_at += index * args.out_stride[dim];
            a_at += index * args.a_stride[dim];
            b_at += index * args.b_stride[dim];
        }
        const float *a = a_room, *b = b_room;
        if (args.a)
            a = reach(static_cast<const char*>(args.a) + a_at * type_bytes(args.a_type), args.a_type,
                     args.a_stride[kDims - 1], count, a_room);
        if (args.b)
            b = reach(static_cast<const char*>(args.b) + b_at * type_bytes(args.b_type), args.b_type,
                     args.b_stride[kDims - 1], count, b_room);
        char* out = static_cast<char*>(args.out) + out_at * type_bytes(args.out_type);
        bool direct = args.out_type == kFloat32 && args.out_stride[kDims - 1] == 1;
        float* result = direct ? reinterpret_cast<float*>(out) : out_room;
        compute(args.operation, a, b, count, result);
        if (!direct) unload(result, count, out, args.out_type, args.out_stride[kDims - 1]);
    }
}

static_assert(num_fields<Pointwise>() == 28);
const Registration registration(
    "pointwise",
    "operation:i out:p out_type:i a:p a_type:i b:p b_type:i scalar:d size0:i size1:i size2:i "
    "size3:i size4:i out_stride0:i out_stride1:i out_stride2:i out_stride3:i out_stride4:i "
    "a_stride0:i a_stride1:i a_stride2:i a_stride3:i a_stride4:i b_stride0:i b_stride1:i "
    "b_stride2:i b_stride3:i b_stride4:i",
    pointwise);

}  // namespace
}  // namespace headway

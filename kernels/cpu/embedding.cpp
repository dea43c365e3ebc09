// embedding: see kernels/linear.py for the contract.
#include <algorithm>
#include <cstring>

#include "linear.h"
#include "team.h"

namespace headway {
namespace {

struct Embedding {
    const int64_t* ids;
    int64_t num_rows;
    const uint8_t* weight;
    int64_t format;
    int64_t num_inputs;
    float* out;
    int64_t out_stride;
    double scale;
};

float scale_at(const Format& format, const uint8_t* at, int lane) {
    if (format.scale_bytes == 2) {
        uint16_t half;
        std::memcpy(&half, at + 2 * lane, sizeof half);
        return _cvtsh_ss(half);
    }
    float whole;
    std::memcpy(&whole, at + 4 * lane, sizeof whole);
    return whole;
}

// Output `lane` of a block of floats: one or two inputs.
void read_floats(const Format& format, const uint8_t* block, int lane, int count, float* out) {
    uint32_t word;
    std::memcpy(&word, block + 4 * lane, sizeof word);
    for (int i = 0; i < count; ++i) {
        uint32_t bits = format.block == 1 ? word : i ? word & 0xffff0000u : word << 16;
        std::memcpy(out + i, &bits, sizeof bits);
    }
}

void read_codes(const Format& format, const uint8_t* block, int lane, int count, float* out) {
    float step = scale_at(format, block, lane);
    float minimum = format.has_minimum ? scale_at(format, block + format.scales_bytes(), lane) : 0;
    const uint8_t* codes = block + format.codes_at() + 4 * lane;
    for (int i = 0; i < count; ++i) {
        int group = i / 4, half = format.block / 8, shift = 0;
        if (format.code_bits == 4 && group >= half) {
            group -= half;
            shift = 4;
        }
        int mask = (1 << format.code_bits) - 1;
        int code = codes[64 * group + i % 4] >> shift & mask;
        auto value = static_cast<float>(code - format.zero);
        out[i] = format.has_minimum ? __builtin_fmaf(step, value, minimum) : step * value;
    }
}

void embedding(const void* words, Thread& thread) {
    const Embedding& args = *static_cast<const Embedding*>(words);
    const Format& format = kFormats[args.format];
    int64_t block_bytes = format.block_bytes();
    int64_t panel_bytes = ceil_div(args.num_inputs, format.block) * block_bytes;
    auto scale = static_cast<float>(args.scale);
    for (int64_t r = thread.index; r < args.num_rows; r += thread.count) {
        const uint8_t* block = args.weight + args.ids[r] / kLanes * panel_bytes;
        int lane = static_cast<int>(args.ids[r] % kLanes);
        float* out = args.out + r * args.out_stride;
        for (int64_t k = 0; k < args.num_inputs; k += format.block, block += block_bytes) {
            int count = static_cast<int>(std::min<int64_t>(format.block, args.num_inputs - k));
            if (format.scale_bytes)
                read_codes(format, block, lane, count, out + k);
            else
                read_floats(format, block, lane, count, out + k);
        }
        for (int64_t k = 0; k < args.num_inputs; ++k) out[k] *= scale;
    }
}

static_assert(num_fields<Embedding>() == 8);
const Registration registration(
    "embedding", "ids:p num_rows:i weight:p format:i num_inputs:i out:p out_stride:i scale:d",
    embedding);

}  // namespace
}  // namespace headway

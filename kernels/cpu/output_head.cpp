// output_head: see kernels/linear.py for the contract.
#include <algorithm>
#include <cmath>
#include <limits>

#include "linear.h"
#include "math.h"
#include "team.h"

namespace headway {
namespace {

struct OutputHead {
    Product product;
    const float* bias;
    double softcap;
    float* logits;
    int64_t logits_stride;
    int64_t num_top;
    float* values;
    int64_t* indices;
    float* log_sums;
    char* scratch;
};

// Outputs in a chunk: one thread adds them up in order, whatever the number of threads.
constexpr int64_t kChunkPanels = 16;

struct Candidate {
    float value;
    int32_t index;
};

// NaN above every number, as torch has it; the lowest index among equals.
bool is_better(Candidate a, Candidate b) {
    bool a_nan = std::isnan(a.value), b_nan = std::isnan(b.value);
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.value != b.value) return a.value > b.value;
    return a.index < b.index;
}

// Into a list of `count`, best first, whose last falls out.
void insert(Candidate candidate, Candidate* best, int64_t count) {
    if (!is_better(candidate, best[count - 1])) return;
    int64_t at = count - 1;
    for (; at > 0 && is_better(candidate, best[at - 1]); --at) best[at] = best[at - 1];
    best[at] = candidate;
}

// The sum over outputs of exp(logit) as sum * exp(most), by lanes.
struct LaneSums {
    Floats most, sum;

    void clear() {
        // Not -inf: a logit of -inf less that would be NaN.
        most = splat(std::numeric_limits<float>::lowest());
        sum = zeros();
    }
    void add(Floats logits) {
        Floats next = max(most, logits);
        // exp(0) is 1 exactly, so leaving the product out changes nothing.
        if (any(not_at_most(logits, most))) sum = sum * exp(most - next);
        most = next;
        sum = sum + exp(logits - most);
    }
};

struct ChunkSum {
    float most, sum;
};

ChunkSum over_lanes(const LaneSums& lanes) {
    float most = max_lanes(lanes.most);
    return {most, sum_lanes(lanes.sum * exp(lanes.most - splat(most)))};
}

// Parts of the scratch memory: candidates [threads, rows, top], sums [rows, chunks].
struct Scratch {
    Scratch(const OutputHead& args, int64_t num_threads)
        : num_chunks(ceil_div(args.product.num_panels(), kChunkPanels)),
          num_rows(args.product.num_rows),
          num_top(args.num_top),
          candidates(reinterpret_cast<Candidate*>(args.scratch)),
          sums(reinterpret_cast<ChunkSum*>(candidates + num_threads * num_rows * num_top)) {}

    Candidate* best(int64_t thread, int64_t row) {
        return candidates + (thread * num_rows + row) * num_top;
    }
    ChunkSum& sum(int64_t row, int64_t chunk) { return sums[row * num_chunks + chunk]; }

    const int64_t num_chunks, num_rows, num_top;
    Candidate* const candidates;
    ChunkSum* const sums;
};

void offer(Floats logits, int64_t column, int64_t count, Candidate* best, int64_t num_top) {
    unsigned below = bits_of(logits < splat(best[num_top - 1].value));
    unsigned rest = bits_of(first_lanes(count)) & ~below;
    if (!rest) return;
    float values[kLanes];
    store(values, logits);
    for (; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        insert({values[lane], static_cast<int32_t>(column + lane)}, best, num_top);
    }
}

void finish_panel(const OutputHead& args, int64_t panel, int64_t first_row, int64_t num_rows,
                  const float* sums, Candidate* best, LaneSums* lanes) {
    int64_t column = panel * kLanes;
    int64_t count = std::min<int64_t>(kLanes, args.product.num_outputs - column);
    Mask mask = first_lanes(count);
    Floats bias = args.bias ? load(args.bias + column, mask) : zeros();
    Floats cap = splat(static_cast<float>(args.softcap));
    for (int64_t r = 0; r < num_rows; ++r) {
        Floats y = load(sums + r * kLanes);
        if (args.bias) y = y + bias;
        if (args.softcap > 0) y = cap * tanh(y / cap);
        int64_t row = first_row + r;
        if (args.logits) store(args.logits + row * args.logits_stride + column, y, mask);
        if (args.num_top) offer(y, column, count, best + r * args.num_top, args.num_top);
        if (args.log_sums)
            lanes[r].add(select(mask, y, splat(-std::numeric_limits<float>::infinity())));
    }
}

void run_chunk(const OutputHead& args, int64_t chunk, Scratch& scratch, int thread) {
    ChunkSums sums;
    LaneSums lanes[kRowChunk];
    int64_t begin = chunk * kChunkPanels;
    int64_t end = std::min(args.product.num_panels(), begin + kChunkPanels);
    for (int64_t row = 0; row < args.product.num_rows; row += kRowChunk) {
        int64_t num_rows = std::min(kRowChunk, args.product.num_rows - row);
        for (int64_t r = 0; r < num_rows; ++r) lanes[r].clear();
        for (int64_t panel = begin; panel < end; panel += kPanelChunk) {
            int64_t num_panels = std::min(kPanelChunk, end - panel);
            chunk_sums(args.product, panel, num_panels, row, num_rows, sums);
            for (int64_t p = 0; p < num_panels; ++p)
                finish_panel(args, panel + p, row, num_rows, sums.at[p], scratch.best(thread, row),
                             lanes);
        }
        if (args.log_sums)
            for (int64_t r = 0; r < num_rows; ++r) scratch.sum(row + r, chunk) = over_lanes(lanes[r]);
    }
}

void merge_top(const OutputHead& args, Scratch& scratch, int64_t row, int num_threads) {
    Candidate* best = scratch.best(0, row);
    for (int thread = 1; thread < num_threads; ++thread)
        for (int64_t i = 0; i < args.num_top; ++i)
            insert(scratch.best(thread, row)[i], best, args.num_top);
    for (int64_t i = 0; i < args.num_top; ++i) {
        args.values[row * args.num_top + i] = best[i].value;
        args.indices[row * args.num_top + i] = best[i].index;
    }
}

void merge_sums(const OutputHead& args, Scratch& scratch, int64_t row) {
    double most = std::numeric_limits<double>::lowest(), total = 0;
    for (int64_t chunk = 0; chunk < scratch.num_chunks; ++chunk)
        most = std::max<double>(most, scratch.sum(row, chunk).most);
    for (int64_t chunk = 0; chunk < scratch.num_chunks; ++chunk) {
        ChunkSum part = scratch.sum(row, chunk);
        total += part.sum * std::exp(part.most - most);
    }
    args.log_sums[row] = static_cast<float>(most + std::log(total));
}

void output_head(const void* words, Thread& thread) {
    const OutputHead& args = *static_cast<const OutputHead*>(words);
    Scratch scratch(args, thread.count);
    constexpr Candidate kNothing{-std::numeric_limits<float>::infinity(), INT32_MAX};
    std::fill_n(scratch.best(thread.index, 0), scratch.num_rows * scratch.num_top, kNothing);
    for (int64_t chunk; (chunk = thread.take(1)) < scratch.num_chunks;)
        run_chunk(args, chunk, scratch, thread.index);
    thread.barrier();
    for (int64_t row = thread.index; row < scratch.num_rows; row += thread.count) {
        if (args.num_top) merge_top(args, scratch, row, thread.count);
        if (args.log_sums) merge_sums(args, scratch, row);
    }
}

static_assert(num_fields<OutputHead>() == 18);
const Registration registration(
    "output_head",
    "x:p x_stride:i index:p num_rows:i quantised:i weight:p format:i num_outputs:i num_inputs:i "
    "bias:p softcap:d logits:p logits_stride:i num_top:i values:p indices:p log_sums:p scratch:p",
    output_head);

}  // namespace
}  // namespace headway

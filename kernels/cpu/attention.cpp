// attention: see kernels/attention.py for the contract.
//
// A row's keys are visited in the order of their positions, cut into chunks at multiples of 64. Each
// chunk's part of the softmax (largest score, sum of weights, weighted sum of values) is computed
// alone and the parts are put together in order, the way of Milakov and Gimelshein, Online
// Normalizer Calculation for Softmax. Where a key lies, whether it was drafted or accepted, who
// computes a chunk and which other rows share its packed keys changes no bit.
#include <algorithm>

#include "attention_pack.h"
#include "attention_product.h"
#include "math.h"
#include "team.h"

namespace headway {
namespace {

constexpr int64_t kChunk = kColumns;
constexpr int64_t kTileQueries = 96;  // queries (row and head) that share packed keys
constexpr float kLowest = -__builtin_inff();

struct Attention {
    const float* query;
    int64_t query_stride, query_head_stride;
    const void* key_cache;
    const void* value_cache;
    const float* key_scales;
    const float* value_scales;
    int64_t cache_type, slot_stride;
    const int32_t* block_tables;
    int64_t table_stride, block_size;
    const int32_t* cu_lengths;
    const int32_t* context_lengths;
    const int32_t* span_lengths;
    const int64_t* positions;
    const int64_t* tree_masks;
    int64_t num_sequences, num_heads, num_groups, head_size;
    int64_t window;  // 0: none
    double scale;
    double softcap;  // 0: none
    float* out;
    int64_t out_stride, out_head_stride;
    char* scratch;
    int64_t scratch_bytes;

    int64_t ratio() const { return num_heads / num_groups; }
    int64_t padded_size() const { return (head_size + kLanes - 1) / kLanes * kLanes; }
};

// Floats of one part: the weighted sum of values, then the largest score and the sum of weights.
int64_t part_floats(const Attention& args) { return args.padded_size() + kLanes; }

// What a thread works in.
struct Room {
    float *keys, *values, *node_keys, *node_values;  // packed
    float* block;                                    // parts of kRows queries
    float* states;                                   // parts of kTileQueries queries
    float* end;

    Room(const Attention& args, int index) {
        int64_t keys_floats = args.head_size * kColumns, values_floats = args.padded_size() * kColumns;
        int64_t parts = (kRows + std::max(kTileQueries, args.ratio())) * part_floats(args);
        int64_t total = 2 * (keys_floats + values_floats) + parts;
        keys = reinterpret_cast<float*>(args.scratch) + index * total;
        values = keys + keys_floats;
        node_keys = values + values_floats;
        node_values = node_keys + keys_floats;
        block = node_values + values_floats;
        states = block + kRows * part_floats(args);
        end = keys + total;
    }
};

// Some rows of one sequence.
struct Tile {
    int64_t first_row, num_rows;
    int64_t root;        // the last position of the sequence's own tokens
    int64_t first_node;  // the row of node 1
    uint64_t nodes;      // those that a row of the tile sees; bit 0 is unused
    int64_t first_key, last_key;  // positions
    const int32_t* table;

    int64_t first_chunk() const { return first_key / kChunk; }
    int64_t num_chunks() const { return last_key / kChunk - first_chunk() + 1; }
};

// First position that a row at `position` sees.
int64_t window_begin(const Attention& args, int64_t position) {
    return args.window ? std::max<int64_t>(0, position - args.window + 1) : 0;
}

Tile make_tile(const Attention& args, int64_t sequence, int64_t first_row, int64_t num_rows) {
    Tile tile;
    tile.first_row = first_row;
    tile.num_rows = num_rows;
    tile.root = int64_t{args.context_lengths[sequence]} + args.span_lengths[sequence] - 1;
    tile.first_node = int64_t{args.cu_lengths[sequence]} + args.span_lengths[sequence];
    tile.table = args.block_tables + sequence * args.table_stride;
    tile.nodes = 0;
    tile.last_key = 0;
    int64_t lowest = args.positions[first_row];
    for (int64_t row = first_row; row < first_row + num_rows; ++row) {
        lowest = std::min(lowest, args.positions[row]);
        tile.last_key = std::max(tile.last_key, args.positions[row]);
        if (row >= tile.first_node) tile.nodes |= static_cast<uint64_t>(args.tree_masks[row]) & ~1ull;
    }
    tile.first_key = window_begin(args, lowest);
    return tile;
}

// Calls f(tile) for every tile, the longest of a sequence first.
template <typename F>
void each_tile(const Attention& args, F f) {
    int64_t tile_rows = std::max<int64_t>(1, kTileQueries / args.ratio());
    for (int64_t sequence = 0; sequence < args.num_sequences; ++sequence) {
        int64_t begin = args.cu_lengths[sequence], end = args.cu_lengths[sequence + 1];
        for (; end > begin; end = std::max(begin, end - tile_rows)) {
            int64_t first = std::max(begin, end - tile_rows);
            f(make_tile(args, sequence, first, end - first));
        }
    }
}

// What one chunk holds for the rows of a tile: lanes are positions, counted from the chunk's first.
struct Chunk {
    int64_t base;
    int64_t begin, end;  // lanes of the sequence's own tokens
    uint64_t nodes;      // those with a position in this chunk
    int64_t num_nodes;
    uint8_t node_lane[64], node_column[64];  // by node
};

int64_t lane_of(int64_t position, int64_t base) {
    return std::clamp<int64_t>(position - base, 0, kChunk);
}

int64_t slot_of(const Attention& args, const Tile& tile, int64_t index) {
    return tile.table[index / args.block_size] * args.block_size + index % args.block_size;
}

template <int64_t kType>
CachedHead<kType> cached_head(const Attention& args, const void* data, const float* scales,
                              int64_t group) {
    return {static_cast<const char*>(data) + group * args.head_size * cache_type_bytes(kType),
            scales + (kType == kCacheInt8 ? group : 0), args.slot_stride, args.num_groups,
            args.head_size};
}

template <int64_t kType>
Chunk pack_chunk(const Attention& args, const Tile& tile, int64_t group, int64_t index, Room& room) {
    CachedHead<kType> keys = cached_head<kType>(args, args.key_cache, args.key_scales, group);
    CachedHead<kType> values = cached_head<kType>(args, args.value_cache, args.value_scales, group);
    Chunk chunk;
    chunk.base = index * kChunk;
    chunk.begin = lane_of(tile.first_key, chunk.base);
    chunk.end = lane_of(std::min(tile.last_key, tile.root) + 1, chunk.base);
    int64_t slots[kColumns];
    if (chunk.begin < chunk.end) {
        for (int64_t lane = chunk.begin; lane < chunk.end; ++lane)
            slots[lane] = slot_of(args, tile, chunk.base + lane);
        pack_keys(keys, slots, chunk.begin, chunk.end, room.keys);
        pack_values(values, slots, chunk.begin, chunk.end, room.values);
    }
    chunk.nodes = 0;
    chunk.num_nodes = 0;
    for (uint64_t rest = tile.nodes; rest; rest &= rest - 1) {
        int node = __builtin_ctzll(rest);
        int64_t lane = args.positions[tile.first_node + node - 1] - chunk.base;
        if (lane < 0 || lane >= kChunk) continue;
        chunk.nodes |= 1ull << node;
        chunk.node_lane[node] = static_cast<uint8_t>(lane);
        chunk.node_column[node] = static_cast<uint8_t>(chunk.num_nodes);
        slots[chunk.num_nodes++] = slot_of(args, tile, tile.root + node);
    }
    if (chunk.num_nodes) {
        pack_keys(keys, slots, 0, chunk.num_nodes, room.node_keys);
        pack_values(values, slots, 0, chunk.num_nodes, room.node_values);
    }
    return chunk;
}

// One query's lanes in a chunk: begin .. end - 1, of which those below `own_end` are the sequence's
// own tokens and the others the nodes `nodes`, in order.
struct Visible {
    int64_t begin, end, own_end;
    uint64_t nodes;
};

Visible visible_lanes(const Attention& args, const Tile& tile, const Chunk& chunk, int64_t row) {
    int64_t position = args.positions[row];
    Visible seen;
    seen.begin = lane_of(window_begin(args, position), chunk.base);
    seen.end = lane_of(position + 1, chunk.base);
    seen.own_end = lane_of(std::min(position, tile.root) + 1, chunk.base);
    uint64_t mask = row < tile.first_node ? 0 : static_cast<uint64_t>(args.tree_masks[row]);
    seen.nodes = mask & chunk.nodes;
    return seen;
}

// exp(x) for x <= 0. Below exp(-64), which no sum with a 1 in it would notice, it is 0, since what
// follows is many times slower where numbers get too small to be normal.
Floats weight_of(Floats x) {
    Floats lowest = splat(-64.0f);
    return select(x < lowest, zeros(), exp(max(lowest, x)));
}

// Turns the scores of visible lanes into weights, others into 0; sets the part's maximum and sum.
void softmax_lanes(const Attention& args, const Visible& seen, float* scores, float* limits) {
    constexpr int kParts = kChunk / kLanes;
    Floats scale = splat(static_cast<float>(args.scale)), largest = splat(kLowest);
    Floats cap = splat(static_cast<float>(args.softcap));
    Floats score[kParts];
    for (int i = 0; i < kParts; ++i) {
        score[i] = load(scores + i * kLanes) * scale;
        if (args.softcap > 0) score[i] = cap * tanh(score[i] / cap);
        Mask before = first_lanes(std::clamp<int64_t>(seen.begin - i * kLanes, 0, kLanes));
        Mask until = first_lanes(std::clamp<int64_t>(seen.end - i * kLanes, 0, kLanes));
        score[i] = select(before, splat(kLowest), select(until, score[i], splat(kLowest)));
        largest = max(score[i], largest);
    }
    float limit = max_lanes(largest);
    for (int i = 0; i < kParts; ++i) {
        score[i] = weight_of(score[i] - splat(limit));
        store(scores + i * kLanes, score[i]);
    }
    limits[0] = limit;
    limits[1] = sum_lanes((score[0] + score[1]) + (score[2] + score[3]));
}

// The parts of up to kRows queries for one chunk, in room.block. False where a query sees nothing.
void block_parts(const Attention& args, const Chunk& chunk, const Room& room, int64_t count,
                 const float* const* queries, const Visible* seen) {
    alignas(64) float scores[kRows][kChunk], node_scores[kRows][kChunk];
    int64_t begin = kChunk, end = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (seen[i].begin >= seen[i].end) continue;
        begin = std::min(begin, seen[i].begin);
        end = std::max(end, seen[i].own_end);
    }
    if (begin < end) {
        int64_t first = begin / kLanes, last = (end + kLanes - 1) / kLanes;
        product(count, queries, room.keys + first * kLanes, kColumns, args.head_size, last - first,
                scores[0] + first * kLanes, kChunk);
    }
    uint64_t nodes = 0;
    for (int64_t i = 0; i < count; ++i) nodes |= seen[i].nodes;
    if (nodes)
        product(count, queries, room.node_keys, kColumns, args.head_size,
                (chunk.num_nodes + kLanes - 1) / kLanes, node_scores[0], kChunk);
    const float* weights[kRows];
    int64_t stride = part_floats(args), width = args.padded_size();
    for (int64_t i = 0; i < count; ++i) {
        for (uint64_t rest = seen[i].nodes; rest; rest &= rest - 1) {
            int node = __builtin_ctzll(rest);
            scores[i][chunk.node_lane[node]] = node_scores[i][chunk.node_column[node]];
        }
        softmax_lanes(args, seen[i], scores[i], room.block + i * stride + width);
        weights[i] = scores[i] + begin;
    }
    product(count, weights, room.values + begin * width, width, std::max<int64_t>(0, end - begin),
            width / kLanes, room.block, stride);
    for (int64_t i = 0; i < count; ++i)
        for (uint64_t rest = seen[i].nodes; rest; rest &= rest - 1) {
            int node = __builtin_ctzll(rest);
            if (chunk.node_lane[node] < seen[i].begin) continue;
            Floats weight = splat(scores[i][chunk.node_lane[node]]);
            const float* value = room.node_values + chunk.node_column[node] * width;
            float* sum = room.block + i * stride;
            for (int64_t at = 0; at < width; at += kLanes)
                store(sum + at, fma(weight, load(value + at), load(sum + at)));
        }
}

// Puts the next part behind those in `state`.
void append_part(float* state, const float* part, int64_t width, bool first) {
    if (first) {
        for (int64_t at = 0; at < width + kLanes; at += kLanes) store(state + at, load(part + at));
        return;
    }
    float largest = std::max(state[width], part[width]);
    Floats old_scale = weight_of(splat(state[width] - largest));
    Floats scale = weight_of(splat(part[width] - largest));
    for (int64_t at = 0; at < width; at += kLanes)
        store(state + at, fma(load(state + at), old_scale, load(part + at) * scale));
    Floats sum = fma(splat(state[width + 1]), old_scale, splat(part[width + 1]) * scale);
    state[width] = largest;
    store(state + width + 1, sum, first_lanes(1));
}

void write_row(const Attention& args, const float* state, int64_t row, int64_t head) {
    float* out = args.out + row * args.out_stride + head * args.out_head_stride;
    Floats scale = splat(1.0f / state[args.padded_size() + 1]);
    for (int64_t at = 0; at < args.head_size; at += kLanes)
        store(out + at, load(state + at) * scale, lanes_left(args.head_size - at));
}

// Computes the parts of every query of a tile for one chunk; f(query, part, first) takes them.
template <int64_t kType, typename F>
void chunk_parts(const Attention& args, const Tile& tile, int64_t group, int64_t index, Room& room,
                 F f) {
    Chunk chunk = pack_chunk<kType>(args, tile, group, index, room);
    int64_t num_queries = tile.num_rows * args.ratio();
    for (int64_t first = 0; first < num_queries; first += kRows) {
        int64_t count = std::min<int64_t>(kRows, num_queries - first);
        const float* queries[kRows];
        Visible seen[kRows];
        bool any_seen = false;
        for (int64_t i = 0; i < count; ++i) {
            int64_t row = tile.first_row + (first + i) / args.ratio();
            int64_t head = group * args.ratio() + (first + i) % args.ratio();
            queries[i] = args.query + row * args.query_stride + head * args.query_head_stride;
            seen[i] = visible_lanes(args, tile, chunk, row);
            any_seen |= seen[i].begin < seen[i].end;
        }
        if (!any_seen) continue;
        block_parts(args, chunk, room, count, queries, seen);
        for (int64_t i = 0; i < count; ++i) {
            if (seen[i].begin >= seen[i].end) continue;
            int64_t position = args.positions[tile.first_row + (first + i) / args.ratio()];
            bool is_first = window_begin(args, position) / kChunk == index;
            f(first + i, room.block + i * part_floats(args), is_first);
        }
    }
}

// One thread does every chunk of a tile and head, one after another.
template <int64_t kType>
void whole_tile(const Attention& args, const Tile& tile, int64_t group, Room& room) {
    int64_t stride = part_floats(args), ratio = args.ratio();
    for (int64_t i = 0; i < tile.num_chunks(); ++i)
        chunk_parts<kType>(args, tile, group, tile.first_chunk() + i, room,
                           [&](int64_t query, const float* part, bool first) {
                               append_part(room.states + query * stride, part, args.padded_size(),
                                           first);
                           });
    for (int64_t query = 0; query < tile.num_rows * ratio; ++query)
        write_row(args, room.states + query * stride, tile.first_row + query / ratio,
                  group * ratio + query % ratio);
}

// Puts the stored parts of the rows of a tile together; `parts` is [query][chunk] for each group.
void merge_tile(const Attention& args, const Tile& tile, const float* parts, Room& room,
                Thread& thread) {
    int64_t stride = part_floats(args), ratio = args.ratio(), num_chunks = tile.num_chunks();
    for (int64_t at = thread.index; at < tile.num_rows * args.num_heads; at += thread.count) {
        int64_t group = at / (tile.num_rows * ratio), query = at % (tile.num_rows * ratio);
        int64_t row = tile.first_row + query / ratio, position = args.positions[row];
        int64_t first = window_begin(args, position) / kChunk - tile.first_chunk();
        int64_t last = position / kChunk - tile.first_chunk();
        for (int64_t i = first; i <= last; ++i)
            append_part(room.block, parts + (at * num_chunks + i) * stride, args.padded_size(),
                        i == first);
        write_row(args, room.block, row, group * ratio + query % ratio);
    }
}

// Whether chunks of one tile go to different threads: where whole tiles would leave threads idle,
// and the parts have room.
bool splits(const Attention& args, const Thread& thread, int64_t capacity) {
    int64_t parts = 0, total = 0, largest = 0;
    each_tile(args, [&](const Tile& tile) {
        parts += tile.num_rows * args.num_heads * tile.num_chunks() * part_floats(args);
        int64_t cost = (tile.num_rows * args.ratio() + 8) * tile.num_chunks();
        total += cost * args.num_groups;
        largest = std::max(largest, cost);
    });
    return thread.count > 1 && parts <= capacity && largest * 4 * thread.count > total;
}

template <int64_t kType>
void attend(const Attention& args, Thread& thread) {
    Room room(args, thread.index);
    float* parts = Room(args, thread.count - 1).end;
    float* scratch_end = reinterpret_cast<float*>(args.scratch + args.scratch_bytes);
    bool split = splits(args, thread, scratch_end - parts);
    int64_t stride = part_floats(args), groups = args.num_groups;
    int64_t unit = thread.take(1), first_unit = 0;
    float* tile_parts = parts;
    each_tile(args, [&](const Tile& tile) {
        int64_t num_chunks = tile.num_chunks(), num_queries = tile.num_rows * args.ratio();
        int64_t num_units = groups * (split ? num_chunks : 1);
        for (; unit < first_unit + num_units; unit = thread.take(1)) {
            int64_t group = (unit - first_unit) % groups, i = (unit - first_unit) / groups;
            if (!split) {
                whole_tile<kType>(args, tile, group, room);
                continue;
            }
            float* out = tile_parts + (group * num_queries * num_chunks + i) * stride;
            chunk_parts<kType>(args, tile, group, tile.first_chunk() + i, room,
                               [&](int64_t query, const float* part, bool) {
                                   append_part(out + query * num_chunks * stride, part,
                                               args.padded_size(), true);
                               });
        }
        first_unit += num_units;
        tile_parts += groups * num_queries * num_chunks * stride;
    });
    if (!split) return;
    thread.barrier();
    tile_parts = parts;
    each_tile(args, [&](const Tile& tile) {
        merge_tile(args, tile, tile_parts, room, thread);
        tile_parts += tile.num_rows * args.num_heads * tile.num_chunks() * stride;
    });
}

void attention(const void* words, Thread& thread) {
    const Attention& args = *static_cast<const Attention*>(words);
    switch (args.cache_type) {
        case kCacheFloat32: return attend<kCacheFloat32>(args, thread);
        case kCacheBfloat16: return attend<kCacheBfloat16>(args, thread);
        case kCacheInt8: return attend<kCacheInt8>(args, thread);
    }
}

static_assert(num_fields<Attention>() == 29);
const Registration registration(
    "attention",
    "query:p query_stride:i query_head_stride:i key_cache:p value_cache:p key_scales:p "
    "value_scales:p cache_type:i slot_stride:i block_tables:p table_stride:i block_size:i "
    "cu_lengths:p context_lengths:p span_lengths:p positions:p tree_masks:p num_sequences:i "
    "num_heads:i num_groups:i head_size:i window:i scale:d softcap:d out:p out_stride:i "
    "out_head_stride:i scratch:p scratch_bytes:i",
    attention);

}  // namespace
}  // namespace headway

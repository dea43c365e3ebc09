// attention: see kernels/attention.py for the contract.
//
// A row's keys are visited in the order of their positions, cut into chunks at multiples of 64. Each
// chunk's part of the softmax (largest score, sum of weights, weighted sum of values) is computed
// alone and the parts are put together in order, the way of Milakov and Gimelshein, Online
// Normalizer Calculation for Softmax. Where a key lies, whether it was drafted or accepted, who
// computes a chunk and which other rows share its packed keys changes no bit.
#include <algorithm>
#include <tuple>
#include <utility>

#include "attention_pack.h"
#include "attention_product.h"
#include "attention_softmax.h"
#include "team.h"

namespace headway {
namespace {

static_assert(kChunk == kColumns && kChunk % kLanes == 0);
constexpr int64_t kTileQueries = 192;  // queries (row and head) that share packed keys

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
    float* out_row(int64_t row, int64_t head) const {
        return out + row * out_stride + head * out_head_stride;
    }
    int64_t padded_size() const { return (head_size + kLanes - 1) / kLanes * kLanes; }
};

// Floats of one part: the weighted sum of values, then the largest score and the sum of weights.
int64_t part_floats(const Attention& args) { return args.padded_size() + kLanes; }

// What a thread works in.
struct Room {
    float *keys, *values, *node_keys, *node_values;  // packed
    float* block;                                    // weighted sums of kRows queries
    States states;                                   // of kTileQueries queries
    float* end;

    Room(const Attention& args, int index) {
        int64_t width = args.padded_size();
        int64_t keys_floats = args.head_size * kColumns, values_floats = width * kColumns;
        int64_t queries = std::max(kTileQueries, args.ratio()) + kLanes;
        int64_t total = 2 * (keys_floats + values_floats) + (kRows + queries) * width + 2 * queries;
        keys = reinterpret_cast<float*>(args.scratch) + index * total;
        values = keys + keys_floats;
        node_keys = values + values_floats;
        node_values = node_keys + keys_floats;
        block = node_values + values_floats;
        states.width = width;
        states.sums = block + kRows * width;
        states.largest = states.sums + queries * width;
        states.sum_of_weights = states.largest + queries;
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

// The slots of tokens index, index + 1, ...
void find_slots(const Attention& args, const Tile& tile, int64_t index, int64_t count,
                int64_t* slots) {
    int64_t block = index / args.block_size, offset = index % args.block_size;
    for (int64_t i = 0; i < count; ++block, offset = 0)
        for (; offset < args.block_size && i < count; ++offset, ++i)
            slots[i] = int64_t{tile.table[block]} * args.block_size + offset;
}

// Gives the lanes beside begin .. end - 1, up to multiples of 16, slots that may be read.
void fill_beside(int64_t* slots, int64_t begin, int64_t end) {
    for (int64_t lane = begin; lane % kLanes;) slots[--lane] = slots[begin];
    for (int64_t lane = end; lane % kLanes; ++lane) slots[lane] = slots[begin];
}

template <int64_t kType>
CachedHead<kType> cached_head(const Attention& args, const void* data, const float* scales,
                              int64_t group) {
    return {static_cast<const char*>(data) + group * args.head_size * cache_type_bytes(kType),
            scales + (kType == kCacheInt8 ? group : 0), args.slot_stride, args.num_groups,
            args.head_size};
}

// One head's keys and values of one chunk.
struct Piece {
    int64_t group, chunk;
};

template <int64_t kType>
Chunk pack_chunk(const Attention& args, const Tile& tile, Piece piece, const Room& room) {
    int64_t group = piece.group;
    CachedHead<kType> keys = cached_head<kType>(args, args.key_cache, args.key_scales, group);
    CachedHead<kType> values = cached_head<kType>(args, args.value_cache, args.value_scales, group);
    Chunk chunk;
    chunk.base = piece.chunk * kChunk;
    chunk.begin = lane_of(tile.first_key, chunk.base);
    chunk.end = lane_of(std::min(tile.last_key, tile.root) + 1, chunk.base);
    int64_t slots[kColumns];
    if (chunk.begin < chunk.end) {
        find_slots(args, tile, chunk.base + chunk.begin, chunk.end - chunk.begin,
                   slots + chunk.begin);
        fill_beside(slots, chunk.begin, chunk.end);
        // They come while the keys are turned.
        for (int64_t lane = chunk.begin; lane < chunk.end; ++lane) values.prefetch(slots[lane]);
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
        fill_beside(slots, 0, chunk.num_nodes);
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

// The parts of up to kRows queries for one chunk: weighted sums in room.block, and their limits.
Limits block_parts(const Attention& args, const Chunk& chunk, const Room& room, int64_t count,
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
    Limits limits = {};
    int64_t width = args.padded_size();
    for (int64_t i = 0; i < count; ++i) {
        for (uint64_t rest = seen[i].nodes; rest; rest &= rest - 1) {
            int node = __builtin_ctzll(rest);
            scores[i][chunk.node_lane[node]] = node_scores[i][chunk.node_column[node]];
        }
        std::tie(limits.largest[i], limits.sum[i]) =
            softmax_lanes(scores[i], seen[i].begin, seen[i].end, static_cast<float>(args.scale),
                          static_cast<float>(args.softcap));
        weights[i] = scores[i] + begin;
    }
    product(count, weights, room.values + begin * width, width, std::max<int64_t>(0, end - begin),
            width / kLanes, room.block, width);
    for (int64_t i = 0; i < count; ++i)
        for (uint64_t rest = seen[i].nodes; rest; rest &= rest - 1) {
            int node = __builtin_ctzll(rest);
            if (chunk.node_lane[node] < seen[i].begin) continue;
            Floats weight = splat(scores[i][chunk.node_lane[node]]);
            const float* value = room.node_values + chunk.node_column[node] * width;
            float* sum = room.block + i * width;
            for (int64_t at = 0; at < width; at += kLanes)
                store(sum + at, fma(weight, load(value + at), load(sum + at)));
        }
    return limits;
}

// Computes the parts of every query of a tile for one piece; f(first query, limits, rows, fresh)
// takes them from room.block, as States::append does.
template <int64_t kType, typename F>
void piece_parts(const Attention& args, const Tile& tile, Piece piece, const Room& room, F f) {
    Chunk chunk = pack_chunk<kType>(args, tile, piece, room);
    int64_t ratio = args.ratio(), num_queries = tile.num_rows * ratio;
    for (int64_t first = 0; first < num_queries; first += kRows) {
        int64_t count = std::min<int64_t>(kRows, num_queries - first);
        const float* queries[kRows];
        Visible seen[kRows];
        unsigned rows = 0, fresh = 0;
        for (int64_t i = 0; i < count; ++i) {
            int64_t row = tile.first_row + (first + i) / ratio;
            int64_t head = piece.group * ratio + (first + i) % ratio;
            queries[i] = args.query + row * args.query_stride + head * args.query_head_stride;
            seen[i] = visible_lanes(args, tile, chunk, row);
            if (seen[i].begin >= seen[i].end) continue;
            rows |= 1u << i;
            if (window_begin(args, args.positions[row]) >= chunk.base) fresh |= 1u << i;
        }
        if (rows) f(first, block_parts(args, chunk, room, count, queries, seen), rows, fresh);
    }
}

// The pieces of some heads of a tile, in the order in which they are computed: all heads of a chunk
// and then the next chunk, since the heads of a slot lie side by side.
struct Pieces {
    int64_t first_group, num_groups, first_chunk, num_chunks;

    int64_t count() const { return num_groups * num_chunks; }
    Piece operator[](int64_t i) const {
        return {first_group + i % num_groups, first_chunk + i / num_groups};
    }
};

// One thread does every chunk of some heads of a tile.
template <int64_t kType>
void whole_tile(const Attention& args, const Tile& tile, int64_t first_group, int64_t num_groups,
                const Room& room) {
    int64_t ratio = args.ratio(), num_queries = tile.num_rows * ratio;
    Pieces pieces = {first_group, num_groups, tile.first_chunk(), tile.num_chunks()};
    States states = room.states;
    for (int64_t i = 0; i < pieces.count(); ++i)
        piece_parts<kType>(args, tile, pieces[i], room,
                           [&](int64_t first, const Limits& limits, unsigned rows, unsigned fresh) {
                               states.append(i % num_groups * num_queries + first, room.block,
                                             limits, rows, fresh);
                           });
    for (int64_t at = 0; at < num_groups * num_queries; ++at) {
        int64_t group = first_group + at / num_queries, query = at % num_queries;
        float* out = args.out_row(tile.first_row + query / ratio, group * ratio + query % ratio);
        states.write(at, out, args.head_size);
    }
}

// Computes one piece of a tile and stores its parts: parts[group][query][chunk].
template <int64_t kType>
void split_tile(const Attention& args, const Tile& tile, Piece piece, const Room& room,
                float* parts) {
    int64_t width = args.padded_size(), num_queries = tile.num_rows * args.ratio();
    piece_parts<kType>(
        args, tile, piece, room,
        [&](int64_t first, const Limits& limits, unsigned rows, unsigned) {
            for (; rows; rows &= rows - 1) {
                int i = __builtin_ctz(rows);
                int64_t query = piece.group * num_queries + first + i;
                int64_t at = query * tile.num_chunks() + piece.chunk - tile.first_chunk();
                float* part = parts + at * part_floats(args);
                std::memcpy(part, room.block + i * width, static_cast<size_t>(width) * 4);
                part[width] = limits.largest[i];
                part[width + 1] = limits.sum[i];
            }
        });
}

// Puts the stored parts of the rows of a tile together; `parts` is as split_tile left them.
void merge_tile(const Attention& args, const Tile& tile, const float* parts, const Room& room,
                Thread& thread) {
    int64_t stride = part_floats(args), ratio = args.ratio(), num_chunks = tile.num_chunks();
    States state = room.states;
    for (int64_t at = thread.index; at < tile.num_rows * args.num_heads; at += thread.count) {
        int64_t group = at / (tile.num_rows * ratio), query = at % (tile.num_rows * ratio);
        int64_t row = tile.first_row + query / ratio, position = args.positions[row];
        int64_t first = window_begin(args, position) / kChunk - tile.first_chunk();
        int64_t last = position / kChunk - tile.first_chunk();
        for (int64_t i = first; i <= last; ++i) {
            const float* part = parts + (at * num_chunks + i) * stride;
            Limits limits = {{part[state.width]}, {part[state.width + 1]}};
            state.append(0, part, limits, 1, i == first);
        }
        state.write(0, args.out_row(row, group * ratio + query % ratio), args.head_size);
    }
}

// How work is divided; it changes no bit.
struct Division {
    bool chunks;  // chunks of one tile go to different threads, and the parts are merged afterwards
    bool heads;   // so do key-value heads
};

// As little as keeps every thread busy: slots are read front to back where one thread does all of
// their heads.
Division divide(const Attention& args, const Thread& thread, int64_t capacity) {
    int64_t parts = 0, total = 0, largest = 0, num_chunks = 0, most_rows = 0;
    each_tile(args, [&](const Tile& tile) {
        parts += tile.num_rows * args.num_heads * tile.num_chunks() * part_floats(args);
        int64_t cost = (tile.num_rows * args.ratio() + 8) * tile.num_chunks();
        total += cost;
        largest = std::max(largest, cost);
        num_chunks += tile.num_chunks();
        most_rows = std::max(most_rows, tile.num_rows);
    });
    bool fits = most_rows * args.num_heads <= kTileQueries;
    int64_t share = total / (4 * thread.count);
    if (thread.count == 1 || (fits && largest <= share)) return {false, !fits};
    bool few_chunks = num_chunks < 4 * thread.count;
    if (parts > capacity || largest <= share * args.num_groups) return {false, true};
    return {true, !fits || few_chunks};
}

template <int64_t kType>
void attend(const Attention& args, Thread& thread) {
    Room room(args, thread.index);
    float* parts = Room(args, thread.count - 1).end;
    float* scratch_end = reinterpret_cast<float*>(args.scratch + args.scratch_bytes);
    Division division = divide(args, thread, scratch_end - parts);
    int64_t stride = part_floats(args), per_unit = division.heads ? 1 : args.num_groups;
    int64_t unit = thread.take(1), first_unit = 0;
    float* tile_parts = parts;
    each_tile(args, [&](const Tile& tile) {
        Pieces pieces = {0, args.num_groups, tile.first_chunk(), tile.num_chunks()};
        int64_t num_units = (division.chunks ? pieces.count() : args.num_groups) / per_unit;
        while (unit < first_unit + num_units) {
            int64_t first = (unit - first_unit) * per_unit;
            for (int64_t i = first; division.chunks && i < first + per_unit; ++i)
                split_tile<kType>(args, tile, pieces[i], room, tile_parts);
            if (!division.chunks) whole_tile<kType>(args, tile, first, per_unit, room);
            unit = thread.take(1);
        }
        first_unit += num_units;
        tile_parts += tile.num_rows * args.num_heads * tile.num_chunks() * stride;
    });
    if (!division.chunks) return;
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

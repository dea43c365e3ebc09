// write_kv and move_kv: see kernels/attention.py for the contracts.
#include "kv_write.h"

#include "team.h"

namespace headway {
namespace {

struct WriteKv {
    const float* key;
    int64_t key_stride, key_head_stride;
    const float* value;
    int64_t value_stride, value_head_stride;
    void* key_cache;
    void* value_cache;
    float* key_scales;
    float* value_scales;
    int64_t cache_type, slot_stride;
    const int64_t* slots;
    int64_t num_rows, num_groups, head_size;
};

void write_kv(const void* words, Thread& thread) {
    const WriteKv& args = *static_cast<const WriteKv*>(words);
    Cache keys{args.key_cache,   args.key_scales, args.cache_type,
               args.slot_stride, args.num_groups, args.head_size};
    Cache values = keys;
    values.data = args.value_cache;
    values.scales = args.value_scales;
    for (int64_t row = thread.index; row < args.num_rows; row += thread.count) {
        const float* key = args.key + row * args.key_stride;
        const float* value = args.value + row * args.value_stride;
        for (int64_t head = 0; head < args.num_groups; ++head) {
            keys.store(args.slots[row], head, key + head * args.key_head_stride);
            values.store(args.slots[row], head, value + head * args.value_head_stride);
        }
    }
}

struct MoveKv {
    char* data;
    int64_t layer_bytes, slot_bytes, num_layers;
    const int64_t* sources;
    const int64_t* targets;
    int64_t num_moves;
    char* scratch;  // num_moves * slot_bytes for each thread
};

void move_kv(const void* words, Thread& thread) {
    const MoveKv& args = *static_cast<const MoveKv*>(words);
    size_t bytes = static_cast<size_t>(args.slot_bytes);
    char* held = args.scratch + thread.index * args.num_moves * args.slot_bytes;
    for (int64_t layer = thread.index; layer < args.num_layers; layer += thread.count) {
        char* slots = args.data + layer * args.layer_bytes;
        for (int64_t i = 0; i < args.num_moves; ++i)
            std::memcpy(held + i * args.slot_bytes, slots + args.sources[i] * args.slot_bytes,
                        bytes);
        for (int64_t i = 0; i < args.num_moves; ++i)
            std::memcpy(slots + args.targets[i] * args.slot_bytes, held + i * args.slot_bytes,
                        bytes);
    }
}

static_assert(num_fields<WriteKv>() == 16);
const Registration write_kv_registration(
    "write_kv",
    "key:p key_stride:i key_head_stride:i value:p value_stride:i value_head_stride:i key_cache:p "
    "value_cache:p key_scales:p value_scales:p cache_type:i slot_stride:i slots:p num_rows:i "
    "num_groups:i head_size:i",
    write_kv);

static_assert(num_fields<MoveKv>() == 8);
const Registration move_kv_registration(
    "move_kv",
    "data:p layer_bytes:i slot_bytes:i num_layers:i sources:p targets:p num_moves:i scratch:p",
    move_kv);

}  // namespace
}  // namespace headway

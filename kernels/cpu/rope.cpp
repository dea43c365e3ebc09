// rope: see kernels/rope.py for the contract. rope_write_kv is rope and write_kv (kernels/attention.py)
// in one: queries and keys are rotated where they lie, then keys and values stored.
#include "rope.h"

#include "kv_write.h"
#include "team.h"

namespace headway {
namespace {

struct Rope {
    const float* x;
    int64_t x_stride, x_head_stride;
    const float* cos;
    const float* sin;
    int64_t angle_stride;
    float* out;
    int64_t out_stride, out_head_stride;
    int64_t num_rows, num_heads, head_size, rotary_size;
};

void rope(const void* words, Thread& thread) {
    const Rope& args = *static_cast<const Rope*>(words);
    int64_t total = args.num_rows * args.num_heads;
    int64_t begin = total * thread.index / thread.count;
    int64_t end = total * (thread.index + 1) / thread.count;
    for (int64_t at = begin; at < end; ++at) {
        int64_t row = at / args.num_heads, head = at % args.num_heads;
        rotate(args.x + row * args.x_stride + head * args.x_head_stride,
               args.cos + row * args.angle_stride, args.sin + row * args.angle_stride,
               args.rotary_size, args.head_size,
               args.out + row * args.out_stride + head * args.out_head_stride);
    }
}

struct RopeWriteKv {
    float* query;
    int64_t query_stride, query_head_stride;
    float* key;
    int64_t key_stride, key_head_stride;
    const float* value;
    int64_t value_stride, value_head_stride;
    const float* cos;
    const float* sin;
    int64_t angle_stride;
    void* key_cache;
    void* value_cache;
    float* key_scales;
    float* value_scales;
    int64_t cache_type, slot_stride;
    const int64_t* slots;
    int64_t num_rows, num_heads, num_groups, head_size, rotary_size;
};

void rope_write_kv(const void* words, Thread& thread) {
    const RopeWriteKv& args = *static_cast<const RopeWriteKv*>(words);
    Cache keys{args.key_cache,   args.key_scales, args.cache_type,
               args.slot_stride, args.num_groups, args.head_size};
    Cache values = keys;
    values.data = args.value_cache;
    values.scales = args.value_scales;
    int64_t per_row = args.num_heads + 2 * args.num_groups, total = args.num_rows * per_row;
    int64_t begin = total * thread.index / thread.count;
    int64_t end = total * (thread.index + 1) / thread.count;
    for (int64_t at = begin; at < end; ++at) {
        int64_t row = at / per_row, part = at % per_row;
        const float* cos = args.cos + row * args.angle_stride;
        const float* sin = args.sin + row * args.angle_stride;
        if (part < args.num_heads) {
            float* x = args.query + row * args.query_stride + part * args.query_head_stride;
            rotate(x, cos, sin, args.rotary_size, args.head_size, x);
        } else if ((part -= args.num_heads) < args.num_groups) {
            float* x = args.key + row * args.key_stride + part * args.key_head_stride;
            rotate(x, cos, sin, args.rotary_size, args.head_size, x);
            keys.store(args.slots[row], part, x);
        } else {
            part -= args.num_groups;
            values.store(args.slots[row], part,
                         args.value + row * args.value_stride + part * args.value_head_stride);
        }
    }
}

static_assert(num_fields<Rope>() == 13);
const Registration rope_registration(
    "rope",
    "x:p x_stride:i x_head_stride:i cos:p sin:p angle_stride:i out:p out_stride:i "
    "out_head_stride:i num_rows:i num_heads:i head_size:i rotary_size:i",
    rope);

static_assert(num_fields<RopeWriteKv>() == 24);
const Registration rope_write_kv_registration(
    "rope_write_kv",
    "query:p query_stride:i query_head_stride:i key:p key_stride:i key_head_stride:i value:p "
    "value_stride:i value_head_stride:i cos:p sin:p angle_stride:i key_cache:p value_cache:p "
    "key_scales:p value_scales:p cache_type:i slot_stride:i slots:p num_rows:i num_heads:i "
    "num_groups:i head_size:i rotary_size:i",
    rope_write_kv);

}  // namespace
}  // namespace headway

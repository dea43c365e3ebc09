// matmul of small strided matrices: see kernels/matmul.py for the contract.
#include "team.h"
#include "vec.h"

namespace headway {
namespace {

constexpr int64_t kColumns = 64;

struct Matmul {
    const float* a;
    const float* b;
    float* out;
    int64_t num_batches, num_rows, num_inner, num_columns;
    int64_t a_batch_stride, a_row_stride, a_inner_stride;
    int64_t b_batch_stride, b_inner_stride, b_column_stride;
    int64_t out_batch_stride, out_row_stride, out_column_stride;
};

// One row by up to kColumns columns; every element is added up over k in order.
void multiply(const Matmul& args, const float* a, const float* b, float* out, int64_t count) {
    Floats partial[kColumns / kLanes];
    for (Floats& part : partial) part = zeros();
    float row[kColumns] = {};
    for (int64_t k = 0; k < args.num_inner; ++k, b += args.b_inner_stride) {
        Floats x = splat(a[k * args.a_inner_stride]);
        const float* y = b;
        if (args.b_column_stride != 1 || count < kColumns) {
            for (int64_t j = 0; j < count; ++j) row[j] = b[j * args.b_column_stride];
            y = row;
        }
        for (int part = 0; part < kColumns / kLanes; ++part)
            partial[part] = fma(x, load(y + part * kLanes), partial[part]);
    }
    for (int part = 0; part < kColumns / kLanes; ++part) store(row + part * kLanes, partial[part]);
    for (int64_t j = 0; j < count; ++j) out[j * args.out_column_stride] = row[j];
}

void matmul(const void* words, Thread& thread) {
    const Matmul& args = *static_cast<const Matmul*>(words);
    int64_t num_pieces = (args.num_columns + kColumns - 1) / kColumns;
    int64_t total = args.num_batches * args.num_rows * num_pieces;
    int64_t begin = total * thread.index / thread.count;
    int64_t end = total * (thread.index + 1) / thread.count;
    for (int64_t at = begin; at < end; ++at) {
        int64_t first = at % num_pieces * kColumns, row = at / num_pieces % args.num_rows;
        int64_t batch = at / num_pieces / args.num_rows;
        int64_t rest = args.num_columns - first;
        multiply(args, args.a + batch * args.a_batch_stride + row * args.a_row_stride,
                 args.b + batch * args.b_batch_stride + first * args.b_column_stride,
                 args.out + batch * args.out_batch_stride + row * args.out_row_stride +
                     first * args.out_column_stride,
                 rest < kColumns ? rest : kColumns);
    }
}

static_assert(num_fields<Matmul>() == 16);
const Registration registration(
    "matmul",
    "a:p b:p out:p num_batches:i num_rows:i num_inner:i num_columns:i a_batch_stride:i "
    "a_row_stride:i a_inner_stride:i b_batch_stride:i b_inner_stride:i b_column_stride:i "
    "out_batch_stride:i out_row_stride:i out_column_stride:i",
    matmul);

}  // namespace
}  // namespace headway

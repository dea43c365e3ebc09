// A body for tests of the team: each element of `to` is one more than its neighbour in `from`.
#include "team.h"

namespace headway {
namespace {

struct AddOne {
    const int64_t* from;
    int64_t* to;
    int64_t size;
    double extra;
};

void add_one(const void* words, Thread& thread) {
    const AddOne& args = *static_cast<const AddOne*>(words);
    for (int64_t i; (i = thread.take(1)) < args.size;)
        args.to[i] = args.from[(i + 1) % args.size] + 1 + static_cast<int64_t>(args.extra);
}

static_assert(num_fields<AddOne>() == 4);
const Registration registration("add_one", "from:p to:p size:i extra:d", add_one);

}  // namespace
}  // namespace headway

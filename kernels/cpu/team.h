// What a kernel body sees of the threads that run it, and how bodies are registered.
//
// A body is a function that every thread of a team calls with the same arguments. Threads divide the
// work by index or by `take`; the runner puts a barrier after each instruction, so what one writes
// the next may read.
#pragma once

#include <atomic>
#include <cstdint>

namespace headway {

class Team;

class Thread {
   public:
    Thread(Team& team, int index, int count) : index(index), count(count), team_(team) {}

    // Waits until every thread of the team is here.
    void barrier();

    // The first of `grain` pieces of work that nobody has taken since the last barrier.
    int64_t take(int64_t grain);

    const int index;
    const int count;

   private:
    Team& team_;
};

// `args` points at the argument words of one instruction: a struct of 8-byte fields (pointers,
// int64_t and double), in the order of the field list that the body was registered with.
using Body = void (*)(const void* args, Thread& thread);

// `fields` names the arguments in order, each with its kind: p pointer, i int64_t, d double, as in
// "x:p x_stride:i epsilon:d". Python packs arguments by these names (library.py).
struct Registration {
    Registration(const char* name, const char* fields, Body body);
    const char* name;
    const char* fields;
    Body body;
    const Registration* next;
};

template <typename Args>
constexpr int num_fields() {
    static_assert(sizeof(Args) % 8 == 0, "arguments are 8-byte words");
    return sizeof(Args) / 8;
}

}  // namespace headway

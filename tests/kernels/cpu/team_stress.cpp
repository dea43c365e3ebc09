// A program for the thread sanitizer: teams that start, run, take, sleep and end in every order.
// Exits with 0 if each instruction ran on every thread and saw what the one before it wrote.
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "team.h"

extern "C" {
void* headway_team_create(int num_threads, int pinned);
void headway_team_destroy(void* team);
void headway_team_run(void* team, const int64_t* words, int64_t num_words);
}

namespace headway {
namespace {

struct Args {
    const int64_t* from;
    int64_t* to;
    int64_t size;
};

// Plain memory, so that a missing barrier is a race that the sanitizer sees.
void add_one_by_index(const void* words, Thread& thread) {
    const Args& args = *static_cast<const Args*>(words);
    for (int64_t i = thread.index; i < args.size; i += thread.count) args.to[i] = args.from[i] + 1;
}

// Reads what other threads wrote, and after a barrier of its own what they wrote just now.
void add_one_by_take(const void* words, Thread& thread) {
    const Args& args = *static_cast<const Args*>(words);
    for (int64_t i; (i = thread.take(2)) < args.size;)
        for (int64_t j = i; j < i + 2 && j < args.size; ++j) args.to[j] = args.from[args.size - 1] + 1;
    thread.barrier();
    for (int64_t i; (i = thread.take(3)) < args.size;)
        if (args.to[args.size - 1 - i] != args.to[0]) std::abort();
}

void push(std::vector<int64_t>& program, Body body, const int64_t* from, int64_t* to, int64_t size) {
    program.insert(program.end(), {reinterpret_cast<int64_t>(body), 3,
                                   reinterpret_cast<int64_t>(from), reinterpret_cast<int64_t>(to),
                                   size});
}

void run_one_team(int num_threads, bool pinned, int num_runs) {
    constexpr int64_t kSize = 13, kPairs = 20;
    void* team = headway_team_create(num_threads, pinned);
    if (!team) std::abort();
    for (int run = 0; run < num_runs; ++run) {
        // Freed after each run: threads that still read the program would be caught.
        std::vector<int64_t> a(kSize, 0), b(kSize, -1), program;
        for (int64_t pair = 0; pair < kPairs; ++pair) {
            push(program, add_one_by_index, a.data(), b.data(), kSize);
            push(program, add_one_by_take, b.data(), a.data(), kSize);
        }
        headway_team_run(team, program.data(), static_cast<int64_t>(program.size()));
        for (int64_t value : a)
            if (value != 2 * kPairs) std::abort();
        if (run % 16 == 15) usleep(3000);  // long enough for the others to fall asleep
    }
    headway_team_destroy(team);
}

void* use_teams(void*) {
    for (int num_threads : {1, 2, 3, 5}) {
        headway_team_destroy(headway_team_create(num_threads, 0));
        run_one_team(num_threads, num_threads == 3, 50);
    }
    return nullptr;
}

}  // namespace
}  // namespace headway

int main() {
    pthread_t other;
    if (pthread_create(&other, nullptr, headway::use_teams, nullptr)) return 1;
    headway::use_teams(nullptr);
    pthread_join(other, nullptr);
    std::puts("done");
    return 0;
}

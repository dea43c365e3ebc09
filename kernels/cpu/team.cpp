// The thread team: runs a program, one instruction after another, with a barrier after each.
//
// Waiting threads spin for a while, since the next instruction is mostly microseconds away, and then
// sleep in the kernel, so that an idle server burns nothing.
#include "team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <thread>
#include <vector>

namespace headway {
namespace {

constexpr int kSpins = 20000;  // of a pause instruction each: some 0.3 to 1 ms

const Registration* registrations = nullptr;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is one 32-bit word");

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// A number that goes up, and threads that wait until it has.
struct Signal {
    alignas(64) std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    void raise() {
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) futex_wake_all(value);
    }

    void wait_beyond(uint32_t seen) {
        for (int spin = 0; spin < kSpins; ++spin) {
            if (value.load(std::memory_order_acquire) != seen) return;
            relax();
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (value.load(std::memory_order_seq_cst) == seen) futex_wait(value, seen);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
};

}  // namespace

Registration::Registration(const char* name, const char* fields, Body body)
    : name(name), fields(fields), body(body), next(registrations) {
    registrations = this;
}

class Team {
   public:
    Team(int num_threads, bool pinned) : count_(num_threads), pinned_(pinned) {
        for (int index = 1; index < num_threads; ++index)
            workers_.emplace_back([this, index] { work(index); });
    }

    ~Team() {
        words_ = nullptr;
        start_.raise();
        for (auto& worker : workers_) worker.join();
    }

    // The calling thread works as thread 0.
    void run(const int64_t* words, int64_t num_words) {
        if (!num_words) return;
        words_ = words;
        num_words_ = num_words;
        start_.raise();
        execute(0);
    }

    void barrier() {
        uint32_t phase = done_.value.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < count_) {
            done_.wait_beyond(phase);
            return;
        }
        arrived_.store(0, std::memory_order_relaxed);
        taken_.store(0, std::memory_order_relaxed);
        done_.raise();
    }

    int64_t take(int64_t grain) { return taken_.fetch_add(grain, std::memory_order_relaxed); }

   private:
    void work(int index) {
        if (pinned_) pin(index);
        for (uint32_t seen = 0;; ++seen) {
            start_.wait_beyond(seen);
            if (!words_) return;
            execute(index);
        }
    }

    // Instructions lie one after another: body, number of argument words, argument words.
    void execute(int index) {
        // Copies: past the last barrier the caller may already be setting up the next run.
        const int64_t *at = words_, *end = at + num_words_;
        for (Thread thread(*this, index, count_); at < end; at += 2 + at[1]) {
            reinterpret_cast<Body>(at[0])(at + 2, thread);
            barrier();
        }
    }

    static void pin(int index) {
        cpu_set_t allowed;
        if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
        int num_allowed = CPU_COUNT(&allowed);
        for (int cpu = 0, nth = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (!CPU_ISSET(cpu, &allowed) || nth++ != index % num_allowed) continue;
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof one, &one);
            return;
        }
    }

    const int count_;
    const bool pinned_;
    const int64_t* words_ = nullptr;
    int64_t num_words_ = 0;
    Signal start_, done_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> taken_{0};
    std::vector<std::thread> workers_;
};

void Thread::barrier() { team_.barrier(); }
int64_t Thread::take(int64_t grain) { return team_.take(grain); }

}  // namespace headway

extern "C" {

void* headway_team_create(int num_threads, int pinned) {
    return new headway::Team(num_threads, pinned != 0);
}

void headway_team_destroy(void* team) { delete static_cast<headway::Team*>(team); }

void headway_team_run(void* team, const int64_t* words, int64_t num_words) {
    static_cast<headway::Team*>(team)->run(words, num_words);
}

// The registered bodies one by one: the first for null, null after the last.
const void* headway_next_kernel(const void* previous) {
    return previous ? static_cast<const headway::Registration*>(previous)->next
                    : headway::registrations;
}

const char* headway_kernel_name(const void* kernel) {
    return static_cast<const headway::Registration*>(kernel)->name;
}

const char* headway_kernel_fields(const void* kernel) {
    return static_cast<const headway::Registration*>(kernel)->fields;
}

void* headway_kernel_body(const void* kernel) {
    return reinterpret_cast<void*>(static_cast<const headway::Registration*>(kernel)->body);
}
}

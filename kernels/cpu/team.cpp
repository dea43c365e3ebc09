// The thread team: runs a program, one instruction after another, with a barrier after each.
//
// Waiting threads spin, since the next instruction is mostly microseconds away, and then sleep in the
// kernel, so that an idle server burns nothing.
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <new>
#include <vector>

namespace headway {
namespace {

// A wait first pauses: threads that are in step reach a barrier within microseconds of each other.
// Then it offers its core to others between looks, and in the end it sleeps.
//
// Offering matters more than the lengths. A program of 300 instructions, 8 ms of work for each of two
// threads, on two cores that two to four other processes kept busy: 16 ms with it, whatever the
// lengths (20 us to 2 ms); without it 15 ms if the spin ends after 5 us, 48 after 50, 130 after 200,
// 190 after 1000, since the thread that is waited for may be queued behind the one that spins. Three
// threads on the two cores: 12 ms against 40 to 400.
//
// The whole spin outlasts what Python does between two steps.
constexpr int64_t kPauseNanoseconds = 2'000;
constexpr int64_t kSpinNanoseconds = 1'000'000;
constexpr int kPausesPerLook = 16;  // at the clock

const Registration* registrations = nullptr;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
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
        if (spin_beyond(seen)) return;
        // Both sides are sequentially consistent: either the raiser sees a sleeper here, or this
        // thread sees the raised value; so no wake-up is lost.
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (value.load(std::memory_order_seq_cst) == seen) futex_wait(value, seen);
        sleepers.fetch_sub(1, std::memory_order_relaxed);
    }

    bool spin_beyond(uint32_t seen) const {
        int64_t start = 0, spent = 0;
        while (spent < kSpinNanoseconds) {
            for (int spin = 0; spin < kPausesPerLook; ++spin) {
                if (value.load(std::memory_order_acquire) != seen) return true;
                relax();
            }
            int64_t now = nanoseconds();
            if (!start) start = now;
            spent = now - start;
            if (spent >= kPauseNanoseconds) sched_yield();
        }
        return false;
    }
};

}  // namespace

Registration::Registration(const char* name, const char* fields, Body body)
    : name(name), fields(fields), body(body), next(registrations) {
    registrations = this;
}

class Team {
   public:
    // Null if the threads cannot be started.
    static Team* start(int num_threads, bool pinned) {
        Team* team = new (std::nothrow) Team(num_threads, pinned);
        if (!team || team->start_workers()) return team;
        delete team;
        return nullptr;
    }

    ~Team() {
        words_ = nullptr;
        start_.raise();
        for (const Worker& worker : workers_) pthread_join(worker.thread, nullptr);
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
    struct Worker {
        Team* team;
        int index;
        pthread_t thread;
    };

    Team(int num_threads, bool pinned) : count_(num_threads), pinned_(pinned) {}

    bool start_workers() {
        // Signals are the interpreter's business: they go to threads that can act on them.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        workers_.reserve(count_ - 1);  // so that workers stay where they are
        bool started = true;
        for (int index = 1; index < count_ && started; ++index) {
            workers_.push_back({this, index, {}});
            Worker& worker = workers_.back();
            started = !pthread_create(&worker.thread, nullptr, work, &worker);
            if (!started) workers_.pop_back();
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }

    static void* work(void* worker) {
        auto& [team, index, thread] = *static_cast<Worker*>(worker);
        if (team->pinned_) pin(index);
        for (uint32_t seen = 0;; ++seen) {
            team->start_.wait_beyond(seen);
            if (!team->words_) return nullptr;
            team->execute(index);
        }
    }

    // Instructions lie one after another: body, number of argument words, argument words.
    void execute(int index) {
        Thread thread(*this, index, count_);
        const int64_t *at = words_, *end = at + num_words_;
        while (at < end) {
            const int64_t* instruction = at;
            // Moved on before the barrier: past the last one the caller may free the words.
            at += 2 + at[1];
            reinterpret_cast<Body>(instruction[0])(instruction + 2, thread);
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
    std::vector<Worker> workers_;
};

void Thread::barrier() { team_.barrier(); }
int64_t Thread::take(int64_t grain) { return team_.take(grain); }

}  // namespace headway

extern "C" {

void* headway_team_create(int num_threads, int pinned) {
    return headway::Team::start(num_threads, pinned != 0);
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

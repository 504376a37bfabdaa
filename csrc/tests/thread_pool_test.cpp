// Tests of the thread pool: how a step is cancelled, which threads may still write afterwards, and how memory
// is released. Gates in the chunks force every case; nothing depends on time.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "../runtime.h"
#include "../thread_choice.h"

namespace {

using namespace hotset;

void check(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "thread_pool_test: %s\n", what);
    std::exit(1);
}

// Phases of chunks. Each chunk calls `body` and is then committed.
class Chunks : public Job {
  public:
    std::function<void(int phase, int chunk, Worker&)> body = [](int, int, Worker&) {};
    mutable std::atomic<int> n_begun{0}, n_committed{0}, n_stragglers{0};
    std::vector<int> phases;
    int alone_phase = -1;  // a phase that only the calling thread computes

    explicit Chunks(std::vector<int> chunks) : phases(std::move(chunks)) {}
    int n_phases() const override { return int(phases.size()); }
    int n_chunks(int phase) const override { return phases[phase]; }
    bool alone(int phase) const override { return phase == alone_phase; }
    void run_chunk(int phase, int chunk, Worker& worker) const override {
        n_begun++;
        body(phase, chunk, worker);
        if (!worker.begin_commit()) return void(n_stragglers++);
        n_committed++;
        worker.end_commit();
    }
    bool prefetch(int, int, int) const override { return false; }
    void reached(int) const override {}
    int total() const {
        int n = 0;
        for (int chunks : phases) n += chunks;
        return n;
    }
};

bool run(Runtime& runtime, const Chunks& job, std::atomic<bool>& cancel, const Poll* poll = nullptr,
         int n_threads = 0) {
    const Runtime::Turn turn(runtime, cancel, poll);
    return turn.pool().run(turn.pool().free_slot(), job, cancel, poll, &job, n_threads);
}

void expect_whole(Runtime& runtime) {
    std::atomic<bool> cancel{false};
    Chunks job(std::vector<int>(40, 7));
    check(run(runtime, job, cancel), "a step after a cancelled one is not done");
    check(job.n_committed == job.total(), "a step after a cancelled one lacks chunks");
    runtime.leave(&job);
}

// After the flag is set, every other thread begins at most one chunk: the one that it was about to claim.
void test_few_chunks_follow_the_flag(int n_threads) {
    Runtime runtime(n_threads);
    for (int at : {0, 1, 5, 99, 100, 537, 999}) {
        std::atomic<bool> cancel{false};
        std::atomic<int> begun_at_flag{-1};
        Chunks job(std::vector<int>(10, 100));
        job.body = [&](int phase, int chunk, Worker&) {
            if (phase * 100 + chunk != at) return;
            begun_at_flag = job.n_begun.load();
            cancel = true;
        };
        const bool done = run(runtime, job, cancel);
        const int after = job.n_begun - begun_at_flag;
        check(!done || job.n_committed == job.total(), "a step that is done lacks chunks");
        check(done || job.n_committed < job.total(), "a complete step was reported as cancelled");
        check(at == 999 || !done, "a cancelled step completed");
        check(after <= n_threads - 1, "threads continued with chunks after the flag");
        runtime.leave(&job);
        expect_whole(runtime);
    }
}

// A thread in the middle of a chunk does not delay the step, and cannot write when it continues.
void test_straggler_writes_nothing() {
    Runtime runtime(2);
    std::atomic<bool> cancel{false}, gate{false}, inside{false};
    const auto caller = std::this_thread::get_id();
    Chunks job({2, 1, 1});
    job.body = [&](int, int, Worker&) {
        if (std::this_thread::get_id() == caller) {
            while (!inside) std::this_thread::yield();
            cancel = true;
        } else {
            inside = true;
            while (!gate) std::this_thread::yield();
        }
    };
    check(!run(runtime, job, cancel), "a cancelled step is done");
    const int committed = job.n_committed;
    expect_whole(runtime);  // with the other thread still in its chunk
    gate = true;
    runtime.leave(&job);  // waits for the straggler
    check(job.n_stragglers >= 1 && job.n_committed == committed, "a straggler wrote after the step was over");
    expect_whole(runtime);
}

// `leave` returns only when no thread is in a step of its owner.
void test_leave_waits_for_stragglers() {
    Runtime runtime(2);
    std::atomic<bool> cancel{false}, gate{false}, inside{false}, left{false};
    const auto caller = std::this_thread::get_id();
    auto job = std::make_unique<Chunks>(std::vector<int>{2});
    job->body = [&](int, int, Worker&) {
        if (std::this_thread::get_id() == caller) {
            while (!inside) std::this_thread::yield();
        } else {
            inside = true;
            while (!gate) std::this_thread::yield();
        }
    };
    check(run(runtime, *job, cancel), "a step with a straggler is not done");  // its chunk is computed again
    std::thread leaver([&] {
        runtime.leave(job.get());
        left = true;
    });
    std::this_thread::yield();
    check(!left, "leave did not wait for a thread in the step");
    gate = true;
    leaver.join();
    job.reset();
    expect_whole(runtime);
}

// The thread that runs the step calls poll, also while it waits for others. A long chunk calls it itself.
void test_poll(int n_threads) {
    Runtime runtime(n_threads);
    std::atomic<bool> cancel{false};
    int n_polls = 0;
    const auto caller = std::this_thread::get_id();
    const Poll poll = [&] {
        check(std::this_thread::get_id() == caller, "another thread called poll");
        return ++n_polls == 3;
    };
    Chunks endless({1, 1});
    endless.body = [&](int, int, Worker& worker) {
        while (!worker.cancelled()) std::this_thread::yield();
    };
    check(!run(runtime, endless, cancel, &poll) && n_polls == 3 && cancel, "poll did not end the step");
    runtime.leave(&endless);
    expect_whole(runtime);
}

// A thread that waits for its turn can be cancelled, too. A second turn on the same thread is refused.
void test_turns() {
    Runtime runtime(2);
    std::atomic<bool> first{false}, second{false}, waiting{false};
    std::thread other;
    {
        const Runtime::Turn turn(runtime, first, nullptr);
        other = std::thread([&] {
            const Poll poll = [&] { return waiting = true; };
            const Runtime::Turn mine(runtime, second, &poll);
            check(!mine, "a turn was given twice");
        });
        while (!waiting) std::this_thread::yield();
        bool refused = false;
        try {
            const Runtime::Turn again(runtime, first, nullptr);
        } catch (const std::logic_error&) {
            refused = true;
        }
        check(refused, "a step within a step was not refused");
        other.join();
    }
    expect_whole(runtime);
}

// Steps of two owners, cancelled from outside at any time; one owner is released after each step.
void test_many_random_cancels(int n_threads) {
    Runtime runtime(n_threads);
    std::atomic<bool> cancel{false}, stop{false};
    std::thread canceller([&] {
        while (!stop) {
            cancel = true;
            for (int i = 0; i < 2000; i++) relax();
        }
    });
    for (int i = 0; i < 3000; i++) {
        cancel = false;
        auto job = std::make_unique<Chunks>(std::vector<int>(1 + i % 23, 1 + i % 11));
        const bool done = run(runtime, *job, cancel);
        check(!done || job->n_committed == job->total(), "a step that is done lacks chunks");
        check(done || job->n_committed < job->total(), "a complete step was reported as cancelled");
        runtime.leave(job.get());
        job.reset();
    }
    stop = true;
    canceller.join();
    expect_whole(runtime);
}

// A phase that waits for a disk is computed once, by the thread that called `run`. The others sleep
// meanwhile, and wake up for the next phase. A cancel in the middle ends the step.
void test_phase_of_calling_thread(int n_threads) {
    Runtime runtime(n_threads);
    std::atomic<bool> cancel{false};
    const std::thread::id caller = std::this_thread::get_id();
    for (int i = 0; i < 300; i++) {
        Chunks job({3, 1, 9, 1, 5});
        job.alone_phase = i % 2 ? 1 : 3;
        std::atomic<int> n_alone{0}, n_elsewhere{0};
        job.body = [&](int phase, int, Worker&) {
            if (phase != job.alone_phase) return;
            n_alone++;
            n_elsewhere += std::this_thread::get_id() != caller;
            // Long enough for others to compute the chunk again, if they could, and to fall asleep.
            std::this_thread::sleep_for(std::chrono::microseconds(i % 3 ? 0 : 500));
            if (i % 10 == 9) cancel = true;
        };
        const bool done = run(runtime, job, cancel);
        check(n_alone == 1 && n_elsewhere == 0, "a phase of one thread was computed by others");
        check(done == (i % 10 != 9) && (!done || job.n_committed == job.total()),
              "a phase of the calling thread lost chunks");
        cancel = false;
        runtime.leave(&job);
    }
    expect_whole(runtime);
}

// Threads beyond a step's number of threads do nothing for it, and join the next one.
void test_step_on_some_threads() {
    Runtime runtime(4);
    for (int turn = 0; turn < 200; turn++)
        for (const int n_threads : {1, 3, 2, 4}) {
            std::atomic<bool> cancel{false};
            std::atomic<int> last{0};
            Chunks job(std::vector<int>(5, 11));
            job.body = [&](int, int, Worker& worker) {
                for (int seen = last;
                     seen < worker.index() && !last.compare_exchange_weak(seen, worker.index());) {
                }
            };
            check(run(runtime, job, cancel, nullptr, n_threads), "a step of some threads is not done");
            check(job.n_committed == job.total(), "a step of some threads lacks chunks");
            runtime.leave(&job);
            check(last < n_threads, "a thread beyond the step's number took part");
        }
}

// Tries each number of threads, and keeps the one that is fastest in a model of a machine.
void test_thread_choice() {
    for (const double meeting_ns : {0.0, 8000.0, 1e9}) {
        const auto ns = [&](int64_t bytes, int n) {
            return int64_t(meeting_ns * n + double(bytes) / (4.2 * n));
        };
        ThreadChoice choice(15);
        for (const int64_t bytes : {int64_t(0), int64_t(100'000), int64_t(1'200'000), int64_t(80'000'000)}) {
            int best = 1;
            for (const int n : {15, 7, 3, 1})
                if (ns(bytes, n) < ns(bytes, best)) best = n;
            for (int i = 0; i < 5 * ThreadChoice::kTrials; i++) {
                const int n = choice.choose(bytes), disturbed = i % 3 == 1 ? 10 : 1;
                choice.note(bytes, n, disturbed * ns(bytes, n));
            }
            check(ns(bytes, choice.choose(bytes)) == ns(bytes, best),
                  "another number of threads would be faster");
        }
    }
    // A number of threads that becomes slower is noticed.
    ThreadChoice choice(2);
    for (int i = 0; i < 100; i++)
        choice.note(1000, choice.choose(1000), choice.choose(1000) == 2 ? 100 : 200);
    check(choice.choose(1000) == 2, "two threads were faster");
    for (int64_t i = 0; i < 2 * ThreadChoice::kAgain; i++) {
        const int n = choice.choose(1000);
        choice.note(1000, n, n == 2 ? 400 : 200);
    }
    check(choice.choose(1000) == 1, "two threads have become slower");
}

}  // namespace

int main() {
    for (int n_threads : {1, 2, 4}) {
        test_few_chunks_follow_the_flag(n_threads);
        test_poll(n_threads);
        test_many_random_cancels(n_threads);
        test_phase_of_calling_thread(n_threads);
    }
    test_straggler_writes_nothing();
    test_leave_waits_for_stragglers();
    test_turns();
    test_step_on_some_threads();
    test_thread_choice();
    std::printf("thread_pool_test: passed\n");
}

// The thread pool: how a step is cancelled, who may still write afterwards, and how memory is let go of.
// Everything is forced by gates in the chunks; nothing depends on time.
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

// Phases of chunks, each of which calls `body` and is then committed.
class Chunks : public Job {
  public:
    std::function<void(int phase, int chunk, Worker&)> body = [](int, int, Worker&) {};
    mutable std::atomic<int> n_begun{0}, n_committed{0}, n_late{0};
    std::vector<int> phases;
    int lonely = -1;  // a phase that the calling thread computes alone

    explicit Chunks(std::vector<int> chunks) : phases(std::move(chunks)) {}
    int n_phases() const override { return int(phases.size()); }
    int n_chunks(int phase) const override { return phases[phase]; }
    bool alone(int phase) const override { return phase == lonely; }
    void run_chunk(int phase, int chunk, Worker& worker) const override {
        n_begun++;
        body(phase, chunk, worker);
        if (!worker.begin_commit()) return void(n_late++);
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

// After the flag is up, every other thread begins one chunk at most: the one that it was about to claim.
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
        check(done || job.n_committed < job.total(), "a step that is complete was given up");
        check(at == 999 || !done, "a cancelled step went on to its end");
        check(after <= n_threads - 1, "threads went on with chunks after the flag");
        runtime.leave(&job);
        expect_whole(runtime);
    }
}

// A thread in the middle of a chunk does not hold the step up, and cannot write when it comes back.
void test_a_late_thread_writes_nothing() {
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
    runtime.leave(&job);  // waits for it
    check(job.n_late >= 1 && job.n_committed == committed, "a late thread wrote after the step was over");
    expect_whole(runtime);
}

// `leave` returns only when no thread is in a step of its owner.
void test_leave_waits_for_late_threads() {
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
    check(run(runtime, *job, cancel), "a step with a late thread is not done");  // its chunk is done again
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

// The thread that runs the step is asked, also while it waits for others; a long chunk asks by itself.
void test_poll(int n_threads) {
    Runtime runtime(n_threads);
    std::atomic<bool> cancel{false};
    int n_polls = 0;
    const auto caller = std::this_thread::get_id();
    const Poll poll = [&] {
        check(std::this_thread::get_id() == caller, "another thread asked");
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

// A thread that waits for its turn can be cancelled too; the same thread is refused.
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

// Steps of two owners, cancelled from outside at any time, one of them let go of after each.
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
        check(done || job->n_committed < job->total(), "a step that is complete was given up");
        runtime.leave(job.get());
        job.reset();
    }
    stop = true;
    canceller.join();
    expect_whole(runtime);
}

// A phase that waits, for a disk, is computed once, by the thread that called `run`; the others sleep
// meanwhile, and wake up for the next phase. A cancel in its middle ends the step.
void test_a_phase_of_one_thread_alone(int n_threads) {
    Runtime runtime(n_threads);
    std::atomic<bool> cancel{false};
    const std::thread::id caller = std::this_thread::get_id();
    for (int i = 0; i < 300; i++) {
        Chunks job({3, 1, 9, 1, 5});
        job.lonely = i % 2 ? 1 : 3;
        std::atomic<int> n_alone{0}, n_elsewhere{0};
        job.body = [&](int phase, int, Worker&) {
            if (phase != job.lonely) return;
            n_alone++;
            n_elsewhere += std::this_thread::get_id() != caller;
            // Long enough for the others to lose their patience, were they to have any; then to fall asleep.
            std::this_thread::sleep_for(std::chrono::microseconds(i % 3 ? 0 : 500));
            if (i % 10 == 9) cancel = true;
        };
        const bool done = run(runtime, job, cancel);
        check(n_alone == 1 && n_elsewhere == 0, "a phase of one thread was computed by others");
        check(done == (i % 10 != 9) && (!done || job.n_committed == job.total()),
              "a lonely phase loses chunks");
        cancel = false;
        runtime.leave(&job);
    }
    expect_whole(runtime);
}

// Threads beyond those that a step is given do none of it, and join the next one.
void test_a_step_of_some_threads() {
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
            check(last < n_threads, "a thread took part that was not asked");
        }
}

// Tries each number of threads, and stays with the one that a made-up machine is quickest with.
void test_how_many_threads_are_chosen() {
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
                  "another number of threads would be quicker");
        }
    }
    // What has become slower is found out.
    ThreadChoice choice(2);
    for (int i = 0; i < 100; i++)
        choice.note(1000, choice.choose(1000), choice.choose(1000) == 2 ? 100 : 200);
    check(choice.choose(1000) == 2, "two threads were quicker");
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
        test_a_phase_of_one_thread_alone(n_threads);
    }
    test_a_late_thread_writes_nothing();
    test_leave_waits_for_late_threads();
    test_turns();
    test_a_step_of_some_threads();
    test_how_many_threads_are_chosen();
    std::printf("thread_pool_test: passed\n");
}

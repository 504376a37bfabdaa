// State that all plans of one processor share: the thread pool and its scratch memory.
//
// One runtime serves the CPU of one model: its plain plan, its plans with taps, and its CPU workers. They
// take turns, one step at a time, so that two plans never compete for the cores and share the scratch memory.
// Each plan holds a reference to the runtime. Before a plan frees its own memory, `leave` waits until no
// straggler reads it. The owner of the runtime closes it, which ends its threads. Plans may live on, held by
// views of their results or by the frames of an exception.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "threads.h"

namespace hotset {

class Runtime {
  public:
    explicit Runtime(int n_threads);  // throws ThreadError
    ~Runtime();
    Runtime(const Runtime&) = delete;

    int n_threads() const { return n_threads_; }
    int n_slots() const { return n_threads_ + 1; }

    // Bytes for each worker, and for memory kept between the phases of an operation.
    struct Scratch {
        size_t kernel = 0, results = 0, inputs = 0, shared = 0;
    };
    // Reserve at least this much. Waits for a running step.
    void reserve(const Scratch& bytes);
    size_t bytes() const {  // all reserved bytes
        return size_t(n_threads_) * (bytes_.kernel + bytes_.results + bytes_.inputs) + bytes_.shared;
    }
    uint8_t* shared() const { return shared_.data(); }  // 64-byte aligned; its contents last one operation

    // The right to run a step, with the default floating point, while the object lives.
    class Turn;

    // Return when no thread reads data of `owner` (see ThreadPool::run). No step of `owner` may be running.
    void leave(const void* owner);
    // Wait for a running step, then end the threads; no step can run afterwards. Safe to call twice. If a
    // step's own poll (a signal handler) calls it, the threads end when the last holder releases the runtime.
    void close();

  private:
    // State that a forked child cannot use. The child leaves it untouched and makes its own.
    struct State {
        State(int n_threads, const Scratch& bytes);
        void allocate(const Scratch& bytes, const Scratch& before);

        const uint64_t born = n_forks();
        std::timed_mutex mutex;
        std::atomic<std::thread::id> holder{};
        ThreadPool pool;
    };
    State& state();  // throws std::logic_error after `close`

    const int n_threads_;
    Scratch bytes_;
    Memory shared_;
    std::atomic<State*> state_;
    std::atomic<bool> closed_{false};
    std::atomic<uint64_t> renewing_{~uint64_t(0)};  // the fork for which a thread is making a state
};

class Runtime::Turn {
  public:
    // Wait for the turn. False as a condition if `cancel` was set first. Throws std::logic_error if this
    // thread already runs a step of this runtime (a signal handler that calls in) or the runtime was closed,
    // and ThreadError in a child that cannot start threads.
    Turn(Runtime& runtime, std::atomic<bool>& cancel, const Poll* poll);
    ~Turn();
    Turn(const Turn&) = delete;

    explicit operator bool() const { return taken_; }
    ThreadPool& pool() const { return state_.pool; }

  private:
    const DefaultFloats floats_;
    State& state_;
    bool taken_ = false;
};

}  // namespace hotset

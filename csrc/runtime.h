// What all plans of one processor share: the thread pool and the memory in which it works.
//
// One runtime serves a process half (the CPU of a model): its plain plan, its plans with taps, and the cold
// services beside devices. They take turns, a step at a time, so that no two teams want the same cores and no
// scratch memory lies idle. Each plan holds on to the runtime; before a plan's own memory goes, `leave` waits
// until no straggler reads it. The owner of the runtime closes it: plans may live on, held by views of
// their results or by the frames of an exception, but no thread does.
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

    // Bytes: of each worker, and of the memory that lies between the phases of an operation.
    struct Scratch {
        size_t kernel = 0, results = 0, inputs = 0, shared = 0;
    };
    // Afterwards there is as much at least. Waits for a step that runs.
    void reserve(const Scratch& bytes);
    size_t bytes() const {  // of all that was reserved
        return size_t(n_threads_) * (bytes_.kernel + bytes_.results + bytes_.inputs) + bytes_.shared;
    }
    uint8_t* shared() const { return shared_.data(); }  // 64-byte aligned; what it holds lasts one operation

    // The right to run a step, and its floating point, while it lives.
    class Turn;

    // Returns when no thread reads what belongs to `owner` (see ThreadPool::run), none of whose steps is
    // running.
    void leave(const void* owner);
    // Waits for a step that runs, and ends the threads; no step can run any more. Safe to call twice. Out of
    // a step's own poll (a signal handler) the threads end with the last who holds the runtime.
    void close();

  private:
    // What a child of this process cannot take over: it leaves it as it is and makes its own.
    struct State {
        State(int n_threads, const Scratch& bytes);
        void allocate(const Scratch& bytes, const Scratch& before);

        const uint64_t born = n_forks();
        std::timed_mutex mutex;
        std::atomic<std::thread::id> holder{};
        ThreadPool pool;
    };
    State& state();  // throws std::logic_error once it was closed

    const int n_threads_;
    Scratch bytes_;
    Memory shared_;
    std::atomic<State*> state_;
    std::atomic<bool> closed_{false};
    std::atomic<uint64_t> renewing_{~uint64_t(0)};  // the fork for which a thread is making a state
};

class Runtime::Turn {
  public:
    // Waits; false in a condition: `cancel` came first. Throws std::logic_error where this thread runs a step
    // of this runtime already (a signal handler that calls in) or the runtime was closed, ThreadError in a
    // child without threads.
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

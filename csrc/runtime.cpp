#include "runtime.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace hotset {
namespace {
constexpr char kClosed[] = "the threads of this runtime have ended; make another";
}

Runtime::State::State(int n_threads, const Scratch& bytes) : pool(n_threads) {
    allocate(bytes, {});
}

void Runtime::State::allocate(const Scratch& bytes, const Scratch& before) {
    for (int i = 0; i < pool.n_threads(); i++) {
        Worker& worker = pool.worker(i);
        if (bytes.kernel > before.kernel) worker.kernel_scratch = Memory(bytes.kernel);
        if (bytes.results > before.results) worker.results = Memory(bytes.results);
        if (bytes.inputs > before.inputs) worker.inputs = Memory(bytes.inputs);
    }
}

Runtime::Runtime(int n_threads) : n_threads_(n_threads), state_(new State(n_threads, {})) {}

Runtime::~Runtime() {
    State* state = state_.load();
    // A lock held by another process's thread must not be destroyed, and its threads cannot be joined here.
    if (state->born == n_forks()) delete state;
}

Runtime::State& Runtime::state() {
    for (;;) {
        if (closed_.load()) throw std::logic_error(kClosed);
        State* state = state_.load(std::memory_order_acquire);
        const uint64_t now = n_forks();
        if (state->born == now) return *state;
        // After a fork the inherited state is left untouched: a parent's thread may hold its lock or be in
        // the middle of a step.
        uint64_t other = renewing_.load();
        if (other == now || !renewing_.compare_exchange_strong(other, now)) {
            std::this_thread::yield();
            continue;
        }
        try {
            state_.store(new State(n_threads_, bytes_), std::memory_order_release);
        } catch (...) {
            renewing_.store(~uint64_t(0));
            throw;
        }
    }
}

void Runtime::reserve(const Scratch& bytes) {
    std::atomic<bool> never{false};
    const Turn turn(*this, never, nullptr);
    turn.pool().leave_all();
    const Scratch before = bytes_;
    const Scratch after = {std::max(bytes.kernel, before.kernel), std::max(bytes.results, before.results),
                           std::max(bytes.inputs, before.inputs), std::max(bytes.shared, before.shared)};
    if (after.shared > before.shared) shared_ = Memory(after.shared);
    state_.load()->allocate(after, before);
    bytes_ = after;
}

void Runtime::leave(const void* owner) {
    State* state = state_.load();
    if (state->born == n_forks()) state->pool.leave(owner);
}

void Runtime::close() {
    closed_.store(true);
    State* state = state_.load();
    if (state->born != n_forks() || state->holder.load() == std::this_thread::get_id()) return;
    const std::scoped_lock lock(state->mutex);
    state->pool.stop();
}

Runtime::Turn::Turn(Runtime& runtime, std::atomic<bool>& cancel, const Poll* poll) : state_(runtime.state()) {
    if (state_.holder.load() == std::this_thread::get_id())
        throw std::logic_error("a step is running in this very thread; let it end first");
    while (!state_.mutex.try_lock_for(std::chrono::nanoseconds(ThreadPool::kPoll_ns))) {
        if (poll && (*poll)()) cancel.store(true);
        if (cancel.load()) return;
    }
    if (runtime.closed_.load()) {  // while this thread waited
        state_.mutex.unlock();
        throw std::logic_error(kClosed);
    }
    state_.holder.store(std::this_thread::get_id());
    taken_ = true;
}

Runtime::Turn::~Turn() {
    if (!taken_) return;
    state_.holder.store({});
    state_.mutex.unlock();
}

}  // namespace hotset

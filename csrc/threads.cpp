#include "threads.h"

#include <chrono>
#include <cstdlib>
#include <new>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif
#ifdef _WIN32
#include <malloc.h>
#endif

namespace hotset {
namespace {

constexpr int kTicketBits = 20;
constexpr uint64_t kTicketMask = (uint64_t(1) << kTicketBits) - 1;
constexpr int64_t kSpinBeforeSleep_ns = 2'000'000;  // longer than what lies between two tokens
constexpr int64_t kPatience_ns = 20'000;            // before another thread's chunk is computed again

void relax() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Memory::Memory(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64 + 64;
#ifdef _WIN32
    void* p = _aligned_malloc(bytes, 64);
#else
    void* p = std::aligned_alloc(64, bytes);
#endif
    if (!p) throw std::bad_alloc();
    data_.reset(static_cast<uint8_t*>(p));
}

void Memory::Free::operator()(uint8_t* p) const {
#ifdef _WIN32
    _aligned_free(p);
#else
    std::free(p);
#endif
}

bool Worker::begin_commit() {
    std::atomic<uint64_t>& taken = slot_->taken[chunk_];
    uint64_t seen = taken.load(std::memory_order_relaxed);
    return seen < epoch_ && taken.compare_exchange_strong(seen, epoch_, std::memory_order_acq_rel);
}

void Worker::end_commit() {
    const int n = slot_->job->n_chunks(int(epoch_ - slot_->first_epoch));
    if (slot_->n_committed.fetch_add(1, std::memory_order_acq_rel) + 1 < n) return;
    slot_->n_committed.store(0, std::memory_order_relaxed);
    slot_->ticket.store((epoch_ + 1) << kTicketBits, std::memory_order_release);
}

int Worker::slot_index() const {
    return slot_->index;
}

Team::Team(int n_threads) {
    for (int i = 0; i < n_threads; i++) workers_.push_back(std::make_unique<Worker>());
    for (int i = 0; i <= n_threads; i++) {  // the current one, a late thread in each other: one is left
        auto slot = std::make_unique<Slot>();
        slot->index = i;
        slot->taken = std::make_unique<std::atomic<uint64_t>[]>(kMaxChunks);
        slots_.push_back(std::move(slot));
    }
    for (int i = 1; i < n_threads; i++) threads_.emplace_back([this, i] { serve(*workers_[i]); });
}

Team::~Team() {
    stop_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

int Team::free_slot() const {
    for (;;) {
        for (const auto& slot : slots_) {
            // A thread may be about to enter the current slot; any other it can only have entered already.
            bool used = slot.get() == current_.load();
            for (const auto& worker : workers_) used |= worker->inside_.load() == slot.get();
            if (!used) return slot->index;
        }
        std::this_thread::yield();
    }
}

void Team::run(int slot_index, const Job& job) {
    if (job.n_phases() == 0) return;
    Slot& slot = *slots_[slot_index];
    slot.job = &job;
    slot.first_epoch = slot.end_epoch + 1;
    slot.end_epoch = slot.first_epoch + job.n_phases();
    slot.ticket.store(slot.first_epoch << kTicketBits);
    current_.store(&slot);
    generation_.fetch_add(1);
    if (sleepers_.load() > 0) generation_.notify_all();
    Worker& self = *workers_[0];
    self.inside_.store(&slot);
    participate(self, slot);
    self.inside_.store(nullptr);
}

void Team::serve(Worker& worker) {
    uint32_t seen = 0;
    for (;;) {
        const int64_t start = now_ns();
        for (int spins = 1; generation_.load() == seen; spins++) {
            relax();
            if (spins % 64) continue;
            const int64_t waited = now_ns() - start;
            if (waited > kPatience_ns) std::this_thread::yield();
            if (waited < kSpinBeforeSleep_ns) continue;
            sleepers_.fetch_add(1);
            generation_.wait(seen);
            sleepers_.fetch_sub(1);
        }
        seen = generation_.load();
        if (stop_.load()) return;
        Slot* slot = current_.load();
        worker.inside_.store(slot);
        // The announcement counts only if the slot is still the current one: else it may be being refilled.
        if (current_.load() == slot && generation_.load() == seen) participate(worker, *slot);
        worker.inside_.store(nullptr);
    }
}

void Team::participate(Worker& worker, Slot& slot) {
    worker.slot_ = &slot;
    uint64_t timed_epoch = 0;
    int64_t own_chunk_ns = 0;
    for (;;) {
        const uint64_t ticket = slot.ticket.fetch_add(1, std::memory_order_acq_rel);
        const uint64_t epoch = ticket >> kTicketBits;
        if (epoch >= slot.end_epoch) return;
        const int phase = int(epoch - slot.first_epoch), chunk = int(ticket & kTicketMask);
        if (timed_epoch != epoch) own_chunk_ns = 0;
        timed_epoch = epoch;
        if (chunk < slot.job->n_chunks(phase)) {
            worker.epoch_ = epoch;
            worker.chunk_ = chunk;
            const int64_t start = now_ns();
            slot.job->run_chunk(phase, chunk, worker);
            own_chunk_ns = now_ns() - start;
        } else {
            wait_or_redo(worker, slot, epoch, own_chunk_ns);
        }
    }
}

// All chunks of the phase are claimed. Waits for the next phase; a chunk that takes much longer than our own
// did is computed again here.
void Team::wait_or_redo(Worker& worker, Slot& slot, uint64_t epoch, int64_t own_chunk_ns) {
    auto over = [&] { return slot.ticket.load(std::memory_order_acquire) >> kTicketBits != epoch; };
    const int64_t start = now_ns();
    int64_t patience = 2 * own_chunk_ns + kPatience_ns;
    for (int spins = 1; !over(); spins++) {
        relax();
        if (spins % 16 || now_ns() - start < patience) continue;
        const int phase = int(epoch - slot.first_epoch);
        for (int chunk = 0; chunk < slot.job->n_chunks(phase) && !over(); chunk++) {
            if (slot.taken[chunk].load(std::memory_order_relaxed) >= epoch) continue;
            worker.epoch_ = epoch;
            worker.chunk_ = chunk;
            slot.job->run_chunk(phase, chunk, worker);
        }
        std::this_thread::yield();  // the thread in the middle of its copy may be waiting for this core
        patience *= 2;
    }
}

}  // namespace hotset

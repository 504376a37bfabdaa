#include "threads.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif
#ifdef _WIN32
#include <malloc.h>
#else
#include <pthread.h>
#endif

namespace hotset {
namespace {

constexpr int kTicketBits = 20;
constexpr uint64_t kTicketMask = (uint64_t(1) << kTicketBits) - 1;
constexpr int64_t kSpinBeforeSleep_ns = 2'000'000;  // longer than the time between two tokens
constexpr int64_t kPatience_ns = 20'000;            // before a thread computes another thread's chunk again
constexpr int kPrefetchPhases = 3;       // phases that a waiting thread searches for data to prefetch
constexpr int64_t kLook_ns = 1'000'000;  // approximate time of chunks between two reads of the clock

std::atomic<uint64_t> forks{0};

// The default value of the register that controls rounding and denormals. On x86 the default masks all
// exceptions.
#if defined(__x86_64__) || defined(_M_X64)
constexpr uint64_t kDefaultFloats = 0x1f80;
uint64_t float_control() {
    return _mm_getcsr();
}
void set_float_control(uint64_t word) {
    _mm_setcsr(unsigned(word));
}
#elif defined(__aarch64__) && defined(__GNUC__)
constexpr uint64_t kDefaultFloats = 0;
uint64_t float_control() {
    uint64_t word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
}
void set_float_control(uint64_t word) {
    asm volatile("msr fpcr, %0" : : "r"(word));
}
#else
constexpr uint64_t kDefaultFloats = 0;
uint64_t float_control() {
    return kDefaultFloats;
}
void set_float_control(uint64_t) {}
#endif

}  // namespace

DefaultFloats::DefaultFloats() : before_(float_control()) {
    set_float_control(kDefaultFloats);
}

DefaultFloats::~DefaultFloats() {
    set_float_control(before_);
}

uint64_t n_forks() {
#ifndef _WIN32
    static std::once_flag once;
    std::call_once(once, [] {
        pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    });
#endif
    return forks.load(std::memory_order_relaxed);
}

std::thread start_thread(const std::string& what, std::function<void()> body) {
    try {
        return std::thread([body = std::move(body)] {
            const DefaultFloats floats;
            body();
        });
    } catch (const std::system_error& error) {
        throw ThreadError(what + " (" + error.code().message() +
                          "); ask for fewer, or raise the limit on processes and memory");
    }
}

void run_on_threads(int n_threads, const std::function<void()>& work) {
    std::vector<std::thread> threads;
    threads.reserve(size_t(std::max(n_threads, 0)));
    try {
        for (int i = 1; i < n_threads; i++) threads.emplace_back([&work] { work(); });
    } catch (const std::exception&) {  // fewer threads do the same work
    }
    work();
    for (std::thread& thread : threads) thread.join();
}

int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

void relax() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
    asm volatile("yield");
#endif
}

void prefetch_line(const void* p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 0, 2);
#elif defined(_M_X64)
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
#endif
}

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
    slot_->open(epoch_ + 1);
}

void Slot::open(uint64_t new_epoch) {
    n_committed.store(0, std::memory_order_relaxed);
    job->reached(int(new_epoch - first_epoch));
    if (new_epoch < end_epoch)
        for (Ticket& ticket : tickets)
            ticket.value.store(new_epoch << kTicketBits, std::memory_order_release);
    // Other threads may have finished this phase and opened later ones since the tickets were stored, for
    // example if this thread lost its core. The epoch must never decrease.
    raise_epoch(new_epoch);
}

void Slot::raise_epoch(uint64_t new_epoch) {
    uint64_t seen = epoch.load(std::memory_order_relaxed);
    while (seen < new_epoch && !epoch.compare_exchange_weak(seen, new_epoch)) {
    }
    if (n_asleep.load() > 0) epoch.notify_all();
}

bool Worker::enter_inputs() {
    if (inputs_epoch_ == epoch_ && inputs_slot_ == slot_) return false;
    inputs_epoch_ = epoch_;
    inputs_slot_ = slot_;
    return true;
}

bool Worker::cancelled() {
    if (poll_) poll_at(now_ns());
    return slot_->cancel->load(std::memory_order_relaxed);
}

// Poll for signals on the thread that called `run`, which also computes chunks.
void Worker::poll_at(int64_t now) {
    if (!poll_ || now < next_poll_ns_) return;
    // Only the step itself may write its owner's flag.
    if ((*poll_)()) const_cast<std::atomic<bool>*>(slot_->cancel)->store(true);
    next_poll_ns_ = now_ns() + ThreadPool::kPoll_ns;
}

ThreadPool::ThreadPool(int n_threads) {
    for (int i = 0; i < n_threads; i++) {
        workers_.push_back(std::make_unique<Worker>());
        workers_.back()->index_ = i;
    }
    for (int i = 0; i <= n_threads; i++) {  // for the current step, one per straggler, and a free one
        auto slot = std::make_unique<Slot>();
        slot->index = i;
        slot->tickets = std::vector<Slot::Ticket>(n_threads);
        slot->taken = std::make_unique<std::atomic<uint64_t>[]>(kMaxChunks);
        slots_.push_back(std::move(slot));
    }
    try {
        for (int i = 1; i < n_threads; i++)
            threads_.push_back(start_thread("only " + std::to_string(i) + " of " + std::to_string(n_threads) +
                                                " threads could be started",
                                            [this, i] { serve(*workers_[i]); }));
    } catch (...) {
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    stop();
}

void ThreadPool::stop() {
    stop_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

bool ThreadPool::anyone_in(const Slot* slot) const {
    for (const auto& worker : workers_)
        if (worker->inside_.load() == slot) return true;
    return false;
}

int ThreadPool::free_slot() const {
    for (;;) {
        for (const auto& slot : slots_)
            // A thread may be about to enter the current slot. No thread can newly enter any other.
            if (slot.get() != current_.load() && !anyone_in(slot.get())) return slot->index;
        std::this_thread::yield();
    }
}

void ThreadPool::leave(const void* owner) {
    for (const auto& slot : slots_) {
        if (slot->owner.load() != owner) continue;
        // No thread enters it from now on: a thread that announces itself later finds another current slot.
        Slot* last = slot.get();
        current_.compare_exchange_strong(last, nullptr);
        while (slot->owner.load() == owner && anyone_in(slot.get())) std::this_thread::yield();
    }
}

void ThreadPool::leave_all() {
    current_.store(nullptr);
    for (const auto& slot : slots_)
        while (anyone_in(slot.get())) std::this_thread::yield();
}

bool ThreadPool::run(int slot_index, const Job& job, std::atomic<bool>& cancel, const Poll* poll,
                     const void* owner, int n_threads) {
    if (job.n_phases() == 0) return true;
    Slot& slot = *slots_[slot_index];
    slot.job = &job;
    slot.cancel = &cancel;
    slot.owner.store(owner);
    slot.n_threads = n_threads > 0 ? std::min(n_threads, this->n_threads()) : this->n_threads();
    slot.first_epoch = slot.end_epoch + 1;
    slot.end_epoch = slot.first_epoch + job.n_phases();
    slot.open(slot.first_epoch);
    current_.store(&slot);
    generation_.fetch_add(1);
    if (sleepers_.load() > 0) generation_.notify_all();
    Worker& self = *workers_[0];
    self.poll_ = poll;
    self.next_poll_ns_ = poll ? now_ns() + kPoll_ns : 0;
    self.inside_.store(&slot);
    participate(self, slot);
    const bool done = slot.epoch.load(std::memory_order_acquire) >= slot.end_epoch || abandon(slot);
    self.inside_.store(nullptr);
    self.poll_ = nullptr;
    return done;
}

// End a cancelled step. Returns true if all of its phases were complete.
bool ThreadPool::abandon(Slot& slot) {
    for (;;) {
        const uint64_t epoch = slot.epoch.load(std::memory_order_acquire);
        if (epoch >= slot.end_epoch) return true;
        const int n = slot.job->n_chunks(int(epoch - slot.first_epoch));
        int n_dropped = 0;
        for (int chunk = 0; chunk < n; chunk++) {
            uint64_t seen = slot.taken[chunk].load(std::memory_order_relaxed);
            while (seen < epoch &&
                   !slot.taken[chunk].compare_exchange_weak(seen, epoch, std::memory_order_acq_rel)) {
            }
            n_dropped += seen < epoch;
        }
        if (n_dropped == 0) {  // all chunks are committed or about to be: the next phase opens
            while (slot.epoch.load(std::memory_order_acquire) == epoch) std::this_thread::yield();
            continue;
        }
        // Now the phase can never complete. Threads that took a chunk earlier are copying it.
        while (slot.n_committed.load(std::memory_order_acquire) < n - n_dropped) std::this_thread::yield();
        for (Slot::Ticket& ticket : slot.tickets) ticket.value.fetch_add(kMaxChunks);  // nothing to claim
        slot.raise_epoch(slot.end_epoch);
        return false;
    }
}

void ThreadPool::serve(Worker& worker) {
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
        // The announcement counts only if the slot is still current. Otherwise the slot may be in
        // preparation, or the data of its step may be freed.
        if (slot && current_.load() == slot && generation_.load() == seen && worker.index_ < slot->n_threads)
            participate(worker, *slot);
        worker.inside_.store(nullptr);
    }
}

// Claim and run a chunk of thread `owner`'s range. False: none is left, or the step is cancelled.
bool ThreadPool::claim(Worker& worker, Slot& slot, int owner) {
    if (slot.cancel->load(std::memory_order_relaxed)) return false;
    auto range_of = [&](uint64_t ticket) {
        const int n = slot.job->n_chunks(int((ticket >> kTicketBits) - slot.first_epoch));
        const int first = int(int64_t(n) * owner / slot.n_threads);
        return std::pair(first, int(int64_t(n) * (owner + 1) / slot.n_threads) - first);
    };
    std::atomic<uint64_t>& next = slot.tickets[owner].value;
    uint64_t ticket = next.load(std::memory_order_acquire);
    if (int(ticket & kTicketMask) >= range_of(ticket).second) return false;  // without a disturbing write
    const auto forbidden = [&](uint64_t of) {
        return worker.index_ != 0 && slot.job->alone(int((of >> kTicketBits) - slot.first_epoch));
    };
    if (forbidden(ticket)) return false;
    ticket = next.fetch_add(1, std::memory_order_acq_rel);  // possibly of a later phase by now
    const auto [first, count] = range_of(ticket);
    const int claimed = int(ticket & kTicketMask);
    if (claimed >= count) return false;
    if (forbidden(ticket)) return false;  // of a phase that just opened: thread 0 computes it again
    worker.epoch_ = ticket >> kTicketBits;
    worker.chunk_ = first + claimed;
    prefetch_line(&slot.taken[worker.chunk_]);  // for the commit: weights have evicted it from the caches
    slot.job->run_chunk(int(worker.epoch_ - slot.first_epoch), worker.chunk_, worker);
    return true;
}

// Work until the step is over. On the thread that called `run`, return also when it is cancelled.
void ThreadPool::participate(Worker& worker, Slot& slot) {
    worker.slot_ = &slot;
    for (;;) {
        const uint64_t epoch = slot.epoch.load(std::memory_order_acquire);
        if (epoch >= slot.end_epoch) return;
        if (worker.index_ == 0 && slot.cancel->load(std::memory_order_relaxed)) return;
        const int64_t start = now_ns();
        worker.poll_at(start);
        int n_own = 0, look_at = 1;
        for (int i = 0; i < slot.n_threads; i++)
            while (claim(worker, slot, (worker.index_ + i) % slot.n_threads)) {
                if (++n_own < look_at || !worker.poll_) continue;
                const int64_t now = now_ns();
                look_at =
                    n_own + int(std::clamp<int64_t>(kLook_ns * n_own / (now - start + 1), 1, kMaxChunks));
                worker.poll_at(now);
            }
        const int64_t end = now_ns(), per_chunk = n_own ? (end - start) / n_own : 0;
        wait_or_redo(worker, slot, epoch, end, kPatience_ns + 2 * per_chunk);
    }
}

// Sleep until the phase or the step is over.
void ThreadPool::sleep_until_over(Slot& slot, uint64_t epoch) {
    slot.n_asleep.fetch_add(1);
    slot.epoch.wait(epoch);
    slot.n_asleep.fetch_sub(1);
}

// All chunks of the phase have been claimed since `start`. Wait for the next phase, and prefetch its data.
// Compute another thread's chunk again if it takes much longer than this thread's own did.
void ThreadPool::wait_or_redo(Worker& worker, Slot& slot, uint64_t epoch, int64_t start,
                              int64_t patience_ns) {
    auto over = [&] { return slot.epoch.load(std::memory_order_acquire) != epoch; };
    auto cancelled = [&] { return slot.cancel->load(std::memory_order_relaxed); };
    if (over()) return;
    const Job& job = *slot.job;
    const int phase = int(epoch - slot.first_epoch), n_phases = int(slot.end_epoch - slot.first_epoch);
    int ahead = 1, piece = 0;
    for (int spins = 1; !over(); spins++) {
        if (cancelled()) {  // the thread that called `run` ends the step
            if (worker.index_ == 0) return;
            std::this_thread::yield();
            continue;
        }
        if (ahead <= kPrefetchPhases && phase + ahead < n_phases) {
            const int chunk = int(int64_t(job.n_chunks(phase + ahead)) * worker.index_ / slot.n_threads);
            if (job.prefetch(phase + ahead, chunk, piece++)) continue;
            ahead = piece > 1 ? n_phases : ahead + 1;  // one phase with data to prefetch is enough
            piece = 0;
            continue;
        }
        relax();
        if (spins % 16) continue;
        const int64_t now = now_ns();
        worker.poll_at(now);
        if (now - start < patience_ns) continue;
        if (worker.index_ != 0 && job.alone(phase)) {
            sleep_until_over(slot, epoch);
            continue;
        }
        for (int chunk = 0; chunk < job.n_chunks(phase) && !over() && !cancelled(); chunk++) {
            if (slot.taken[chunk].load(std::memory_order_relaxed) >= epoch) continue;
            worker.epoch_ = epoch;
            worker.chunk_ = chunk;
            job.run_chunk(phase, chunk, worker);
        }
        std::this_thread::yield();  // a thread that is copying may need this core
        patience_ns *= 2;
    }
}

}  // namespace hotset

// One thread pool that executes the phases of a step.
//
// A phase is a number of independent chunks. Each thread claims the chunks of its own range one at a time, so
// that it streams through adjacent memory, then those that others have left. The thread that commits the last
// chunk of a phase opens the next one; threads that wait for it fetch what they will read first in the next
// phase.
//
// A chunk is computed into memory private to its thread and then *committed* (copied out), which only one
// thread can do. So when a thread loses its core in the middle of a chunk, another simply computes the chunk
// again and commits it; the late one finds the chunk taken and drops its result. No thread waits for a stolen
// core, except in the few hundred nanoseconds of a copy.
//
// A late thread may read memory that has moved on to later phases or steps (its result is dropped); what it
// must never see is memory that is gone. Hence the data of a step lives in one of several slots, and a slot
// is used again only when no thread is left in it; and the owner of what a step reads calls `leave` before it
// frees that memory.
//
// A step can be *cancelled*. Every thread looks at the step's flag before it claims a chunk, and operations
// whose chunks are long look in between. The calling thread then takes all chunks of the open phase for
// itself, so that no thread can commit any more, waits for copies in progress, and leaves at once: a thread
// that is still computing a chunk finds it taken, and joins the next step when it is through.
//
// A child of the process has no thread pool: it forgets the object, which must not be destroyed there, and
// makes its
// own (runtime.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace hotset {

constexpr int kMaxChunks = 1024;  // per phase
constexpr int kMaxThreads = 256;

// 64-byte aligned memory, not cleared (large blocks cost nothing until used).
class Memory {
  public:
    Memory() = default;
    explicit Memory(size_t bytes);
    uint8_t* data() const { return data_.get(); }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_.get());
    }

  private:
    struct Free {
        void operator()(uint8_t* p) const;
    };
    std::unique_ptr<uint8_t, Free> data_;
};

int64_t now_ns();  // of a clock that never goes back
void relax();      // a hint to the processor that this thread only waits

// Fetches the cache line at p, if there is memory: any address may be given.
void prefetch_line(const void* p);

// Floating point as the language has it, for this thread while the object lives: rounding to nearest, and
// denormals are numbers. A program that embeds hotset may have set a thread to flush them to zero, and the
// threads that it starts inherit that; results must not depend on it.
class DefaultFloats {
  public:
    DefaultFloats();
    ~DefaultFloats();
    DefaultFloats(const DefaultFloats&) = delete;

  private:
    uint64_t before_ = 0;
};

// How often this process was forked off another: threads started under another number are not here.
uint64_t n_forks();

// A thread could not be started. The message is a sentence for users.
class ThreadError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Starts a thread, with DefaultFloats; ThreadError says `what` could not be done without it.
std::thread start_thread(const std::string& what, std::function<void()> body);

// Runs `work`, which throws nothing, on n_threads threads, this one among them, and returns when all are
// through; fewer do the same where no more can be started.
void run_on_threads(int n_threads, const std::function<void()>& work);

// What the thread that called `run` asks now and then while the step goes on: whether to cancel it.
using Poll = std::function<bool()>;

class ThreadPool;
struct Slot;

// What one thread owns, in lines of its own.
class alignas(64) Worker {
  public:
    // Between these two the chunk's results are copied out. False: another thread has done it, drop them.
    bool begin_commit();
    void end_commit();

    Memory kernel_scratch;  // packed weights
    Memory results;         // a chunk's results before they are committed
    // What the thread derives once a phase from what the phase reads (quantised activations, a list of
    // neurons).
    Memory inputs;
    // Whether `inputs` is of another phase, and must be filled now.
    bool enter_inputs();

    // Whether the step is being cancelled: then a chunk may return without a commit. For chunks that take
    // milliseconds, about once each.
    bool cancelled();

    int index() const { return index_; }  // among the threads of its thread pool

  private:
    friend class ThreadPool;
    void poll_at(int64_t now);

    int index_ = 0;
    const Poll* poll_ = nullptr;  // of the thread that called `run`, during the call
    int64_t next_poll_ns_ = 0;
    Slot* slot_ = nullptr;
    uint64_t epoch_ = 0;
    int chunk_ = 0;
    uint64_t inputs_epoch_ = ~uint64_t(0);
    const Slot* inputs_slot_ = nullptr;
    std::atomic<Slot*> inside_{nullptr};  // the slot that this thread may be reading
};

// What a step consists of. Implementations must be safe to call from several threads at once.
class Job {
  public:
    virtual ~Job() = default;
    virtual int n_phases() const = 0;
    virtual int n_chunks(int phase) const = 0;  // 1..kMaxChunks
    virtual void run_chunk(int phase, int chunk, Worker& worker) const = 0;
    // Whether the thread that called `run` computes the phase alone, which has one chunk: one that waits, for
    // a disk, and must not be computed again by those who wait for it. They sleep.
    virtual bool alone(int /*phase*/) const { return false; }
    // Fetches piece `piece` (0, 1, ...) of what the chunk will read; false: there is no such piece.
    virtual bool prefetch(int phase, int chunk, int piece) const = 0;
    // Called by one thread when all phases before `phase` are complete; n_phases() when all are.
    virtual void reached(int phase) const = 0;
};

struct Slot {
    // What all threads read with every chunk; what any of them writes lies in lines of its own.
    int index = 0;
    const Job* job = nullptr;
    const std::atomic<bool>* cancel = nullptr;  // of the step
    std::atomic<const void*> owner{nullptr};    // of what the step reads
    uint64_t first_epoch = 1;
    uint64_t end_epoch = 1;
    int n_threads = 0;  // that compute it: those of lower indices
    struct alignas(64) Ticket {
        std::atomic<uint64_t> value{0};  // epoch << kTicketBits | chunks claimed of the thread's range
    };
    std::vector<Ticket> tickets;                     // one per thread
    std::unique_ptr<std::atomic<uint64_t>[]> taken;  // [kMaxChunks], epoch whose commit has begun
    alignas(64) std::atomic<uint64_t> epoch{0};      // the open phase is epoch - first_epoch
    std::atomic<int> n_asleep{0};                    // until the epoch is another
    alignas(64) std::atomic<int> n_committed{0};

    void open(uint64_t new_epoch);
    void raise_epoch(uint64_t new_epoch);
};

class ThreadPool {
  public:
    explicit ThreadPool(int n_threads);  // throws ThreadError
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;

    int n_threads() const { return int(workers_.size()); }
    int n_slots() const { return int(slots_.size()); }
    Worker& worker(int i) { return *workers_[i]; }

    // A slot that no thread is in and that was not the last to run. Its data may be written until `run`.
    int free_slot() const;
    // Runs all phases of the job; the caller is one of the thread pool. Not reentrant. poll: null, or
    // asked every
    // kPoll_ns by this thread. True: all phases are complete. False: `cancel` became true, by `poll` or by
    // anyone, before they were; nothing of the job is written after the return. owner: see `leave`.
    // n_threads: how many compute it, the caller among them; 0: all.
    bool run(int slot, const Job& job, std::atomic<bool>& cancel, const Poll* poll, const void* owner,
             int n_threads = 0);

    // Returns when no thread reads what belongs to `owner`, none of whose steps is running.
    void leave(const void* owner);
    // Returns when no thread is in a step; none is running.
    void leave_all();

    void stop();  // ends the threads; no step is running, and none may come

    static constexpr int64_t kPoll_ns = 10'000'000;

  private:
    void serve(Worker& worker);
    void participate(Worker& worker, Slot& slot);
    bool claim(Worker& worker, Slot& slot, int owner);
    void wait_or_redo(Worker& worker, Slot& slot, uint64_t epoch, int64_t start, int64_t patience_ns);
    static void sleep_until_over(Slot& slot, uint64_t epoch);
    bool abandon(Slot& slot);
    bool anyone_in(const Slot* slot) const;

    std::vector<std::unique_ptr<Worker>> workers_;
    std::vector<std::unique_ptr<Slot>> slots_;
    std::vector<std::thread> threads_;
    std::atomic<uint32_t> generation_{0};
    std::atomic<Slot*> current_{nullptr};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
};

}  // namespace hotset

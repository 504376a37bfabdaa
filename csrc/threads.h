// A thread pool that executes the phases of a step.
//
// A phase is a number of independent chunks. Each thread first claims the chunks of its own range, one at a
// time, so that it streams through adjacent memory. Then it claims chunks that other threads have left. The
// thread that commits the last chunk of a phase opens the next one. Waiting threads prefetch the first data
// that they will read in the next phase.
//
// A thread computes a chunk into private memory and then *commits* it (copies it out), which only one thread
// can do. If a thread loses its core in the middle of a chunk, another thread computes the chunk again and
// commits it. The straggler then finds the chunk taken and drops its result. No thread waits for a lost core,
// except during the few hundred nanoseconds of a copy.
//
// A straggler may read memory that later phases or steps have overwritten, because its result is dropped. It
// must never read freed memory. So a step's data is in one of several slots, and a slot is reused only when
// no thread is inside it. The owner of the data that a step reads calls `leave` before it frees that data.
//
// A step can be *cancelled*. Every thread checks the step's flag before it claims a chunk, and operations
// with long chunks check it in between. The calling thread then claims all chunks of the open phase, so that
// no other thread can commit, waits for copies in progress, and returns at once. A thread that is still
// computing a chunk finds it taken, and joins the next step when it has finished.
//
// A forked child has no thread pool. It abandons the inherited object, which must not be destroyed there, and
// makes its own (runtime.h).
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

// 64-byte aligned memory, not cleared: a large block costs nothing until it is used.
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

int64_t now_ns();  // from a monotonic clock
void relax();      // tells the processor that this thread is spinning

// Prefetch the cache line at p. Any address is allowed.
void prefetch_line(const void* p);

// Sets this thread's floating point to the language's defaults while the object lives: round to nearest, keep
// denormals. A program that embeds hotset may flush denormals to zero, and the threads that it starts inherit
// that setting. Results must not depend on it.
class DefaultFloats {
  public:
    DefaultFloats();
    ~DefaultFloats();
    DefaultFloats(const DefaultFloats&) = delete;

  private:
    uint64_t before_ = 0;
};

// The number of forks that led to this process. Threads started under another number do not exist here.
uint64_t n_forks();

// A thread could not be started. The message is meant for users.
class ThreadError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Start a thread with DefaultFloats. ThreadError's message begins with `what`.
std::thread start_thread(const std::string& what, std::function<void()> body);

// Run `work`, which must not throw, on n_threads threads including this one, and wait for all. If the system
// refuses more threads, fewer run it.
void run_on_threads(int n_threads, const std::function<void()>& work);

// Called now and then by the thread that called `run`: whether to cancel the step.
using Poll = std::function<bool()>;

class ThreadPool;
struct Slot;

// The state of one thread, in its own cache lines.
class alignas(64) Worker {
  public:
    // A chunk's results are copied out between these two calls. False: already done; drop them.
    bool begin_commit();
    void end_commit();

    Memory kernel_scratch;  // packed weights
    Memory results;         // of a chunk, before the commit
    // Data that the thread derives once per phase from the phase's inputs (quantised activations, a list of
    // neurons).
    Memory inputs;
    // Whether `inputs` belongs to another phase and must be filled now.
    bool enter_inputs();

    // Whether the step is being cancelled, so that a chunk may return without a commit. Chunks that take
    // several milliseconds call it about once per millisecond.
    bool cancelled();

    int index() const { return index_; }  // in the thread pool

  private:
    friend class ThreadPool;
    void poll_at(int64_t now);

    int index_ = 0;
    const Poll* poll_ = nullptr;  // set on the thread that called `run`, during the call
    int64_t next_poll_ns_ = 0;
    Slot* slot_ = nullptr;
    uint64_t epoch_ = 0;
    int chunk_ = 0;
    uint64_t inputs_epoch_ = ~uint64_t(0);
    const Slot* inputs_slot_ = nullptr;
    std::atomic<Slot*> inside_{nullptr};  // the slot that this thread may be reading
};

// The work of a step. Implementations must allow calls from several threads at once.
class Job {
  public:
    virtual ~Job() = default;
    virtual int n_phases() const = 0;
    virtual int n_chunks(int phase) const = 0;  // 1..kMaxChunks
    virtual void run_chunk(int phase, int chunk, Worker& worker) const = 0;
    // Whether only the thread that called `run` computes the phase, which has one chunk. Meant for a phase
    // that waits for a disk: the other threads sleep and do not compute it again.
    virtual bool alone(int /*phase*/) const { return false; }
    // Prefetch piece `piece` (0, 1, ...) of the chunk's input. Returns false if the piece does not exist.
    virtual bool prefetch(int phase, int chunk, int piece) const = 0;
    // Called by one thread when all phases before `phase` are complete; n_phases() when all phases are.
    virtual void reached(int phase) const = 0;
};

struct Slot {
    // All threads read these with every chunk. Fields that threads write are in other cache lines.
    int index = 0;
    const Job* job = nullptr;
    const std::atomic<bool>* cancel = nullptr;  // of the step
    std::atomic<const void*> owner{nullptr};    // of the data that the step reads
    uint64_t first_epoch = 1;
    uint64_t end_epoch = 1;
    int n_threads = 0;  // the threads with lower indices compute the step
    struct alignas(64) Ticket {
        std::atomic<uint64_t> value{0};  // epoch << kTicketBits | chunks claimed from the thread's range
    };
    std::vector<Ticket> tickets;                     // one per thread
    std::unique_ptr<std::atomic<uint64_t>[]> taken;  // [kMaxChunks]: epoch of the latest commit
    alignas(64) std::atomic<uint64_t> epoch{0};      // the open phase is epoch - first_epoch
    std::atomic<int> n_asleep{0};                    // threads that sleep until the epoch changes
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

    // Return a slot that no thread is inside and that did not run last. Its data may be written until `run`.
    int free_slot() const;
    // Run all phases of the job; the caller is one of the threads. Not reentrant. poll: null, or a function
    // that this thread calls every kPoll_ns. Returns true if all phases are complete, false if `cancel`
    // became true before; the job writes nothing after the return. owner: see `leave`. n_threads: threads to
    // use, including the caller; 0: all.
    bool run(int slot, const Job& job, std::atomic<bool>& cancel, const Poll* poll, const void* owner,
             int n_threads = 0);

    // Return when no thread reads data of `owner`. No step of `owner` may be running.
    void leave(const void* owner);
    // Return when no thread is inside a step. No step may be running.
    void leave_all();

    void stop();  // ends the threads; no step may be running or start later

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

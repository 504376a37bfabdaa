// Reads of pieces of files, past the page cache where the system lets us: what a model larger than memory is
// read with.
//
// A batch is a list of reads that are on their way together. They are done by threads that call `pread`, or
// by one that has a ring of the kernel's (io_uring), where that is allowed; which of the two, and how many
// reads are in flight, is the caller's choice (hotset measures both). A read that fails makes its whole batch
// fail, with a sentence; nothing of a batch is in flight when `wait` has returned.
//
// A child of the process has none of the threads: it starts its own with its first batch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../threads.h"

namespace hotset {

constexpr size_t kReadAlign = 4096;  // of offsets, sizes and addresses of reads past the page cache

// The message is a sentence for users.
class ReadError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A file that is read, never mapped: one that is cut short, replaced in place or written to is found out.
class StoredFile {
  public:
    explicit StoredFile(std::string path);  // throws ReadError
    ~StoredFile();
    StoredFile(const StoredFile&) = delete;

    const std::string& path() const { return path_; }
    uint64_t bytes() const { return bytes_; }
    bool direct() const { return direct_; }  // past the page cache
    void check() const;  // throws ReadError if it is not the file any more that was opened

    // What one call of the system can read at an offset. Reads past the page cache begin at whole pages, so
    // what is left of a page after a short read goes through the cache. Descriptor: -1 on Windows.
    struct Attempt {
        int descriptor;
        size_t bytes;
    };
    Attempt attempt(uint64_t offset, size_t bytes) const;
    // As pread, of one attempt: bytes that were read, which may be fewer than requested; 0 at the end; or
    // minus an error number.
    int64_t read_at(uint8_t* to, size_t bytes, uint64_t offset) const;

  private:
    const std::string path_;
    uint64_t bytes_ = 0;
    int64_t changed_ns_ = 0;  // when it was last written to
    bool direct_ = false;
    int descriptor_ = -1;
    int cached_ = -1;         // of a file that is read past the page cache: through it
    void* handle_ = nullptr;  // Windows
};

// Files that are open once each.
class StoredFiles {
  public:
    std::shared_ptr<const StoredFile> open(const std::string& path);  // throws ReadError
    void check() const;                                               // of all of them

  private:
    std::vector<std::shared_ptr<const StoredFile>> files_;
};

struct Read {
    // Bytes of the read that go elsewhere.
    struct Copy {
        uint32_t from, bytes;
        uint8_t* to;
    };
    const StoredFile* file;
    uint64_t offset;  // whole kReadAlign, and so is `bytes`, which may reach beyond the end of the file
    uint32_t bytes;   // Reader::kMostBytes at most, with copies kMostCopied
    uint8_t* into;    // aligned memory; null: a buffer of the reader, of which copies are made
    uint32_t first_copy = 0, n_copies = 0;  // of the batch's copies, which lie side by side
};

class Reader {
  public:
    enum class Kind { Threads, Ring };
    static constexpr uint32_t kMostBytes = 512 << 10;   // of one read
    static constexpr uint32_t kMostCopied = 128 << 10;  // of one that goes through a buffer, for less memory

    // depth: reads in flight at most, 1 to 256. Throws ReadError where a ring is asked for and not to be had,
    // ThreadError.
    Reader(Kind kind, int depth);
    ~Reader();
    Reader(const Reader&) = delete;

    static bool ring_allowed();  // whether this kernel gives us a ring
    Kind kind() const { return kind_; }
    int depth() const { return depth_; }
    size_t buffer_bytes() const {
        return size_t(depth_) * kMostCopied;
    }  // at most; untouched ones cost nothing

    class Batch {
      public:
        std::vector<Read> reads;
        std::vector<Read::Copy> copies;
        bool is_done() const { return left.load() == 0; }
        bool ahead = false;  // no thread waits for it yet: reads of other batches go first

      private:
        friend class Reader;
        std::atomic<size_t> left{0};
        std::mutex mutex;
        std::condition_variable done;
        std::string error;
    };

    // Starts the reads of a batch, which must stay where it is until `wait`. Throws ThreadError.
    void begin(Batch& batch);
    // Returns when none of the batch is in flight. True: all is read. False: `cancelled` said so (asked every
    // 10 ms); what was read then is anything. Throws ReadError.
    bool wait(Batch& batch, const std::function<bool()>& cancelled);

    // A seam for tests: about `share` of the attempts to read fail, give less than was requested, or find the
    // end of the file. short_only: they give less, which no caller may notice.
    void inject_faults(double share, uint64_t seed, bool short_only = false);

  private:
    struct Job {
        Read* read;
        Batch* batch;
    };
    class Ring;
    struct State;  // what a child of this process cannot take over

    State& state();
    void serve_with_pread(State& state);
    void serve_with_ring(State& state, Ring& ring);
    // The number of bytes that count as read of a result of the system; the others are overwritten.
    int64_t faulty(int64_t result, uint8_t* to);
    // Whether the read is complete after `result` more bytes (or minus an error number); else `done` is where
    // it goes on. `error` says what is wrong.
    static bool advance(const Read& read, int64_t result, size_t& done, std::string& error);
    static void finish(const Job& job, const uint8_t* buffer, const std::string& error);

    const Kind kind_;
    const int depth_;
    std::atomic<State*> state_{nullptr};
    std::mutex starting_;
    std::atomic<uint64_t> fault_limit_{0}, fault_seed_{0}, n_attempts_{0};
    std::atomic<bool> fault_short_only_{false};
};

// Straight to their place, without a copy: what `room_for_pages` says, at `to`, which is aligned as reads
// are. The bytes are then at to + offset % kReadAlign.
void add_straight_reads(Reader::Batch& batch, const StoredFile* file, uint64_t offset, size_t bytes,
                        uint8_t* to);
constexpr size_t room_for_pages(size_t bytes) {
    return (bytes + kReadAlign - 1) / kReadAlign * kReadAlign + kReadAlign;
}

// Bytes per second of random reads of `size` bytes (whole kReadAlign) of a file, in about `seconds`.
double read_rate(const StoredFile& file, Reader& reader, uint32_t size, double seconds);

}  // namespace hotset

// Reads parts of files, past the page cache if the system allows it. This is how a model larger than memory
// is read.
//
// A batch is a list of concurrent reads. Either threads call `pread`, or one thread uses io_uring, if the
// system allows it. The caller chooses the kind and the number of reads in flight (hotset measures both). If
// a read fails, its whole batch fails with an error message. When `wait` has returned, no read of the batch
// is in flight.
//
// A forked child has none of the threads: it starts its own with its first batch.
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

constexpr size_t kReadAlign = 4096;  // of offsets, sizes and addresses when reading past the page cache

// The message is meant for users.
class ReadError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A file that is read but never mapped. Truncation, replacement and writes are detected.
class StoredFile {
  public:
    explicit StoredFile(std::string path);  // throws ReadError
    ~StoredFile();
    StoredFile(const StoredFile&) = delete;

    const std::string& path() const { return path_; }
    uint64_t bytes() const { return bytes_; }
    bool direct() const { return direct_; }  // past the page cache
    void check() const;                      // throws ReadError if the file has changed since it was opened

    // The descriptor and size for one read at an offset. Reads past the page cache must begin at a page, so
    // that the rest of a page after a short read goes through the cache. The descriptor is -1 on Windows.
    struct Attempt {
        int descriptor;
        size_t bytes;
    };
    Attempt attempt(uint64_t offset, size_t bytes) const;
    // Read once, as pread does. Returns the number of bytes, possibly fewer than requested, 0 at the end, or
    // a negative error number.
    int64_t read_at(uint8_t* to, size_t bytes, uint64_t offset) const;

  private:
    const std::string path_;
    uint64_t bytes_ = 0;
    int64_t changed_ns_ = 0;  // time of the last write
    bool direct_ = false;
    int descriptor_ = -1;
    int cached_ = -1;         // a second descriptor through the page cache
    void* handle_ = nullptr;  // Windows
};

// Files, each opened once.
class StoredFiles {
  public:
    std::shared_ptr<const StoredFile> open(const std::string& path);  // throws ReadError
    void check() const;                                               // checks all of them

  private:
    std::vector<std::shared_ptr<const StoredFile>> files_;
};

struct Read {
    // A part of the read's bytes to be copied elsewhere.
    struct Copy {
        uint32_t from, bytes;
        uint8_t* to;
    };
    const StoredFile* file;
    uint64_t offset;  // a multiple of kReadAlign, like `bytes`, which may extend past the file's end
    uint32_t bytes;   // at most Reader::kMostBytes, or kMostCopied with copies
    uint8_t* into;    // aligned memory; null: read into the reader's buffer and copy
    uint32_t first_copy = 0, n_copies = 0;  // adjacent entries of the batch's copies
};

class Reader {
  public:
    enum class Kind { Threads, Ring };
    static constexpr uint32_t kMostBytes = 512 << 10;   // of one read
    static constexpr uint32_t kMostCopied = 128 << 10;  // of one read through a buffer, which saves memory

    // depth: most reads in flight, 1 to 256. Throws ReadError if a ring is requested but not allowed, and
    // ThreadError.
    Reader(Kind kind, int depth);
    ~Reader();
    Reader(const Reader&) = delete;

    static bool ring_allowed();  // whether this process may use io_uring
    Kind kind() const { return kind_; }
    int depth() const { return depth_; }
    // The most that buffers can take; unused ones cost nothing.
    size_t buffer_bytes() const { return size_t(depth_) * kMostCopied; }

    class Batch {
      public:
        std::vector<Read> reads;
        std::vector<Read::Copy> copies;
        bool is_done() const { return left.load() == 0; }
        bool ahead = false;  // no thread waits for it yet: other batches come first

      private:
        friend class Reader;
        std::atomic<size_t> left{0};
        std::mutex mutex;
        std::condition_variable done;
        std::string error;
    };

    // Start the reads of a batch. The batch must not be moved until `wait`. Throws ThreadError.
    void begin(Batch& batch);
    // Return when no read of the batch is in flight. Returns true if all bytes are read, false if `cancelled`
    // (called every 10 ms) returned true; the read bytes are then undefined. Throws ReadError.
    bool wait(Batch& batch, const std::function<bool()>& cancelled);

    // For tests: make about `share` of the reads fail, return fewer bytes than requested, or report the end
    // of the file. short_only: only return fewer bytes, which callers must not notice.
    void inject_faults(double share, uint64_t seed, bool short_only = false);

  private:
    struct Job {
        Read* read;
        Batch* batch;
    };
    class Ring;
    struct State;  // state that a forked child cannot use

    State& state();
    void serve_with_pread(State& state);
    void serve_with_ring(State& state, Ring& ring);
    // Return the number of bytes to report for a system's result; overwrites the others.
    int64_t faulty(int64_t result, uint8_t* to);
    // Add `result` bytes (or a negative error number) to `done`. Returns whether the read is complete.
    // `error` describes a failure.
    static bool advance(const Read& read, int64_t result, size_t& done, std::string& error);
    static void finish(const Job& job, const uint8_t* buffer, const std::string& error);

    const Kind kind_;
    const int depth_;
    std::atomic<State*> state_{nullptr};
    std::mutex starting_;
    std::atomic<uint64_t> fault_limit_{0}, fault_seed_{0}, n_attempts_{0};
    std::atomic<bool> fault_short_only_{false};
};

// Add reads directly to `to`, without a copy. `to` needs room for `room_for_pages(bytes)` and the alignment
// of reads. The bytes are then at to + offset % kReadAlign.
void add_straight_reads(Reader::Batch& batch, const StoredFile* file, uint64_t offset, size_t bytes,
                        uint8_t* to);
constexpr size_t room_for_pages(size_t bytes) {
    return (bytes + kReadAlign - 1) / kReadAlign * kReadAlign + kReadAlign;
}

// Measure the bytes per second of random reads of `size` bytes (whole kReadAlign) for some seconds.
double read_rate(const StoredFile& file, Reader& reader, uint32_t size, double seconds);

}  // namespace hotset

// Weights that do not fit into memory and are read again in every step, ahead of their use.
//
// A stream has pieces: tensors that are needed together, in the order in which a step needs them. Each piece
// has a fixed place in a ring of memory that is smaller than all pieces together, so that operations see
// ordinary matrices. Several pieces share a place in turn. A piece is read as soon as the previous one at its
// place has been used. A step's first pieces are read while the previous step ends.
//
// A straggler may read a place that is being filled, and drops its result.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "../threads.h"
#include "reader.h"

namespace hotset {

class Stream {
  public:
    struct Part {
        const StoredFile* file;
        uint64_t offset;
        size_t bytes;
    };
    // Totals since construction.
    struct Counts {
        int64_t bytes_read = 0, n_reads = 0;
        double seconds_waited = 0.0;
    };

    explicit Stream(std::shared_ptr<Reader> reader) : reader_(std::move(reader)) {}
    ~Stream();  // waits for reads in flight
    Stream(const Stream&) = delete;

    StoredFiles& files() { return files_; }
    // Add a piece and return its number. Parts must be inside their files.
    int add_piece(std::vector<Part> parts);
    int n_pieces() const { return int(pieces_.size()); }
    int n_parts(int piece) const { return int(pieces_[piece].parts.size()); }
    size_t least_bytes() const;   // bytes of the largest piece
    void allocate(size_t bytes);  // once, after the last piece; at least least_bytes()
    bool allocated() const { return ring_ != nullptr; }

    // Return the address of a part, valid while its piece is loaded. Readable while the ring's memory lives.
    const uint8_t* data(int piece, int part) const;
    std::shared_ptr<const Memory> memory() const { return memory_; }
    size_t bytes(int piece, int part) const { return pieces_[piece].parts[part].bytes; }

    // Load a piece, which stays until another piece at its place is acquired, and start to read the following
    // ones if there is room. Earlier acquired pieces are no longer in use. Returns false if `cancelled`
    // returned true. Throws ReadError. In both cases the next call works.
    bool acquire(int piece, const std::function<bool()>& cancelled);
    // Start the same reads without waiting.
    void read_ahead(int piece);
    void check() const { files_.check(); }  // throws ReadError if a file has changed
    const Counts& counts() const { return counts_; }

  private:
    enum class State { Absent, Coming, There };
    struct Piece {
        std::vector<Part> parts;
        size_t room = 0, at = 0;  // in the ring
        State state = State::Absent;
        std::vector<int> sharing;  // other pieces whose places overlap
        std::unique_ptr<Reader::Batch> batch;
    };
    void begin(Piece& piece);
    void drop(Piece& piece);
    void forget_parent();
    int distance(int from, int to) const { return (to - from + n_pieces()) % n_pieces(); }

    const std::shared_ptr<Reader> reader_;
    StoredFiles files_;
    std::vector<Piece> pieces_;
    std::shared_ptr<Memory> memory_;
    uint8_t* ring_ = nullptr;
    uint64_t born_ = n_forks();
    Counts counts_;
};

}  // namespace hotset

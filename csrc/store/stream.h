// Weights that have no room in memory: they are read anew in every step, in the order of their use and ahead
// of it.
//
// A stream has pieces, tensors that are needed together, in the order in which a step needs them. Each has a
// fixed place in a ring of memory that is smaller than all of them together, so that operations take them for
// ordinary matrices: several pieces share a place in turn, and one is read as soon as what lay there before
// has been used. A step's first pieces are read while the one before it ends.
//
// A late thread may read a place that is being filled, and drops what it made of it.
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
    // Since the stream was made.
    struct Counts {
        int64_t bytes_read = 0, n_reads = 0;
        double seconds_waited = 0.0;
    };

    explicit Stream(std::shared_ptr<Reader> reader) : reader_(std::move(reader)) {}
    ~Stream();  // waits for reads that are on their way
    Stream(const Stream&) = delete;

    StoredFiles& files() { return files_; }
    // Returns its number. Parts must lie in their files.
    int add_piece(std::vector<Part> parts);
    int n_pieces() const { return int(pieces_.size()); }
    int n_parts(int piece) const { return int(pieces_[piece].parts.size()); }
    size_t least_bytes() const;   // the room for the largest piece
    void allocate(size_t bytes);  // once, after the last piece; least_bytes() at least
    bool allocated() const { return ring_ != nullptr; }

    // Where a part is while its piece is there. Readable as long as the ring's memory lives.
    const uint8_t* data(int piece, int part) const;
    std::shared_ptr<const Memory> memory() const { return memory_; }
    size_t bytes(int piece, int part) const { return pieces_[piece].parts[part].bytes; }

    // Sees to it that a piece is there, until another is asked for that shares its place, and begins to read
    // those behind it as far as there is room: what was asked for before is over. False: `cancelled` said so.
    // Throws ReadError; in both cases the next call works.
    bool acquire(int piece, const std::function<bool()>& cancelled);
    // The same without waiting.
    void read_ahead(int piece);
    void check() const { files_.check(); }  // throws ReadError where a file has changed
    const Counts& counts() const { return counts_; }

  private:
    enum class State { Absent, Coming, There };
    struct Piece {
        std::vector<Part> parts;
        size_t room = 0, at = 0;  // of the ring
        State state = State::Absent;
        std::vector<int> sharing;  // other pieces with bytes of its place
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

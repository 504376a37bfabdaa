// Rows of weights that are read from a file when needed, and kept while they are needed often.
//
// A group is the unit of fetching: rows of gate, up and down of one layer's neurons, or the matrices of its
// experts. Each group has slots for some of its rows, managed by Replacement. All groups share one staging
// area, which holds rows without a slot until the next fetch. It has room for the rows that one token may
// need. If a fetch needs more (a prompt), it borrows slots of other groups, whose rows are later read again.
// So all requested rows are available at once, in a fixed amount of memory.
//
// A table holds each row's address (Matrix::places). It changes only in `begin` and `finish`, which the
// thread that runs the step calls between two phases. A straggler may read a row that is being replaced, and
// drops its result. Between the two calls the reads are in flight, and rows that were already loaded can be
// used.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "../replacement.h"
#include "../types.h"
#include "reader.h"
#include "touch.h"

namespace hotset {

// Add bytes of a file to a batch, extending its last read if the gap to it is at most `gap` bytes.
void add_reads(Reader::Batch& batch, const StoredFile* file, uint64_t offset, size_t bytes, uint8_t* to,
               uint64_t gap);

class RowStore {
  public:
    // The location of a matrix's rows: row i is at offset + i * stride.
    struct Part {
        const StoredFile* file;
        uint64_t offset;
        size_t row_bytes;
        size_t stride;
    };
    // Totals since construction.
    struct Counts {
        int64_t hits = 0, misses = 0, bytes_read = 0, n_reads = 0;
        double seconds_waited = 0.0;
    };

    // gap: largest gap that is read and discarded to join two reads. half_life: see Replacement, in requests
    // of a group.
    RowStore(std::shared_ptr<Reader> reader, uint64_t gap, int half_life);
    ~RowStore();  // waits for reads in flight
    RowStore(const RowStore&) = delete;

    StoredFiles& files() { return files_; }
    // Add a group and return its number. Parts must be inside their files. at_once: most rows of one fetch.
    // usual: rows without a slot that a single token typically needs. n_needed: rows that can ever be needed
    // here, which limits the slots.
    int add_group(int64_t n_rows, std::vector<Part> parts, int64_t usual, int64_t at_once, int64_t n_needed);
    // Return the memory of a row's slot, given the bytes of its parts.
    static size_t slot_bytes_of(const std::vector<size_t>& row_bytes);
    int n_groups() const { return int(groups_.size()); }
    // The facts of a group that determine its share of memory. n_rows: rows that can ever be needed.
    struct Size {
        int64_t n_rows;
        size_t slot_bytes;
        int64_t usual, at_once;
    };
    // Slots of each group, bytes of the staging area
    struct Shares {
        std::vector<int64_t> slots;
        size_t staging;
    };
    // Divide `bytes` of memory: a slot for each row if all fit; otherwise a staging area and the same share
    // of each group's rows. Staging and other groups' slots hold the most that one fetch may need.
    static Shares share_out(const std::vector<Size>& groups, size_t bytes);
    // The least and the most bytes that `allocate` can use.
    size_t least_bytes() const;
    size_t most_bytes() const;
    void allocate(size_t bytes);              // once, after the last group; at least least_bytes()
    void touch_ahead();                       // makes the system provide the memory in the background
    bool is_whole() const { return whole_; }  // whether every row that can be needed has a slot

    int64_t n_rows(int group) const { return groups_[group].n_rows; }
    int64_t at_once(int group) const { return groups_[group].at_once; }
    size_t row_bytes(int group, int part) const { return groups_[group].parts[part].row_bytes; }
    int n_parts(int group) const { return int(groups_[group].parts.size()); }
    // For Matrix: [n_rows] addresses. Each points to readable memory, which holds the row since the last
    // `begin` and `finish` that named it. Valid while the store lives; null before `allocate`.
    const uint8_t* const* places(int group, int part) const { return groups_[group].places[part].data(); }
    const uint8_t* end() const { return memory_.data() + bytes_; }  // null before `allocate`

    // Start to load these rows (rising, at most at_once). They are available from the return of `finish` to
    // the next `begin`. learn: whether their use earns credit. Drops an unfinished earlier `begin`.
    void begin(int group, const int32_t* rows, int64_t n, bool learn);
    // Wait for the rows. Returns false if `cancelled` returned true. Throws ReadError. In both cases the
    // group's rows are undefined, and the next `begin` works.
    bool finish(const std::function<bool()>& cancelled);
    // Whether reads of `begin` are still in flight.
    bool is_coming() const { return coming_ && !batch_->is_done(); }
    // Before the first request: set the share of tokens that needed each row, [n_rows], in an earlier
    // measurement.
    void expect(int group, const float* shares) {
        if (groups_[group].policy) groups_[group].policy->expect(0, shares);
    }
    // Read rows (rising) into free slots, without credit.
    bool preload(int group, const int32_t* rows, int64_t n, const std::function<bool()>& cancelled);
    // Copy rows (as for `begin`) to out[part], [n][row_bytes], for computation elsewhere. Earns no credit.
    // Returns false, or throws ReadError, as `finish` does.
    bool copy(int group, const int32_t* rows, int64_t n, const std::vector<uint8_t*>& out,
              const std::function<bool()>& cancelled);
    // Copy a part of a row if it is in a slot and loaded; otherwise return false. Reads nothing and earns no
    // credit.
    bool peek(int group, int32_t row, int part, uint8_t* out) const;
    int64_t n_slots(int group) const { return groups_[group].n_slots(); }  // valid after `allocate`
    // [n_rows]: whether the latest `begin` of the group found the row missing.
    const uint8_t* missed(int group) const { return groups_[group].missed.data(); }
    void check() const { files_.check(); }  // throws ReadError if a file has changed
    const Counts& counts() const { return counts_; }

  private:
    struct Group {
        int64_t n_rows, n_needed;
        size_t slot_bytes;
        int64_t usual, at_once;
        std::vector<Part> parts;
        std::vector<size_t> at;  // offset of each part in a slot
        std::vector<std::vector<const uint8_t*>> places;
        std::unique_ptr<Replacement> policy;  // null if the group has no slots
        int64_t n_there = 0;                  // if every row has a slot: rows that are loaded
        std::vector<int32_t> missing;
        std::vector<uint8_t> missed;
        uint8_t* slots = nullptr;
        int64_t n_slots() const { return policy ? policy->n_slots() : 0; }
        uint64_t offset(int32_t row, size_t part) const {  // in the file
            return parts[part].offset + uint64_t(row) * parts[part].stride;
        }
    };
    // Memory for rows without a slot: the staging area, then slots of other groups.
    class Passing {
      public:
        Passing(RowStore& store, const Group& group);
        uint8_t* next();

      private:
        RowStore& store_;
        const Group& group_;
        uint8_t *at_, *end_;
        size_t next_lender_ = 0;
        Group* lender_ = nullptr;  // the group that owns the slots at at_; null: the staging area
        size_t n_borrowed_ = 0;    // number of these slots, from the first
    };
    std::vector<Size> sizes() const;
    void read_rows(const Group& group);
    void give_up();

    const std::shared_ptr<Reader> reader_;
    const uint64_t gap_;
    const int half_life_;
    StoredFiles files_;
    std::vector<Group> groups_;
    Memory memory_;
    size_t bytes_ = 0;
    uint8_t* staging_ = nullptr;
    size_t staging_bytes_ = 0;
    bool whole_ = false;
    std::unique_ptr<Reader::Batch> batch_ = std::make_unique<Reader::Batch>();
    Group* coming_ = nullptr;  // begun but not finished
    uint64_t born_ = 0;        // n_forks() at `begin`
    std::unique_ptr<TouchAhead> touching_;
    uint64_t touched_by_ = 0;  // n_forks() when touching_ was started
    std::vector<Replacement::Place> found_;
    std::vector<uint8_t*> to_;  // addresses of the missing rows of the latest group
    Counts counts_;
};

}  // namespace hotset

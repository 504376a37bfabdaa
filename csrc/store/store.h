// Rows of weights that are read from a file when they are needed, and kept as long as they are needed often.
//
// A group is what is fetched together: of a layer's neurons the rows of gate, up and down of the same number;
// of its experts their matrices. Each group has slots of its own for some of its rows, by Replacement, and
// all groups share one staging: what gets no slot lies there until the next group is fetched. It has room
// for
// what one token may need; where more is asked for (by a prompt), slots of other groups are borrowed, whose
// rows are then read anew. So whatever is asked for is there at once, and the memory is what it was made
// with.
//
// A row's address is looked up in a table (Matrix::places). It changes only in `begin` and `finish`, which
// the thread that runs the step calls between two phases; a late thread may read a row that is being
// replaced, and drops what it made of it. Between the two reads are on their way, and what was there already
// may be used.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "../replacement.h"
#include "../types.h"
#include "reader.h"
#include "touch.h"

namespace hotset {

// Adds bytes of a file to a batch: to its last read, where they lie in it or `gap` bytes behind.
void add_reads(Reader::Batch& batch, const StoredFile* file, uint64_t offset, size_t bytes, uint8_t* to,
               uint64_t gap);

class RowStore {
  public:
    // Where a matrix's rows are: row i at offset + i * stride.
    struct Part {
        const StoredFile* file;
        uint64_t offset;
        size_t row_bytes;
        size_t stride;
    };
    // Since the store was made.
    struct Counts {
        int64_t hits = 0, misses = 0, bytes_read = 0, n_reads = 0;
        double seconds_waited = 0.0;
    };

    // gap: bytes that are read in vain rather than two reads made of one. half_life: as Replacement, in
    // requests of a group.
    RowStore(std::shared_ptr<Reader> reader, uint64_t gap, int half_life);
    ~RowStore();  // waits for reads that are on their way
    RowStore(const RowStore&) = delete;

    StoredFiles& files() { return files_; }
    // Returns its number. Parts must lie in their files. at_once: rows that one fetch asks for at most;
    // usual: of these without a slot while single tokens are computed, more or less. n_asked: rows that are
    // ever asked for, where others are not needed here: no more have a slot.
    int add_group(int64_t n_rows, std::vector<Part> parts, int64_t usual, int64_t at_once, int64_t n_asked);
    // What a row takes in memory, of the bytes of its parts.
    static size_t slot_bytes_of(const std::vector<size_t>& row_bytes);
    int n_groups() const { return int(groups_.size()); }
    // What matters of a group for who shares out memory; n_rows: that are ever asked for.
    struct Size {
        int64_t n_rows;
        size_t slot_bytes;
        int64_t usual, at_once;
    };
    // Slots of each group, and bytes of the staging.
    struct Shares {
        std::vector<int64_t> slots;
        size_t staging;
    };
    // In so much memory: a slot for each row where all fit, else the same share of each group's rows beside
    // the staging. Of this and slots of other groups is made what any group may ask for at once.
    static Shares share_out(const std::vector<Size>& groups, size_t bytes);
    // The least and the most that `allocate` has a use for.
    size_t least_bytes() const;
    size_t most_bytes() const;
    void allocate(size_t bytes);              // once, after the last group; least_bytes() at least
    void touch_ahead();                       // has its memory be given while other things are done
    bool is_whole() const { return whole_; }  // whether every row that is asked for has a slot

    int64_t n_rows(int group) const { return groups_[group].n_rows; }
    int64_t at_once(int group) const { return groups_[group].at_once; }
    size_t row_bytes(int group, int part) const { return groups_[group].parts[part].row_bytes; }
    int n_parts(int group) const { return int(groups_[group].parts.size()); }
    // For Matrix: [n_rows] addresses; what they point to is readable, and theirs since the last `acquire`
    // that named them. Valid while the store is; before `allocate` they are null.
    const uint8_t* const* places(int group, int part) const { return groups_[group].places[part].data(); }
    const uint8_t* end() const { return memory_.data() + bytes_; }  // null before `allocate`

    // Sees to it that these rows (different, rising, at_once at most) are there when `finish` has returned,
    // until the next `begin`. learn: it counts for what stays. What an earlier `begin` has not finished is
    // given up.
    void begin(int group, const int32_t* rows, int64_t n, bool learn);
    // False: `cancelled` said so. Throws ReadError; in both cases nothing of the group is to be relied on,
    // and the next `begin` works.
    bool finish(const std::function<bool()>& cancelled);
    // Whether reads that `begin` began are still on their way.
    bool is_coming() const { return coming_ && !batch_->is_done(); }
    // Before anything is asked for: the share of the tokens that need each row, [n_rows], of those that were
    // counted elsewhere.
    void expect(int group, const float* shares) {
        if (groups_[group].policy) groups_[group].policy->expect(0, shares);
    }
    // Reads rows (different, rising) into free slots, without credit.
    bool preload(int group, const int32_t* rows, int64_t n, const std::function<bool()>& cancelled);
    // Copies rows (as for `begin`) of one part after the other to out[part], [n][row_bytes]: for what is
    // computed elsewhere. They give no credit. False, and ReadError: as `finish`.
    bool copy(int group, const int32_t* rows, int64_t n, const std::vector<uint8_t*>& out,
              const std::function<bool()>& cancelled);
    // Copies a part of a row that has a slot, and is there; else false. It asks for nothing, and counts
    // nowhere.
    bool peek(int group, int32_t row, int part, uint8_t* out) const;
    int64_t n_slots(int group) const { return groups_[group].n_slots(); }  // once it has its memory
    // [n_rows] which of the rows that the latest `begin` of the group named were not there.
    const uint8_t* missed(int group) const { return groups_[group].missed.data(); }
    void check() const { files_.check(); }  // throws ReadError where a file has changed
    const Counts& counts() const { return counts_; }

  private:
    struct Group {
        int64_t n_rows, n_asked;
        size_t slot_bytes;
        int64_t usual, at_once;
        std::vector<Part> parts;
        std::vector<size_t> at;  // of the parts in a slot
        std::vector<std::vector<const uint8_t*>> places;
        std::unique_ptr<Replacement> policy;  // null where it has no slot
        int64_t n_there = 0;                  // of a whole store: rows that have come, which stay
        std::vector<int32_t> missing;
        std::vector<uint8_t> missed;
        uint8_t* slots = nullptr;
        int64_t n_slots() const { return policy ? policy->n_slots() : 0; }
        uint64_t offset(int32_t row, size_t part) const {  // in its file
            return parts[part].offset + uint64_t(row) * parts[part].stride;
        }
    };
    // Room for rows of a group that have no slot: the staging, and then slots of other groups.
    class Passing {
      public:
        Passing(RowStore& store, const Group& group);
        uint8_t* next();

      private:
        RowStore& store_;
        const Group& group_;
        uint8_t *at_, *end_;
        size_t next_lender_ = 0;
        Group* lender_ = nullptr;  // whose slots at_ lies in; null: the staging
        size_t n_borrowed_ = 0;    // of these slots, from the first on
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
    Group* coming_ = nullptr;  // begun and not finished
    uint64_t born_ = 0;        // n_forks() then
    std::unique_ptr<TouchAhead> touching_;
    uint64_t touched_by_ = 0;  // n_forks() when that began
    std::vector<Replacement::Place> found_;
    std::vector<uint8_t*> to_;  // of the missing rows of the group that was begun last
    Counts counts_;
};

}  // namespace hotset

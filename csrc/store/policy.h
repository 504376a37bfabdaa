// Which rows of a layer stay in its slots: those that were asked for most often of late.
//
// Every row has a score, whether it is in a slot or not: each request that names it adds one, and all scores
// lose half in `half_life` requests. A row that is asked for takes a slot from the row with the least score,
// unless that is more than its own: then it gets none. (The unit of a request grows instead of all scores
// shrinking.)
#pragma once

#include <cstdint>
#include <vector>

namespace hotset {

class SlotPolicy {
  public:
    SlotPolicy(int64_t n_rows, int64_t n_slots, double half_life);

    // rows: n different ones. Afterwards row rows[i] is in slot slots[i], or, -1, has none; it is there
    // already where hits[i] says so. learn: the request counts, and may take slots from others; else only
    // empty ones are given.
    void request(const int32_t* rows, int64_t n, bool learn, int32_t* slots, uint8_t* hits);
    void drop(int32_t row);  // it did not come: its slot is empty

    int64_t n_rows() const { return int64_t(slot_of_.size()); }
    int64_t n_slots() const { return int64_t(row_of_.size()); }

  private:
    void learn(const int32_t* rows, int64_t n);

    const double growth_;
    double unit_ = 1.0;
    std::vector<float> score_;                       // of rows
    std::vector<int32_t> slot_of_, row_of_, empty_;  // -1: none
    std::vector<uint64_t> asked_;                    // of slots: the request that named its row last
    std::vector<int32_t> candidates_;                // slots
    uint64_t n_requests_ = 0;
};

}  // namespace hotset

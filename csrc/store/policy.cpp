#include "policy.h"

#include <algorithm>
#include <cmath>

namespace hotset {
namespace {
constexpr double kLargestUnit = 1e30;  // of a float, with room for sums
}

SlotPolicy::SlotPolicy(int64_t n_rows, int64_t n_slots, double half_life)
    : growth_(std::exp2(1.0 / half_life)),
      score_(size_t(n_rows)),
      slot_of_(size_t(n_rows), -1),
      row_of_(size_t(n_slots), -1),
      asked_(size_t(n_slots)) {
    for (int64_t slot = n_slots; slot-- > 0;) empty_.push_back(int32_t(slot));
}

void SlotPolicy::learn(const int32_t* rows, int64_t n) {
    unit_ *= growth_;
    if (unit_ > kLargestUnit) {
        for (float& score : score_) score = float(score / unit_);
        unit_ = 1.0;
    }
    for (int64_t i = 0; i < n; i++) score_[rows[i]] += float(unit_);
}

void SlotPolicy::request(const int32_t* rows, int64_t n, bool learn, int32_t* slots, uint8_t* hits) {
    n_requests_++;
    if (learn) this->learn(rows, n);
    int64_t missing = 0;
    for (int64_t i = 0; i < n; i++) {
        slots[i] = slot_of_[rows[i]];
        hits[i] = slots[i] >= 0;
        if (hits[i])
            asked_[slots[i]] = n_requests_;
        else
            missing++;
    }
    candidates_.clear();
    const int64_t lacking = missing - int64_t(empty_.size());
    if (learn && lacking > 0) {
        for (int64_t slot = 0; slot < n_slots(); slot++)
            if (row_of_[slot] >= 0 && asked_[slot] != n_requests_) candidates_.push_back(int32_t(slot));
        const auto before = [&](int32_t a, int32_t b) { return score_[row_of_[a]] < score_[row_of_[b]]; };
        if (int64_t(candidates_.size()) > lacking) {
            std::nth_element(candidates_.begin(), candidates_.begin() + lacking, candidates_.end(), before);
            candidates_.resize(size_t(lacking));
        }
        std::sort(candidates_.begin(), candidates_.end(), before);
    }
    size_t next = 0;
    for (int64_t i = 0; i < n; i++) {
        if (hits[i]) continue;
        int32_t slot;
        if (!empty_.empty()) {
            slot = empty_.back();
            empty_.pop_back();
        } else {
            if (next == candidates_.size()) continue;
            slot = candidates_[next];
            if (score_[row_of_[slot]] > score_[rows[i]]) continue;
            next++;
            slot_of_[row_of_[slot]] = -1;
        }
        slots[i] = slot;
        row_of_[slot] = rows[i];
        slot_of_[rows[i]] = slot;
        asked_[slot] = n_requests_;
    }
}

void SlotPolicy::drop(int32_t row) {
    const int32_t slot = slot_of_[row];
    if (slot < 0) return;
    slot_of_[row] = row_of_[slot] = -1;
    empty_.push_back(slot);
}

}  // namespace hotset

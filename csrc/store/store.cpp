#include "store.h"

#include <algorithm>

namespace hotset {
namespace {

constexpr size_t kRowAlign = 64;

constexpr size_t rounded(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}

}  // namespace

RowStore::RowStore(std::shared_ptr<Reader> reader, uint64_t gap, int half_life)
    : reader_(std::move(reader)), gap_(gap), half_life_(half_life) {}

int RowStore::add_group(int64_t n_rows, std::vector<Part> parts) {
    Group group;
    group.n_rows = n_rows;
    size_t at = 0;
    for (const Part& part : parts) {
        group.at.push_back(at);
        at += rounded(part.row_bytes, kRowAlign);
        group.places.emplace_back(size_t(n_rows));
    }
    group.slot_bytes = at;
    group.parts = std::move(parts);
    groups_.push_back(std::move(group));
    return int(groups_.size()) - 1;
}

size_t RowStore::least_bytes() const {
    size_t largest = 0;
    for (const Group& group : groups_) largest = std::max(largest, group.bytes());
    return largest;
}

size_t RowStore::most_bytes() const {
    size_t all = 0;
    for (const Group& group : groups_) all += group.bytes();
    return all;
}

std::vector<int64_t> RowStore::slots_in(const std::vector<std::pair<int64_t, size_t>>& groups, size_t bytes) {
    size_t all = 0, largest = 0;
    for (const auto& [rows, slot] : groups) {
        all += size_t(rows) * slot;
        largest = std::max(largest, size_t(rows) * slot);
    }
    const bool whole = bytes >= all;
    const double share = whole ? 1.0 : double(bytes - std::min(bytes, largest)) / double(all);
    std::vector<int64_t> slots;
    for (const auto& [rows, slot] : groups) slots.push_back(whole ? rows : int64_t(double(rows) * share));
    return slots;
}

void RowStore::allocate(size_t bytes) {
    std::vector<std::pair<int64_t, size_t>> sizes;
    for (const Group& group : groups_) sizes.emplace_back(group.n_rows, group.slot_bytes);
    const std::vector<int64_t> slots = slots_in(sizes, bytes);
    const size_t transit = bytes >= most_bytes() ? 0 : least_bytes();
    bytes_ = transit;
    for (size_t g = 0; g < groups_.size(); g++) bytes_ += size_t(slots[g]) * groups_[g].slot_bytes;
    memory_ = Memory(bytes_ + kReadAlign);  // kernels may read a little beyond a row
    uint8_t* at = memory_.data() + transit;
    transit_ = memory_.data();
    for (size_t g = 0; g < groups_.size(); g++) {
        Group& group = groups_[g];
        group.policy =
            std::make_unique<Replacement>(1, int(group.n_rows), std::vector{int32_t(slots[g])}, half_life_);
        group.slots = at;
        at += size_t(slots[g]) * group.slot_bytes;
        for (size_t p = 0; p < group.places.size(); p++)
            std::fill(group.places[p].begin(), group.places[p].end(), memory_.data() + group.at[p]);
    }
}

bool RowStore::acquire(int index, const int32_t* rows, int64_t n, bool learn,
                       const std::function<bool()>& cancelled) {
    Group& group = groups_[index];
    found_.resize(size_t(n));
    group.policy->begin_step();
    group.policy->lookup(0, rows, size_t(n), learn, found_.data(), true);
    missing_.clear();
    to_.clear();
    uint8_t* next = transit_;
    for (int64_t i = 0; i < n; i++) {
        if (found_[i].hit) continue;
        missing_.push_back(rows[i]);
        if (found_[i].slot != Replacement::kNone) {
            to_.push_back(group.slots + size_t(found_[i].slot) * group.slot_bytes);
        } else {
            to_.push_back(next);
            next += group.slot_bytes;
        }
    }
    counts_.hits += n - int64_t(missing_.size());
    counts_.misses += int64_t(missing_.size());
    if (missing_.empty()) return true;
    const int64_t start = now_ns();
    bool done = false;
    try {
        read_rows(group, missing_.data(), int64_t(missing_.size()));
        reader_->begin(batch_);
        done = reader_->wait(batch_, cancelled);
    } catch (...) {
        for (const int32_t row : missing_) group.policy->drop(0, row);
        throw;
    }
    counts_.seconds_waited += double(now_ns() - start) * 1e-9;
    if (!done) {
        for (const int32_t row : missing_) group.policy->drop(0, row);
        return false;
    }
    for (size_t p = 0; p < group.parts.size(); p++)
        for (size_t i = 0; i < missing_.size(); i++) group.places[p][missing_[i]] = to_[i] + group.at[p];
    return true;
}

// Makes the batch of the reads of `n` rows, whose places are to_.
void RowStore::read_rows(const Group& group, const int32_t* rows, int64_t n) {
    batch_.reads.clear();
    const Part& first = group.parts[0];
    const auto piece = [&](int64_t i, size_t p) {
        const Part& part = group.parts[p];
        add_reads(batch_, part.file, part.offset + uint64_t(rows[i]) * part.stride, part.row_bytes,
                  to_[i] + group.at[p], gap_);
    };
    if (first.stride > first.row_bytes) {  // the parts of a row lie side by side
        for (int64_t i = 0; i < n; i++)
            for (size_t p = 0; p < group.parts.size(); p++) piece(i, p);
    } else {
        for (size_t p = 0; p < group.parts.size(); p++)
            for (int64_t i = 0; i < n; i++) piece(i, p);
    }
    counts_.n_reads += int64_t(batch_.reads.size());
    for (const Read& read : batch_.reads) counts_.bytes_read += read.bytes;
}

void add_reads(Reader::Batch& batch, const StoredFile* file, uint64_t offset, size_t bytes, uint8_t* to,
               uint64_t gap) {
    while (bytes) {
        const uint64_t begin = offset / kReadAlign * kReadAlign;
        const size_t here = std::min<size_t>(bytes, begin + Reader::kMostBytes - offset);
        const uint64_t end = rounded(offset + here, kReadAlign);
        Read* last = batch.reads.empty() ? nullptr : &batch.reads.back();
        if (last && last->file == file && begin >= last->offset &&
            begin <= last->offset + last->bytes + gap && end - last->offset <= Reader::kMostBytes) {
            last->bytes = std::max(last->bytes, uint32_t(end - last->offset));
        } else {
            batch.reads.push_back({file, begin, uint32_t(end - begin), nullptr, {}});
            last = &batch.reads.back();
        }
        last->copies.push_back({uint32_t(offset - last->offset), uint32_t(here), to});
        offset += here, to += here, bytes -= here;
    }
}

}  // namespace hotset

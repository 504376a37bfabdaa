#include "store.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace hotset {
namespace {

constexpr size_t kRowAlign = 64;
constexpr size_t kLentAtOnce = 63;           // slots borrowed in addition to one: each borrowing has a cost
constexpr size_t kStraightBytes = 64 << 10;  // least bytes of a part that is read directly, without a copy

constexpr size_t rounded(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}

bool is_straight(size_t row_bytes) {
    return row_bytes >= kStraightBytes;
}

uint8_t* page_at(uint8_t* p) {
    return p + (kReadAlign - reinterpret_cast<uintptr_t>(p) % kReadAlign) % kReadAlign;
}

// Rows are scattered in memory: large pages save many address lookups.
void ask_for_large_pages(uint8_t* p, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uint8_t* const end = p + bytes;
    p = page_at(p);
    if (p < end) madvise(p, size_t(end - p) / kReadAlign * kReadAlign, MADV_HUGEPAGE);
#else
    (void)p, (void)bytes;
#endif
}

size_t least_of(const std::vector<RowStore::Size>& groups) {
    size_t largest = 0;
    for (const RowStore::Size& group : groups)
        largest = std::max(largest, size_t(group.at_once) * group.slot_bytes);
    return largest;
}

size_t most_of(const std::vector<RowStore::Size>& groups) {
    size_t all = 0;
    for (const RowStore::Size& group : groups) all += size_t(group.n_rows) * group.slot_bytes;
    return all;
}

// Return how many rows fit into `bytes` bytes of another group's slots, which may not begin at a page.
size_t room_among(size_t bytes, size_t slot) {
    return (slot % kReadAlign == 0 ? bytes - std::min(bytes, kReadAlign) : bytes) / slot;
}

// Return the offset of each part in a row's slot, parts that begin at pages first, and the slot's size.
std::pair<std::vector<size_t>, size_t> lay_out(const std::vector<size_t>& row_bytes) {
    std::vector<size_t> at(row_bytes.size());
    size_t end = 0;
    for (const bool straight : {true, false})
        for (size_t p = 0; p < at.size(); p++) {
            if (is_straight(row_bytes[p]) != straight) continue;
            at[p] = end;
            end += straight ? room_for_pages(row_bytes[p]) : rounded(row_bytes[p], kRowAlign);
        }
    const bool pages = std::any_of(row_bytes.begin(), row_bytes.end(), is_straight);
    return {at, rounded(end, pages ? kReadAlign : kRowAlign)};
}

}  // namespace

RowStore::RowStore(std::shared_ptr<Reader> reader, uint64_t gap, int half_life)
    : reader_(std::move(reader)), gap_(gap), half_life_(half_life) {}

RowStore::~RowStore() {
    if (touched_by_ != n_forks()) touching_.release();  // a parent's thread cannot be joined here
    give_up();
}

int RowStore::add_group(int64_t n_rows, std::vector<Part> parts, int64_t usual, int64_t at_once,
                        int64_t n_needed) {
    Group group;
    group.n_rows = n_rows;
    group.n_needed = n_needed;
    group.at_once = std::min(at_once, n_needed);
    group.usual = std::min(usual, group.at_once);
    std::vector<size_t> row_bytes;
    for (const Part& part : parts) {
        row_bytes.push_back(part.row_bytes);
        group.places.emplace_back(size_t(n_rows));
    }
    std::tie(group.at, group.slot_bytes) = lay_out(row_bytes);
    group.missed.resize(size_t(n_rows));
    group.parts = std::move(parts);
    groups_.push_back(std::move(group));
    return int(groups_.size()) - 1;
}

size_t RowStore::slot_bytes_of(const std::vector<size_t>& row_bytes) {
    return lay_out(row_bytes).second;
}

std::vector<RowStore::Size> RowStore::sizes() const {
    std::vector<Size> sizes;
    sizes.reserve(groups_.size());
    for (const Group& group : groups_)
        sizes.push_back({group.n_needed, group.slot_bytes, group.usual, group.at_once});
    return sizes;
}

size_t RowStore::least_bytes() const {
    return least_of(sizes());
}

size_t RowStore::most_bytes() const {
    return most_of(sizes());
}

RowStore::Shares RowStore::share_out(const std::vector<Size>& groups, size_t bytes) {
    const size_t all = most_of(groups);
    Shares shares{{}, 0};
    if (bytes >= all) {
        for (const Size& group : groups) shares.slots.push_back(group.n_rows);
        return shares;
    }
    for (const Size& group : groups)
        shares.staging = std::max(shares.staging, size_t(group.usual) * group.slot_bytes);
    const auto share = [&] {
        const double part = double(bytes - std::min(bytes, shares.staging)) / double(all);
        shares.slots.clear();
        for (const Size& group : groups) shares.slots.push_back(int64_t(double(group.n_rows) * part));
    };
    share();
    // Whether the rows without a slot fit into the staging area and the slots of other groups.
    const auto holds = [&](size_t g) {
        const size_t slot = groups[g].slot_bytes;
        size_t room = shares.staging / slot;
        for (size_t other = 0; other < groups.size(); other++)
            if (other != g) room += room_among(size_t(shares.slots[other]) * groups[other].slot_bytes, slot);
        return size_t(groups[g].at_once) <= size_t(shares.slots[g]) + room;
    };
    for (size_t g = 0; g < groups.size(); g++) {
        if (holds(g)) continue;
        shares.staging = least_of(groups);
        share();
        break;
    }
    return shares;
}

void RowStore::allocate(size_t bytes) {
    const Shares shares = share_out(sizes(), bytes);
    const std::vector<int64_t>& slots = shares.slots;
    whole_ = bytes >= most_bytes();
    staging_bytes_ = bytes_ = shares.staging;
    for (size_t g = 0; g < groups_.size(); g++) bytes_ += size_t(slots[g]) * groups_[g].slot_bytes;
    bytes_ += (groups_.size() + 1) * kReadAlign;
    memory_ = Memory(bytes_ + kReadAlign);  // kernels may read slightly past a row
    ask_for_large_pages(memory_.data(), bytes_);
    staging_ = page_at(memory_.data());
    uint8_t* at = staging_ + staging_bytes_;
    for (size_t g = 0; g < groups_.size(); g++) {
        Group& group = groups_[g];
        if (group.slot_bytes % kReadAlign == 0) at = page_at(at);
        if (slots[g] > 0)
            group.policy = std::make_unique<Replacement>(1, int(group.n_rows), std::vector{int32_t(slots[g])},
                                                         half_life_);
        group.slots = at;
        at += size_t(slots[g]) * group.slot_bytes;
        for (size_t p = 0; p < group.places.size(); p++)
            std::fill(group.places[p].begin(), group.places[p].end(), staging_ + group.at[p]);
    }
}

void RowStore::touch_ahead() {
    TouchAhead::Pieces pieces{{staging_, staging_bytes_}};
    for (const Group& group : groups_)
        pieces.emplace_back(group.slots, size_t(group.n_slots()) * group.slot_bytes);
    touched_by_ = n_forks();
    touching_ = std::make_unique<TouchAhead>(std::move(pieces));
}

void RowStore::begin(int index, const int32_t* rows, int64_t n, bool learn) {
    give_up();
    Group& group = groups_[index];
    if (whole_ && group.n_there == group.n_needed) {
        counts_.hits += n;
        return;
    }
    for (const int32_t row : group.missing) group.missed[row] = 0;
    found_.assign(size_t(n), {});
    if (group.policy) {
        group.policy->begin_step();
        group.policy->lookup(0, rows, size_t(n), learn, found_.data());
    }
    group.missing.clear();
    to_.clear();
    Passing passing(*this, group);
    for (int64_t i = 0; i < n; i++) {
        if (found_[i].hit) continue;
        group.missing.push_back(rows[i]);
        group.missed[rows[i]] = 1;
        to_.push_back(found_[i].slot == Replacement::kNone
                          ? passing.next()
                          : group.slots + size_t(found_[i].slot) * group.slot_bytes);
    }
    const int64_t n_missing = int64_t(group.missing.size());
    counts_.hits += n - n_missing;
    counts_.misses += n_missing;
    if (n_missing == 0) return;
    coming_ = &group;
    born_ = n_forks();
    read_rows(group);
    reader_->begin(*batch_);
}

RowStore::Passing::Passing(RowStore& store, const Group& group)
    : store_(store), group_(group), at_(store.staging_), end_(at_ + store.staging_bytes_) {}

uint8_t* RowStore::Passing::next() {
    const size_t bytes = group_.slot_bytes;
    while (size_t(end_ - at_) < bytes) {
        if (next_lender_ == store_.groups_.size())
            throw std::logic_error("more rows were requested than one fetch may have");
        Group& other = store_.groups_[next_lender_++];
        if (&other == &group_ || !other.policy) continue;
        lender_ = &other;
        n_borrowed_ = 0;
        at_ = bytes % kReadAlign == 0 ? page_at(other.slots) : other.slots;
        end_ = std::max(at_, other.slots + size_t(other.n_slots()) * other.slot_bytes);
    }
    uint8_t* const row = std::exchange(at_, at_ + bytes);
    if (lender_ && size_t(at_ - lender_->slots) > n_borrowed_ * lender_->slot_bytes) {
        const size_t needed = (size_t(at_ - lender_->slots) + lender_->slot_bytes - 1) / lender_->slot_bytes;
        const size_t until = std::min(needed + kLentAtOnce, size_t(lender_->n_slots()));
        lender_->policy->drop_slots(int32_t(n_borrowed_), int32_t(until));
        n_borrowed_ = until;
    }
    return row;
}

bool RowStore::finish(const std::function<bool()>& cancelled) {
    if (!coming_) return true;
    if (coming_->policy) coming_->policy->settle();
    const int64_t start = now_ns();
    bool done = false;
    try {
        done = reader_->wait(*batch_, cancelled);
    } catch (...) {
        give_up();
        throw;
    }
    counts_.seconds_waited += double(now_ns() - start) * 1e-9;
    if (!done) {
        give_up();
        return false;
    }
    Group& group = *std::exchange(coming_, nullptr);
    group.n_there += int64_t(group.missing.size());
    for (size_t p = 0; p < group.parts.size(); p++) {
        const bool straight = is_straight(group.parts[p].row_bytes);
        for (size_t i = 0; i < group.missing.size(); i++) {
            const int32_t row = group.missing[i];
            group.places[p][row] = to_[i] + group.at[p] + (straight ? group.offset(row, p) % kReadAlign : 0);
        }
    }
    return true;
}

bool RowStore::preload(int group, const int32_t* rows, int64_t n, const std::function<bool()>& cancelled) {
    const Counts before = counts_;
    begin(group, rows, n, false);
    const bool done = finish(cancelled);
    counts_ = before;
    return done;
}

bool RowStore::copy(int group, const int32_t* rows, int64_t n, const std::vector<uint8_t*>& out,
                    const std::function<bool()>& cancelled) {
    begin(group, rows, n, false);
    if (!finish(cancelled)) return false;
    for (int p = 0; p < n_parts(group); p++)
        for (int64_t i = 0; i < n; i++)
            std::copy_n(places(group, p)[rows[i]], row_bytes(group, p),
                        out[size_t(p)] + size_t(i) * row_bytes(group, p));
    return true;
}

bool RowStore::peek(int index, int32_t row, int part, uint8_t* out) const {
    const Group& group = groups_[index];
    if (!group.policy || group.policy->find(0, row) == Replacement::kNone) return false;
    if (coming_ == &group && group.missed[row]) return false;
    std::copy_n(places(index, part)[row], row_bytes(index, part), out);
    return true;
}

// Drop the reads in flight and the failed ones: they are not needed any more.
void RowStore::give_up() {
    if (!coming_) return;
    if (born_ != n_forks()) {  // a parent's reads never end here, and its threads may hold a lock
        batch_.release();
        batch_ = std::make_unique<Reader::Batch>();
    } else {
        try {
            reader_->wait(*batch_, [] { return true; });
        } catch (const ReadError&) {  // the result is not needed
        }
    }
    if (coming_->policy)
        for (const int32_t row : coming_->missing) coming_->policy->drop(0, row);
    coming_ = nullptr;
}

// Make the batch of reads for the missing rows, whose addresses are in to_.
void RowStore::read_rows(const Group& group) {
    batch_->reads.clear();
    batch_->copies.clear();
    const Part& first = group.parts[0];
    const size_t n = group.missing.size();
    const auto piece = [&](size_t i, size_t p) {
        const Part& part = group.parts[p];
        const uint64_t offset = group.offset(group.missing[i], p);
        if (is_straight(part.row_bytes))
            add_straight_reads(*batch_, part.file, offset, part.row_bytes, to_[i] + group.at[p]);
        else
            add_reads(*batch_, part.file, offset, part.row_bytes, to_[i] + group.at[p], gap_);
    };
    if (first.stride > first.row_bytes) {  // the parts of a row are adjacent in the file
        for (size_t i = 0; i < n; i++)
            for (size_t p = 0; p < group.parts.size(); p++) piece(i, p);
    } else {
        for (size_t p = 0; p < group.parts.size(); p++)
            for (size_t i = 0; i < n; i++) piece(i, p);
    }
    counts_.n_reads += int64_t(batch_->reads.size());
    for (const Read& read : batch_->reads) counts_.bytes_read += read.bytes;
}

void add_reads(Reader::Batch& batch, const StoredFile* file, uint64_t offset, size_t bytes, uint8_t* to,
               uint64_t gap) {
    while (bytes) {
        const uint64_t begin = offset / kReadAlign * kReadAlign;
        const size_t here = std::min<size_t>(bytes, begin + Reader::kMostCopied - offset);
        const uint64_t end = rounded(offset + here, kReadAlign);
        Read* last = batch.reads.empty() ? nullptr : &batch.reads.back();
        if (last && !last->into && last->file == file && begin >= last->offset &&
            begin <= last->offset + last->bytes + gap && end - last->offset <= Reader::kMostCopied) {
            last->bytes = std::max(last->bytes, uint32_t(end - last->offset));
        } else {
            batch.reads.push_back(
                {file, begin, uint32_t(end - begin), nullptr, uint32_t(batch.copies.size())});
            last = &batch.reads.back();
        }
        batch.copies.push_back({uint32_t(offset - last->offset), uint32_t(here), to});
        last->n_copies++;
        offset += here, to += here, bytes -= here;
    }
}

}  // namespace hotset

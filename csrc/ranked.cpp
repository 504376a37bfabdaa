#include "ranked.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "sums.h"

namespace hotset {
namespace {

constexpr size_t kFew = 512;       // candidates that are sorted completely
constexpr size_t kBlock = 512;     // candidates that are weighed at a time
constexpr size_t kAtOnce = 16;     // candidates whose buckets are compared without a branch
constexpr double kUnit = 0x1p-53;  // the largest relative error of an addition
// The largest difference between orders of summation or versions of exp: absolute (logits), relative.
constexpr double kNear = 1e-10;
constexpr double kEdge = 2e-5;  // how far float rounding can put a candidate beyond the edge of its bucket

// Return the least of some numbers, at least one of which is finite.
float least(const float* values, size_t n) {
    constexpr size_t kLanes = 8;  // compilers vectorise a loop over lanes
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, std::numeric_limits<float>::infinity());
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (size_t lane = 0; lane < kLanes; lane++)
            lanes[lane] = values[i + lane] < lanes[lane] ? values[i + lane] : lanes[lane];
    for (; i < n; i++) lanes[0] = std::min(lanes[0], values[i]);
    return *std::min_element(lanes, lanes + kLanes);
}

}  // namespace

void Ranked::begin(Order order, double base, double divisor, size_t most, bool has_entropy) {
    order_ = order;
    base_ = base;
    divisor_ = divisor;
    has_entropy_ = has_entropy;
    shift_ = more_shift_ = 0.0;
    is_shifted_ = in_doubt_ = false;
    temperature_ = slack_ = 0.0;
    n_ = 0;
    if (keys_.size() < most + 1) {  // `add` may write one candidate that is not kept
        keys_.resize(most + 1);
        places_.resize(most + 1);
    }
}

void Ranked::rank(const Kernels& kernels) {
    kernels_ = &kernels;
    first_ = 0;
    last_ = n_;
    if (items_.size() < n_) {
        buckets_.resize(n_ + kAtOnce);
        items_.resize(n_);
        relatives_.resize(n_);
        weights_.resize(n_);
        factors_.resize(kBuckets);
    }
    if (n_ <= kFew) {
        for (size_t i = 0; i < n_; i++) items_[i] = item(i);
        starts_ = {0, uint32_t(n_)};
        gathered_.assign(1, true);
        settled_.assign(1, false);
        order_ = Order::exact;
    } else {
        spread();
    }
    if (order_ == Order::exact) settle_range(first_, last_);
}

// Find the bucket of each candidate, and count the candidates of each bucket.
void Ranked::spread() {
    lowest_ = (double(least(keys_.data(), n_)) - base_) / divisor_;
    per_unit_ = kMostPerUnit;
    while (per_unit_ > kLeastPerUnit && -lowest_ * per_unit_ >= double(kBuckets)) per_unit_ /= 2.0;
    const float base = float(base_), scale = float(std::min(per_unit_ / divisor_, 1e30));
    const float deepest = float(kBuckets - 1);
    for (size_t i = 0; i < n_; i++) {
        const float below = (base - keys_[i]) * scale;
        buckets_[i] = uint16_t(int32_t(below < deepest ? below : deepest));
    }
    std::fill_n(buckets_.begin() + long(n_), kAtOnce, uint16_t(kBuckets));
    // Two counters per bucket, so that adjacent candidates in one bucket do not wait for each other.
    ends_.assign(2 * kBuckets + 2, 0);
    for (size_t i = 0; i < n_; i += 2) {
        ends_[2 * size_t(buckets_[i])]++;
        ends_[2 * size_t(buckets_[i + 1]) + 1]++;
    }
    starts_.resize(kBuckets + 1);
    starts_[0] = 0;
    for (size_t b = 0; b < kBuckets; b++) starts_[b + 1] = starts_[b] + ends_[2 * b] + ends_[2 * b + 1];
    gathered_.assign(kBuckets, false);
    settled_.assign(kBuckets, false);
    weighed_.assign(kBuckets, 0);
    round_ = 0;
}

// Copy the candidates of the buckets first..last into items_, ordered by place within a bucket.
void Ranked::gather(size_t first, size_t last) {
    if (std::all_of(gathered_.begin() + long(first), gathered_.begin() + long(last) + 1,
                    [](uint8_t each) { return each; }))
        return;
    ends_.assign(starts_.begin() + long(first), starts_.begin() + long(last) + 1);
    const uint16_t lowest = uint16_t(first), span = uint16_t(last - first);
    for (size_t begin = 0; begin < n_; begin += kAtOnce) {
        const uint16_t* buckets = &buckets_[begin];
        uint16_t has_any = 0;
        for (size_t i = 0; i < kAtOnce; i++) has_any |= uint16_t(buckets[i] - lowest) <= span ? 1 : 0;
        if (!has_any) continue;
        for (size_t i = begin; i < begin + kAtOnce; i++) {
            const uint16_t b = uint16_t(buckets_[i] - lowest);
            if (b <= span && !gathered_[first + b]) items_[ends_[b]++] = item(i);
        }
    }
    std::fill(gathered_.begin() + long(first), gathered_.begin() + long(last) + 1, true);
}

// Gather a bucket and its neighbours, which are often needed next.
void Ranked::gather_near(size_t bucket) {
    if (!gathered_[bucket])
        gather(bucket - std::min<size_t>(bucket, 2), std::min(bucket + 2, gathered_.size() - 1));
}

void Ranked::settle(size_t bucket) {
    if (settled_[bucket]) return;
    gather_near(bucket);
    settled_[bucket] = true;
    const auto begin = items_.begin() + starts_[bucket], end = items_.begin() + starts_[bucket + 1];
    if (std::is_sorted(begin, end)) return;
    std::sort(begin, end);
    if (divisor_ != 1.0)  // the division may make logits equal; sort equal ones by place
        for (auto run = begin; run != end;) {
            const double value = relative_of(*run);
            const auto next =
                std::find_if(run, end, [&](uint64_t item) { return relative_of(item) != value; });
            std::sort(run, next, [](uint64_t a, uint64_t b) { return uint32_t(a) < uint32_t(b); });
            run = next;
        }
    if (!is_exact()) weighed_[bucket] = 0;
}

// Return the range of the bucket's remaining candidates. It is empty if first >= second.
std::pair<size_t, size_t> Ranked::part(size_t bucket) const {
    return {std::max<size_t>(starts_[bucket], first_), std::min<size_t>(starts_[bucket + 1], last_)};
}

size_t Ranked::bucket_at(size_t at) const {
    return size_t(std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin()) - 1;
}

void Ranked::settle_range(size_t first, size_t last) {
    if (first >= last) return;
    const size_t end = bucket_at(last - 1);
    gather(bucket_at(first), end);
    for (size_t b = bucket_at(first); b <= end; b++) settle(b);
}

size_t Ranked::place(size_t rank) {
    settle(bucket_at(first_ + rank));
    return size_t(uint32_t(items_[first_ + rank]));
}

double Ranked::relative(size_t rank) {
    settle(bucket_at(first_ + rank));
    return shifted(first_ + rank);
}

void Ranked::narrow(size_t first, size_t last) {
    first_ = first;
    last_ = last;
    if (order_ != Order::fast || size() > kFew) return;
    settle_range(first_, last_);
    order_ = Order::exact;
    temperature_ = 0.0;
}

void Ranked::shift_to_first() {
    (is_shifted_ ? more_shift_ : shift_) = relative(0);
    is_shifted_ = true;
    if (is_exact()) temperature_ = 0.0;
}

void Ranked::keep_first(size_t k) {
    if (k >= size()) return;
    const size_t last = first_ + k, b = bucket_at(last - 1);
    if (!settled_[b]) {  // the order within the bucket does not matter
        gather_near(b);
        const auto begin = items_.begin();
        std::nth_element(begin + starts_[b], begin + long(last - 1), begin + starts_[b + 1]);
    }
    narrow(first_, last);
}

// ---- weights and sums ----

// Weigh the remaining candidates. In the fast order, weights are relative to the first of all candidates,
// because only ratios matter.
void Ranked::weigh(double temperature) {
    if (temperature_ == temperature) return;
    temperature_ = temperature;
    if (is_exact()) return weigh_range(first_, last_);
    round_++;
    const size_t first = bucket_at(first_), last = bucket_at(last_ - 1);
    sums_.assign(kBuckets, 0.0);
    moments_.assign(kBuckets, 0.0);
    if (size() <= n_ / 4) {
        gather(first, last);
        for (size_t b = first; b <= last; b++) {
            weigh_bucket(b);
            for (size_t at = starts_[b]; at < starts_[b + 1]; at++) {
                sums_[b] += weights_[at];
                moments_[b] += weights_[at] * relatives_[at];
            }
        }
    } else {
        weigh_all();
    }
    if (first + 1 == kBuckets) gather_near(first);
    const double depth = first + 1 < kBuckets ? -double(first + 1) / per_unit_ : relative_of(items_[first_]);
    if (depth / temperature < -300.0) in_doubt_ = true;
}

// Sum the weights of all candidates by bucket: the weight of the bucket's edge times the sum of the
// exponentials of the distances to it. A short series computes those exactly.
void Ranked::weigh_all() {
    constexpr size_t kDeep = kBuckets - 1;
    const bool has_moments = has_entropy_ && temperature_ == 1.0;
    const bool has_series = temperature_ >= 0.25 && divisor_ >= 1e-3 && divisor_ <= 1e3;
    const double inverse = 1.0 / divisor_, rate = 1.0 / temperature_, width = 1.0 / per_unit_;
    double relatives[kBlock], weights[kBlock];
    // Two sums per bucket, so that adjacent candidates in one bucket do not wait for each other.
    lanes_.assign(2 * kBuckets, 0.0);
    moment_lanes_.assign(has_moments ? 2 * kBuckets : 0, 0.0);
    for (size_t begin = 0; begin < n_; begin += kBlock) {
        const size_t n = std::min(n_ - begin, kBlock);
        const float* keys = &keys_[begin];
        const uint16_t* buckets = &buckets_[begin];
        if (has_series) {
            for (size_t i = 0; i < n; i++) {
                relatives[i] = (double(keys[i]) - base_) * inverse;
                const double x = (relatives[i] + double(buckets[i]) * width) * rate;
                double series = 1.0 + x * (1.0 / 6.0);
                series = 1.0 + x * (1.0 / 5.0) * series;
                series = 1.0 + x * (1.0 / 4.0) * series;
                series = 1.0 + x * (1.0 / 3.0) * series;
                series = 1.0 + x * (1.0 / 2.0) * series;
                weights[i] = 1.0 + x * series;
            }
        } else {
            for (size_t i = 0; i < n; i++) relatives[i] = (double(keys[i]) - base_) / divisor_;
            kernels_->weights(relatives, temperature_, int64_t(n), weights);
        }
        for (size_t i = 0; i < n; i++) lanes_[2 * size_t(buckets[i]) + i % 2] += weights[i];
        for (size_t i = 0; has_moments && i < n; i++)
            moment_lanes_[2 * size_t(buckets[i]) + i % 2] += weights[i] * relatives[i];
    }
    std::fill_n(factors_.begin(), kBuckets, 1.0);
    if (has_series) {
        for (size_t b = 0; b < kBuckets; b++) sums_[b] = -double(b) * width;
        kernels_->weights(sums_.data(), temperature_, kBuckets, factors_.data());
    }
    for (size_t b = 0; b < kBuckets; b++) {
        sums_[b] = factors_[b] * (lanes_[2 * b] + lanes_[2 * b + 1]);
        if (has_moments) moments_[b] = factors_[b] * (moment_lanes_[2 * b] + moment_lanes_[2 * b + 1]);
    }
    if (!has_series || starts_[kDeep] == n_) return;
    sums_[kDeep] = moments_[kDeep] = 0.0;  // these candidates are far from the edge
    size_t n_deep = 0;
    for (size_t i = 0; i < n_; i++) {
        relatives[n_deep] = (double(keys_[i]) - base_) * inverse;
        n_deep += buckets_[i] == kDeep;
        if (n_deep < kBlock && i + 1 < n_) continue;
        kernels_->weights(relatives, temperature_, int64_t(n_deep), weights);
        for (size_t j = 0; j < n_deep; j++) {
            sums_[kDeep] += weights[j];
            moments_[kDeep] += weights[j] * relatives[j];
        }
        n_deep = 0;
    }
}

// Compute the weights of the candidates of a bucket.
void Ranked::weigh_bucket(size_t bucket) {
    if (is_exact() || weighed_[bucket] == round_) return;
    gather_near(bucket);
    weighed_[bucket] = round_;
    weigh_range(starts_[bucket], starts_[bucket + 1]);
}

void Ranked::find_relatives(size_t first, size_t last) {
    if (divisor_ == 1.0)  // avoids the division, the slowest part
        for (size_t i = first; i < last; i++) relatives_[i] = key_of(items_[i]) - base_;
    else
        for (size_t i = first; i < last; i++) relatives_[i] = relative_of(items_[i]);
}

void Ranked::weigh_range(size_t first, size_t last) {
    if (first >= last) return;
    if (is_exact()) {
        for (size_t i = first; i < last; i++) {
            relatives_[i] = shifted(i);
            weights_[i] = std::exp(relatives_[i] / temperature_);
        }
    } else {
        find_relatives(first, last);
        kernels_->weights(&relatives_[first], temperature_, int64_t(last - first), &weights_[first]);
    }
}

double Ranked::total() {
    if (is_exact()) return pairwise_sum(&weights_[first_], size());
    double sum = 0.0;
    for (size_t b = bucket_at(first_), last = bucket_at(last_ - 1); b <= last; b++) sum += weight_of(b);
    return sum;
}

// Return the sum of weights times relative logits.
double Ranked::moment() {
    double sum = 0.0;
    for (size_t b = bucket_at(first_), last = bucket_at(last_ - 1); b <= last; b++) sum += moment_of(b);
    return sum;
}

// Return how far a sum over buckets may be from the sum in the defined order.
double Ranked::margin(double total) const {
    return total * (double(2 * size() + kBuckets + 100) * kUnit + slack_);
}

// Return where the running sum of the weights reaches the target, or exceeds it if `beyond`.
size_t Ranked::reached(double target, bool beyond, double total) {
    double sum = 0.0;
    const auto has = [&] { return beyond ? sum > target : sum >= target; };
    if (is_exact()) {
        for (size_t at = first_; at < last_; at++) {
            sum += weights_[at];
            if (has()) return at;
        }
        return last_;
    }
    const double doubt = margin(total);
    for (size_t b = bucket_at(first_); starts_[b] < last_; b++) {
        const auto [begin, end] = part(b);
        const double of_bucket = weight_of(b);
        if (sum + of_bucket < target - doubt) {
            sum += of_bucket;
            continue;
        }
        settle(b);
        weigh_bucket(b);
        for (size_t at = begin; at < end; at++) {
            const double before = sum;
            sum += weights_[at];
            if (!has()) continue;
            if (sum - target <= doubt || (at > first_ && target - before <= doubt)) in_doubt_ = true;
            return at;
        }
    }
    in_doubt_ = true;
    return last_ - 1;
}

// Return the first candidate whose relative logit is below `relative`. The result is in doubt if a candidate
// is within `doubt` of it.
size_t Ranked::first_below(double relative, double doubt) {
    const auto is_above = [&](uint64_t item) { return relative_of(item) - shift_ - more_shift_ >= relative; };
    const auto begin = items_.begin();
    if (is_exact())
        return size_t(std::partition_point(begin + long(first_), begin + long(last_), is_above) - begin);
    // The boundary is in this bucket or, by rounding, in one of its neighbours.
    const double bucket = (relative + shift_ + more_shift_) * -per_unit_;
    const size_t middle = size_t(std::clamp(bucket, 0.0, double(kBuckets - 1)));
    if (last_ == n_ && lowest_ - shift_ - more_shift_ - relative > doubt) return last_;
    size_t at = std::clamp<size_t>(starts_[middle > 0 ? middle - 1 : 0], first_, last_);
    for (size_t b = middle > 0 ? middle - 1 : 0; b < std::min(middle + 2, kBuckets); b++) {
        const auto [first, last] = part(b);
        if (first >= last) continue;
        gather_near(b);
        const auto from = begin + long(first), to = begin + long(last);
        for (auto item = from; doubt > 0.0 && item != to; ++item)
            in_doubt_ |= std::abs(relative_of(*item) - shift_ - more_shift_ - relative) <= doubt;
        if (settled_[b]) {
            at = size_t(std::partition_point(from, to, is_above) - begin);
        } else {  // the order within the bucket does not matter
            at = size_t(std::partition(from, to, is_above) - begin);
            weighed_[b] = 0;
        }
        if (at < last) break;
    }
    return at;
}

// Return the first candidate whose weight is below `weight`.
size_t Ranked::first_lighter(double weight) {
    if (is_exact())
        return size_t(std::partition_point(weights_.begin() + long(first_), weights_.begin() + long(last_),
                                           [&](double each) { return each >= weight; }) -
                      weights_.begin());
    return weight > 0.0 ? first_below(std::log(weight) - shift_ - more_shift_, kNear) : last_;
}

// ---- filters ----

void Ranked::keep_top_p(double p, double total_of_all, double min_p) {
    size_t last = last_;
    if (p < 1.0) {
        weigh(1.0);
        double of_these = 0.0;
        if (is_exact())
            for (size_t at = first_; at < last_; at++) of_these += weights_[at];
        else
            of_these = total();
        const double whole = total_of_all != 0.0 ? total_of_all : of_these;
        // If the total covers all logits, the sum over the candidates may never reach p * total.
        const bool is_reached = is_exact() || p * whole < of_these - margin(of_these);
        if (!is_reached) in_doubt_ = true;
        last = std::min(reached(p * whole, false, of_these) + 1, last_);
    }
    if (min_p > 0.0) last = std::min(last, first_below(std::log(min_p), 0.0));
    narrow(first_, std::max(last, first_ + 1));
}

void Ranked::keep_typical_exactly(double p) {
    const size_t n = size();
    weigh(1.0);
    const double sum = total(), log_sum = std::log(sum);
    std::vector<double> probabilities(n), parts(n), away(n);
    for (size_t i = 0; i < n; i++) {
        probabilities[i] = weights_[first_ + i] / sum;
        away[i] = log_sum - relatives_[first_ + i];
        parts[i] = probabilities[i] * away[i];
    }
    const double expected = pairwise_sum(parts.data(), n);
    for (double& each : away) each = std::abs(each - expected);
    std::vector<uint32_t> order(n);
    for (size_t i = 0; i < n; i++) order[i] = uint32_t(i);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return away[a] < away[b]; });
    size_t n_kept = 0;
    for (double reached = 0.0; n_kept < n && reached <= p; n_kept++) reached += probabilities[order[n_kept]];
    order.resize(n_kept);
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < n_kept; i++) items_[first_ + i] = items_[first_ + order[i]];
    narrow(first_, first_ + n_kept);
}

// Extends a range of buckets outwards from the expected surprise.
class Ranked::Outwards {
  public:
    Outwards(Ranked& of, double centre) : of_(of), centre_(centre), width_(1.0 / of.per_unit_) {
        const double bucket = std::clamp(-centre * of.per_unit_, 0.0, double(kBuckets - 1));
        begin = size_t(bucket);
        end = begin + 1;
        reach = farthest(begin);
        weight = of_.weight_of(begin);
    }
    double width() const { return width_; }
    // Return the largest distance from the centre of a candidate in the bucket.
    double farthest(size_t b) const {
        if (b + 1 == kBuckets) return std::numeric_limits<double>::infinity();
        return std::max(std::abs(double(b) * width_ + centre_), std::abs(double(b + 1) * width_ + centre_)) +
               kEdge;
    }
    // Add the nearest bucket. Returns false if none is left.
    bool extend() {
        if (begin == 0 && end == kBuckets) return false;
        const bool is_up = end == kBuckets || (begin > 0 && farthest(begin - 1) <= farthest(end));
        const size_t b = is_up ? --begin : end++;
        weight += of_.weight_of(b);
        reach = farthest(b);
        return true;
    }

    size_t begin, end;  // the range of added buckets
    double weight;      // their total weight
    double reach;       // the largest distance of a candidate in the latest bucket

  private:
    Ranked& of_;
    const double centre_, width_;
};

// Whether all candidates of the bucket remain.
bool Ranked::is_whole(size_t bucket) const {
    return starts_[bucket] >= first_ && starts_[bucket + 1] <= last_;
}

double Ranked::weight_of(size_t bucket) {
    if (is_whole(bucket)) return sums_[bucket];
    const auto [begin, end] = part(bucket);
    if (begin >= end) return 0.0;
    weigh_bucket(bucket);
    return pairwise_sum(&weights_[begin], end - begin);
}

double Ranked::moment_of(size_t bucket) {
    if (is_whole(bucket)) return moments_[bucket];
    const auto [begin, end] = part(bucket);
    if (begin >= end) return 0.0;
    weigh_bucket(bucket);
    double sum = 0.0;
    for (size_t at = begin; at < end; at++) sum += weights_[at] * relatives_[at];
    return sum;
}

// Keep whole buckets outwards from the expected surprise, and single candidates of the buckets near the
// boundary. Returns false if the boundary is not certain.
bool Ranked::keep_typical_buckets(double p) {
    weigh(1.0);
    const double sum = total(), doubt = margin(sum), target = p * sum;
    const double centre = moment() / sum;  // the relative logit with the expected surprise
    Outwards in(*this, centre);
    while (in.weight < target - doubt && in.extend()) {
    }
    if (!std::isfinite(in.reach)) return false;
    // The last candidate to keep is at a distance between `reach` minus a bucket's width and `reach`.
    const double inside = in.reach - in.width() - 4.0 * kEdge;
    struct Outer {
        double away;
        size_t at;
    };
    std::vector<Outer> outer;
    size_t first = last_, last = first_, n_kept = 0;
    double kept = 0.0;
    for (size_t b = in.begin - std::min<size_t>(in.begin, 3); b < std::min(in.end + 3, kBuckets); b++) {
        const auto [begin, end] = part(b);
        if (begin >= end) continue;
        if (in.farthest(b) < inside) {
            first = std::min(first, begin);
            last = end;
            n_kept += end - begin;
            kept += weight_of(b);
            continue;
        }
        settle(b);
        weigh_bucket(b);
        for (size_t at = begin; at < end; at++) outer.push_back({std::abs(relatives_[at] - centre), at});
    }
    std::sort(outer.begin(), outer.end(), [](const Outer& a, const Outer& b) {
        return a.away != b.away ? a.away < b.away : a.at < b.at;
    });
    size_t n_outer = 0;
    double before = kept;
    for (; n_outer < outer.size() && kept <= target; n_outer++) {
        const size_t at = outer[n_outer].at;
        before = kept;
        kept += weights_[at];
        first = std::min(first, at);
        last = std::max(last, at + 1);
    }
    if (n_outer == 0 || kept - target <= doubt || target - before <= doubt) return false;
    if (last - first != n_kept + n_outer) return false;  // equal logits that are only partly kept
    const auto is_unlike = [&](size_t a, size_t b) {     // whose order is not certain
        return std::abs(outer[a].away - outer[b].away) < kNear &&
               items_[outer[a].at] >> 32 != items_[outer[b].at] >> 32;
    };
    if (n_outer > 1 && is_unlike(n_outer - 2, n_outer - 1)) return false;
    if (n_outer < outer.size() && is_unlike(n_outer - 1, n_outer)) return false;
    narrow(first, last);
    return true;
}

void Ranked::keep_typical(double p) {
    if (is_exact())
        keep_typical_exactly(p);
    else if (!keep_typical_buckets(p))
        in_doubt_ = true;
    shift_to_first();
}

void Ranked::drop_top_choices(double threshold) {
    weigh(1.0);
    const size_t likely = first_lighter(threshold * total()) - first_;
    if (likely < 2) return;
    settle(bucket_at(first_ + likely - 1));
    narrow(first_ + likely - 1, last_);
    shift_to_first();
}

void Ranked::keep_surprising(double most, double doubt) {
    if (is_exact()) {  // the caller filters few candidates itself
        in_doubt_ = true;
        return;
    }
    weigh(1.0);
    narrow(first_, std::max(first_below(std::log(total()) - most, doubt), first_ + 1));
}

// ---- the token ----

double Ranked::dynamic_temperature(double low, double high, double exponent) {
    if (size() < 2) return high;
    weigh(1.0);
    const double sum = total(), log_sum = std::log(sum), largest = std::log(double(size()));
    double entropy = 0.0;
    if (is_exact()) {
        std::vector<double> parts(size());
        for (size_t i = 0; i < parts.size(); i++)
            parts[i] = weights_[first_ + i] / sum * (log_sum - relatives_[first_ + i]);
        entropy = pairwise_sum(parts.data(), parts.size());
    } else {
        entropy = log_sum - moment() / sum;
        slack_ = 1e-12 * std::max(exponent, 1.0) / std::max(entropy / largest, 1e-9);
    }
    return low + (high - low) * std::pow(std::min(std::max(entropy / largest, 0.0), 1.0), exponent);
}

size_t Ranked::drawn(double temperature, double u) {
    if (temperature == 0.0) return 0;
    temperature_ = 0.0;
    weigh(temperature);
    if (!is_exact()) return reached(u * total(), true, total()) - first_;
    double sum = 0.0;
    for (size_t at = first_; at < last_; at++) sum += weights_[at];
    // A float below 1 times the total can round up to the total, past the last candidate with a probability.
    return std::min(reached(u * sum, true, sum), reached(sum, false, sum)) - first_;
}

double Ranked::surprise(size_t rank) {
    const double log_sum = std::log(total());
    return log_sum - relatives_[first_ + rank];
}

}  // namespace hotset

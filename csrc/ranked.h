// The candidates for the next token by falling logit, sorted only as far as the samplers need.
//
// A full vocabulary is not sorted: each candidate belongs to a bucket by its logit. A histogram holds the
// number and the weight of each bucket's candidates, and sums run over whole buckets. Candidates of a bucket
// are sorted only if a boundary is in it, such as top-p's, or the drawn token. These sums add in another
// order than the definition of a seed's tokens (tests/support/sampling_reference.py), which sorts candidates.
// So each decision is compared with the largest difference that the order can cause. If it is not certain,
// `in_doubt` becomes true, and the caller starts again with `Order::exact`, which sums in the defined order.
// A small number of candidates is always exact.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/kernels.h"

namespace hotset {

enum class Order { fast, exact };

class Ranked {
  public:
    // Forget all candidates and make room for `most`. A candidate's relative logit is (key - base) / divisor,
    // at most 0. has_entropy: weights at temperature 1 include the sums that entropies need.
    void begin(Order order, double base, double divisor, size_t most, bool has_entropy = false);
    // place: rising, at most 2^32 - 1. key: finite. is_in: if false, nothing is added; avoids a branch.
    void add(float key, size_t place, bool is_in = true) {
        keys_[n_] = key;
        places_[n_] = uint32_t(place);
        n_ += is_in;
    }
    void rank(const Kernels& kernels);

    size_t size() const { return last_ - first_; }
    bool in_doubt() const { return in_doubt_; }
    size_t place(size_t rank);  // of the candidate with this rank among the remaining ones
    double relative(size_t rank);

    // Filters. engine/sampler.py defines their parameters. Each keeps at least one candidate.
    void keep_first(size_t k);
    void keep_typical(double p);
    // total: the sum of the exponentials of all logits; 0: sum over the candidates.
    void keep_top_p(double p, double total, double min_p);
    void drop_top_choices(double threshold);
    // Keep candidates with a surprise of at most `most`. doubt: its error. Only in the fast order.
    void keep_surprising(double most, double doubt);

    double dynamic_temperature(double low, double high, double exponent);
    // Return the rank of the candidate drawn by u in [0, 1).
    size_t drawn(double temperature, double u);
    // Return the surprise of a candidate: log(sum of exponentials) - relative(rank).
    double surprise(size_t rank);

  private:
    static constexpr uint32_t kSign = 0x80000000;
    // Relative logits down to at least -64; the last bucket holds all below. If the logits span less, the
    // buckets are narrower, by powers of two, so that edges are exact.
    static constexpr size_t kBuckets = 8192;
    static constexpr double kLeastPerUnit = 128.0, kMostPerUnit = 1024.0;

    uint64_t item(size_t candidate) const {
        const uint32_t bits = std::bit_cast<uint32_t>(keys_[candidate] + 0.0f);  // -0 equals 0
        const uint32_t falling = bits & kSign ? bits : ~bits & ~kSign;
        return uint64_t(falling) << 32 | uint64_t(places_[candidate]);
    }
    static double key_of(uint64_t item) {
        const uint32_t falling = uint32_t(item >> 32);
        return double(std::bit_cast<float>(falling & kSign ? falling : ~falling & ~kSign));
    }
    double relative_of(uint64_t item) const { return (key_of(item) - base_) / divisor_; }
    double shifted(size_t at) const { return relative_of(items_[at]) - shift_ - more_shift_; }
    bool is_exact() const { return order_ == Order::exact; }
    class Outwards;

    void spread();
    void gather(size_t first, size_t last);
    void gather_near(size_t bucket);
    void settle(size_t bucket);
    void settle_range(size_t first, size_t last);
    std::pair<size_t, size_t> part(size_t bucket) const;
    double weight_of(size_t bucket);
    double moment_of(size_t bucket);
    bool is_whole(size_t bucket) const;
    size_t bucket_at(size_t at) const;
    void narrow(size_t first, size_t last);
    void shift_to_first();
    void find_relatives(size_t first, size_t last);
    void weigh(double temperature);
    void weigh_range(size_t first, size_t last);
    void weigh_bucket(size_t bucket);
    void weigh_all();
    double total();
    double moment();
    double margin(double total) const;
    size_t reached(double target, bool beyond, double total);
    size_t first_below(double relative, double doubt);
    size_t first_lighter(double weight);
    void keep_typical_exactly(double p);
    bool keep_typical_buckets(double p);

    Order order_ = Order::exact;
    const Kernels* kernels_ = nullptr;
    double base_ = 0.0, divisor_ = 1.0;
    double shift_ = 0.0, more_shift_ = 0.0;  // the first candidate's relative logit, after one shift and two
    bool is_shifted_ = false;
    double temperature_ = 0.0;  // of weights_; 0: weights_ is empty
    double slack_ = 0.0;        // relative error of weights_ in addition to the sums' error
    bool in_doubt_ = false;
    bool has_entropy_ = false;
    double lowest_ = 0.0;          // the least relative logit
    double per_unit_ = 0.0;        // buckets per unit of the relative logit
    size_t n_ = 0;                 // candidates
    size_t first_ = 0, last_ = 0;  // the remaining range of items_
    std::vector<float> keys_;      // [n_], ordered by place
    std::vector<uint32_t> places_;
    std::vector<uint16_t> buckets_;
    // Ordered by bucket, then by rank. Only the ranges of gathered buckets are valid.
    std::vector<uint64_t> items_;  // the key, so that it sorts falling, and the place
    std::vector<double> relatives_, weights_;
    // [n_buckets]; starts_ has one more, of positions in items_. weighed_: the round of a bucket's weights.
    // sums_: total weights. moments_: sums of weights times relative logits.
    std::vector<uint32_t> starts_, ends_, weighed_;
    uint32_t round_ = 0;
    std::vector<uint8_t> gathered_, settled_;
    std::vector<double> sums_, moments_;
    std::vector<double> lanes_, moment_lanes_, factors_;  // scratch memory of weigh_all
};

}  // namespace hotset

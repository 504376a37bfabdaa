#include "draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "plan.h"

namespace hotset {
namespace {

constexpr int64_t kFew = 4;  // as _FEW of engine/sampler.py
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kOut = -std::numeric_limits<float>::infinity();

// A NaN stays.
float bounded(float value) {
    return value < -kLargest ? -kLargest : value > kLargest ? kLargest : value;
}

// NaN where one is.
float largest_of(const float* values, int64_t n) {
    float most = values[0];
    for (int64_t i = 0; i < n; i++) {
        if (std::isnan(values[i])) return values[i];
        most = std::max(most, values[i]);
    }
    return most;
}

}  // namespace

Draw::Draw(DrawRules rules, int64_t n_vocab)
    : rules_(std::move(rules)), n_vocab_(n_vocab), values_(kLogitGroup) {}

int64_t Draw::token(const float* logits, const float* largest,
                    const std::vector<std::pair<int64_t, int64_t>>& counts, double u) {
    const int64_t n_groups = n_vocab_ / kLogitGroup;
    const int64_t k = rules_.temperature == 0.0 ? 1 : rules_.top_k;
    if (kFew * k > n_groups || kFew * int64_t(rules_.bias.size() + counts.size()) > n_groups) return -1;
    largest_.assign(largest, largest + n_groups);
    change(logits, counts);
    for (size_t i = 0; i < changed_.size(); i++) {
        const int64_t g = changed_[i].id / kLogitGroup;
        if (i == 0 || changed_[i - 1].id / kLogitGroup != g)
            largest_[size_t(g)] = largest_of(group(logits, g), kLogitGroup);
    }
    if (!std::isfinite(largest_of(largest_.data(), n_groups))) return -1;
    // The largest of groups are distinct logits: the k-th of them is at most the k-th logit of all.
    const float bound = bound_of_best(k);
    if (bound == kOut) return -1;
    likely_.clear();
    int64_t n_read = 0;
    for (int64_t g = 0; g < n_groups; g++) {
        if (largest_[size_t(g)] < bound) continue;
        if (kFew * ++n_read > n_groups) return -1;
        const float* values = group(logits, g);
        for (int64_t i = 0; i < kLogitGroup; i++)
            if (values[i] >= bound) likely_.push_back({g * kLogitGroup + i, values[i]});
    }
    if (int64_t(likely_.size()) < k) return -1;  // (they are not the largest of this row)
    if (rules_.temperature == 0.0) return likely_[0].id;
    std::sort(likely_.begin(), likely_.end(), [](const Logit& a, const Logit& b) {
        return a.value != b.value ? a.value > b.value : a.id < b.id;
    });
    likely_.resize(size_t(k));
    return drawn(u);
}

void Draw::change(const float* logits, const std::vector<std::pair<int64_t, int64_t>>& counts) {
    changed_.clear();
    for (const auto& [id, bias] : rules_.bias)
        changed_.push_back({id, bias == kOut || logits[id] == kOut ? kOut : bounded(logits[id] + bias)});
    const size_t n_biased = changed_.size();
    const float penalty = std::max(std::numeric_limits<float>::min(), std::min(rules_.repetition, kLargest));
    for (const auto& [id, count] : counts) {
        const auto biased = std::find_if(changed_.begin(), changed_.begin() + long(n_biased),
                                         [id = id](const Logit& of) { return of.id == id; });
        const bool is_biased = biased != changed_.begin() + long(n_biased);
        float value = is_biased ? biased->value : logits[id];
        if (value != kOut) {
            value = bounded(value > 0.0f ? value / penalty : value * penalty);
            value = bounded(value - bounded(float(count) * rules_.frequency));
            value = bounded(value - rules_.presence);
        }
        if (is_biased)
            biased->value = value;
        else
            changed_.push_back({id, value});
    }
    std::sort(changed_.begin(), changed_.end(), [](const Logit& a, const Logit& b) { return a.id < b.id; });
}

const float* Draw::group(const float* logits, int64_t g) {
    const float* as_it_is = logits + g * kLogitGroup;
    auto at = std::lower_bound(changed_.begin(), changed_.end(), g * kLogitGroup,
                               [](const Logit& of, int64_t id) { return of.id < id; });
    if (at == changed_.end() || at->id >= (g + 1) * kLogitGroup) return as_it_is;
    std::copy_n(as_it_is, kLogitGroup, values_.begin());
    for (; at != changed_.end() && at->id < (g + 1) * kLogitGroup; ++at)
        values_[size_t(at->id % kLogitGroup)] = at->value;
    return values_.data();
}

// The k-th of the largest of groups.
float Draw::bound_of_best(int64_t k) {
    best_.assign(largest_.begin(), largest_.begin() + k);
    std::make_heap(best_.begin(), best_.end(), std::greater<>());
    for (size_t g = size_t(k); g < largest_.size(); g++) {
        if (!(largest_[g] > best_.front())) continue;
        std::pop_heap(best_.begin(), best_.end(), std::greater<>());
        best_.back() = largest_[g];
        std::push_heap(best_.begin(), best_.end(), std::greater<>());
    }
    return best_.front();
}

// One of the likely, which are in order, after top-p and min-p.
int64_t Draw::drawn(double u) {
    relative_.clear();
    for (const Logit& of : likely_) relative_.push_back(double(of.value) - double(likely_[0].value));
    const auto sum_up = [&](double temperature) {
        cumulative_.clear();
        double sum = 0.0;
        for (const double value : relative_) cumulative_.push_back(sum += std::exp(value / temperature));
    };
    size_t n = relative_.size();
    if (rules_.top_p < 1.0) {
        sum_up(1.0);
        const auto last =
            std::lower_bound(cumulative_.begin(), cumulative_.end(), rules_.top_p * cumulative_.back());
        n = std::min(n, size_t(last - cumulative_.begin()) + 1);
    }
    if (rules_.min_p > 0.0) {
        const double least = std::log(rules_.min_p);
        const auto below =
            std::find_if(relative_.begin(), relative_.end(), [&](double value) { return value < least; });
        n = std::min(n, size_t(below - relative_.begin()));
    }
    relative_.resize(n);
    sum_up(rules_.temperature);
    // A float below 1 times the total can round up to it, past the last that has a probability.
    const double total = cumulative_.back();
    const auto first = cumulative_.begin(), end = cumulative_.end();
    const auto at = std::min(std::upper_bound(first, end, u * total), std::lower_bound(first, end, total));
    return likely_[size_t(at - first)].id;
}

}  // namespace hotset

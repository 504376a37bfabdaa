#include "repetitions.h"

#include <algorithm>

namespace hotset {
namespace {

// Return for each position how many tokens up to it equal the last tokens (the Z algorithm from the end).
std::vector<int32_t> lengths_of(const std::vector<int64_t>& tokens) {
    const size_t n = tokens.size();
    std::vector<int32_t> found(n, int32_t(n));
    const auto backwards = [&](size_t i) { return tokens[n - 1 - i]; };
    size_t left = 0, right = 0;  // bounds of the match that reaches furthest
    for (size_t i = 1; i < n; i++) {
        size_t length = i < right ? std::min(right - i, size_t(found[n - 1 - (i - left)])) : 0;
        while (i + length < n && backwards(length) == backwards(i + length)) length++;
        found[n - 1 - i] = int32_t(length);
        if (i + length > right) {
            left = i;
            right = i + length;
        }
    }
    return found;
}

}  // namespace

Repetitions::Repetitions(std::vector<int64_t> tokens, int64_t last_n,
                         const std::vector<std::vector<int64_t>>& breakers)
    : last_n_(last_n), tokens_(std::move(tokens)), lengths_(lengths_of(tokens_)) {
    for (const std::vector<int64_t>& breaker : breakers) breakers_[breaker.back()].push_back(breaker);
    for (size_t position = 0; position < tokens_.size(); position++) look_for_breaker(position);
}

void Repetitions::push(int64_t token) {
    const size_t n = tokens_.size(), first = window();
    for (size_t i = n; i-- > first;)
        lengths_[i] = tokens_[i] == token ? (i > 0 ? lengths_[i - 1] : 0) + 1 : 0;
    tokens_.push_back(token);
    lengths_.push_back(int32_t(n + 1));
    look_for_breaker(n);
}

size_t Repetitions::window() const {
    const int64_t n = int64_t(tokens_.size());
    return last_n_ < 0 ? 0 : size_t(std::max<int64_t>(n - last_n_, 0));
}

void Repetitions::look_for_breaker(size_t last) {
    const auto found = breakers_.find(tokens_[last]);
    if (found == breakers_.end()) return;
    for (const std::vector<int64_t>& breaker : found->second) {
        if (breaker.size() > last + 1) continue;
        const size_t first = last + 1 - breaker.size();
        if (std::equal(breaker.begin(), breaker.end(), tokens_.begin() + long(first)))
            broken_ = std::max(broken_, {int64_t(first), int64_t(last)});
    }
}

std::vector<std::pair<int64_t, int64_t>> Repetitions::continued(int64_t at_least,
                                                                std::vector<int32_t>& longest) const {
    std::vector<std::pair<int64_t, int64_t>> found;
    const int64_t n = int64_t(tokens_.size()), first = int64_t(window());
    const int64_t limit = broken_.first >= first ? n - 1 - broken_.second : n - first;
    if (n - first <= at_least || limit < at_least) return found;
    for (int64_t i = first; i + 1 < n; i++) {  // no repetition begins before the window
        const int64_t length = std::min({int64_t(lengths_[size_t(i)]), i - first + 1, limit});
        if (length < at_least) continue;
        const int64_t token = tokens_[size_t(i + 1)];
        int32_t& known = longest[size_t(token)];
        if (known == 0) found.push_back({token, 0});
        known = std::max(known, int32_t(length + 1));  // + 1: 0 means not seen yet
    }
    for (auto& [token, length] : found) {
        length = longest[size_t(token)] - 1;
        longest[size_t(token)] = 0;
    }
    return found;
}

}  // namespace hotset

// DRY: which tokens would continue a repetition of what the sequence ends with, and how long it is. The
// definition is llama.cpp's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hotset {

class Repetitions {
  public:
    // tokens: of the sequence; at least 0, as all others. last_n: how many of the latest tokens count; -1:
    // all. breakers: sequences of tokens, none empty, that no repetition crosses.
    Repetitions(std::vector<int64_t> tokens, int64_t last_n,
                const std::vector<std::vector<int64_t>>& breakers);

    void push(int64_t token);

    // Tokens that would continue a repetition of at least so many tokens, with the length of the longest.
    // longest: scratch memory, as many zeros as there are tokens in the vocabulary, before and after.
    std::vector<std::pair<int64_t, int64_t>> continued(int64_t at_least, std::vector<int32_t>& longest) const;

  private:
    size_t window() const;  // its first position
    void look_for_breaker(size_t last);

    const int64_t last_n_;
    std::unordered_map<int64_t, std::vector<std::vector<int64_t>>> breakers_;  // by their last token
    // First and last position of the breaker that begins last, of these the longest.
    std::pair<int64_t, int64_t> broken_ = {-1, -1};
    std::vector<int64_t> tokens_;
    std::vector<int32_t> lengths_;  // by position: how many tokens up to it equal those up to the end
};

}  // namespace hotset

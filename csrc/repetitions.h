// DRY sampling: the tokens that would continue a repetition of the sequence's latest tokens, and the length
// of the repetition. Defined as in llama.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hotset {

class Repetitions {
  public:
    // tokens: the sequence's, none negative. last_n: the latest tokens to consider; -1: all. breakers:
    // non-empty token sequences that no repetition crosses.
    Repetitions(std::vector<int64_t> tokens, int64_t last_n,
                const std::vector<std::vector<int64_t>>& breakers);

    void push(int64_t token);

    // Return the tokens that would continue a repetition of at least `at_least` tokens, with the longest
    // length. longest: scratch memory of one zero per token of the vocabulary; zeros again on return.
    std::vector<std::pair<int64_t, int64_t>> continued(int64_t at_least, std::vector<int32_t>& longest) const;

  private:
    size_t window() const;  // first position in the window
    void look_for_breaker(size_t last);

    const int64_t last_n_;
    std::unordered_map<int64_t, std::vector<std::vector<int64_t>>> breakers_;  // by their last token
    // First and last position of the breaker that begins last; the longest one if several begin there.
    std::pair<int64_t, int64_t> broken_ = {-1, -1};
    std::vector<int64_t> tokens_;
    std::vector<int32_t> lengths_;  // by position: how many tokens ending there equal the latest tokens
};

}  // namespace hotset

// Makes the system allocate memory before it is used.
//
// The system allocates memory page by page at the first write, which takes about as long as reading as many
// bytes from a fast disk. Without this, loading rows into slots would wait for page allocation.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace hotset {

// A thread that allocates the pages of several pieces of memory, alternating between pieces, while others use
// them. It does not change their contents. On systems without MADV_POPULATE_WRITE it does nothing.
class TouchAhead {
  public:
    using Pieces = std::vector<std::pair<uint8_t*, size_t>>;

    explicit TouchAhead(Pieces pieces);  // throws ThreadError
    ~TouchAhead();                       // stops the thread early
    TouchAhead(const TouchAhead&) = delete;

  private:
    void run(const Pieces& pieces) const;

    std::atomic<bool> stop_{false};
    std::thread thread_;
};

}  // namespace hotset

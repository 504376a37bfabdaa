// Memory that the system gives before it is needed.
//
// Memory that was asked for is given page by page when it is first written to, which takes about as long as
// to read these bytes from a quick disk: as long as slots fill, who puts rows into them would wait for pages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace hotset {

// A thread that has pages of these pieces of memory be given, of all pieces in turn, while others may use
// them: nothing that is there changes. Where the system knows no such call, nothing is done.
class TouchAhead {
  public:
    using Pieces = std::vector<std::pair<uint8_t*, size_t>>;

    explicit TouchAhead(Pieces pieces);  // throws ThreadError
    ~TouchAhead();                       // ends it where it stands
    TouchAhead(const TouchAhead&) = delete;

  private:
    void run(const Pieces& pieces) const;

    std::atomic<bool> stop_{false};
    std::thread thread_;
};

}  // namespace hotset

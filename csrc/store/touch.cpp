#include "touch.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>

#include "reader.h"

namespace hotset {
namespace {

constexpr size_t kStep = 2 << 20;  // one large page of each piece in turn

}  // namespace

TouchAhead::TouchAhead(Pieces pieces) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
    thread_ = start_thread("the thread that touches memory in advance could not be started",
                           [this, pieces = std::move(pieces)] { run(pieces); });
#else
    (void)pieces;
#endif
}

TouchAhead::~TouchAhead() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
}

void TouchAhead::run(const Pieces& pieces) const {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
    size_t longest = 0;
    for (const auto& [data, bytes] : pieces) longest = std::max(longest, bytes);
    for (size_t at = 0; at < longest; at += kStep)
        for (const auto& [data, bytes] : pieces) {
            if (at >= bytes) continue;
            if (stop_.load()) return;
            uint8_t* const first = data + at;
            uint8_t* const page = first - reinterpret_cast<uintptr_t>(first) % kReadAlign;
            // An old kernel rejects this, and memory may be short: then pages are allocated on first use.
            if (madvise(page, size_t(first - page) + std::min(kStep, bytes - at), MADV_POPULATE_WRITE))
                return;
        }
#else
    (void)pieces;
#endif
}

}  // namespace hotset

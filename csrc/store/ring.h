// Reads with io_uring, using its system calls directly. Many containers forbid it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace hotset {

bool kernel_ring_allowed();

class KernelRing {
  public:
    explicit KernelRing(int depth);  // throws ReadError
    ~KernelRing();
    KernelRing(const KernelRing&) = delete;

    // Queue a read for `submit_and_wait`. At most `depth` reads may be in flight.
    void push(int descriptor, uint8_t* to, uint32_t bytes, uint64_t offset, uint64_t tag);
    // Submit, wait for at least one read, and call `done` for each finished one. `done` may push.
    void submit_and_wait(const std::function<void(uint64_t tag, int64_t result)>& done);

  private:
    struct Maps;
    std::unique_ptr<Maps> maps_;
};

}  // namespace hotset

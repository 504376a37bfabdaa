// A ring of the kernel's for reads (io_uring), by its system calls alone. Many containers forbid it.
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

    // A read that `submit_and_wait` hands to the kernel. At most `depth` are on their way.
    void push(int descriptor, uint8_t* to, uint32_t bytes, uint64_t offset, uint64_t tag);
    // Waits until one at least is done, and calls `done` for each that is; which may push.
    void submit_and_wait(const std::function<void(uint64_t tag, int64_t result)>& done);

  private:
    struct Maps;
    std::unique_ptr<Maps> maps_;
};

}  // namespace hotset

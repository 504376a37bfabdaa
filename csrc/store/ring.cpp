#include "ring.h"

#include "reader.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace hotset {

struct KernelRing::Maps {
    int descriptor = -1;
    struct Map {
        void* at = MAP_FAILED;
        size_t bytes = 0;
        ~Map() {
            if (at != MAP_FAILED) munmap(at, bytes);
        }
        bool open(int descriptor, size_t n, off_t what) {
            bytes = n;
            at = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, what);
            return at != MAP_FAILED;
        }
        uint32_t* word(uint32_t offset) const {
            return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(at) + offset);
        }
    };
    Map submissions, completions, entries;
    io_uring_params facts = {};
    uint32_t n_pushed = 0;  // reads that were not yet submitted

    ~Maps() {
        if (descriptor >= 0) close(descriptor);
    }
    // Return false, with errno set, if the kernel refuses.
    bool open(int depth) {
        descriptor = int(syscall(__NR_io_uring_setup, unsigned(depth), &facts));
        if (descriptor < 0) return false;
        return submissions.open(descriptor, facts.sq_off.array + facts.sq_entries * sizeof(uint32_t),
                                IORING_OFF_SQ_RING) &&
               completions.open(descriptor, facts.cq_off.cqes + facts.cq_entries * sizeof(io_uring_cqe),
                                IORING_OFF_CQ_RING) &&
               entries.open(descriptor, facts.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    }
    uint32_t load(const Map& map, uint32_t offset) const {
        return __atomic_load_n(map.word(offset), __ATOMIC_ACQUIRE);
    }
    void store(const Map& map, uint32_t offset, uint32_t value) const {
        __atomic_store_n(map.word(offset), value, __ATOMIC_RELEASE);
    }
};

bool kernel_ring_allowed() {
    static const bool allowed = [] {
        io_uring_params facts = {};
        const int descriptor = int(syscall(__NR_io_uring_setup, 4u, &facts));
        if (descriptor < 0) return false;
        // Plain reads need Linux 5.6 or later.
        constexpr size_t kBytes = sizeof(io_uring_probe) + (IORING_OP_READ + 1) * sizeof(io_uring_probe_op);
        alignas(io_uring_probe) uint8_t memory[kBytes] = {};
        const auto* const probe = reinterpret_cast<const io_uring_probe*>(memory);
        const long known =
            syscall(__NR_io_uring_register, descriptor, IORING_REGISTER_PROBE, memory, IORING_OP_READ + 1);
        close(descriptor);
        return known == 0 && (probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED);
    }();
    return allowed;
}

KernelRing::KernelRing(int depth) : maps_(std::make_unique<Maps>()) {
    if (!maps_->open(depth)) throw ReadError("this system does not allow io_uring; use threads");
}

KernelRing::~KernelRing() = default;

void KernelRing::push(int descriptor, uint8_t* to, uint32_t bytes, uint64_t offset, uint64_t tag) {
    Maps& m = *maps_;
    const uint32_t tail = *m.submissions.word(m.facts.sq_off.tail);
    const uint32_t at = tail & *m.submissions.word(m.facts.sq_off.ring_mask);
    auto* const entry = static_cast<io_uring_sqe*>(m.entries.at) + at;
    std::memset(entry, 0, sizeof(*entry));
    entry->opcode = IORING_OP_READ;
    entry->fd = descriptor;
    entry->addr = reinterpret_cast<uint64_t>(to);
    entry->len = bytes;
    entry->off = offset;
    entry->user_data = tag;
    m.submissions.word(m.facts.sq_off.array)[at] = at;
    m.store(m.submissions, m.facts.sq_off.tail, tail + 1);
    m.n_pushed++;
}

void KernelRing::submit_and_wait(const std::function<void(uint64_t, int64_t)>& done) {
    Maps& m = *maps_;
    const long n =
        syscall(__NR_io_uring_enter, m.descriptor, m.n_pushed, 1u, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (n > 0) m.n_pushed -= uint32_t(n);  // otherwise EINTR, EAGAIN or EBUSY: the next call submits them
    const uint32_t mask = *m.completions.word(m.facts.cq_off.ring_mask);
    uint32_t head = *m.completions.word(m.facts.cq_off.head);
    while (head != m.load(m.completions, m.facts.cq_off.tail)) {
        const io_uring_cqe entry = reinterpret_cast<const io_uring_cqe*>(
            static_cast<uint8_t*>(m.completions.at) + m.facts.cq_off.cqes)[head & mask];
        m.store(m.completions, m.facts.cq_off.head, ++head);
        done(entry.user_data, entry.res);
    }
}

}  // namespace hotset

#else

namespace hotset {

struct KernelRing::Maps {};
bool kernel_ring_allowed() {
    return false;
}
KernelRing::KernelRing(int) {
    throw ReadError("this system does not allow io_uring; use threads");
}
KernelRing::~KernelRing() = default;
void KernelRing::push(int, uint8_t*, uint32_t, uint64_t, uint64_t) {}
void KernelRing::submit_and_wait(const std::function<void(uint64_t, int64_t)>&) {}

}  // namespace hotset

#endif

#include "mapped.h"

#ifdef _WIN32

namespace hotset {

struct GuardedFile {};

GuardedFile* guard_file(const uint8_t*, size_t, int) {
    static GuardedFile none;
    return &none;
}
void unguard_file(GuardedFile*) {}
bool is_truncated(const GuardedFile*) {
    return false;
}
void map_cached(const GuardedFile*, size_t, size_t) {}

}  // namespace hotset

#else

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>

namespace hotset {

// An entry is reused but never freed, since the handler may read it in any thread.
struct GuardedFile {
    std::atomic<bool> used{true};
    std::atomic<uintptr_t> begin{0};
    std::atomic<size_t> bytes{0};  // whole pages; 0: no mapping
    std::atomic<bool> truncated{false};
    off_t file_bytes = 0;
    int descriptor = -1;
    GuardedFile* next = nullptr;
};

namespace {

std::atomic<GuardedFile*> files{nullptr};
std::atomic<size_t> page_bytes{0};
struct sigaction previous;
bool chains_back = false;             // `previous` was installed after `handle`, and may call it again
std::atomic<bool> passing_on{false};  // a previous handler is handling a fault

// Everything from here on must be safe in a signal handler: atomics and system calls only.
bool put_zeros(uintptr_t address) {
    for (GuardedFile* file = files.load(std::memory_order_acquire); file; file = file->next) {
        const uintptr_t begin = file->begin.load(std::memory_order_relaxed);
        const size_t bytes = file->bytes.load(std::memory_order_acquire);
        if (address - begin >= bytes) continue;
        const uintptr_t page = address / page_bytes * page_bytes;
        file->truncated.store(true, std::memory_order_release);
        // Usually the rest of the file is missing: replace all of it at once instead of a page per fault.
        return mmap(reinterpret_cast<void*>(page), begin + bytes - page, PROT_READ,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
    }
    return false;
}

void handle(int signal, siginfo_t* info, void* context) {
    const int saved = errno;
    const bool is_fault = info->si_code > 0;  // otherwise a process sent it, without an address
    if (is_fault && put_zeros(reinterpret_cast<uintptr_t>(info->si_addr))) {
        errno = saved;
        return;
    }
    // A handler such as faulthandler restores the one it found, which may be this one, and raises again.
    const bool again = passing_on.exchange(true);
    const bool is_function = (previous.sa_flags & SA_SIGINFO) ||
                             (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN);
    if (is_function && !again) {
        if (previous.sa_flags & SA_SIGINFO)
            previous.sa_sigaction(signal, info, context);
        else
            previous.sa_handler(signal);
    } else if (is_fault || again || previous.sa_handler == SIG_DFL) {
        struct sigaction deadly = {};
        deadly.sa_handler = SIG_DFL;
        sigemptyset(&deadly.sa_mask);
        sigaction(signal, &deadly, nullptr);
        if (!is_fault) raise(signal);  // delivered when this handler returns; a fault repeats by itself
        errno = saved;
        return;
    }
    if (!chains_back) passing_on.store(false);
    errno = saved;
}

// Another handler may have been installed since (faulthandler). Other faults then go to that handler.
void install() {
    struct sigaction now = {};
    if (sigaction(SIGBUS, nullptr, &now) != 0 || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == handle))
        return;
    chains_back = page_bytes.exchange(size_t(sysconf(_SC_PAGESIZE))) != 0;
    previous = now;
    struct sigaction own = {};
    own.sa_sigaction = handle;
    own.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&own.sa_mask);
    sigaction(SIGBUS, &own, nullptr);
}

GuardedFile* new_entry() {
    for (GuardedFile* file = files.load(std::memory_order_acquire); file; file = file->next) {
        bool used = false;
        if (file->used.compare_exchange_strong(used, true)) return file;
    }
    auto* file = new GuardedFile;
    file->next = files.load();
    while (!files.compare_exchange_weak(file->next, file)) {
    }
    return file;
}

}  // namespace

GuardedFile* guard_file(const uint8_t* mapping, size_t bytes, int descriptor) {
    const int copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) throw std::system_error(errno, std::generic_category(), "a mapped file cannot be guarded");
    install();
    GuardedFile* file = new_entry();
    file->descriptor = copy;
    file->file_bytes = off_t(bytes);
    file->truncated.store(false);
    file->begin.store(reinterpret_cast<uintptr_t>(mapping), std::memory_order_relaxed);
    file->bytes.store((bytes + page_bytes - 1) / page_bytes * page_bytes, std::memory_order_release);
    return file;
}

void unguard_file(GuardedFile* file) {
    file->bytes.store(0);
    close(file->descriptor);
    file->descriptor = -1;
    file->used.store(false);
}

bool is_truncated(const GuardedFile* file) {
    install();
    if (file->truncated.load(std::memory_order_acquire)) return true;
    // The rest of the last page reads as zeros without a fault.
    struct stat facts = {};
    return fstat(file->descriptor, &facts) == 0 && facts.st_size < file->file_bytes;
}

#ifdef __linux__
#ifndef MADV_POPULATE_READ  // since Linux 5.14; older headers lack it, older systems reject it
#define MADV_POPULATE_READ 22
#endif
void map_cached(const GuardedFile* file, size_t begin, size_t end) {
    // mincore(2) reports all pages of other users' files as cached.
    struct stat facts = {};
    if (fstat(file->descriptor, &facts) != 0 || (facts.st_uid != geteuid() && geteuid() != 0)) return;
    constexpr size_t kPages = 4096;  // pages that one call examines
    unsigned char cached[kPages];
    end = std::min(end, file->bytes.load());
    for (size_t at = begin / page_bytes * page_bytes; at < end; at += kPages * page_bytes) {
        uint8_t* const pages = reinterpret_cast<uint8_t*>(file->begin.load()) + at;
        const size_t n = (std::min(end - at, kPages * page_bytes) + page_bytes - 1) / page_bytes;
        if (mincore(pages, n * page_bytes, cached) != 0) return;
        for (size_t i = 0, last; i < n; i = last) {
            for (last = i; last < n && (cached[last] & 1) == (cached[i] & 1);) last++;
            if ((cached[i] & 1) &&
                madvise(pages + i * page_bytes, (last - i) * page_bytes, MADV_POPULATE_READ) != 0)
                return;
        }
    }
}
#else
void map_cached(const GuardedFile*, size_t, size_t) {}
#endif

}  // namespace hotset

#endif

#include "reader.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>

#ifdef _WIN32
#define NOMINMAX
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include "ring.h"

namespace hotset {
namespace {

std::string reason(int error) {
    return std::generic_category().message(error);
}

uint64_t hash(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

// Memory aligned to kReadAlign.
class Buffer {
  public:
    explicit Buffer(size_t bytes) : memory_(bytes + kReadAlign) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(memory_.data());
        data_ = memory_.data() + (kReadAlign - at % kReadAlign) % kReadAlign;
    }
    uint8_t* data() const { return data_; }

  private:
    Memory memory_;
    uint8_t* data_;
};

}  // namespace

// ---- files

#ifdef _WIN32

namespace {
std::string last_reason() {  // in the words of other systems, if there are any
    return std::error_code(int(GetLastError()), std::system_category()).default_error_condition().message();
}
}  // namespace

StoredFile::StoredFile(std::string path) : path_(std::move(path)) {
    const std::filesystem::path named(std::u8string(path_.begin(), path_.end()));
    handle_ = CreateFileW(named.c_str(), GENERIC_READ, FILE_SHARE_READ, nullptr, OPEN_EXISTING,
                          FILE_FLAG_RANDOM_ACCESS, nullptr);
    LARGE_INTEGER size;
    if (handle_ == INVALID_HANDLE_VALUE || !GetFileSizeEx(handle_, &size))
        throw ReadError(path_ + " cannot be read: " + last_reason());
    bytes_ = uint64_t(size.QuadPart);
}
StoredFile::~StoredFile() {
    CloseHandle(handle_);
}
void StoredFile::check() const {}  // no other process can write to it
StoredFile::Attempt StoredFile::attempt(uint64_t, size_t bytes) const {
    return {-1, bytes};
}
int64_t StoredFile::read_at(uint8_t* to, size_t bytes, uint64_t offset) const {
    OVERLAPPED at = {};
    at.Offset = DWORD(offset);
    at.OffsetHigh = DWORD(offset >> 32);
    DWORD n = 0;
    if (ReadFile(handle_, to, DWORD(bytes), &n, &at)) return n;
    return GetLastError() == ERROR_HANDLE_EOF ? 0 : -EIO;
}

#else

namespace {
int64_t written_ns(const struct stat& facts) {
#ifdef __APPLE__
    return int64_t(facts.st_mtimespec.tv_sec) * 1'000'000'000 + facts.st_mtimespec.tv_nsec;
#else
    return int64_t(facts.st_mtim.tv_sec) * 1'000'000'000 + facts.st_mtim.tv_nsec;
#endif
}
}  // namespace

StoredFile::StoredFile(std::string path) : path_(std::move(path)) {
    descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat facts = {};
    if (descriptor_ < 0 || fstat(descriptor_, &facts) != 0) {
        const int error = errno;
        if (descriptor_ >= 0) close(descriptor_);
        throw ReadError(path_ + " cannot be read: " + reason(error));
    }
    bytes_ = uint64_t(facts.st_size);
    changed_ns_ = written_ns(facts);
#ifdef __APPLE__
    direct_ = fcntl(descriptor_, F_NOCACHE, 1) == 0;
#elif defined(O_DIRECT)
    // Some file systems refuse to open a file with O_DIRECT, others refuse to read it.
    const int direct = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    struct stat same = {};
    const Buffer buffer(kReadAlign);
    if (direct >= 0 && fstat(direct, &same) == 0 && same.st_ino == facts.st_ino &&
        same.st_dev == facts.st_dev && pread(direct, buffer.data(), kReadAlign, 0) >= 0) {
        cached_ = descriptor_;  // for the rest of a page after a short read
        descriptor_ = direct;
        direct_ = true;
    } else if (direct >= 0) {
        close(direct);
    }
#endif
}

StoredFile::~StoredFile() {
    close(descriptor_);
    if (cached_ >= 0) close(cached_);
}

void StoredFile::check() const {
    struct stat facts = {};
    if (fstat(descriptor_, &facts) == 0 && uint64_t(facts.st_size) == bytes_ &&
        written_ns(facts) == changed_ns_)
        return;
    throw ReadError(path_ + " was changed while it was in use; put the whole file there and load it again");
}

StoredFile::Attempt StoredFile::attempt(uint64_t offset, size_t bytes) const {
    if (cached_ < 0 || offset % kReadAlign == 0) return {descriptor_, bytes};
    return {cached_, std::min(bytes, size_t(kReadAlign - offset % kReadAlign))};
}

int64_t StoredFile::read_at(uint8_t* to, size_t bytes, uint64_t offset) const {
    const Attempt next = attempt(offset, bytes);
    for (;;) {
        const ssize_t n = pread(next.descriptor, to, next.bytes, off_t(offset));
        if (n >= 0) return n;
        if (errno != EINTR && errno != EAGAIN) return -errno;
    }
}

#endif

std::shared_ptr<const StoredFile> StoredFiles::open(const std::string& path) {
    for (const auto& known : files_)
        if (known->path() == path) return known;
    return files_.emplace_back(std::make_shared<StoredFile>(path));
}

void StoredFiles::check() const {
    for (const auto& file : files_) file->check();
}

// ---- reads

class Reader::Ring : public KernelRing {
  public:
    explicit Ring(int depth) : KernelRing(depth), flights(size_t(depth)) {
        for (int i = depth; i-- > 0;) idle.push_back(i);
    }
    struct Flight {
        Job job;
        std::unique_ptr<Buffer> buffer;  // allocated when first needed
        uint8_t* to;
        size_t done;
    };
    std::vector<Flight> flights;
    std::vector<int> idle;
};

struct Reader::State {
    const uint64_t born = n_forks();
    std::mutex mutex;
    std::condition_variable more;
    std::deque<Job> queue, ahead;  // of batches that a thread waits for, and of others
    bool idle() const { return queue.empty() && ahead.empty(); }
    Job take() {
        std::deque<Job>& from = queue.empty() ? ahead : queue;
        const Job job = from.front();
        from.pop_front();
        return job;
    }
    bool stop = false;
    std::unique_ptr<Ring> ring;
    std::vector<std::thread> threads;
};

Reader::Reader(Kind kind, int depth) : kind_(kind), depth_(depth) {
    if (kind == Kind::Ring && !ring_allowed())
        throw ReadError("this system does not allow io_uring; use threads");
    state();
}

Reader::~Reader() {
    State* state = state_.load();
    if (!state || state->born != n_forks()) return;  // a parent's threads cannot be joined here
    {
        const std::scoped_lock lock(state->mutex);
        state->stop = true;
    }
    state->more.notify_all();
    for (std::thread& thread : state->threads) thread.join();
    delete state;
}

bool Reader::ring_allowed() {
    return kernel_ring_allowed();
}

Reader::State& Reader::state() {
    State* state = state_.load(std::memory_order_acquire);
    if (state && state->born == n_forks()) return *state;
    const std::scoped_lock lock(starting_);
    state = state_.load();
    if (state && state->born == n_forks()) return *state;
    auto made = std::make_unique<State>();
    if (kind_ == Kind::Ring) made->ring = std::make_unique<Ring>(depth_);
    const int n_threads = made->ring ? 1 : depth_;
    try {
        for (int i = 0; i < n_threads; i++)
            made->threads.push_back(start_thread(
                "the threads that read the model's file could not be started",
                [this, s = made.get()] { s->ring ? serve_with_ring(*s, *s->ring) : serve_with_pread(*s); }));
    } catch (...) {
        {
            const std::scoped_lock stopping(made->mutex);
            made->stop = true;
        }
        made->more.notify_all();
        for (std::thread& thread : made->threads) thread.join();
        throw;
    }
    state_.store(made.get(), std::memory_order_release);
    return *made.release();
}

void Reader::begin(Batch& batch) {
    State& state = this->state();
    batch.error.clear();
    batch.left.store(batch.reads.size());
    if (batch.reads.empty()) return;
    {
        const std::scoped_lock lock(state.mutex);
        std::deque<Job>& queue = batch.ahead ? state.ahead : state.queue;
        for (Read& read : batch.reads) queue.push_back({&read, &batch});
    }
    if (batch.reads.size() == 1 || kind_ == Kind::Ring)
        state.more.notify_one();
    else
        state.more.notify_all();
}

bool Reader::wait(Batch& batch, const std::function<bool()>& cancelled) {
    using namespace std::chrono_literals;
    std::unique_lock lock(batch.mutex);
    bool dropped = false;
    while (!batch.done.wait_for(lock, 10ms, [&] { return batch.left.load() == 0; })) {
        if (dropped || (batch.error.empty() && !cancelled())) continue;
        dropped = true;  // reads that have not begun are dropped; the others finish
        lock.unlock();
        size_t n = 0;
        {
            State& state = this->state();
            const std::scoped_lock taking(state.mutex);
            const auto own = [&](const Job& job) { return job.batch == &batch; };
            n = std::erase_if(batch.ahead ? state.ahead : state.queue, own);
        }
        lock.lock();
        batch.left.fetch_sub(n);
    }
    if (!batch.error.empty()) throw ReadError(batch.error);
    return !dropped;
}

void Reader::finish(const Job& job, const uint8_t* buffer, const std::string& error) {
    if (error.empty())
        for (uint32_t i = 0; i < job.read->n_copies; i++) {
            const Read::Copy& copy = job.batch->copies[job.read->first_copy + i];
            std::memcpy(copy.to, buffer + copy.from, copy.bytes);
        }
    Batch& batch = *job.batch;
    // Hold the lock until the end: the batch may be freed as soon as no read is left.
    const std::scoped_lock lock(batch.mutex);
    if (!error.empty() && batch.error.empty()) batch.error = error;
    if (batch.left.fetch_sub(1) == 1) batch.done.notify_all();
}

bool Reader::advance(const Read& read, int64_t result, size_t& done, std::string& error) {
    if (result < 0) {
        error = read.file->path() + " could not be read at byte " + std::to_string(read.offset + done) +
                ": " + reason(int(-result)) + "; check the disk";
        return true;
    }
    done += size_t(result);
    if (read.offset + done >= std::min(read.offset + read.bytes, read.file->bytes())) return true;
    if (result > 0) return false;  // a short read is normal; only 0 means the end
    error = read.file->path() + " ends near byte " + std::to_string(read.offset + done) +
            ": it was truncated while it was in use; put the whole file there and load it again";
    return true;
}

int64_t Reader::faulty(int64_t result, uint8_t* to) {
    const uint64_t limit = fault_limit_.load(std::memory_order_relaxed);
    if (!limit) return result;
    const uint64_t drawn = hash(fault_seed_.load() + n_attempts_.fetch_add(1));
    if (drawn >= limit) return result;
    const uint64_t kind = fault_short_only_.load() ? 1 : hash(drawn) % 3;
    if (kind == 0) return -EIO;
    if (kind == 2) return 0;
    if (result <= 1) return result;
    const int64_t kept = 1 + int64_t(hash(drawn + 1) % uint64_t(result - 1));
    std::memset(to + kept, 0xa5, size_t(result - kept));  // a short read writes nothing there
    return kept;
}

void Reader::inject_faults(double share, uint64_t seed, bool short_only) {
    fault_seed_.store(seed);
    fault_short_only_.store(short_only);
    n_attempts_.store(0);
    fault_limit_.store(share <= 0 ? 0 : share >= 1 ? ~uint64_t(0) : uint64_t(share * 0x1p64));
}

void Reader::serve_with_pread(State& state) {
    const Buffer buffer(kMostBytes);
    std::unique_lock lock(state.mutex);
    for (;;) {
        state.more.wait(lock, [&] { return state.stop || !state.idle(); });
        if (state.stop) return;
        const Job job = state.take();
        lock.unlock();
        const Read& read = *job.read;
        uint8_t* const to = read.into ? read.into : buffer.data();
        std::string error;
        for (size_t done = 0;;) {
            const int64_t n = read.file->read_at(to + done, read.bytes - done, read.offset + done);
            if (advance(read, faulty(n, to + done), done, error)) break;
        }
        finish(job, to, error);
        lock.lock();
    }
}

void Reader::serve_with_ring(State& state, Ring& ring) {
    const auto launch = [&](int i) {
        const Ring::Flight& f = ring.flights[i];
        const Read& read = *f.job.read;
        const uint64_t at = read.offset + f.done;
        const StoredFile::Attempt next = read.file->attempt(at, read.bytes - f.done);
        ring.push(next.descriptor, f.to + f.done, uint32_t(next.bytes), at, uint64_t(i));
    };
    for (;;) {
        {
            std::unique_lock lock(state.mutex);
            if (ring.idle.size() == ring.flights.size())
                state.more.wait(lock, [&] { return state.stop || !state.idle(); });
            if (state.stop && ring.idle.size() == ring.flights.size()) return;
            while (!state.idle() && !ring.idle.empty() && !state.stop) {
                const int i = ring.idle.back();
                ring.idle.pop_back();
                Ring::Flight& f = ring.flights[i];
                f.job = state.take();
                f.done = 0;
                if (!f.job.read->into && !f.buffer) f.buffer = std::make_unique<Buffer>(kMostBytes);
                f.to = f.job.read->into ? f.job.read->into : f.buffer->data();
                launch(i);
            }
        }
        ring.submit_and_wait([&](uint64_t i, int64_t result) {
            Ring::Flight& f = ring.flights[i];
            std::string error;
            if (result == -EINTR || result == -EAGAIN) return launch(int(i));
            result = faulty(result, f.to + f.done);
            if (!advance(*f.job.read, result, f.done, error)) return launch(int(i));
            finish(f.job, f.to, error);
            ring.idle.push_back(int(i));
        });
    }
}

void add_straight_reads(Reader::Batch& batch, const StoredFile* file, uint64_t offset, size_t bytes,
                        uint8_t* to) {
    const uint64_t first = offset / kReadAlign * kReadAlign;
    const uint64_t end = (offset + bytes + kReadAlign - 1) / kReadAlign * kReadAlign;
    for (uint64_t at = first; at < end; at += Reader::kMostBytes) {
        const uint32_t n = uint32_t(std::min<uint64_t>(end - at, Reader::kMostBytes));
        batch.reads.push_back({file, at, n, to + (at - first)});
    }
}

double read_rate(const StoredFile& file, Reader& reader, uint32_t size, double seconds) {
    const uint64_t places = file.bytes() / size;
    if (places == 0) return 0.0;
    uint64_t drawn = 0, bytes = 0;
    const int64_t start = now_ns();
    int64_t now = start;
    while (double(now - start) < seconds * 1e9) {
        Reader::Batch batch;
        for (int i = 0; i < reader.depth() * 4; i++)
            batch.reads.push_back({&file, hash(drawn++) % places * size, size, nullptr});
        reader.begin(batch);
        reader.wait(batch, [] { return false; });
        bytes += uint64_t(size) * batch.reads.size();
        now = now_ns();
    }
    return double(bytes) / (double(now - start) * 1e-9);
}

}  // namespace hotset

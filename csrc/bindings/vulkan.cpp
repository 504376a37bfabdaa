#include <algorithm>
#include <atomic>
#include <bit>
#include <optional>

#include "bindings/bindings.h"
#include "vulkan/exchange.h"
#include "vulkan/program.h"

namespace hotset::bindings {
namespace {

using vulkan::Binding;
using vulkan::Buffer;
using vulkan::Device;
using vulkan::Exchange;
using vulkan::Kernel;
using vulkan::Place;
using vulkan::Program;

Place place_of(const std::string& name) {
    if (name == "device") return Place::Device;
    if (name == "to_device") return Place::ToDevice;
    if (name == "staging") return Place::Staging;
    require(name == "from_device", "the place must be device, to_device, from_device or staging");
    return Place::FromDevice;
}

std::shared_ptr<Device> open_device(int index, bool validate, bool staged, const nb::bytes& cache) {
    const std::span<const uint8_t> kept(reinterpret_cast<const uint8_t*>(cache.c_str()), cache.size());
    nb::gil_scoped_release release;
    return Device::open(vulkan::Instance::open(validate), index, staged, kept);
}

nb::bytes compiled(const Device& device) {
    const std::vector<uint8_t> data = device.compiled();
    return nb::bytes(reinterpret_cast<const char*>(data.data()), data.size());
}

bool is_cache_of(const Device& device, const nb::bytes& data) {
    return vulkan::is_cache_of(device.info(), {reinterpret_cast<const uint8_t*>(data.c_str()), data.size()});
}

void fail(const std::string& name, int n, int result, bool lasting) {
    vulkan::fail_call(name, n, VkResult(result), lasting);
}

// heaps: bytes and flags. types: heap and flags, as in Vulkan.
std::optional<uint32_t> memory_type(const std::vector<std::pair<uint64_t, uint32_t>>& heaps,
                                    const std::vector<std::pair<uint32_t, uint32_t>>& types, uint32_t allowed,
                                    const std::string& place) {
    VkPhysicalDeviceMemoryProperties memories{};
    require(heaps.size() <= VK_MAX_MEMORY_HEAPS && types.size() <= VK_MAX_MEMORY_TYPES,
            "there are more heaps or types than Vulkan allows");
    for (const auto& [size, flags] : heaps) memories.memoryHeaps[memories.memoryHeapCount++] = {size, flags};
    for (const auto& [heap, flags] : types) {
        require(heap < heaps.size(), "a memory type names no heap");
        memories.memoryTypes[memories.memoryTypeCount++] = {flags, heap};
    }
    return vulkan::choose_memory(memories, allowed, place_of(place));
}

nb::list devices(bool validate) {
    nb::list found;
    for (const vulkan::DeviceInfo& one : vulkan::Instance::open(validate)->devices()) {
        nb::dict facts;
        facts["index"] = one.index;
        facts["name"] = one.name;
        facts["kind"] = one.kind;
        facts["driver"] = one.driver;
        facts["api"] = std::to_string(VK_API_VERSION_MAJOR(one.api_version)) + "." +
                       std::to_string(VK_API_VERSION_MINOR(one.api_version));
        facts["memory"] = one.memory;
        facts["free"] = one.free;
        facts["refusal"] = one.refusal;
        facts["features"] = one.features;
        facts["subgroup"] = one.subgroup;
        facts["vendor"] = one.vendor;
        found.append(facts);
    }
    return found;
}

std::shared_ptr<Buffer> allocate(const std::shared_ptr<Device>& device, uint64_t size,
                                 const std::string& place) {
    require(size > 0 && size <= device->info().max_allocation,
            "an allocation is larger than the device allows");
    return std::make_shared<Buffer>(device, size, place_of(place));
}

void check_range(const Buffer& buffer, uint64_t offset, uint64_t size) {
    require(offset <= buffer.size() && size <= buffer.size() - offset, "the range is outside the buffer");
}

void write(Buffer& buffer, uint64_t offset, const Bytes& bytes) {
    check_range(buffer, offset, bytes.size());
    const std::span<const uint8_t> from(bytes.data(), bytes.size());
    nb::gil_scoped_release release;
    buffer.write(offset, from);
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> read(Buffer& buffer, uint64_t offset, uint64_t size) {
    check_range(buffer, offset, size);
    uint8_t* data;
    auto result = new_array<uint8_t>(data, size);
    {
        nb::gil_scoped_release release;
        buffer.read(offset, {data, size_t(size)});
    }
    return result;
}

// Return a view of a host-visible buffer. It keeps the buffer alive.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> view(nb::handle self) {
    auto& buffer = nb::cast<Buffer&>(self);
    require(buffer.mapped() != nullptr, "the buffer is not host-visible");
    return {buffer.mapped(), {size_t(buffer.size())}, self};
}

using Matrices = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

TileBytes tile_bytes(int type, int64_t cols) {
    require(type >= 0 && type < kTypeCount && cols > 0 && cols <= int64_t(1) << 40,
            "the type or the number of columns is out of range");
    const TileBytes bytes = hotset::tile_bytes(Type(type), cols);
    require(bytes.codes > 0, "no device kernel decodes the type " + std::to_string(type));
    require(cols % type_facts(Type(type)).block_size == 0, "a row must have whole blocks");
    return bytes;
}

// Return the chosen rows of several matrices [n, rows, bytes of a row]. Rows of zeros pad the last tile of
// each matrix; `zeros` must stay alive.
TileRows rows_of(int type, int64_t cols, const Matrices& data, const Ints& chosen,
                 std::vector<uint8_t>& zeros) {
    tile_bytes(type, cols);
    const TypeFacts facts = type_facts(Type(type));
    const size_t row_bytes = data.shape(2), n_rows = data.shape(1);
    require(int64_t(row_bytes) == cols / facts.block_size * facts.block_bytes,
            "the bytes of a row do not match its columns");
    require(chosen.size() <= n_rows, "more rows were chosen than the matrix has");
    for (size_t i = 0; i < chosen.size(); i++)
        require(chosen.data()[i] >= 0 && size_t(chosen.data()[i]) < n_rows, "a row is outside the matrix");
    zeros.resize(row_bytes);
    TileRows rows{Type(type), cols, {}};
    for (size_t matrix = 0; matrix < data.shape(0); matrix++) {
        for (size_t i = 0; i < chosen.size(); i++)
            rows.places.push_back(data.data() + (matrix * n_rows + size_t(chosen.data()[i])) * row_bytes);
        while (rows.places.size() % kTileRows) rows.places.push_back(zeros.data());
    }
    return rows;
}

nb::tuple rearranged(int type, int64_t cols, const Matrices& data, const Ints& chosen, int n_threads) {
    std::vector<uint8_t> zeros;
    const TileRows rows = rows_of(type, cols, data, chosen, zeros);
    check_threads(n_threads);
    const TileBytes bytes = hotset::tile_bytes(rows.type, cols);
    uint8_t *codes, *more;
    auto of_codes = new_array<uint8_t>(codes, rows.n_tiles() * bytes.codes);
    auto of_more = new_array<uint8_t>(more, rows.n_tiles() * bytes.more);
    {
        nb::gil_scoped_release release;
        put_tiles(rows, 0, rows.n_tiles(), codes, more, n_threads);
    }
    return nb::make_tuple(of_codes, of_more);
}

using Spot = std::pair<std::shared_ptr<Buffer>, uint64_t>;  // a buffer and an offset in it

vulkan::Target target_of(const Spot& spot, uint64_t size) {
    check_range(*spot.first, spot.second, size);
    return {spot.first.get(), spot.second, size};
}

void upload(int type, int64_t cols, const Matrices& data, const Ints& chosen, const Spot& codes,
            const std::optional<Spot>& more, int n_threads) {
    std::vector<uint8_t> zeros;
    const TileRows rows = rows_of(type, cols, data, chosen, zeros);
    check_threads(n_threads);
    const TileBytes bytes = hotset::tile_bytes(rows.type, cols);
    require(more.has_value() == (bytes.more > 0), "`more` must be given exactly if the type needs it");
    const vulkan::Target to = target_of(codes, rows.n_tiles() * bytes.codes);
    const vulkan::Target rest = more ? target_of(*more, rows.n_tiles() * bytes.more) : vulkan::Target{};
    nb::gil_scoped_release release;
    vulkan::upload(rows, to, rest, n_threads);
}

std::shared_ptr<Kernel> make_kernel(const std::shared_ptr<Device>& device, const Bytes& spirv, int n_buffers,
                                    int push_bytes, const vulkan::Constants& constants) {
    require(spirv.size() >= 20 && spirv.size() % 4 == 0 && load_u32(spirv.data()) == 0x07230203,
            "the kernel is not SPIR-V");
    require(n_buffers > 0 && n_buffers <= 16 && push_bytes >= 0 && push_bytes <= 128 && push_bytes % 4 == 0,
            "a kernel has up to 16 buffers and 128 bytes of push constants");
    std::vector<uint32_t> words(spirv.size() / 4);
    std::memcpy(words.data(), spirv.data(), spirv.size());
    return std::make_shared<Kernel>(device, words, n_buffers, push_bytes, constants);
}

using Bound = std::tuple<std::shared_ptr<Buffer>, uint64_t, uint64_t, bool>;

std::vector<Binding> bindings_of(const std::vector<Bound>& bound) {
    std::vector<Binding> found;
    found.reserve(bound.size());
    for (const auto& [buffer, offset, size, written] : bound)
        found.push_back({buffer, offset, size, written});
    return found;
}

std::span<const uint8_t> bytes_of(const nb::bytes& push) {
    return {reinterpret_cast<const uint8_t*>(push.c_str()), push.size()};
}

void dispatch(Program& program, const std::shared_ptr<Kernel>& kernel, const std::vector<Bound>& bound,
              const nb::bytes& push, const std::tuple<uint32_t, uint32_t, uint32_t>& groups) {
    program.dispatch(kernel, bindings_of(bound), bytes_of(push),
                     {std::get<0>(groups), std::get<1>(groups), std::get<2>(groups)});
}

void dispatch_indirect(Program& program, const std::shared_ptr<Kernel>& kernel,
                       const std::vector<Bound>& bound, const nb::bytes& push,
                       const std::shared_ptr<Buffer>& counts, uint64_t offset) {
    program.dispatch_indirect(kernel, bindings_of(bound), bytes_of(push), counts, offset);
}

// Return uint64 [dispatches, 2].
nb::ndarray<nb::numpy, uint64_t, nb::ndim<2>> times(const Program& program) {
    const std::vector<std::array<uint64_t, 2>> found = program.times();
    uint64_t* data;
    auto result = new_array<uint64_t>(data, found.size(), 2);
    for (size_t i = 0; i < found.size(); i++) std::copy_n(found[i].data(), 2, data + 2 * i);
    return result;
}

using Words = nb::ndarray<uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Write the positions and block tables of a step (backends/vulkan/inputs.py) and return its largest position.
// Sequences are numbered again: the caller may have more of them than a step has tokens.
int place_tokens(const Words& places, const Words& tables, const Ints& positions, const Ints& sequences,
                 const IntMatrix& kv_blocks) {
    const size_t n = positions.size(), most = places.shape(1), width = tables.shape(1);
    require(n > 0 && n <= most && sequences.size() == n,
            "a step has a position and a sequence for each token");
    require(places.shape(0) == 3 && tables.shape(0) >= n, "the inputs have too few rows");
    uint32_t *const position = places.data(), *const own = position + most, *const last = own + most;
    const int largest = *std::max_element(positions.data(), positions.data() + n);
    require(largest >= 0, "a position is negative");
    const size_t used = std::min({size_t(largest / kKvBlockSize + 1), width, size_t(kv_blocks.shape(1))});
    for (size_t first = 0, row = 0, end; first < n; first = end, row++) {
        const int sequence = sequences.data()[first];
        require(sequence >= 0 && size_t(sequence) < kv_blocks.shape(0), "a sequence has no block table");
        for (end = first + 1; end < n && sequences.data()[end] == sequence;) end++;
        const int32_t* const blocks = kv_blocks.data() + size_t(sequence) * kv_blocks.shape(1);
        std::copy_n(blocks, used, tables.data() + row * width);
        std::copy(positions.data() + first, positions.data() + end, position + first);
        std::fill(own + first, own + end, uint32_t(row));
        std::fill(last + first, last + end, uint32_t(positions.data()[end - 1]));
    }
    return largest;
}

using Pairs = nb::ndarray<const uint32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

nb::tuple candidates(const Pairs& pairs) {
    require(pairs.shape(2) == 2, "candidates are pairs");
    int32_t* ids;
    float* logits;
    const size_t n = pairs.shape(0), width = pairs.shape(1);
    auto of_ids = new_array<int32_t>(ids, n, width);
    auto of_logits = new_array<float>(logits, n, width);
    std::vector<std::pair<uint32_t, uint32_t>> row(width);  // id, key
    for (size_t i = 0; i < n; i++) {
        const uint32_t* const own = pairs.data() + i * width * 2;
        for (size_t j = 0; j < width; j++) row[j] = {own[2 * j + 1], own[2 * j]};
        std::ranges::sort(row);
        for (size_t j = 0; j < width; j++) {
            const auto [id, key] = row[j];
            constexpr uint32_t sign = 1u << 31;
            ids[i * width + j] = int32_t(id);
            logits[i * width + j] = std::bit_cast<float>(key & sign ? key ^ sign : ~key);
        }
    }
    return nb::make_tuple(of_ids, of_logits);
}

// Cancels runs from any thread.
struct Cancel {
    std::atomic<bool> requested{false};
};

// exchange: for layers whose neurons or experts a CPU worker shares, in a step of n_tokens.
void run(const std::vector<Program*>& programs, Cancel& cancel, const Exchange* exchange, int n_tokens) {
    std::exception_ptr raised;  // by a signal handler during the step
    bool done;
    {
        nb::gil_scoped_release release;
        const auto is_cancelled = [&] {
            nb::gil_scoped_acquire acquire;
            if (!raised && PyErr_CheckSignals() != 0) raised = std::make_exception_ptr(nb::python_error());
            return raised || cancel.requested;
        };
        std::function<bool(int)> on_host;
        if (exchange) on_host = [&](int layer) { return exchange->serve(layer, n_tokens, is_cancelled); };
        done = vulkan::run(programs, is_cancelled, on_host);
    }
    if (raised) std::rethrow_exception(raised);
    if (!done) throw StepCancelled();
}

}  // namespace

void bind_vulkan(nb::module_& m) {
    m.def("vulkan_devices", &devices, "validate"_a,
          "Return a dict per Vulkan device; raises DeviceError if there is none (csrc/vulkan/loader.h).");
    nb::class_<Device>(m, "VulkanDevice", "An open device (csrc/vulkan/device.h).")
        .def(nb::new_(&open_device), "index"_a, "validate"_a = false, "staged"_a = false,
             "cache"_a = nb::bytes("", 0))
        .def("compiled", &compiled)
        .def("is_cache_of", &is_cache_of, "data"_a)
        .def_prop_ro("allocated", &Device::allocated)
        .def_prop_ro("name", [](const Device& device) { return device.info().name; })
        .def_prop_ro("has_integer_dots", [](const Device& device) { return device.info().has_integer_dots; })
        .def_prop_ro("max_range",
                     [](const Device& device) {
                         const uint64_t most =
                             device.info().max_allocation & ~uint64_t(255);  // Arena's alignment
                         return std::min<uint64_t>(device.info().limits.maxStorageBufferRange, most);
                     })
        .def_prop_ro("max_lanes",
                     [](const Device& device) { return device.info().limits.maxComputeWorkGroupInvocations; })
        .def_prop_ro("shared_bytes",
                     [](const Device& device) { return device.info().limits.maxComputeSharedMemorySize; })
        .def_prop_ro("tick_nanoseconds",
                     [](const Device& device) {
                         const vulkan::DeviceInfo& info = device.info();
                         return info.timestamp_bits ? info.limits.timestampPeriod : 0.f;
                     })
        .def_prop_ro("max_allocation", [](const Device& device) { return device.info().max_allocation; })
        .def("limit", &Device::limit, "bytes"_a)
        .def("allocate", &allocate, "size"_a, "place"_a)
        .def("kernel", &make_kernel, "spirv"_a, "n_buffers"_a, "push_bytes"_a, "constants"_a);
    nb::class_<Buffer>(m, "VulkanBuffer", "A piece of memory (csrc/vulkan/device.h).")
        .def_prop_ro("size", &Buffer::size)
        .def_prop_ro("reserved", &Buffer::reserved)
        .def("write", &write, "offset"_a, "data"_a)
        .def("read", &read, "offset"_a, "size"_a)
        .def("clear", &Buffer::clear)
        .def("view", [](nb::handle self) { return view(self); });
    [[maybe_unused]] const nb::class_<Kernel> kernel(m, "VulkanKernel",
                                                     "A compute pipeline (csrc/vulkan/device.h).");
    nb::class_<Cancel>(m, "VulkanCancel", "Cancels a run of programs from any thread; `requested` stays set.")
        .def(nb::init<>())
        .def_prop_rw(
            "requested", [](const Cancel& cancel) { return cancel.requested.load(); },
            [](Cancel& cancel, bool requested) { cancel.requested = requested; });
    nb::class_<Program>(m, "VulkanProgram", "Dispatches that are recorded once (csrc/vulkan/program.h).")
        .def(nb::init<std::shared_ptr<Device>, bool>(), "device"_a, "timed"_a = false)
        .def("dispatch", &dispatch, "kernel"_a, "bindings"_a, "push"_a, "groups"_a)
        .def("dispatch_indirect", &dispatch_indirect, "kernel"_a, "bindings"_a, "push"_a, "counts"_a,
             "offset"_a)
        .def("cut", &Program::cut)
        .def("hand_over", &Program::hand_over)
        .def("wait_for_host", &Program::wait_for_host, "layer"_a)
        .def("finish", &Program::finish)
        .def("times", &times)
        .def_prop_ro("n_groups", &Program::n_groups);
    nb::class_<Exchange>(m, "VulkanExchange",
                         "The memory that a device and a CPU worker exchange (csrc/vulkan/exchange.h).")
        .def(nb::init<CpuWorkerPlan&, std::shared_ptr<Buffer>, std::shared_ptr<Buffer>, uint64_t>(),
             "worker"_a, "from_device"_a, "to_device"_a, "bits_offset"_a, nb::keep_alive<1, 2>());
    m.def(
        "vulkan_tile_bytes",
        [](int type, int64_t cols) {
            const TileBytes bytes = tile_bytes(type, cols);
            return std::pair(bytes.codes, bytes.more);
        },
        "type"_a, "cols"_a, "Return the bytes of 32 rows on a device: codes, and the rest.");
    m.def("vulkan_rearranged", &rearranged, "type"_a, "cols"_a, "data"_a, "rows"_a, "n_threads"_a,
          "Rearrange rows of matrices [n, rows, bytes of a row] for a device: codes, and the rest "
          "(csrc/device_tiles.h).");
    m.def("vulkan_upload", &upload, "type"_a, "cols"_a, "data"_a, "rows"_a, "codes"_a, "more"_a.none(),
          "n_threads"_a, "Rearrange rows and write them to a device's buffers, starting at an offset.");
    m.def("vulkan_place_tokens", &place_tokens, "places"_a, "tables"_a, "positions"_a, "sequences"_a,
          "kv_blocks"_a, "Write the positions and block tables of a step; return its largest position.");
    m.def("vulkan_candidates", &candidates, "pairs"_a,
          "Return the token ids, ascending in each row, and their logits (backends/vulkan/candidates.py).");
    m.def("vulkan_fail", &fail, "name"_a, "n"_a, "result"_a, "lasting"_a = false,
          "Make the n-th next call of a Vulkan function, and later ones if lasting, return a VkResult; "
          "0: none (for tests).");
    m.def("vulkan_memory_type", &memory_type, "heaps"_a, "types"_a, "allowed"_a, "place"_a,
          "Return the memory type for a place on a device (csrc/vulkan/device.h; for tests).");
    m.def(
        "vulkan_late_messages", [] { return vulkan::Instance::open(true)->late_messages(); },
        "Return the validation layer's reports about closed devices, mostly objects left open.");
    m.def(
        "vulkan_run", &run, "programs"_a, "cancel"_a, "exchange"_a = nb::none(), "n_tokens"_a = 0,
        "Run programs one after another and wait. Raises StepCancelledError if the run was cancelled or the "
        "exchange's worker poisoned the step.");
}

}  // namespace hotset::bindings

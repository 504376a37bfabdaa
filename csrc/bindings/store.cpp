#include <algorithm>
#include "bindings/bindings.h"
#include "runtime.h"

namespace hotset::bindings {
namespace {

using PartArguments =
    std::tuple<std::string, uint64_t, size_t, size_t>;  // path, offset, bytes of a row, stride

int add_group(RowStore& store, int64_t n_rows, const std::vector<PartArguments>& parts, int64_t usual,
              int64_t at_once, std::optional<int64_t> n_needed) {
    require(n_rows > 0 && n_rows < INT32_MAX && !parts.empty() && !store.end(), "a group needs rows, parts");
    require(!n_needed || (*n_needed > 0 && *n_needed <= n_rows), "n_needed must be between 1 and n_rows");
    require(usual > 0 && at_once > 0, "usual and at_once must be at least 1");
    std::vector<RowStore::Part> built;
    for (const auto& [path, offset, row_bytes, stride] : parts) {
        const StoredFile* file = store.files().open(path).get();
        require(row_bytes > 0 && row_bytes <= stride && stride < INT64_MAX / size_t(n_rows) &&
                    offset <= file->bytes() &&
                    stride * size_t(n_rows - 1) + row_bytes <= file->bytes() - offset,
                "rows of " + path + " are past its end; download or convert it again");
        built.push_back({file, offset, row_bytes, stride});
    }
    return store.add_group(n_rows, std::move(built), usual, at_once, n_needed.value_or(n_rows));
}

void allocate(RowStore& store, size_t bytes) {
    require(!store.end() && store.n_groups() > 0 && bytes >= store.least_bytes(),
            "a store needs room for its largest group");
    store.allocate(bytes);
}

// Run a cancellable function without the GIL. Throws the exception of a signal handler.
template <class F>
bool run_with_signals(F f) {
    std::exception_ptr raised;
    bool done;
    {
        nb::gil_scoped_release release;
        done = f([&] {
            nb::gil_scoped_acquire acquire;
            if (!raised && PyErr_CheckSignals() != 0) raised = std::make_exception_ptr(nb::python_error());
            return bool(raised);
        });
    }
    if (raised) std::rethrow_exception(raised);
    return done;
}

// Check that the rows rise, and that their group has its memory.
void check_rows(const RowStore& store, int group, const Ints& rows) {
    require(group >= 0 && group < store.n_groups() && store.end(), "there is no such group of rows");
    for (size_t i = 0; i < rows.size(); i++)
        require(rows.data()[i] >= (i ? rows.data()[i - 1] + 1 : 0) && rows.data()[i] < store.n_rows(group),
                "rows must rise");
}

void preload(RowStore& store, int group, const Ints& rows) {
    check_rows(store, group, rows);
    require(int64_t(rows.size()) <= store.n_slots(group), "there are fewer slots than rows to preload");
    run_with_signals([&](const auto& cancelled) {
        return store.preload(group, rows.data(), int64_t(rows.size()), cancelled);
    });
}

// Return uint8 [rows * bytes of a row] for each part. runtime: the one whose plans also use the store;
// stragglers of a cancelled step may still read it.
std::vector<nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>> copy_rows(RowStore& store, int group,
                                                                    const Ints& rows,
                                                                    std::shared_ptr<Runtime> runtime) {
    check_rows(store, group, rows);
    require(int64_t(rows.size()) <= store.at_once(group), "there are more rows than one fetch may have");
    std::atomic<bool> never{false};
    std::vector<uint8_t*> to(size_t(store.n_parts(group)));
    std::vector<nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>> copies;
    copies.reserve(to.size());
    for (size_t p = 0; p < to.size(); p++)
        copies.push_back(new_array<uint8_t>(to[p], rows.size() * store.row_bytes(group, int(p))));
    run_with_signals([&](const auto& cancelled) {
        std::optional<Runtime::Turn> turn;
        if (runtime) turn.emplace(*runtime, never, nullptr);
        return store.copy(group, rows.data(), int64_t(rows.size()), to, cancelled);
    });
    return copies;
}

// Return the bytes of a row's part, or nothing if it is not loaded. runtime: see above.
std::optional<nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>> peek_row(
    const RowStore& store, int group, int32_t row, int part, const std::shared_ptr<Runtime>& runtime) {
    require(group >= 0 && group < store.n_groups() && store.end() && part >= 0 &&
                part < store.n_parts(group) && row >= 0 && row < store.n_rows(group),
            "there is no such row");
    uint8_t* to = nullptr;
    auto copy = new_array<uint8_t>(to, store.row_bytes(group, part));
    std::atomic<bool> never{false};
    bool there;
    {
        nb::gil_scoped_release release;
        std::optional<Runtime::Turn> turn;
        if (runtime) turn.emplace(*runtime, never, nullptr);
        there = store.peek(group, row, part, to);
    }
    if (!there) return std::nullopt;
    return copy;
}

std::tuple<int64_t, int64_t, int64_t, int64_t, double> counts_of(const RowStore& store) {
    const RowStore::Counts& c = store.counts();
    return {c.hits, c.misses, c.bytes_read, c.n_reads, c.seconds_waited};
}

using PieceArguments = std::tuple<std::string, uint64_t, size_t>;  // path, offset, bytes

int add_piece(Stream& stream, const std::vector<PieceArguments>& parts) {
    require(!parts.empty() && !stream.allocated(), "a piece needs parts");
    std::vector<Stream::Part> built;
    for (const auto& [path, offset, bytes] : parts) {
        const StoredFile* file = stream.files().open(path).get();
        require(bytes > 0 && offset <= file->bytes() && bytes <= file->bytes() - offset,
                "bytes of " + path + " are past its end; download or convert it again");
        built.push_back({file, offset, bytes});
    }
    return stream.add_piece(std::move(built));
}

void allocate_ring(Stream& stream, size_t bytes) {
    require(!stream.allocated() && stream.n_pieces() > 0 && bytes >= stream.least_bytes(),
            "a stream needs room for its largest piece");
    stream.allocate(bytes);
}

// A view of a part's memory, valid while its piece is loaded. It keeps the ring alive but not the stream: at
// the end of a process NumPy releases arrays late, and nanobind would report our objects as leaks.
nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> data_of(const Stream& stream, int piece, int part) {
    require(stream.allocated() && piece >= 0 && piece < stream.n_pieces() && part >= 0 &&
                part < stream.n_parts(piece),
            "there is no such piece");
    using Ring = std::shared_ptr<const Memory>;
    nb::capsule owner(new Ring(stream.memory()), [](void* p) noexcept { delete static_cast<Ring*>(p); });
    return {stream.data(piece, part), {stream.bytes(piece, part)}, owner};
}

std::tuple<int64_t, int64_t, double> counts_of_stream(const Stream& stream) {
    const Stream::Counts& c = stream.counts();
    return {c.bytes_read, c.n_reads, c.seconds_waited};
}

// Fill arrays with bytes of a file, using many concurrent reads.
void read_arrays(Reader& reader, const std::string& path,
                 const std::vector<std::pair<uint64_t, WritableBytes>>& arrays) {
    const StoredFile file(path);
    Reader::Batch batch;
    for (const auto& [offset, array] : arrays) {
        require(offset <= file.bytes() && array.size() <= file.bytes() - offset,
                "bytes of " + path + " are past its end; download or convert it again");
        add_reads(batch, &file, offset, array.size(), array.data(), 0);
    }
    run_with_signals([&](const auto& cancelled) {
        reader.begin(batch);
        const bool done = reader.wait(batch, cancelled);
        if (done) file.check();
        return done;
    });
}

}  // namespace

void bind_store(nb::module_& m) {
    m.def("ring_allowed", &Reader::ring_allowed, "Return whether this process may use io_uring.");
    nb::class_<Reader>(m, "Reader", "Reads parts of files, many at a time (csrc/store/reader.h).")
        .def(nb::new_([](bool ring, int depth) {
                 require(depth > 0 && depth <= 256, "depth must be between 1 and 256");
                 return std::make_shared<Reader>(ring ? Reader::Kind::Ring : Reader::Kind::Threads, depth);
             }),
             "ring"_a, "depth"_a)
        .def_prop_ro("ring", [](const Reader& reader) { return reader.kind() == Reader::Kind::Ring; })
        .def_prop_ro("depth", &Reader::depth)
        .def_prop_ro("buffer_bytes", &Reader::buffer_bytes)
        .def("read", &read_arrays, "path"_a, "arrays"_a)
        .def(
            "rate",
            [](Reader& reader, const std::string& path, uint32_t size, double seconds) {
                require(size > 0 && size % kReadAlign == 0 && size <= Reader::kMostBytes,
                        "the size of reads must be whole pages, at most 512 KB");
                nb::gil_scoped_release release;
                return read_rate(StoredFile(path), reader, size, seconds);
            },
            "path"_a, "size"_a, "seconds"_a)
        .def("inject_faults", &Reader::inject_faults, "share"_a, "seed"_a, "short_only"_a = false);
    m.def(
        "reads_directly", [](const std::string& path) { return StoredFile(path).direct(); }, "path"_a,
        "Return whether a file can be read past the page cache.");
    nb::class_<StoredRows>(m, "StoredRows", "Rows of a store, used in place of a matrix's bytes.")
        .def_ro("store", &StoredRows::store)
        .def_ro("group", &StoredRows::group);
    nb::class_<RowStore>(m, "RowStore", "Rows that are read as needed (csrc/store/store.h).")
        .def(nb::new_([](std::shared_ptr<Reader> reader, uint64_t gap, int half_life) {
                 require(half_life >= 0 && (half_life & (half_life - 1)) == 0 && gap <= Reader::kMostBytes,
                         "a half-life must be a power of two of requests");
                 return std::make_shared<RowStore>(std::move(reader), gap, half_life);
             }),
             "reader"_a, "gap"_a, "half_life"_a)
        .def("group", &add_group, "n_rows"_a, "parts"_a, "usual"_a, "at_once"_a,
             "n_needed"_a.none() = nb::none())
        .def("allocate", &allocate, "bytes"_a)
        .def("touch_ahead",
             [](RowStore& store) {
                 require(store.end(), "the store has no memory yet");
                 store.touch_ahead();
             })
        .def(
            "n_slots",
            [](const RowStore& store, int group) {
                require(group >= 0 && group < store.n_groups() && store.end(),
                        "there is no such group of rows");
                return store.n_slots(group);
            },
            "group"_a)
        .def(
            "expect",
            [](RowStore& store, int group, const Floats& shares) {
                require(group >= 0 && group < store.n_groups() && store.end() &&
                            int64_t(shares.size()) == store.n_rows(group),
                        "there must be one share per row of the group");
                store.expect(group, shares.data());
            },
            "group"_a, "shares"_a)
        .def("preload", &preload, "group"_a, "rows"_a)
        .def("peek", &peek_row, "group"_a, "row"_a, "part"_a, "runtime"_a.none() = nb::none())
        .def("copy", &copy_rows, "group"_a, "rows"_a, "runtime"_a.none() = nb::none())
        .def_prop_ro("least_bytes", &RowStore::least_bytes)
        .def_prop_ro("most_bytes", &RowStore::most_bytes)
        .def_static("slot_bytes_of", &RowStore::slot_bytes_of, "rows"_a)
        .def_prop_ro("is_whole", &RowStore::is_whole)
        .def(
            "rows",
            [](std::shared_ptr<RowStore> store, int group, int part) {
                require(group >= 0 && group < store->n_groups() && part >= 0 && part < store->n_parts(group),
                        "there is no such part");
                return StoredRows{std::move(store), group, part};
            },
            "group"_a, "part"_a)
        .def("counts", &counts_of)
        .def("check", &RowStore::check)
        .def_static(
            "slots_in",
            [](const std::vector<std::tuple<int64_t, size_t, int64_t>>& groups, size_t bytes) {
                std::vector<RowStore::Size> sizes;
                for (const auto& [rows, slot, usual] : groups) {
                    require(rows > 0 && rows < INT32_MAX && slot > 0 && slot < size_t(1) << 44 && usual > 0,
                            "a group needs rows");
                    sizes.push_back({rows, slot, std::min(usual, rows), rows});
                }
                return RowStore::share_out(sizes, bytes).slots;
            },
            "groups"_a, "bytes"_a);
    nb::class_<Stream>(m, "Stream", "Weights that are read again in every step (csrc/store/stream.h).")
        .def(nb::new_(
                 [](std::shared_ptr<Reader> reader) { return std::make_shared<Stream>(std::move(reader)); }),
             "reader"_a)
        .def("piece", &add_piece, "parts"_a)
        .def("allocate", &allocate_ring, "bytes"_a)
        .def("data", &data_of, "piece"_a, "part"_a)
        .def("counts", &counts_of_stream)
        .def("check", &Stream::check)
        .def_static("room_for", &room_for_pages, "bytes"_a);
}

}  // namespace hotset::bindings

// The module itself, its errors, and what belongs to no plan.
#include "bindings/bindings.h"

#include "mapped.h"
#include "plan.h"
#include "runtime.h"
#include "threads.h"
#include "vulkan/loader.h"

namespace hotset::bindings {
namespace {

nb::object error_class(const char* name) {
    return nb::module_::import_("hotset.errors").attr(name);
}

// What needs another type than ValueError.
void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const ThreadError& error) {
        PyErr_SetString(error_class("InvalidRequestError").ptr(), error.what());
    } catch (const ReadError& error) {
        PyErr_SetString(error_class("ReadError").ptr(), error.what());
    } catch (const vulkan::OutOfMemory& error) {
        PyErr_SetString(error_class("OutOfMemoryError").ptr(), error.what());
    } catch (const vulkan::Error& error) {
        PyErr_SetString(error_class("DeviceError").ptr(), error.what());
    } catch (const StepCancelled&) {
        PyErr_SetNone(error_class("StepCancelledError").ptr());
    }
}

std::shared_ptr<Runtime> make_runtime(int n_threads) {
    check_threads(n_threads);
    return std::make_shared<Runtime>(n_threads);
}

void bind_mapped(nb::module_& m) {
    // Numbers, not objects: maps live as long as any view of them, which may be to the very end.
    m.def(
        "guard_file",
        [](const Bytes& mapping, int descriptor) {
            return reinterpret_cast<uintptr_t>(guard_file(mapping.data(), mapping.size(), descriptor));
        },
        "mapping"_a, "descriptor"_a,
        "Keeps a mapped file that is cut short from ending the process (csrc/mapped.h); a number for the "
        "other two.");
    m.def(
        "is_truncated", [](uintptr_t file) { return is_truncated(reinterpret_cast<GuardedFile*>(file)); },
        "file"_a, "Whether a guarded file is shorter than its map, or a page of it could not be read.");
    m.def(
        "unguard_file", [](uintptr_t file) { unguard_file(reinterpret_cast<GuardedFile*>(file)); }, "file"_a,
        "Ends the guard, once.");
    m.def(
        "map_cached",
        [](uintptr_t file, size_t begin, size_t end) {
            map_cached(reinterpret_cast<const GuardedFile*>(file), begin, end);
        },
        "file"_a, "begin"_a, "end"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Maps what the system's cache has of these bytes of a guarded file (csrc/mapped.h).");
}

void bind_runtime(nb::module_& m) {
    nb::class_<Runtime>(m, "Runtime",
                        "The thread pool and its memory, which plans and CPU workers share, a step at a "
                        "time (csrc/runtime.h).")
        .def(nb::new_(&make_runtime), "n_threads"_a)
        .def_prop_ro("n_threads", &Runtime::n_threads)
        .def_prop_ro("nbytes", &Runtime::bytes)
        .def("close", &Runtime::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

}  // namespace hotset::bindings

NB_MODULE(_core, m) {
    using namespace hotset::bindings;
    m.doc() = "The native core of hotset: kernels, the plan of a step and the threads that run it.";
    m.attr("PAGE_SIZE") = hotset::kPageSize;
    m.attr("SAVED_TOKENS") = hotset::kSavedTokens;
    m.attr("LOGIT_GROUP") = hotset::kLogitGroup;
    nb::register_exception_translator(&translate);
    bind_mapped(m);
    bind_runtime(m);
    bind_checks(m);
    bind_kernels(m);
    bind_draw(m);
    bind_replacement(m);
    bind_store(m);
    bind_cpu_worker(m);
    bind_plan(m);
    bind_vulkan(m);
}

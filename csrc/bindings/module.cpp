// The module, its exceptions, and functions that belong to no plan.
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

// Translate exceptions that are not ValueErrors in Python.
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
    // Files are numbers here, not objects, because a mapping lives as long as any view of it.
    m.def(
        "guard_file",
        [](const Bytes& mapping, int descriptor) {
            return reinterpret_cast<uintptr_t>(guard_file(mapping.data(), mapping.size(), descriptor));
        },
        "mapping"_a, "descriptor"_a,
        "Keep the truncation of a mapped file from ending the process (csrc/mapped.h). Returns a number for "
        "the other two functions.");
    m.def(
        "is_truncated", [](uintptr_t file) { return is_truncated(reinterpret_cast<GuardedFile*>(file)); },
        "file"_a, "Return whether a guarded file is shorter than its mapping, or a read of it failed.");
    m.def(
        "unguard_file", [](uintptr_t file) { unguard_file(reinterpret_cast<GuardedFile*>(file)); }, "file"_a,
        "End the guard. May be called once.");
    m.def(
        "map_cached",
        [](uintptr_t file, size_t begin, size_t end) {
            map_cached(reinterpret_cast<const GuardedFile*>(file), begin, end);
        },
        "file"_a, "begin"_a, "end"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Map the bytes of a guarded file that the system has cached (csrc/mapped.h).");
}

void bind_runtime(nb::module_& m) {
    nb::class_<Runtime>(m, "Runtime",
                        "The thread pool and scratch memory that plans and CPU workers share "
                        "(csrc/runtime.h).")
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
    m.attr("KV_BLOCK_SIZE") = hotset::kKvBlockSize;
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

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "bindings/bindings.h"
#include "buffer/buffer_object.h"
#include "cuda/staging.h"
#include "handlers/ffi.h"
#include "handlers/handlers.h"
#include "handlers/host_callback.h"
#include "handlers/plan_state.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// The handlers by name, each as the dict of stages that JAX registers. "type" and
/// "cuda type" are the types of their states. The names of those for GPUs begin
/// with "cuda".
nb::dict Handlers() {
  nb::dict all;
  const auto add = [&all](const std::string& prefix, XLA_FFI_TypeId* id,
                          const Stages(&handlers)[kKinds]) {
    nb::dict type;
    type["type_id"] = nb::capsule(id);
    type["type_info"] = nb::capsule(PlanTypeInfo());
    all[(prefix + "type").c_str()] = type;
    for (const auto& [name, instantiate, execute] : handlers) {
      nb::dict stages;
      if (instantiate) {
        stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(instantiate));
      }
      stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
      all[(prefix + name).c_str()] = stages;
    }
  };
  add("", &g_plan_type, kCpuHandlers);
  add("cuda ", &g_cuda_plan_type, kCudaHandlers);
  return all;
}

/// Copies memory of a GPU into an output, for a callback that has its values in an
/// array of its own.
void CopyInto(BufferObject& to, uintptr_t address, size_t bytes,
              std::optional<uintptr_t> stream) {
  const Lease::Use use(to.lease);
  if (!BufferObject::Check(use)) throw nb::python_error();
  const bool is_output = to.writeable && use->on_gpu();
  const bool is_packed = to.leaf->bits != 0;  // elements are smaller than a byte
  if (!is_output || is_packed || bytes != static_cast<size_t>(to.leaf->row_bytes)) {
    throw nb::value_error("not an output of that size on a GPU");
  }
  if (bytes == 0) return;
  const void* from = reinterpret_cast<const void*>(address);
  // The copy may wait for streams, and what these wait for may need the GIL.
  GilRelease unlocked;
  CopyOnStream(static_cast<CudaStream>(use->stream), to.data, from, bytes, stream);
}

/// The limit and statistics of a pool of pinned memory; None if it was never used.
nb::object PinnedState(const PinnedPool& pool) {
  const PinnedPool::Stats stats = pool.stats();
  if (stats.allocations == 0) return nb::none();
  nb::dict state;
  state["limit"] = stats.limit;
  state["allocated"] = stats.allocated_bytes;
  state["in_use"] = stats.in_use_bytes;
  state["pending"] = stats.pending_bytes;
  state["peak"] = stats.peak_bytes;
  state["allocations"] = stats.allocations;
  state["reuses"] = stats.reuses;
  state["waits"] = stats.waits;
  state["overruns"] = stats.overruns;
  return state;
}

}  // namespace

void InitHandlers(nb::module_& m) {
  m.def(
      "handlers",
      [](int interface) {
        g_interface_minor = std::min(interface, XLA_FFI_API_MINOR);
        return Handlers();
      },
      nb::arg("interface"));
  m.def("cuda_missing", &CudaMissing);
  m.def("copy_into", &CopyInto, nb::arg("buffer"), nb::arg("address"),
        nb::arg("nbytes"), nb::arg("stream").none());
  m.def("pinned_pools", [] {
    const Gpus& gpus = Gpus::Get();
    return nb::make_tuple(PinnedState(gpus.for_calls), PinnedState(gpus.for_taps));
  });
  // Without the GIL: a lower limit frees pinned memory, and the driver may be slow.
  m.def(
      "limit_pinned",
      [](size_t for_calls, size_t for_taps) {
        Gpus::Get().for_calls.set_limit(for_calls);
        Gpus::Get().for_taps.set_limit(for_taps);
      },
      nb::arg("for_calls"), nb::arg("for_taps"),
      nb::call_guard<nb::gil_scoped_release>());
  // JAX's handler calls it with the callback's arguments, which are not used.
  m.def("run_pending", [](nb::args) { RunPending(); });
  m.def(
      "set_host_callback_handler",
      [](nb::capsule handler, nb::handle run_pending) {
        SetHostCallbackHandler(handler.data(), run_pending.ptr());
      },
      nb::arg("handler"), nb::arg("run_pending"));
  m.def("ask_inside", &AskInside);
  m.def("on_foreign_thread", &OnForeignThread);
}

}  // namespace hostcall

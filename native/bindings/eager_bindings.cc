#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "base/code.h"
#include "base/engine.h"
#include "base/flight.h"
#include "bindings/bindings.h"
#include "buffer/buffer_call.h"
#include "invoke/invoke.h"
#include "invoke/tap_worker.h"
#include "plan/arrays.h"
#include "plan/feed_take.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// The addresses of the operands' memory. Throws if they don't fit the plan.
std::vector<const void*> Buffers(const Plan& plan, nb::list operands) {
  std::vector<size_t> sizes = plan.InputSizes();
  sizes.resize(plan.operands());  // an eager tap has no flag `always`
  return DataOf(operands, sizes);
}

/// Queues a tap of arrays on the host. Returns false if it was dropped.
bool PushEagerly(const PlanHandle& handle, nb::list operands) {
  const Plan& plan = *handle.plan;
  if (!plan.tap) throw nb::type_error("not a plan of a tap");
  const std::vector<const void*> in = Buffers(plan, operands);
  Entry entry;
  if (!entry)
    throw std::runtime_error(
        "hostcall: the engine is closed" HOSTCALL_CODE("hc-closed"));
  for (;;) {
    try {
      GilRelease unlocked;  // it may wait for the worker, which needs the GIL
      return PushOrDeliver(plan, -1, -1, in.data());
    } catch (const PushInterrupted&) {
      // GilRelease has ended with its block, so the GIL is held here. Python's
      // handler raises the interrupt on the main thread; other threads go on
      // waiting.
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }
}

/// Runs a plan on arrays of the host, without a compiled program. Returns a list of
/// new arrays.
nb::list InvokeEagerly(const PlanHandle& handle, nb::list operands) {
  const Plan& plan = *handle.plan;
  std::vector<const void*> in = Buffers(plan, operands);
  nb::list out;
  std::vector<void*> targets;
  for (const Leaf& leaf : plan.results) {
    const nb::object array = nb::steal(ArrayOfRows(leaf, plan.grid).release());
    if (!array.is_valid()) throw nb::python_error();
    void* data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr()));
    // The result takes the place of the argument's memory, which stays unchanged.
    if (plan.buffers.Aliases(targets.size())) {
      const int arg = plan.buffers.aliases[targets.size()];
      std::memcpy(data, in[arg], plan.args[arg].buffer_bytes());
      in[arg] = data;
    }
    targets.push_back(data);
    out.append(array);
  }
  if (plan.buffers.address != 0) {
    NativeStatus status;
    {
      nb::gil_scoped_release unlocked;
      status = RunNative(plan, in.data(), targets.data(), nullptr);
    }
    if (status.ok()) return out;
    RaiseStatus(plan, status);
    throw nb::python_error();
  }
  Before before;
  {
    GilRelease unlocked(plan.history != nullptr);  // Pass takes a lock
    if (Masked(plan, -1, -1, in.data(), targets.data(), &before)) return out;
  }
  std::optional<FeedTake> take;
  if (plan.feed) {
    GilRelease unlocked;
    take.emplace(plan, -1, in.data(), targets.data());
    if (take->Go(0)) return out;
  }
  const int64_t start = Ticks();
  Flight flight(plan.NewEvent(plan.feed ? EventKind::kFeed : EventKind::kCall, -1,
                              -1, start));
  flight.Entered(start);
  bool ok;
  {
    ActiveCall active(plan, -1, -1, start);
    active.before = plan.history ? &before : nullptr;
    active.feed = take ? &*take : nullptr;
    const CallScope scope(active);
    ok = Invoke(plan, active, in.data(), targets.data());
    StayIfLeftBehind();
  }
  Counters::Part& counters = plan.counters->mine();
  if (!ok) counters.errors.Add(1);
  const int64_t end = Ticks();
  counters.python_ticks.Add(end - start);
  flight.Ended(end, ok);
  {
    GilRelease unlocked(plan.feed.has_value());  // its end takes the ring's lock
    take.reset();
  }
  if (!ok) throw nb::python_error();
  return out;
}

}  // namespace

void InitEager(nb::class_<PlanHandle>& plan) {
  plan.def("invoke", &InvokeEagerly, nb::arg("operands"))
      .def("push", &PushEagerly, nb::arg("operands"));
}

}  // namespace hostcall

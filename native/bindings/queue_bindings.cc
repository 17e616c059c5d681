// The queues between programs and Python: of taps, and of feeds' items.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "bindings/bindings.h"
#include "bindings/keywords.h"
#include "cuda/staging.h"
#include "invoke/taps.h"
#include "plan/plan.h"
#include "plan/throttle.h"
#include "queue/feed_ring.h"
#include "queue/tap_queue.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// Whether an execution of a tap outside of any program goes through; counts it if
/// not. `always` is the tap's flag. Needs no GIL.
bool Lets(Throttle& throttle, Counters& counters, bool always) {
  if (throttle.Lets(0, 0) || always) return true;
  counters.taps.skipped.fetch_add(1, std::memory_order_relaxed);
  return false;
}

/// A method of the process's tap queue as a function.
template <typename Result, typename... Arguments>
auto OfTaps(Result (TapQueue::*method)(Arguments...)) {
  return [method](Arguments... arguments) {
    return (TapQueue::Get().*method)(std::move(arguments)...);
  };
}

/// The statistics of the tap queue.
nb::dict QueueState() {
  const TapQueue& queue = TapQueue::Get();
  nb::dict state;
  state["pushed"] = queue.pushed();
  state["delivered"] = queue.delivered();
  state["dropped"] = queue.dropped();
  state["pending"] = queue.pending();
  state["bytes"] = queue.bytes();
  state["limit"] = queue.limit();
  state["blocked"] = queue.blocked();
  return state;
}

/// Copies an item into the ring: for each lane, the arrays of its leaves. False if
/// the ring was closed. Reserve has made space.
bool Push(FeedRing& ring, nb::list arrays) {
  const size_t leaves = ring.leaves().size();
  // Only this thread has the list, which keeps the arrays alive.
  const std::vector<const void*> from = DataOf(arrays, ring.leaves(), ring.lanes());
  GilRelease unlocked;
  for (size_t i = 0; i < from.size(); ++i) {
    const size_t lane = i / leaves;
    const size_t leaf = i % leaves;
    CopyBytes(ring.Target(lane, leaf), from[i], ring.leaves()[leaf]);
  }
  return ring.Commit();
}

nb::dict CountsOf(const FeedRing& ring) {
  FeedRing::Counts counts;
  {
    GilRelease unlocked;
    counts = ring.counts();
  }
  nb::dict state;
  state["taken"] = counts.taken;
  state["put"] = counts.put;
  state["total"] = counts.total;
  state["waits"] = counts.waits;
  state["wait_seconds"] = 1e-9 * static_cast<double>(counts.wait_ns);
  state["stalls"] = counts.stalls;
  state["stall_seconds"] = 1e-9 * static_cast<double>(counts.stall_ns);
  return state;
}

}  // namespace

std::vector<const void*> DataOf(nb::list arrays, const std::vector<size_t>& sizes,
                                size_t times) {
  if (arrays.size() != sizes.size() * times) {
    throw nb::value_error("there are more or fewer arrays than expected");
  }
  std::vector<const void*> data;
  for (nb::handle object : arrays) {
    auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
    if (!PyArray_Check(object.ptr()) || !PyArray_IS_C_CONTIGUOUS(array)) {
      throw nb::type_error("arrays must be row-major");
    }
    const size_t size = sizes[data.size() % sizes.size()];
    if (static_cast<size_t>(PyArray_NBYTES(array)) != size) {
      throw nb::value_error("an array has another size than expected");
    }
    data.push_back(PyArray_DATA(array));
  }
  return data;
}

void InitTaps(nb::module_& m) {
  m.def("run_tap_worker", &RunTapWorker);
  m.def("on_tap_worker", [] { return t_delivers_taps; });
  // The functions that lock the queue release the GIL, so that Python goes on if
  // they have to wait. flush_taps must release it: it waits for the worker, which
  // needs it.
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  m.def("stop_taps", OfTaps(&TapQueue::Stop), unlocked);
  m.def("set_tap_limit", OfTaps(&TapQueue::SetLimit), nb::arg("bytes"), unlocked);
  m.def("discard_taps", OfTaps(&TapQueue::Discard), unlocked);
  m.def("interrupt_pushes", OfTaps(&TapQueue::Interrupt), nb::arg("text"),
        unlocked);
  m.def("tap_mark", [] { return TapQueue::Get().Mark(); });
  m.def("flush_taps", OfTaps(&TapQueue::Flush), nb::arg("mark"), nb::arg("seconds"),
        unlocked);
  m.def(
      "await_taps_of_gpus",
      [](double seconds, bool reached_only) {
        const WaitFor which =
            reached_only ? WaitFor::kReachedTaps : WaitFor::kAllTaps;
        return Gpus::Get().streams.Await(seconds, which);
      },
      nb::arg("seconds"), nb::arg("reached_only"), unlocked);
  m.def("tap_queue", &QueueState);
  nb::class_<Throttle>(m, "Throttle")
      .def(
          "__init__",
          [](Throttle* self, const TapKind& tap) {  // one device, one run
            new (self) Throttle(tap.every_steps, tap.every_ns, tap.sample, 1);
          },
          nb::arg("tap"))
      .def("lets", &Lets, nb::arg("counters"), nb::arg("always"), unlocked);
}

void InitFeeds(nb::module_& m) {
  BindEnum<FeedRing::Took>(m, "FeedFound", {"ITEM", "NOTHING", "END", "STOPPED"});
  // Each method takes the ring's lock, so none holds the GIL: a thread that copies
  // may need it. GilRelease, not nanobind's guard, since the feed's thread is a
  // daemon, and Python may end it where it takes the GIL again (base/guards.h).
  const nb::call_guard<GilRelease> unlocked;
  nb::class_<FeedRing>(m, "FeedRing")
      .def(nb::init<std::vector<size_t>, size_t, size_t>(), nb::arg("leaves"),
           nb::arg("lanes"), nb::arg("capacity"))
      .def_prop_ro("lanes", &FeedRing::lanes)
      .def("reserve", &FeedRing::Reserve, unlocked)
      .def("push", &Push, nb::arg("arrays"))
      .def("idle", &FeedRing::Idle, unlocked)
      .def("finish", &FeedRing::Finish, nb::arg("ending"), unlocked)
      .def("clear", &FeedRing::Clear, unlocked)
      .def("drop", &FeedRing::Drop, nb::arg("n"), unlocked)
      .def("wake", &FeedRing::Wake, unlocked)
      .def("close", &FeedRing::Close, unlocked)
      .def(
          "wait",
          [](FeedRing& ring, size_t lane, double seconds) {
            return ring.Take(lane, nullptr, static_cast<int64_t>(seconds * 1e9));
          },
          nb::arg("lane"), nb::arg("seconds"), unlocked)
      .def("counts", &CountsOf);
}

}  // namespace hostcall

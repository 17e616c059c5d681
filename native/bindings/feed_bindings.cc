#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "base/guards.h"
#include "base/numpy_api.h"
#include "bindings/bindings.h"
#include "bindings/keywords.h"
#include "plan/plan.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// Copies an item into the ring: for each lane, the arrays of its leaves. False if
/// the ring was closed. Reserve has made space.
bool Push(FeedRing& ring, nb::list arrays) {
  const size_t n = ring.leaves().size();
  // Only this thread has the list, which keeps the arrays alive.
  const std::vector<const void*> from = DataOf(arrays, ring.leaves(), ring.lanes());
  GilRelease unlocked;
  for (size_t i = 0; i < from.size(); ++i) {
    const size_t bytes = ring.leaves()[i % n];
    if (bytes != 0) std::memcpy(ring.Target(i / n, i % n), from[i], bytes);
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
  for (nb::handle each : arrays) {
    auto* array = reinterpret_cast<PyArrayObject*>(each.ptr());
    if (!PyArray_Check(each.ptr()) || !PyArray_IS_C_CONTIGUOUS(array)) {
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

void InitFeeds(nb::module_& m) {
  BindEnum<FeedRing::Ending>(m, "FeedEnding", {"NONE", "END", "STOPPED"});
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
      .def(
          "clear", [](FeedRing& ring) { ring.Clear(); }, unlocked)
      .def(
          "drop", [](FeedRing& ring, int64_t n) { return ring.Drop(n); },
          nb::arg("n"), unlocked)
      .def("wake", &FeedRing::Wake, unlocked)
      .def("close", &FeedRing::Close, unlocked)
      .def(
          "wait",
          [](FeedRing& ring, size_t lane, double seconds) {
            return ring.Await(lane, static_cast<int64_t>(seconds * 1e9));
          },
          nb::arg("lane"), nb::arg("seconds"), unlocked)
      .def("counts", &CountsOf);
  BindStruct(m, Keywords<FeedSettings>("FeedSettings")
                    .Field<&FeedSettings::ring>("ring")
                    .Field<&FeedSettings::devices>("devices"));
}

}  // namespace hostcall

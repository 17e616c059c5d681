#include "bindings/feed_bindings.h"

#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "base/guards.h"
#include "base/numpy_api.h"
#include "bindings/keywords.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

/// Copies an item into the ring: for each lane, the arrays of its leaves. False if
/// the ring was closed. Reserve has made space.
bool Push(const FeedHandle& handle, nb::list arrays) {
  FeedRing& ring = *handle.ring;
  const size_t n = ring.leaves().size();
  if (arrays.size() != n * ring.lanes()) {
    throw nb::value_error("the number of arrays differs from the ring's");
  }
  // The caller's list keeps the arrays alive, and only this thread has the list.
  std::vector<const void*> from;
  for (nb::handle each : arrays) {
    auto* array = reinterpret_cast<PyArrayObject*>(each.ptr());
    if (!PyArray_Check(each.ptr()) || !PyArray_IS_C_CONTIGUOUS(array)) {
      throw nb::type_error("items must be row-major arrays");
    }
    if (static_cast<size_t>(PyArray_NBYTES(array)) !=
        ring.leaves()[from.size() % n]) {
      throw nb::value_error("an array's size differs from the ring's");
    }
    from.push_back(PyArray_DATA(array));
  }
  GilRelease unlocked;
  for (size_t i = 0; i < from.size(); ++i) {
    const size_t bytes = ring.leaves()[i % n];
    if (bytes != 0) std::memcpy(ring.Target(i / n, i % n), from[i], bytes);
  }
  return ring.Commit();
}

nb::dict CountsOf(const FeedHandle& handle) {
  FeedRing::Counts counts;
  {
    GilRelease unlocked;
    counts = handle.ring->counts();
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

void InitFeeds(nb::module_& m) {
  nb::enum_<FeedRing::Ending>(m, "FeedEnding")
      .value("NONE", FeedRing::Ending::kNone)
      .value("END", FeedRing::Ending::kEnd)
      .value("STOPPED", FeedRing::Ending::kStopped);
  nb::enum_<FeedRing::Took>(m, "FeedFound")
      .value("ITEM", FeedRing::Took::kItem)
      .value("NOTHING", FeedRing::Took::kNothing)
      .value("END", FeedRing::Took::kEnd)
      .value("STOPPED", FeedRing::Took::kStopped);
  // Each method takes the ring's lock, so none holds the GIL: a thread that copies
  // may need it. GilRelease, not nanobind's guard, since the feed's thread is a
  // daemon, and Python may end it where it takes the GIL again (base/guards.h).
  nb::class_<FeedHandle>(m, "FeedRing")
      .def(
          "__init__",
          [](FeedHandle* self, std::vector<size_t> leaves, size_t lanes,
             size_t capacity) {
            new (self) FeedHandle{
                std::make_shared<FeedRing>(std::move(leaves), lanes, capacity)};
          },
          nb::arg("leaves"), nb::arg("lanes"), nb::arg("capacity"))
      .def_prop_ro("lanes",
                   [](const FeedHandle& self) { return self.ring->lanes(); })
      .def("reserve",
           [](const FeedHandle& self) {
             GilRelease unlocked;
             return self.ring->Reserve();
           })
      .def("push", &Push, nb::arg("arrays"))
      .def("idle",
           [](const FeedHandle& self) {
             GilRelease unlocked;
             self.ring->Idle();
           })
      .def(
          "finish",
          [](const FeedHandle& self, FeedRing::Ending ending) {
            GilRelease unlocked;
            self.ring->Finish(ending);
          },
          nb::arg("ending"))
      .def("clear",
           [](const FeedHandle& self) {
             GilRelease unlocked;
             self.ring->Clear();
           })
      .def(
          "drop",
          [](const FeedHandle& self, int64_t n) {
            GilRelease unlocked;
            return self.ring->Drop(n);
          },
          nb::arg("n"))
      .def("wake",
           [](const FeedHandle& self) {
             GilRelease unlocked;
             self.ring->Wake();
           })
      .def("close",
           [](const FeedHandle& self) {
             GilRelease unlocked;
             self.ring->Close();
           })
      .def(
          "wait",
          [](const FeedHandle& self, size_t lane, double seconds) {
            GilRelease unlocked;
            return self.ring->Await(lane, static_cast<int64_t>(seconds * 1e9));
          },
          nb::arg("lane"), nb::arg("seconds"))
      .def("counts", &CountsOf);
  BindStruct(m, Keywords<FeedSpec>("FeedSettings")
                    .Field<&FeedSpec::ring>("ring")
                    .Field<&FeedSpec::devices>("devices"));
}

}  // namespace hostcall

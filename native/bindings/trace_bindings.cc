#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fatal_signals.h"
#include "base/flight.h"
#include "base/flight_text.h"
#include "base/places.h"
#include "base/signals.h"
#include "base/trace_json.h"
#include "bindings/bindings.h"

namespace nb = nanobind;

namespace hostcall {
namespace {

nb::bytes AsBytes(const std::string& text) {
  return nb::bytes(text.data(), text.size());
}

/// The recorded events as an array of structs.
nb::bytes ReadFlight() {
  std::string raw(FlightRing::kSize * sizeof(Event), '\0');
  const size_t n = FlightRing::Get().Read(reinterpret_cast<Event*>(raw.data()));
  raw.resize(n * sizeof(Event));
  return AsBytes(raw);
}

/// How many events are taken at once. Making a Python object of them copies them
/// under the GIL, so it is not more than takes some 50 us.
constexpr size_t kAtOnce = 4096;

/// Takes up to kAtOnce events. The caller holds a lock, so that nobody else does.
nb::bytes TakeEvents() {
  std::string raw;
  {
    GilRelease unlocked;
    Event event;
    for (size_t i = 0; i < kAtOnce && EventBuffer::Get().Take(&event); ++i) {
      raw.append(reinterpret_cast<const char*>(&event), sizeof(event));
    }
  }
  return AsBytes(raw);
}

/// Formats events that `take_events` returned; with `ending`, also what is still
/// under way. `pending`: taps that are queued now, or -1.
nb::bytes Lines(TraceJson& json, nb::bytes raw, int64_t pending, bool ending) {
  std::string out;
  const char* data = raw.c_str();
  const size_t n = raw.size() / sizeof(Event);
  {
    GilRelease unlocked;  // `raw` keeps the data alive, and bytes never change
    out.reserve(300 * n);
    Event event;
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(&event, data + i * sizeof(Event), sizeof(Event));
      json.Add(event, &out);
    }
    if (ending) {
      std::vector<Event> events(FlightRing::kSize);
      events.resize(FlightRing::Get().Read(events.data()));
      for (const Event& under_way : events) {
        if (under_way.end == 0) json.Add(under_way, &out);
      }
    }
    if (pending >= 0) json.Pending(pending, &out);
  }
  return AsBytes(out);
}

/// Adds an event that Python code saw, which ends now.
void NoteEvent(int kind, uint32_t place, int64_t start, int64_t number,
               int64_t count, uint64_t thread) {
  if (!EventBuffer::IsOn()) return;
  Event event;
  event.kind = static_cast<EventKind>(kind);
  event.state = EventState::kEnded;
  event.place = place;
  event.start = start;
  event.end = Ticks();
  event.number = number;
  event.count = count;
  event.thread = thread == 0 ? ThisThread() : thread;
  EventBuffer::Get().Push(event);
}

}  // namespace

void InitTraces(nb::module_& m) {
  m.def("ticks", &Ticks);
  m.def("tick_ns", &TickNs);
  m.def("name_place", &Places::Name, nb::arg("number"), nb::arg("name"),
        nb::arg("line"), nb::arg("json_name"), nb::arg("json_line"));
  m.def("read_flight", &ReadFlight);
  m.def(
      "flight_text",
      [](const std::string& why) {
        std::vector<Event> events(FlightRing::kSize);
        std::string text;
        const auto add = [&text](const char* line, size_t size) {
          text.append(line, size);
        };
        FlightLines(events.data(), why.c_str(), add);
        return AsBytes(text);  // a cut may split a character
      },
      nb::arg("why"));
  m.def("watch_fatal_signals", &FatalSignals::Watch, nb::arg("on"));
  m.def("tell_at_sigterm", &Signals::TellAtTerminate, nb::arg("on"));
  m.def("switch_events", &EventBuffer::Switch, nb::arg("on"));
  m.def("events_on", &EventBuffer::IsOn);
  m.def("events_dropped", [] { return EventBuffer::Get().dropped(); });
  m.def("take_events", &TakeEvents);
  m.def("note_event", &NoteEvent, nb::arg("kind"), nb::arg("place"),
        nb::arg("start"), nb::arg("number"), nb::arg("count"),
        nb::arg("thread") = 0);
  nb::class_<TraceJson>(m, "TraceJson")
      .def(nb::init<int64_t>(), nb::arg("pending"))
      .def("lines", &Lines, nb::arg("raw"), nb::arg("pending"), nb::arg("ending"))
      .def("ns", &TraceJson::Ns, nb::arg("ticks"));
}

}  // namespace hostcall

#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fatal_signals.h"
#include "base/flight.h"
#include "base/flight_text.h"
#include "base/places.h"
#include "base/signals.h"
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

}  // namespace

void InitFlight(nb::module_& m) {
  m.def("ticks", &Ticks);
  m.def("tick_ns", &TickNs);
  m.def("name_place", &Places::Name, nb::arg("number"), nb::arg("name"),
        nb::arg("line"));
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
  m.def("write_flight_at_sigterm", &Signals::WriteFlightAtTerminate, nb::arg("on"));
}

}  // namespace hostcall

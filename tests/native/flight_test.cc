// The flight recorder, and what it looks like as text.

#undef NDEBUG
#include "base/flight.h"

#include <cassert>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/flight_text.h"
#include "base/places.h"

using namespace hostcall;

namespace {

/// All fields tell the same number, so a mixture of two events shows.
Event Numbered(int64_t number) {
  Event event = {};
  event.place = static_cast<uint32_t>(number);
  event.start = event.entered = event.end = event.bytes = event.run = event.number =
      number;
  event.state = EventState::kEnded;
  return event;
}

bool IsWhole(const Event& e) {
  const int64_t n = e.bytes;
  return e.run == n && e.start == n && e.entered == n && e.place == n &&
         (e.end == 0 || (e.end == n && e.number == n));
}

/// Writers at once with readers: no event is a mixture.
void TestReadersSeeWholeEvents() {
  auto ring = std::make_unique<FlightRing>();
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (int64_t w = 0; w < 4; ++w) {
    writers.emplace_back([&, w] {
      for (int64_t i = 0; i < 20000; ++i) {
        Event event = Numbered(1 + w * 100000 + i);
        event.end = 0;
        FlightRing::Record* record = ring->Begin(event);
        if (record == nullptr) continue;
        event.end = event.bytes;
        record->End(event);
      }
    });
  }
  std::thread reader([&] {
    std::vector<Event> events(FlightRing::kSize);
    while (!stop.load()) {
      const size_t n = ring->Read(events.data());
      for (size_t i = 0; i < n; ++i) assert(IsWhole(events[i]));
    }
  });
  for (auto& writer : writers) writer.join();
  stop.store(true);
  reader.join();
  std::vector<Event> events(FlightRing::kSize);
  assert(ring->Read(events.data()) == FlightRing::kSize);
}

/// The newest events are kept, in their order.
void TestKeepsTheNewest() {
  auto ring = std::make_unique<FlightRing>();
  for (int64_t i = 1; i <= 3000; ++i) {
    ring->Begin(Numbered(i))->End(Numbered(i));
  }
  std::vector<Event> events(FlightRing::kSize);
  assert(ring->Read(events.data()) == FlightRing::kSize);
  for (size_t i = 0; i < FlightRing::kSize; ++i) {
    assert(events[i].bytes == static_cast<int64_t>(3000 - 1023 + i));
  }
}

/// What is under way outlives any number of later events; if everything is under
/// way, an event is lost.
void TestKeepsWhatIsUnderWay() {
  auto ring = std::make_unique<FlightRing>();
  Event hangs = Numbered(7);
  hangs.end = 0;
  FlightRing::Record* record = ring->Begin(hangs);
  for (int64_t i = 10; i < 10000; ++i) ring->Begin(Numbered(i))->End(Numbered(i));
  std::vector<Event> events(FlightRing::kSize);
  const auto hanging = [&] {
    size_t found = 0;
    const size_t n = ring->Read(events.data());
    for (size_t i = 0; i < n; ++i) found += events[i].bytes == 7;
    return found;
  };
  assert(hanging() == 1);
  record->End(Numbered(7));
  for (int64_t i = 10; i < 2000; ++i) ring->Begin(Numbered(i))->End(Numbered(i));
  assert(hanging() == 0);
  for (size_t i = 0; i < FlightRing::kSize; ++i) {
    assert(ring->Begin(Numbered(1)) != nullptr);
  }
  assert(ring->Begin(Numbered(1)) == nullptr);
}

/// A guard writes the ring.
void TestGuard() {
  Event event = Numbered(5);
  event.end = 0;
  {
    Flight flight(event);
  }  // ended by an exception, as it were
  {
    Flight flight(event);
    flight.Number(9);
    flight.Ended(6, true);
  }
  std::vector<Event> events(FlightRing::kSize);
  assert(FlightRing::Get().Read(events.data()) == 2);
  assert(events[0].state == EventState::kFailed && events[0].end == 5);
  assert(events[1].number == 9 && events[1].end == 6);
}

void TestText() {
  Places::Name(5, "lo\"ss\n", "a.py:3 in f");
  Places::Name(5, "another", "");  // a number keeps its first name
  std::vector<Event> events(FlightRing::kSize);
  std::string text;
  FlightLines(events.data(), "a test",
              [&](const char* bytes, size_t n) { text.append(bytes, n); });
  assert(text.find("hostcall flight recorder, a test: 2 events") == 0);
  assert(text.find("lo\"ss , a.py:3 in f\n") != std::string::npos);
  Line line;
  line.Number(-12, 5).Text("|").Seconds(1'234'567'890, 10).Text("|");
  line.EndInto([&](const char* bytes, size_t n) { text.assign(bytes, n); });
  assert(text == "  -12|  1.234567|\n");
  line.Text(std::string(2000, 'x').c_str());
  line.EndInto([&](const char* bytes, size_t n) { text.assign(bytes, n); });
  assert(text.size() == 501 && text.back() == '\n');
}

}  // namespace

int main() {
  TestReadersSeeWholeEvents();
  TestKeepsTheNewest();
  TestKeepsWhatIsUnderWay();
  TestGuard();
  TestText();
  std::puts("flight: ok");
}

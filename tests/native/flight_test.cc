// The flight recorder, the buffer of events, and what both look like as text.

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
#include "base/trace_json.h"

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

/// Events of several pushers arrive whole, each pusher's in order; what does not
/// fit is counted.
void TestBuffer() {
  EventBuffer buffer(1 << 8);
  constexpr int64_t kEach = 20000;
  std::vector<std::thread> pushers;
  for (int64_t p = 0; p < 3; ++p) {
    pushers.emplace_back([&, p] {
      for (int64_t i = 1; i <= kEach; ++i) buffer.Push(Numbered(p * 100000 + i));
    });
  }
  int64_t taken = 0, last[3] = {};
  const auto take = [&] {
    Event event;
    while (buffer.Take(&event)) {
      assert(IsWhole(event) && event.end != 0);
      int64_t& before = last[event.bytes / 100000];
      assert(event.bytes % 100000 > before);
      before = event.bytes % 100000;
      ++taken;
    }
  };
  while (taken + buffer.dropped() < 3 * kEach) take();
  for (auto& pusher : pushers) pusher.join();
  take();
  assert(taken + buffer.dropped() == 3 * kEach);
  // A full buffer keeps the oldest.
  for (int64_t i = 1; i <= 300; ++i) buffer.Push(Numbered(i));
  Event event;
  assert(buffer.Take(&event) && event.bytes == 1);
}

/// A guard writes the ring, and the buffer only while somebody traces.
void TestGuard() {
  Event event = Numbered(5);
  event.end = 0;
  {
    Flight flight(event);
  }  // ended by an exception, as it were
  EventBuffer::Switch(true);
  {
    Flight flight(event);
    flight.Number(9);
    flight.Ended(6, true);
  }
  EventBuffer::Switch(false);
  {
    Flight flight(event);
  }
  Event taken;
  assert(EventBuffer::Get().Take(&taken));
  assert(taken.number == 9 && taken.end == 6 && taken.thread == ThisThread());
  assert(!EventBuffer::Get().Take(&taken));
  std::vector<Event> events(FlightRing::kSize);
  assert(FlightRing::Get().Read(events.data()) == 3);
  assert(events[0].state == EventState::kFailed && events[0].end == 5);
}

void TestText() {
  Places::Name(5, "lo\"ss\n", "a.py:3 in f", "\"lo\\\"ss\\u000a\"", "\"\"");
  Places::Name(5, "another", "", "", "");  // a number keeps its first name
  std::vector<Event> events(FlightRing::kSize);
  std::string text;
  FlightLines(events.data(), "a test",
              [&](const char* bytes, size_t n) { text.append(bytes, n); });
  assert(text.find("hostcall flight recorder, a test: 3 events") == 0);
  assert(text.find("lo\"ss , a.py:3 in f\n") != std::string::npos);
  Event event = Numbered(5);
  event.end = 2000;
  event.count = 1;
  TraceJson json(0);
  ClockPair from;
  from.ns = from.ticks = 0;
  json.SetClock(from, 1.0);
  std::string out;
  json.Add(event, &out);
  assert(out.find("\"name\":\"lo\\\"ss\\u000a\"") != std::string::npos);
  assert(out.find("\"ts\":0.005,\"dur\":1.995") != std::string::npos);
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
  TestBuffer();
  TestGuard();
  TestText();
  std::puts("flight: ok");
}

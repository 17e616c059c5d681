// Writes the flight recorder as text, also from a handler of a fatal signal.
//
// Does not depend on Python (tests/native/flight_test.cc).
//
// Only what POSIX calls async-signal-safe happens here: no allocation, no lock, no
// stdio, and one write(2) for each line, so that lines of two writers do not mix.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/clock.h"
#include "base/flight.h"
#include "base/places.h"

namespace hostcall {

/// A line of text of bounded length. What does not fit is left out.
class Line {
 public:
  Line& Text(const char* text, size_t width = 0) {
    const size_t before = size_;
    for (; *text != '\0' && size_ < kMost; ++text) {
      // A newline in a tag would break the table.
      bytes_[size_++] = static_cast<unsigned char>(*text) < 0x20 ? ' ' : *text;
    }
    return Pad(before + width);
  }
  /// A number, right-aligned.
  Line& Number(int64_t number, size_t width = 0) {
    char digits[24] = {};  // to_chars leaves a zero behind them
    const char* end = std::to_chars(digits, digits + sizeof digits, number).ptr;
    const auto n = static_cast<size_t>(end - digits);
    if (width > n) Pad(size_ + width - n);
    return Text(digits);
  }
  /// Seconds with six decimals, right-aligned.
  Line& Seconds(int64_t ns, size_t width) {
    const int64_t us = ns < 0 ? 0 : ns / 1000;
    Number(us / 1'000'000, width < 7 ? 0 : width - 7).Text(".");
    for (int64_t unit = 100'000; unit != 0; unit /= 10) Number(us / unit % 10);
    return *this;
  }
  Line& Pad(size_t until) {
    while (size_ < until && size_ < kMost) bytes_[size_++] = ' ';
    return *this;
  }
  /// Hands the line to `sink(bytes, size)`, and begins a new one.
  template <typename Sink>
  void EndInto(const Sink& sink) {
    bytes_[size_++] = '\n';
    sink(bytes_, size_);
    size_ = 0;
  }

 private:
  static constexpr size_t kMost = 500;
  char bytes_[kMost + 1];
  size_t size_ = 0;
};

/// The names of EventKind and EventState.
inline const char* NameOf(EventKind kind) {
  static constexpr const char* kNames[] = {"call", "tap", "delivery", "team",
                                           "feed"};
  return kNames[static_cast<size_t>(kind) % 5];
}
inline const char* NameOf(EventState state) {
  static constexpr const char* kNames[] = {"waiting", "running", "ended", "failed"};
  return kNames[static_cast<size_t>(state) % 4];
}

/// Hands the newest `most` events, and all that are under way, to `sink` line by
/// line, oldest first. `why` is in the first line. `events` has room for kSize of
/// them, which is too much for a signal's stack.
template <typename Sink>
void FlightLines(Event* events, const char* why, const Sink& sink,
                 size_t most = 40) {
  const int64_t now = Ticks();
  const size_t n = FlightRing::Get().Read(events);
  for (size_t i = 0; i < n; ++i) {  // an insertion sort: it is nearly sorted
    for (size_t at = i; at > 0 && events[at - 1].start > events[at].start; --at) {
      std::swap(events[at - 1], events[at]);
    }
  }
  Line line;
  line.Text("hostcall flight recorder, ").Text(why).Text(": ");
  line.Number(static_cast<int64_t>(n))
      .Text(" events, the newest last")
      .EndInto(sink);
  if (n != 0) {
    line.Text("  seconds ago     for seconds  state    what      device  ");
    line.Text("run         bytes       function, place").EndInto(sink);
  }
  const double tick_ns = TickNs();
  const auto ns = [tick_ns](int64_t ticks) {
    return static_cast<int64_t>(static_cast<double>(ticks) * tick_ns);
  };
  for (size_t i = 0; i < n; ++i) {
    const Event& event = events[i];
    const bool under_way = event.end == 0;
    if (i + most < n && !under_way) continue;
    const int64_t end = under_way ? now : event.end;
    line.Seconds(ns(now - event.start), 13).Text("  ");
    line.Seconds(ns(end - event.start), 14).Text("  ");
    line.Text(NameOf(event.state), 9).Text(NameOf(event.kind), 10);
    if (event.device < 0) {
      line.Text("-", 8);
    } else {
      line.Number(event.device).Text(" ", 8 - (event.device > 9 ? 2 : 1));
    }
    line.Number(event.run, 8).Text("  ").Number(event.bytes, 9).Text("  ");
    const Place* place = Places::Find(event.place);
    if (place == nullptr) {
      line.Text("(place ").Number(event.place).Text(", whose name is not kept)");
    } else {
      line.Text(place->name.c_str()).Text(", ").Text(place->line.c_str());
    }
    line.EndInto(sink);
  }
}

/// Writes them to a file, from a signal handler. If two threads come at the same
/// time, the second returns at once.
inline void WriteFlight(int file, const char* why) {
  // Bytes: an array of events, whose members have values, would lie in the module's
  // file.
  alignas(Event) static char room[FlightRing::kSize * sizeof(Event)];
  auto* events = reinterpret_cast<Event*>(room);
  // A lock: acquire and release, so that the next writer has the room to itself.
  static std::atomic<bool> writing{false};
  if (writing.exchange(true, std::memory_order_acquire)) return;
  // If nobody reads a pipe or a terminal, a write could wait for ever, and what the
  // signal should do would not happen. A pipe that polls writable takes a line.
  constexpr int kPatienceMs = 100;
  bool stalled = false;
  FlightLines(events, why, [file, &stalled](const char* bytes, size_t size) {
    while (size != 0 && !stalled) {
      pollfd ready{file, POLLOUT, 0};
      const int polled = poll(&ready, 1, kPatienceMs);
      if (polled < 0 && errno == EINTR) continue;
      const ssize_t wrote = polled > 0 ? write(file, bytes, size) : -1;
      if (polled > 0 && wrote < 0 && errno == EINTR) continue;
      stalled = wrote <= 0;
      if (stalled) return;
      bytes += wrote;
      size -= static_cast<size_t>(wrote);
    }
  });
  writing.store(false, std::memory_order_release);
}

}  // namespace hostcall

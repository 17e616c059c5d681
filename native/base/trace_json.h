// Events as lines of JSON in Chrome's trace format, which Perfetto reads.
//
// Does not depend on Python (tests/native/flight_test.cc). Formatting here, without
// the GIL, is what lets a program be traced while its callbacks run: the same work
// in Python would take the GIL from them for milliseconds at a time.
//
// What is where in a viewer
//   process 1        hostcall: the worker that delivers taps with the counter of
//                    queued taps, and waits in hc.barrier
//   process 2        workers of parallel rows
//   process 99       calls and taps outside of programs
//   process 100 + n  device n, with a row for each of XLA's threads that worked for
//                    it. Slices of one row must not overlap, and programs of one
//                    device do.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "base/clock.h"
#include "base/event.h"
#include "base/flight_text.h"
#include "base/places.h"

namespace hostcall {

/// Not safe to use from several threads at once.
class TraceJson {
 public:
  /// `pending`: taps that are queued now.
  explicit TraceJson(int64_t pending) : depth_(pending) {}

  /// Nanoseconds of the monotonic clock for a moment in ticks. One straight line
  /// for all events, or slices that follow each other would overlap by nanoseconds.
  int64_t Ns(int64_t ticks) const {
    return from_.ns + static_cast<int64_t>(
                          static_cast<double>(ticks - from_.ticks) * tick_ns_);
  }
  /// For tests: nanoseconds are ticks.
  void SetClock(const ClockPair& from, double tick_ns) {
    from_ = from;
    tick_ns_ = tick_ns;
  }

  /// Appends the lines of an event, each ending in ",\n".
  void Add(const Event& event, std::string* out) {
    const int64_t start = Ns(event.start);
    const bool under_way = event.end == 0;
    const Track track = TrackOf(event, out);
    const Place* place = Places::Find(event.place);
    *out += under_way ? R"({"ph":"B")" : R"({"ph":"X")";
    Where(track, start, out);
    if (!under_way) Micros(",\"dur\":", Ns(event.end) - start, out);
    *out += ",\"cat\":\"";
    *out += NameOf(event.kind);
    *out += "\",\"name\":";
    if (event.kind == EventKind::kWait) {
      *out += "\"hc.barrier\"},\n";
      return;
    }
    *out += place == nullptr ? "\"?\"" : place->json_name;
    *out += ",\"args\":{\"place\":";
    *out += place == nullptr ? "\"?\"" : place->json_line;
    if (event.kind != EventKind::kRow) Member(",\"bytes\":", event.bytes, out);
    if (event.run != -1) Member(",\"run\":", event.run, out);
    if (event.count != 1) {
      Member(event.kind == EventKind::kDelivery ? ",\"taps\":" : ",\"rows\":",
             event.count, out);
    }
    if (event.state == EventState::kFailed) {
      *out += event.kind == EventKind::kTap ? ",\"state\":\"dropped\""
                                            : ",\"state\":\"failed\"";
    }
    *out += "}},\n";
    if (event.entered - event.start > 0 && Ns(event.entered) - start >= 1000) {
      *out += R"({"ph":"X")";
      Where(track, start, out);
      Micros(",\"dur\":", Ns(event.entered) - start, out);
      *out += ",\"cat\":\"wait\",\"name\":\"wait for the GIL\"},\n";
    }
    if (!under_way) Queue(event, track, out);
  }

  /// Sets the number of queued taps, which dropped ones and taps from before the
  /// trace would make wrong otherwise.
  void Pending(int64_t pending, std::string* out) {
    if (pending == depth_) return;
    depth_ = pending;
    Depth(Ns(Ticks()), out);
  }

 private:
  struct Track {
    int64_t process, thread;
  };
  static constexpr int64_t kHostcall = 1, kWorkers = 2, kOutside = 99,
                           kDevices = 100;

  /// Appends microseconds with three decimals. `key` comes first.
  static void Micros(const char* key, int64_t ns, std::string* out) {
    if (ns < 0) ns = 0;
    char text[32];
    char* end = std::to_chars(text, text + sizeof(text), ns / 1000).ptr;
    *end++ = '.';
    for (int64_t unit = 100; unit != 0; unit /= 10) {
      *end++ = static_cast<char>('0' + ns / unit % 10);
    }
    out->append(key).append(text, static_cast<size_t>(end - text));
  }
  /// Appends a member of an object. `key` has its quotes, comma and colon.
  static void Member(const char* key, int64_t value, std::string* out) {
    char text[24];
    char* end = std::to_chars(text, text + sizeof(text), value).ptr;
    out->append(key).append(text, static_cast<size_t>(end - text));
  }
  static void Where(const Track& track, int64_t ns, std::string* out) {
    Member(",\"pid\":", track.process, out);
    Member(",\"tid\":", track.thread, out);
    Micros(",\"ts\":", ns, out);
  }

  /// The row of an event. Names it when it is first seen.
  Track TrackOf(const Event& event, std::string* out) {
    Track track{kHostcall, 1};
    if (event.kind == EventKind::kRow) {
      track.process = kWorkers;
    } else if (event.kind != EventKind::kDelivery &&
               event.kind != EventKind::kWait) {
      track.process = event.device < 0 ? kOutside : kDevices + event.device;
    }
    if (event.kind != EventKind::kDelivery) {
      track.thread = static_cast<int64_t>(
          threads_.emplace(event.thread, 2 + threads_.size()).first->second);
    }
    if (!named_.insert(track.process << 32 | track.thread).second) return track;
    const std::string process = track.process == kHostcall  ? "hostcall"
                                : track.process == kWorkers ? "parallel workers"
                                : track.process == kOutside
                                    ? "outside of programs"
                                    : "device " + std::to_string(event.device);
    if (named_.insert(track.process << 32).second) {
      Name("process_name", {track.process, 0}, process, out);
    }
    Name("thread_name", track,
         track.thread == 1 ? "taps" : "thread " + std::to_string(track.thread),
         out);
    return track;
  }
  static void Name(const char* what, const Track& track, const std::string& name,
                   std::string* out) {
    *out += "{\"ph\":\"M\",\"name\":\"";
    *out += what;
    *out += "\"";
    Member(",\"pid\":", track.process, out);
    Member(",\"tid\":", track.thread, out);
    *out += ",\"args\":{\"name\":\"" + name + "\"}},\n";
  }

  /// The arrow from a tap to its delivery, and the counter of queued taps.
  void Queue(const Event& event, const Track& track, std::string* out) {
    const bool is_tap = event.kind == EventKind::kTap;
    if (is_tap ? event.number < 0 : event.kind != EventKind::kDelivery) return;
    *out += is_tap ? R"({"ph":"s")" : R"({"ph":"f","bp":"e")";
    Where(track, Ns(event.start), out);
    Member(",\"id\":", event.number, out);
    *out += ",\"cat\":\"taps\",\"name\":\"tap\"},\n";
    depth_ += is_tap ? 1 : -event.count;
    if (depth_ < 0) depth_ = 0;  // taps from before the trace
    const int64_t ns = Ns(event.end);
    // A point each 50 us at most: nobody sees more, and the file stays smaller.
    if (ns - counted_ >= 50'000) Depth(ns, out);
  }
  void Depth(int64_t ns, std::string* out) {
    counted_ = ns;
    *out += R"({"ph":"C","pid":1,"tid":1)";
    Micros(",\"ts\":", ns, out);
    Member(",\"name\":\"queued taps\",\"args\":{\"taps\":", depth_, out);
    *out += "}},\n";
  }

  ClockPair from_;  ///< when this was made
  /// Measured over the life of the process so far, which is longer than TickNs did.
  double tick_ns_ = from_.ticks > g_loaded.ticks
                        ? static_cast<double>(from_.ns - g_loaded.ns) /
                              static_cast<double>(from_.ticks - g_loaded.ticks)
                        : 0.0;
  int64_t depth_;        ///< taps that are queued
  int64_t counted_ = 0;  ///< the time of the last point of the counter
  std::unordered_map<uint64_t, size_t>
      threads_;                        ///< threads by their small numbers
  std::unordered_set<int64_t> named_;  ///< processes and rows with a name
};

}  // namespace hostcall

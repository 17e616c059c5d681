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
#include <string_view>
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
    Put(out, under_way ? R"({"ph":"B")" : R"({"ph":"X")", At{track, start});
    if (!under_way) Put(out, ",\"dur\":", Us{Ns(event.end) - start});
    Put(out, ",\"cat\":\"", NameOf(event.kind), "\",\"name\":");
    if (event.kind == EventKind::kWait) return Put(out, "\"hc.barrier\"},\n");
    static const std::string unknown = "\"?\"";
    Put(out, place == nullptr ? unknown : place->json_name,
        ",\"args\":{\"place\":", place == nullptr ? unknown : place->json_line);
    if (event.kind != EventKind::kRow) Put(out, ",\"bytes\":", event.bytes);
    if (event.run != -1) Put(out, ",\"run\":", event.run);
    const bool taps = event.kind == EventKind::kDelivery;
    if (event.count != 1) {
      Put(out, taps ? ",\"taps\":" : ",\"rows\":", event.count);
    }
    if (event.state == EventState::kFailed) {
      const bool dropped = event.kind == EventKind::kTap;
      Put(out, ",\"state\":", dropped ? "\"dropped\"" : "\"failed\"");
    }
    Put(out, "}},\n");
    if (event.entered - event.start > 0 && Ns(event.entered) - start >= 1000) {
      Put(out, R"({"ph":"X")", At{track, start},
          ",\"dur\":", Us{Ns(event.entered) - start},
          ",\"cat\":\"wait\",\"name\":\"wait for the GIL\"},\n");
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

  /// Appends the parts: texts, numbers, and those below.
  template <typename... Parts>
  static void Put(std::string* out, const Parts&... parts) {
    (Append(out, parts), ...);
  }
  static void Append(std::string* out, std::string_view text) { out->append(text); }
  static void Append(std::string* out, int64_t value) {
    char text[24];
    out->append(text, std::to_chars(text, text + sizeof(text), value).ptr);
  }
  /// Microseconds with three decimals.
  struct Us {
    int64_t ns;
  };
  static void Append(std::string* out, Us time) {
    const int64_t ns = time.ns < 0 ? 0 : time.ns;
    Put(out, ns / 1000, ".", ns / 100 % 10, ns / 10 % 10, ns % 10);
  }
  /// A moment on a row.
  struct At {
    Track track;
    int64_t ns;
  };
  static void Append(std::string* out, const At& at) {
    Put(out, ",\"pid\":", at.track.process, ",\"tid\":", at.track.thread,
        ",\"ts\":", Us{at.ns});
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
    Put(out, R"({"ph":"M","name":")", what, "\",\"pid\":", track.process,
        ",\"tid\":", track.thread, R"(,"args":{"name":")", name, "\"}},\n");
  }

  /// The arrow from a tap to its delivery, and the counter of queued taps.
  void Queue(const Event& event, const Track& track, std::string* out) {
    const bool is_tap = event.kind == EventKind::kTap;
    if (is_tap ? event.number < 0 : event.kind != EventKind::kDelivery) return;
    Put(out, is_tap ? R"({"ph":"s")" : R"({"ph":"f","bp":"e")",
        At{track, Ns(event.start)}, ",\"id\":", event.number,
        ",\"cat\":\"taps\",\"name\":\"tap\"},\n");
    depth_ += is_tap ? 1 : -event.count;
    if (depth_ < 0) depth_ = 0;  // taps from before the trace
    const int64_t ns = Ns(event.end);
    // A point each 50 us at most: nobody sees more, and the file stays smaller.
    if (ns - counted_ >= 50'000) Depth(ns, out);
  }
  void Depth(int64_t ns, std::string* out) {
    counted_ = ns;
    Put(out, R"({"ph":"C")", At{{kHostcall, 1}, ns},
        ",\"name\":\"queued taps\",\"args\":{\"taps\":", depth_, "}},\n");
  }

  ClockPair from_;  ///< when this was made
  /// Measured over the life of the process so far, which is longer than TickNs did.
  double tick_ns_ = from_.ticks > g_loaded.ticks
                        ? static_cast<double>(from_.ns - g_loaded.ns) /
                              static_cast<double>(from_.ticks - g_loaded.ticks)
                        : 0.0;
  int64_t depth_;        ///< taps that are queued
  int64_t counted_ = 0;  ///< the time of the last point of the counter
  /// Threads by their small numbers.
  std::unordered_map<uint64_t, size_t> threads_;
  std::unordered_set<int64_t> named_;  ///< processes and rows with a name
};

}  // namespace hostcall

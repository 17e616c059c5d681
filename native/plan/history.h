// The last executions of a masked call: how many there were in a run, and their
// arguments (`keep=`).
//
// Does not depend on Python (tests/native/history_test.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/layout.h"
#include "plan/run_counts.h"

namespace hostcall {

/// The arguments of one execution, as XLA laid them out.
struct Kept {
  int device = -1;
  int64_t run = -1;  ///< XLA's number of the run
  int64_t step = 0;  ///< executions of the place in this run before this one
  std::vector<char> bytes;
  bool given = false;  ///< a reader may have it; guarded by the lock of its place
};

/// What a call that is made learns of the executions before it.
struct Before {
  int64_t step = 0;  ///< executions of the place in this run before this one
  /// The last executions, the oldest first. Nobody changes them any more.
  std::vector<std::shared_ptr<const Kept>> kept;
};

/// The history of one place of a program, separate for each device. Safe to use
/// from several threads. A call without the GIL: it may copy large arrays.
///
/// XLA does not say when a run ends, so arguments stay until later ones replace
/// them: `keep` copies for each device.
class History {
 public:
  /// `sizes` are the bytes of each argument. `places` is a number of devices; more
  /// devices than that share places, and then each finds fewer of its executions.
  History(size_t keep, std::vector<size_t> sizes, size_t places = 64)
      : keep_(keep), sizes_(std::move(sizes)), layout_(sizes_), places_(places) {}

  /// Where each argument begins in Kept::bytes.
  const std::vector<size_t>& offsets() const { return layout_.offsets; }

  /// Notes an execution with these arguments. If `before` is not null, first tells
  /// it what was before: executions of the same run, or if this is the first of its
  /// run, those of earlier runs.
  void Pass(int device, int64_t run, const void* const* args, Before* before) {
    Place& place = places_[static_cast<unsigned>(device + 1) % places_.size()];
    std::lock_guard<std::mutex> lock(place.mutex);
    const int64_t step = place.runs.Count(run);
    if (before != nullptr) {
      before->step = step;
      for (size_t i = 0; i < place.ring.size(); ++i) {
        const auto& kept = place.ring[(place.next + i) % place.ring.size()];
        const bool wanted = step == 0 || kept->run == run;
        if (!wanted || kept->device != device) continue;
        kept->given = true;
        before->kept.push_back(kept);
      }
    }
    if (keep_ == 0) return;
    const bool full = place.ring.size() == keep_;
    // A reader may still hold the oldest, and it must not change under the reader.
    auto kept = full && !place.ring[place.next]->given ? place.ring[place.next]
                                                       : std::make_shared<Kept>();
    // If memory is short, this throws before the ring has changed.
    kept->bytes.resize(layout_.bytes);
    kept->device = device;
    kept->run = run;
    kept->step = step;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if (sizes_[i] == 0) continue;
      std::memcpy(kept->bytes.data() + layout_.offsets[i], args[i], sizes_[i]);
    }
    if (full) {
      place.ring[place.next] = std::move(kept);
      place.next = (place.next + 1) % keep_;
    } else {  // `next` stays 0 until the ring is full, so the oldest is first
      place.ring.push_back(std::move(kept));
    }
  }

 private:
  struct alignas(64) Place {
    // Guards all fields, for as long as the arguments are copied. Its parties are
    // threads that run the same program on the same device, mostly one at a time.
    std::mutex mutex;
    RunCounts runs;
    std::vector<std::shared_ptr<Kept>> ring;
    size_t next = 0;  ///< the oldest in a full ring, which is replaced next
  };

  const size_t keep_;
  const std::vector<size_t> sizes_;
  const Layout layout_;
  std::vector<Place> places_;
};

}  // namespace hostcall

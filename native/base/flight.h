// The flight recorder: the newest 1,024 calls and taps, always on.
//
// Does not depend on Python (tests/native/flight_test.cc). Reading takes no lock
// and allocates nothing, so a handler of a fatal signal may do it.
//
// Guarantees
//   * A writer never waits, neither for readers nor for other writers.
//   * A record that is under way is not overwritten: a call that hangs is still
//     there after a million others. If a writer finds kTries such records in a row,
//     its own event is not recorded.
//   * A reader never sees a mixture of two events.
//
// The word `lock` of each record says who may touch it: its ticket and three flags.
//
//   1. writer: takes the next ticket, which names a record (relaxed: tickets only
//      have to differ, and a reader only begins there)
//   2. writer: a compare-and-swap sets `owned` and `busy` if neither was set.
//      Acquire: what the previous owner wrote comes before. The record is this
//      writer's alone until it clears `owned`.
//   3. writer: writes the fields, then clears `busy`; the event is under way
//   4. writer: when a call gets the GIL, sets `busy`, writes, and clears it; the
//      word then has `entered`, so that it differs from the one before. `busy` is
//      set relaxed: the fields' own stores release it
//   5. writer: at the end sets `busy`, writes the last fields, clears all but the
//      ticket
//
// A reader reads the word, the fields, and the word again; if it was busy or has
// changed, the reader tries again, and leaves the record out in the end. Why it
// can't miss a change: fields are stored with release and loaded with acquire. If a
// reader sees one new field, it also sees the word that was stored before it, with
// `busy`, when it reads the word again. (Fences would do the same, but
// ThreadSanitizer does not know them.) All fields are atomic, so a torn record is
// no data race, only one that the reader throws away.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/event.h"
#include "base/no_copy.h"

namespace hostcall {

class FlightRing {
 public:
  static constexpr size_t kSize = 1024;

  /// One event on one cache line.
  class alignas(64) Record {
   public:
    /// Step 2 and 3. False: somebody else owns the record.
    bool Begin(uint64_t ticket, const Event& event) {
      uint64_t before = lock_.load(std::memory_order_relaxed);
      if ((before & (kBusy | kOwned)) != 0) return false;
      const uint64_t word = ticket << kShift;
      if (!lock_.compare_exchange_strong(before, word | kBusy | kOwned,
                                         std::memory_order_acquire,
                                         std::memory_order_relaxed)) {
        return false;
      }
      Put<0, 1, 2, 3, 4, 5, 6>(event);
      lock_.store(word | kOwned, std::memory_order_release);
      return true;
    }
    /// Step 4: changes a record that the caller owns. At most once for an event, or
    /// the word could be the same as a reader has seen before.
    void Enter(const Event& event) {
      const uint64_t word = lock_.load(std::memory_order_relaxed) | kEntered;
      lock_.store(word | kBusy, std::memory_order_relaxed);
      Put<0, 2>(event);
      lock_.store(word, std::memory_order_release);
    }
    /// Step 5.
    void End(const Event& event) {
      const uint64_t word = lock_.load(std::memory_order_relaxed);
      lock_.store(word | kBusy, std::memory_order_relaxed);
      Put<0, 3, 6>(event);
      lock_.store(word >> kShift << kShift, std::memory_order_release);
    }
    /// Copies the event. False: there is none, or it changes all the time.
    bool Read(Event* event, uint64_t* ticket) const {
      for (int tries = 0; tries < 64; ++tries) {
        const uint64_t before = lock_.load(std::memory_order_acquire);
        if (before == 0) return false;
        if ((before & kBusy) != 0) continue;
        uint64_t words[kWords];
        for (size_t i = 0; i < kWords; ++i) {
          words[i] = words_[i].load(std::memory_order_acquire);
        }
        if (lock_.load(std::memory_order_relaxed) != before) continue;
        *event = {};
        std::memcpy(static_cast<void*>(event), words, sizeof words);
        Unpack(words[0], event);
        *ticket = before >> kShift;
        return true;
      }
      return false;
    }

   private:
    static constexpr uint64_t kBusy = 1;     ///< fields are being written
    static constexpr uint64_t kOwned = 2;    ///< the event is under way
    static constexpr uint64_t kEntered = 4;  ///< Enter has changed it
    static constexpr int kShift = 3;
    static constexpr size_t kWords = 7;
    static_assert(sizeof(Event) == kWords * sizeof(uint64_t));
    /// Writes these words of the event.
    template <size_t... kWord>
    void Put(const Event& event) {
      (words_[kWord].store(WordOf(event, kWord), std::memory_order_release), ...);
    }
    static uint64_t WordOf(const Event& event, size_t i) {
      if (i == 0) return Pack(event);
      uint64_t word;
      std::memcpy(&word, reinterpret_cast<const char*>(&event) + 8 * i,
                  sizeof word);
      return word;
    }
    /// The fields of the first word, in an order of their own: in that of memory,
    /// one load of the whole word would wait for the stores of its parts.
    static uint64_t Pack(const Event& event) {
      return uint64_t{event.place} << 32 |
             uint64_t{static_cast<uint16_t>(event.device)} << 16 |
             uint64_t{static_cast<uint8_t>(event.kind)} << 8 |
             uint64_t{static_cast<uint8_t>(event.state)};
    }
    static void Unpack(uint64_t word, Event* event) {
      event->place = static_cast<uint32_t>(word >> 32);
      event->device = static_cast<int16_t>(word >> 16);
      event->kind = static_cast<EventKind>(word >> 8 & 0xff);
      event->state = static_cast<EventState>(word & 0xff);
    }
    std::atomic<uint64_t> lock_{0};  ///< 0: never used
    std::atomic<uint64_t> words_[kWords] = {};
  };
  static_assert(sizeof(Record) == 64, "one cache line");

  /// The ring of the process. It is constant-initialised and never destroyed:
  /// threads of XLA may use it during static destruction.
  static FlightRing& Get() { return g_ring; }

  /// Takes a record for an event that begins. Null: none was free.
  Record* Begin(const Event& event) {
    for (int i = 0; i < kTries; ++i) {
      // Begins at 1, so that no record's word is 0 again.
      const uint64_t ticket = next_.fetch_add(1, std::memory_order_relaxed) + 1;
      Record& record = records_[ticket % kSize];
      if (record.Begin(ticket, event)) return &record;
    }
    return nullptr;
  }

  /// Copies the events, oldest ticket first, into `out`, which has room for kSize;
  /// returns their number. Async-signal-safe.
  size_t Read(Event* out) const {
    size_t count = 0;
    const uint64_t next = next_.load(std::memory_order_relaxed) + 1;
    uint64_t ticket;
    // An event that is older than a round of the ring, since it is still under way,
    // is out of order here. Readers sort by the start if they need to.
    for (size_t i = 0; i < kSize; ++i) {
      if (records_[(next + i) % kSize].Read(&out[count], &ticket)) ++count;
    }
    return count;
  }

 private:
  static constexpr int kTries = 16;
  static FlightRing g_ring;
  alignas(64) std::atomic<uint64_t> next_{0};
  Record records_[kSize];
};
inline FlightRing FlightRing::g_ring;

/// Records one event for the guard's life. Costs two locked instructions, and no
/// reading of the clock: the caller has the times.
class Flight : NoCopy {
 public:
  /// `event` has all fields but the times after its start.
  explicit Flight(const Event& event)
      : event_(event), record_(FlightRing::Get().Begin(event)) {}
  /// Without Ended, an exception has ended the event.
  ~Flight() {
    if (event_.end == 0) Ended(event_.start, false);
  }

  /// The call holds the GIL since `ticks`.
  void Entered(int64_t ticks) {
    event_.entered = ticks;
    event_.state = EventState::kRunning;
    if (record_ != nullptr) record_->Enter(event_);
  }
  /// Ends the event.
  void Ended(int64_t ticks, bool ok) {
    event_.end = ticks;
    event_.state = ok ? EventState::kEnded : EventState::kFailed;
    if (record_ != nullptr) record_->End(event_);
  }
  /// The position in the queue, once it is known.
  void Number(int64_t number) { event_.number = number; }

 private:
  Event event_;
  FlightRing::Record* record_;  ///< null: the ring had none
};

}  // namespace hostcall

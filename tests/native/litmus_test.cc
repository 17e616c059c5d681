// The orders of memory that native/ argues with, in the model of memory_model.h.
//
// Each program is the smallest that has the race, and runs the engine's own code.
// The number behind its name says how many of its promises of order it needs; the
// log (build/native/litmus_test.plain.log) lists them, and what goes wrong without
// each.

#include "base/semaphore.h"
#include "memory_model.h"

namespace hostcall {
using model::ModelSemaphore;
}
#define Semaphore ModelSemaphore
/// Slabs of one way; the next one has them again.
namespace std {
inline char g_slabs[2][(1 << 18) + 64] __attribute__((aligned(64)));
inline int g_slab = 0;
inline void* model_slab(size_t, size_t) { return g_slabs[g_slab++]; }
}  // namespace std
#define aligned_alloc model_slab

#include "base/engine.h"
#include "base/flight.h"
#include "base/places.h"
#include "base/signals.h"
#include "base/slot_table.h"
#include "queue/tap_queue.h"

using namespace hostcall;
using model::Check;
using model::Program;

namespace {

// --- base/engine.h

/// WaitIdle returns true only when no call is in Python, or will be.
struct IdleMeansNoCall : Program {
  Engine engine;
  int python = 1;
  void Thread(int number) override {
    if (number == 0) {
      engine.Close();
      if (engine.WaitIdle(-1)) python = 0;
    } else if (engine.Enter()) {
      Check(python == 1, "a call is made after the engine was idle");
      engine.Leave();
    }
  }
};

/// Who finds that threads are left behind knows the one that is exempt.
struct TheEnderIsKnown : Program {
  Engine engine;
  void Thread(int number) override {
    if (number == 0) {
      engine.LeaveBehind();
    } else {
      Check(!engine.IsLeftBehind(), "all fibers are on the ender's thread");
    }
  }
};

// --- base/slot_table.h

struct Dead : RefCounted {
  explicit Dead(bool* its_end) : ended(its_end) {}
  ~Dead() override {
    Check(content == 7, "what was done to the object is not seen");
    content = 0;
    if (ended != nullptr) *ended = true;
  }
  int content = 7;
  bool* const ended;
};

int g_asks = 0;
ModelSemaphore* g_asked = nullptr;

/// A push either reaches a burier that is under way, or asks for another.
struct NoPushIsForgotten : Program {
  bool first = false, second = false;
  Dead* dead = new Dead(&second);
  NoPushIsForgotten() {
    g_asks = 0;
    Graveyard::Get().AskBy([] { ++g_asks; });
    Graveyard::Get().Push(new Dead(&first));
  }
  void Thread(int number) override {
    if (number == 1) return Graveyard::Get().Bury();
    dead->content = 7;
    Graveyard::Get().Push(dead);
  }
  void After() override {
    Check(second || g_asks == 2, "a push is forgotten");
    Graveyard::Get().Bury();
  }
};

/// The one who is asked buries, also when another burier came before it.
struct LaterPushesAskAgain : Program {
  bool first = false, second = false;
  ModelSemaphore asked;
  Dead* dead = new Dead(&first);
  LaterPushesAskAgain() {
    g_asks = 0;
    g_asked = &asked;
    Graveyard::Get().AskBy([] {
      ++g_asks;
      g_asked->Post();
    });
  }
  void Thread(int number) override {
    if (number == 0) return Graveyard::Get().Push(dead);
    if (number == 2) asked.Wait(0);
    Graveyard::Get().Bury();
  }
  void After() override {
    Check(first, "an object stays in the graveyard");
    Graveyard::Get().Push(new Dead(&second));
    Check(g_asks == 2, "later pushes ask nobody");
    Graveyard::Get().Bury();
  }
};

/// The last reference destroys the object, when all others have done with it.
struct TheLastOneDestroys : Program {
  bool ended = false;
  RefCounted* shared = new Dead(&ended);
  TheLastOneDestroys() { shared->Retain(); }
  void Thread(int) override {
    Check(static_cast<Dead*>(shared)->content == 7, "the object is gone");
    shared->ReleaseHere();
  }
  void After() override { Check(ended, "the object lives on"); }
};
/// The same by the graveyard, for a plan that was found in the table of slots while
/// its program was dropped.
struct WhatWasFoundLives : Program {
  bool ended = false;
  SlotTable<Dead> table;
  WhatWasFoundLives() {
    Graveyard::Get().AskBy(nullptr);
    table.Add(1, RefPtr<Dead>::Adopt(new Dead(&ended)));
  }
  void Thread(int number) override {
    if (number == 0) {
      if (RefPtr<Dead> found = table.Find(1, 1)) {
        Check(found->content == 7, "the object is gone");
      }
    } else if (number == 1) {
      table.Remove(1, 1);
    } else {
      Graveyard::Get().Bury();
    }
  }
  void After() override {
    Graveyard::Get().Bury();
    Check(ended, "the object lives on");
  }
};

// --- base/places.h

struct APlaceIsWhole : Program {
  void Thread(int number) override {
    if (number == 0) return Places::Name(3, "name", "line");
    const Place* place = Places::Find(3);
    Check(place == nullptr || place->line.size() == 4, "half a place");
  }
};

// --- base/flight.h

/// An event all of whose fields say the same number.
Event Numbered(int64_t number) {
  Event event;
  event.place = static_cast<uint32_t>(number);
  event.start = event.entered = event.end = event.bytes = event.run = event.number =
      number;
  return event;
}
bool IsWhole(const Event& e) {
  const int64_t n = e.bytes;
  return e.place == n && e.start == n && e.entered == n && e.end == n && e.run == n;
}
/// A reader of a record that gets its next event.
struct ReadAtBegin : Program {
  FlightRing::Record record;
  ReadAtBegin() {
    record.Begin(1, Numbered(1));
    record.End(Numbered(1));
  }
  void Thread(int number) override {
    if (number == 0) return void(record.Begin(2, Numbered(2)));
    Event event;
    uint64_t ticket;
    if (!record.Read(&event, &ticket)) return;
    Check(IsWhole(event) && event.bytes == static_cast<int64_t>(ticket),
          "a mixture of events");
  }
};
/// A reader of an event that goes on.
template <bool kEnds>
struct ReadAtChange : Program {
  FlightRing::Record record;
  ReadAtChange() { record.Begin(2, Numbered(2)); }
  void Thread(int number) override {
    if (number == 1) return CheckOne();
    Event event = Numbered(2);
    event.state = EventState::kRunning;
    event.entered = event.end = event.number = 9;
    if (kEnds) {
      record.End(event);
    } else {
      record.Enter(event);
    }
  }
  void CheckOne() const {
    Event event;
    uint64_t ticket;
    if (!record.Read(&event, &ticket)) return;
    const bool running = event.state == EventState::kRunning;
    Check(event.entered == (running && !kEnds ? 9 : 2) &&
              event.end == (running && kEnds ? 9 : 2) &&
              event.number == (running && kEnds ? 9 : 2),
          "a mixture of two states");
  }
};
/// The next owner's event is not overwritten by the one before.
struct OwnersFollow : Program {
  FlightRing::Record record;
  bool begun = false;
  OwnersFollow() { record.Begin(1, Numbered(1)); }
  void Thread(int number) override {
    if (number == 0) return record.End(Numbered(1));
    begun = record.Begin(2, Numbered(2));
  }
  void After() override {
    Event event;
    uint64_t ticket;
    Check(record.Read(&event, &ticket), "no event");
    Check(event.bytes == (begun ? 2 : 1) && IsWhole(event), "a mixture");
  }
};

// --- base/signals.h

/// The watcher gets every event, and sees what was done before it was posted.
struct EveryEventIsReturned : Program {
  int told[2] = {};
  void Thread(int number) override {
    if (number != 2) {
      told[number] = 1;
      return Signals::Post(static_cast<Signals::Event>(1 << number));
    }
    for (int got = 0; got != 3;) {
      const int events = Signals::Wait(1e9);
      Check((events & got) == 0, "an event comes twice");
      for (int i = 0; i < 2; ++i) {
        if ((events & 1 << i) != 0) Check(told[i] == 1, "posted too early");
      }
      got |= events;
    }
  }
};

// --- queue/tap_queue.h

struct Owner : TapOwner {
  Owner() { counts = &mine; }
  TapCounts mine;
};

struct OfQueue : Program {
  static constexpr size_t kBytes = 8;  // an event of one line
  Owner* owner = new Owner;
  TapQueue queue;
  explicit OfQueue(int64_t limit, int naps = 0)
      : queue(std::chrono::milliseconds(naps * 5)) {
    std::g_slab = 0;
    Graveyard::Get().AskBy(nullptr);
    queue.SetLimit(limit);
  }
  void Push(WhenFull when_full = WhenFull::kBlock) {
    queue.Push(0, 7, *owner, kBytes, when_full, false,
               [](char* to) { std::memset(to, 5, kBytes); });
  }
  void TakeOne() {
    const TapBatch batch = queue.Wait(1);
    Check(batch && batch.first->payload()[0] == 5, "no event");
    if (batch) queue.Finish(batch.first, nullptr);
  }
};

/// A worker that goes to sleep finds the event, or is woken.
struct NoEventSleeps : OfQueue {
  NoEventSleeps() : OfQueue(1 << 20) {}
  void Thread(int number) override { number == 0 ? Push() : TakeOne(); }
};
/// So it does if another device was the first in the lane, and ended there.
struct NoLaneIsSkipped : OfQueue {
  NoLaneIsSkipped() : OfQueue(1 << 20) {}
  void Thread(int number) override {
    if (number != 2) return number == 0 ? Push() : TakeOne();
    try {
      queue.Push(0, 7, *owner, size_t{1} << 40, WhenFull::kBlock, false,
                 [](char*) {});
    } catch (const std::bad_alloc&) {
    }
  }
  bool IsOfOneOrder() const override { return true; }
};
/// A device that waits for space gets it, or learns that there will be none.
enum class Relief { kFinish, kLimit, kStop };
template <Relief kRelief>
struct NoDeviceWaitsForEver : OfQueue {
  NoDeviceWaitsForEver() : OfQueue(64) {
    Push();
    batch = queue.Wait(1);
  }
  TapBatch batch;
  void Thread(int number) override {
    if (number == 0) return Push();
    if (kRelief == Relief::kFinish) return queue.Finish(batch.first, nullptr);
    if (kRelief == Relief::kLimit) return queue.SetLimit(1 << 20);
    queue.Stop();
  }
};
/// A device that finds much in the queue ends a nap, or the worker takes none.
struct ALongQueueEndsNaps : OfQueue {
  ALongQueueEndsNaps() : OfQueue(64, 1) {}
  void Thread(int number) override { number == 0 ? Push() : TakeOne(); }
  bool LimitsEnd() const override { return false; }
};
/// Devices that come together do not exceed the limit.
struct TheLimitHolds : OfQueue {
  TheLimitHolds() : OfQueue(64) {}
  void Thread(int) override { Push(WhenFull::kDropNewest); }
  void After() override {
    Check(queue.bytes() == 64 && queue.dropped() == 1, "both were let in");
  }
};

}  // namespace

int main() {
  model::Try<IdleMeansNoCall>("engine: idle", 2, 10);
  model::Try<TheEnderIsKnown>("engine: left behind", 2, 2);
  model::Try<NoPushIsForgotten>("graveyard: push and bury", 2, 4);
  model::Try<LaterPushesAskAgain>("graveyard: two buriers", 3, 2);
  model::Try<TheLastOneDestroys>("references: the last destroys", 2, 2);
  model::Try<WhatWasFoundLives>("slots: found and removed", 3, 4);
  model::Try<APlaceIsWhole>("places: publish", 2, 2);
  model::Try<ReadAtBegin>("flight: begin", 2, 4, 12);
  model::Try<ReadAtChange<false>>("flight: enter", 2, 4, 12);
  model::Try<ReadAtChange<true>>("flight: end", 2, 4, 12);
  model::Try<OwnersFollow>("flight: two owners", 2, 2);
  model::Try<EveryEventIsReturned>("signals: post and wait", 3, 2, 12);
  model::Try<NoEventSleeps>("taps: sleep", 2, 13);
  model::Try<NoLaneIsSkipped>("taps: lanes", 3, 7);
  model::Try<NoDeviceWaitsForEver<Relief::kFinish>>("taps: space", 2, 10);
  model::Try<NoDeviceWaitsForEver<Relief::kLimit>>("taps: limit rises", 2, 5);
  model::Try<NoDeviceWaitsForEver<Relief::kStop>>("taps: stop", 2, 9);
  model::Try<ALongQueueEndsNaps>("taps: naps", 2, 15);
  model::Try<TheLimitHolds>("taps: limit", 2, 0);
  std::puts("litmus: ok");
}

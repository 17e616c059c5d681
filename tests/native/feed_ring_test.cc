// The ring of a feed: order, lanes, ends, and threads on both sides.
#undef NDEBUG
#include "queue/feed_ring.h"

#include <atomic>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

using hostcall::FeedRing;
using Took = FeedRing::Took;

namespace {

constexpr int64_t kLong = 600'000'000'000;
constexpr FeedRing::Patience kAtOnce{0};
constexpr FeedRing::Patience kPatient{kLong};

/// Each item is one number, once small and once as a long leaf; and an empty leaf.
std::vector<size_t> Leaves() { return {8, 0, 1000}; }

void Write(FeedRing& ring, int64_t value) {
  for (size_t lane = 0; lane < ring.lanes(); ++lane) {
    const int64_t mine = value * 10 + static_cast<int64_t>(lane);
    std::memcpy(ring.Target(lane, 0), &mine, 8);
    std::memset(ring.Target(lane, 2), static_cast<char>(value), 1000);
  }
}

bool Put(FeedRing& ring, int64_t value) {
  if (!ring.Reserve()) return false;
  Write(ring, value);
  return ring.Commit();
}

/// What a lane finds; `value` gets the item's number.
Took Take(FeedRing& ring, size_t lane, int64_t* value, int64_t wait = 0) {
  int64_t got = -1;
  char bulk[1000];
  char* targets[] = {reinterpret_cast<char*>(&got), nullptr, bulk};
  const Took took = ring.Take(lane, targets, wait);
  if (took != Took::kItem) return took;
  assert(got % 10 == static_cast<int64_t>(lane));
  *value = got / 10;
  for (char byte : bulk) assert(byte == static_cast<char>(*value));
  return took;
}

void ItemsComeInOrder() {
  FeedRing ring(Leaves(), 1, 3);
  int64_t value;
  assert(Take(ring, 0, &value) == Took::kNothing);
  for (int64_t i = 0; i < 100; ++i) {
    assert(Put(ring, i));
    if (i < 2) continue;
    assert(Take(ring, 0, &value) == Took::kItem && value == i - 2);
  }
  assert(ring.counts().taken == 98 && ring.counts().put == 100);
}

void TheEndComesAfterTheItems() {
  for (auto [ending, found] : {std::pair{Took::kEnd, Took::kEnd},
                               std::pair{Took::kStopped, Took::kStopped}}) {
    FeedRing ring(Leaves(), 1, 3);
    int64_t value;
    Put(ring, 5);
    ring.Finish(ending);
    assert(Take(ring, 0, &value) == Took::kItem && value == 5);
    assert(Take(ring, 0, &value, kLong) == found);
    assert(ring.Take(0, nullptr, kLong) == found);
    ring.Clear();
    assert(Take(ring, 0, &value) == Took::kNothing && ring.counts().taken == 0);
    Put(ring, 6);
    assert(Take(ring, 0, &value) == Took::kItem && value == 6);
  }
}

void CloseDropsTheItems() {
  FeedRing ring(Leaves(), 1, 3);
  int64_t value;
  Put(ring, 1);
  ring.Close();
  assert(Take(ring, 0, &value, kLong) == Took::kStopped);
  assert(!ring.Reserve());
  ring.Idle();  // does not wait
}

void DropTakesWithoutCopying() {
  FeedRing ring(Leaves(), 2, 4, kAtOnce);
  int64_t value;
  for (int64_t i = 0; i < 4; ++i) Put(ring, i);
  Take(ring, 1, &value);      // this lane is ahead
  assert(ring.Drop(2) == 2);  // as if lane 0 were of a failed program
  for (size_t lane : {0, 1}) {
    assert(Take(ring, lane, &value) == Took::kItem && value == 3);
  }
  assert(ring.Drop(5) == 0 && ring.counts().taken == 4);
  for (int64_t i = 4; i < 8; ++i) Put(ring, i);  // all space is free again
  assert(ring.Drop(5) == 4);
}

void AWakeEndsOneWait() {
  FeedRing ring(Leaves(), 1, 1);
  Put(ring, 0);
  std::thread waker([&] { ring.Wake(); });
  assert(!ring.Reserve());  // the ring is full
  waker.join();
  ring.Wake();
  ring.Idle();
  int64_t value;
  Take(ring, 0, &value);
  assert(ring.Reserve());
}

/// An item's memory is written again only when the slowest lane has it.
void LanesNeedNotKeepInStep() {
  constexpr size_t kLanes = 4;
  constexpr int64_t kItems = 5000;
  FeedRing ring(Leaves(), kLanes, 3);
  std::vector<std::thread> threads;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    threads.emplace_back([&ring, lane] {
      int64_t value;
      for (int64_t i = 0; i < kItems; ++i) {
        assert(Take(ring, lane, &value, kLong) == Took::kItem && value == i);
      }
      assert(Take(ring, lane, &value, kLong) == Took::kEnd);
    });
  }
  for (int64_t i = 0; i < kItems; ++i) assert(Put(ring, i));
  ring.Finish(Took::kEnd);
  for (std::thread& thread : threads) thread.join();
  assert(ring.counts().total == kItems);
}

/// Several programs take from one lane: each item goes to exactly one.
void SeveralTakersOfOneLane() {
  constexpr int64_t kItems = 20000;
  FeedRing ring(Leaves(), 1, 4);
  std::mutex mutex;
  std::set<int64_t> seen;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      int64_t value, last = -1;
      while (Take(ring, 0, &value, kLong) == Took::kItem) {
        assert(value > last);
        last = value;
        std::lock_guard<std::mutex> lock(mutex);
        assert(seen.insert(value).second);
      }
    });
  }
  for (int64_t i = 0; i < kItems; ++i) assert(Put(ring, i));
  ring.Finish(Took::kEnd);
  for (std::thread& thread : threads) thread.join();
  assert(seen.size() == kItems);
}

/// The producer clears while devices take: they see no mixture of two rounds.
void ClearWhileOthersTake() {
  FeedRing ring(Leaves(), 1, 4);
  std::atomic<bool> done{false};
  std::thread taker([&] {
    int64_t value;
    while (!done) Take(ring, 0, &value, 1'000'000);
  });
  for (int64_t round = 0; round < 500; ++round) {
    for (int64_t i = 0; i < 5; ++i) assert(Put(ring, i));
    ring.Clear();
    assert(ring.counts().taken == 0);
  }
  done = true;
  taker.join();
}

/// Clear and Drop come after the same item for all lanes, also around ends.
void LanesMeetAtClearAndDrop() {
  constexpr size_t kLanes = 4;
  FeedRing ring(Leaves(), kLanes, 3, kPatient);
  std::vector<std::vector<int64_t>> seen(kLanes);
  std::vector<std::thread> threads;
  std::atomic<size_t> running{kLanes};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    threads.emplace_back([&, lane] {
      for (int i = 0; i < 3000; ++i) {
        int64_t value = -1;  // stays so at an end
        Took took = Took::kNothing;
        while (took == Took::kNothing) took = Take(ring, lane, &value, 1'000'000);
        assert(took == Took::kItem || took == Took::kEnd);
        seen[lane].push_back(value);
      }
      --running;
    });
  }
  for (int64_t i = 0; running != 0; ++i) {
    // Lanes that have all they want leave the others alone.
    if (ring.Reserve()) {
      Write(ring, i);
      ring.Commit();
    }
    if (running != kLanes) continue;
    if (i % 7 == 0) ring.Finish(Took::kEnd);
    if (i % 7 == 0 || i % 5 == 0) ring.Clear();
    if (i % 11 == 0) ring.Drop(1);
    if (i % 13 == 0) ring.Drop(0);
    ring.Wake();
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& each : seen) assert(each == seen[0]);
}

void LanesMeetAtTheClose() {
  constexpr size_t kLanes = 4;
  for (int round = 0; round < 100; ++round) {
    FeedRing ring(Leaves(), kLanes, 5);
    std::vector<int64_t> last(kLanes, -1);
    std::vector<std::thread> threads;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      threads.emplace_back([&, lane] {
        while (Take(ring, lane, &last[lane], kLong) == Took::kItem) continue;
      });
    }
    std::thread closer([&] {
      while (ring.counts().put < round) std::this_thread::yield();
      ring.Close();
    });
    for (int64_t i = 0; Put(ring, i); ++i) continue;
    closer.join();
    for (std::thread& thread : threads) thread.join();
    for (int64_t each : last) assert(each == last[0]);
  }
}

/// A lane of a program that failed never comes to the line.
void ClearWaitsOnlySoLong() {
  FeedRing ring(Leaves(), 2, 4, kAtOnce);
  int64_t value;
  for (int64_t i = 0; i < 3; ++i) Put(ring, i);
  Take(ring, 1, &value);
  ring.Clear();
  Put(ring, 7);
  for (size_t lane : {0, 1}) {
    assert(Take(ring, lane, &value) == Took::kItem && value == 7);
  }
}

void CloseEndsAWaitForLanes() {
  FeedRing ring(Leaves(), 2, 4, kPatient);
  int64_t value;
  for (int64_t i = 0; i < 2; ++i) Put(ring, i);
  Take(ring, 1, &value);
  std::thread closer([&] { ring.Close(); });
  ring.Clear();  // lane 0 does not come
  closer.join();
  ring.Clear();
  assert(ring.Drop(1) == 0);
  assert(Take(ring, 1, &value) == Took::kStopped);
  assert(Take(ring, 0, &value) == Took::kItem && value == 0);
  assert(Take(ring, 0, &value) == Took::kStopped);
}

void CloseEndsAllWaits() {
  FeedRing empty(Leaves(), 1, 1), full(Leaves(), 1, 1);
  Put(full, 0);
  std::thread taker([&] {
    int64_t value;
    assert(Take(empty, 0, &value, kLong) == Took::kStopped);
  });
  std::thread producer([&] { assert(!full.Reserve()); });
  empty.Close();
  full.Close();
  taker.join();
  producer.join();
}

}  // namespace

int main() {
  ItemsComeInOrder();
  TheEndComesAfterTheItems();
  CloseDropsTheItems();
  DropTakesWithoutCopying();
  AWakeEndsOneWait();
  LanesNeedNotKeepInStep();
  SeveralTakersOfOneLane();
  ClearWhileOthersTake();
  LanesMeetAtClearAndDrop();
  LanesMeetAtTheClose();
  ClearWaitsOnlySoLong();
  CloseEndsAWaitForLanes();
  CloseEndsAllWaits();
  std::puts("feed_ring: items in order, each taken once by each lane");
}

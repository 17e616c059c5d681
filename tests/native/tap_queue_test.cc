// The tap queue, between threads that act as devices and one that acts as the
// worker.
#undef NDEBUG
#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tap_events.h"

namespace hostcall {
namespace {

void OrderOfEachDevice(int devices, int count, size_t most = 16) {
  TapQueue* queue = NewQueue();
  OwnerPtr owner = MakeOwner();
  Worker worker(*queue, most);
  std::vector<std::thread> threads;
  for (int device = 0; device < devices; ++device) {
    threads.emplace_back([&, device] {
      std::mt19937 random(static_cast<uint32_t>(device));
      for (int i = 0; i < count; ++i) {
        // Small events, events that fill slabs, and events with a slab of their
        // own.
        const uint32_t kind = random() % 100;
        const size_t bytes = kind < 80   ? random() % 200
                             : kind < 98 ? random() % TapLane::kOwnBlock
                                         : TapLane::kOwnBlock + random() % 300'000;
        assert(Send(*queue, owner, device, i, bytes));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  assert(queue->Flush(queue->Mark(), 60));
  assert(queue->bytes() == 0);
  queue->Stop();
  worker.Join();
  assert(worker.got.size() == static_cast<size_t>(devices) * count);
  std::vector<int> next(static_cast<size_t>(devices), 0);
  for (const Value& value : worker.got) {
    assert(value.number == next[static_cast<size_t>(value.device)]++);
  }
}

/// Devices that push in turns are delivered in the order of their turns.
void OrderBetweenDevices() {
  TapQueue* queue = NewQueue();
  OwnerPtr owner = MakeOwner();
  for (int i = 0; i < 3000; ++i) Send(*queue, owner, i % 3, i / 3);
  Worker worker(*queue);
  assert(queue->Flush(queue->Mark(), 60));
  queue->Stop();
  worker.Join();
  for (int i = 0; i < 3000; ++i) {
    assert(worker.got[static_cast<size_t>(i)].device == i % 3);
    assert(worker.got[static_cast<size_t>(i)].number == i / 3);
  }
}

/// Many senders, all policies, a tight queue: every event is delivered or dropped,
/// and each device's are delivered in order.
void Stress() {
  TapQueue* queue = NewQueue();
  queue->SetLimit(20'000);
  OwnerPtr owner = MakeOwner();
  Worker worker(*queue, TapQueue::kMostAtOnce);
  std::atomic<int> sent{0}, refused{0};
  std::vector<std::thread> threads;
  for (int device = 0; device < 8; ++device) {
    threads.emplace_back([&, device] {
      std::mt19937 random(static_cast<uint32_t>(device) + 100);
      for (int i = 0; i < 2000; ++i) {
        const auto policy = static_cast<WhenFull>(random() % 3);
        ++sent;
        if (!Send(*queue, owner, device, i, random() % 3000, policy)) ++refused;
        if (random() % 500 == 0) queue->Flush(queue->Mark(), 0.001);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  assert(queue->Flush(queue->Mark(), 60));
  queue->Stop();
  worker.Join();
  assert(queue->dropped() == owner->dropped() && owner->dropped() >= refused);
  assert(static_cast<int64_t>(worker.got.size()) + queue->dropped() == sent);
  assert(queue->delivered() == static_cast<int64_t>(worker.got.size()));
  assert(queue->bytes() == 0);
  std::vector<int> last(8, -1);
  for (const Value& value : worker.got) {
    int& before = last[static_cast<size_t>(value.device)];
    assert(value.number > before);
    before = value.number;
  }
}

/// A sleeping worker is woken, and an event that is pushed during a nap is found.
void Waking() {
  TapQueue* queue = NewQueue();
  OwnerPtr owner = MakeOwner();
  Worker worker(*queue);
  std::mt19937 random(5);
  for (int i = 0; i < 40; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 30));
    Send(*queue, owner, 0, i);
    assert(queue->Flush(queue->Mark(), 60));
  }
  queue->Stop();
  worker.Join();
  assert(worker.got.size() == 40);
}

void FlushTimesOutIfNobodyDelivers() {
  TapQueue* queue = NewQueue();
  OwnerPtr owner = MakeOwner();
  assert(queue->Flush(queue->Mark(), 0));
  Send(*queue, owner, 0, 0);
  assert(!queue->Flush(queue->Mark(), 0.02));
  TapEvent* batch[TapQueue::kMostAtOnce];
  assert(Take(*queue, batch, 1) == 1);
  assert(!queue->Flush(queue->Mark(), 0.02));  // taken, not delivered
  const int64_t mark = queue->Mark();
  Send(*queue, owner, 0, 1);
  queue->Finish(batch[0], nullptr);
  assert(queue->Flush(mark, 0));  // events after the mark do not count
  assert(Take(*queue, batch, 1) == 1);
  queue->Finish(batch[0], nullptr);
}

void AnOwnerLivesUntilItsEventsAreDelivered() {
  Graveyard::Get().Bury();
  const int before = g_buried;
  TapQueue* queue = NewQueue();
  {
    OwnerPtr owner = MakeOwner();
    Send(*queue, owner, 0, 0);
  }
  Graveyard::Get().Bury();
  assert(g_buried == before);
  TapEvent* batch[TapQueue::kMostAtOnce];
  assert(Take(*queue, batch, 1) == 1);
  queue->Finish(batch[0], nullptr);
  Graveyard::Get().Bury();
  assert(g_buried == before + 1);
}

void DiscardDropsWhatIsQueued() {
  TapQueue& queue = *NewQueue();
  const OwnerPtr owner = MakeOwner();
  for (int i = 0; i < 300; ++i) Send(queue, owner, i % 3, i);
  TapBatch batch = queue.Wait(4);
  queue.Discard();
  // The worker asks about the events that it has taken, and skips them.
  int forgotten = 0;
  for (TapEvent* event = batch.first; event != nullptr; event = event->next) {
    assert(queue.IsDiscarded(*event));
    queue.CountDiscarded(*event);
    ++forgotten;
  }
  queue.Finish(batch.first, nullptr);
  assert(queue.dropped() == 300 && owner->dropped() == 300);
  assert(queue.delivered() == 0 && queue.bytes() == 0 && forgotten > 0);
  assert(queue.Flush(queue.Mark(), 0));
  // What comes later is delivered.
  Send(queue, owner, 0, 300);
  batch = queue.Wait(4);
  assert(Read(batch.first).number == 300 && !queue.IsDiscarded(*batch.first));
  queue.Finish(batch.first, nullptr);
  assert(queue.delivered() == 1);
}

/// Runs of one owner's events are in order, miss none that is near, and leave the
/// other events in order, whether the rest is delivered or given back.
void RunsOfOneOwner(uint32_t seed) {
  std::mt19937 random(seed);
  TapQueue& queue = *NewQueue();
  const std::vector<OwnerPtr> owners{MakeOwner(), MakeOwner(), MakeOwner()};
  std::vector<std::vector<int>> sent(3), got(3);
  constexpr int kEvents = 500;
  for (int i = 0; i < kEvents; ++i) {
    const size_t who = random() % 3;
    Send(queue, owners[who], 0, i);
    sent[who].push_back(i);
  }
  const auto unwanted = [](TapEvent& event) {
    return Read(&event).number % 50 == 7;
  };
  while (queue.pending() != 0) {
    TapBatch batch = queue.Wait(TapQueue::kMostAtOnce);
    int left = static_cast<int>(random() % 40);  // runs before the rest goes back
    while (batch && left-- >= 0) {
      const TapRun run = GatherRun(batch, 1 + random() % 20, unwanted);
      assert(run.count >= 1 && batch.last->next == nullptr);
      TapOwner* owner = batch.first->owner;
      size_t who = 0;
      while (owners[who].get() != owner) ++who;
      TapEvent* event = batch.first;
      for (size_t i = 0; i < run.count; ++i, event = event->next) {
        assert(event->owner == owner && (i == 0 || !unwanted(*event)));
        got[who].push_back(Read(event).number);
        if (i + 1 == run.count) assert(event == run.last);
      }
      const int64_t oldest = event == nullptr ? queue.Mark() : event->sequence;
      queue.Finish(batch.first, event);
      batch.first = event;
      // All before the oldest that is left are done, and that one is not.
      assert(queue.Flush(oldest, 0));
      if (event != nullptr) assert(!queue.Flush(oldest + 1, 0));
    }
    if (batch) queue.GiveBack(batch);
  }
  for (size_t who = 0; who < 3; ++who) {
    // An unwanted event stays behind younger ones of its owner.
    std::vector<int> wanted, late, expected, later;
    const auto split = [](const std::vector<int>& all, std::vector<int>& rest) {
      std::vector<int> some;
      for (int i : all) (i % 50 == 7 ? rest : some).push_back(i);
      return some;
    };
    wanted = split(got[who], late);
    expected = split(sent[who], later);
    assert(wanted == expected && late == later);
  }
  assert(queue.bytes() == 0 && queue.delivered() == kEvents);
}

/// The search ends when the run is full, or far from its last event.
void RunsEnd() {
  TapQueue& queue = *NewQueue();
  const OwnerPtr mine = MakeOwner(), other = MakeOwner();
  const auto all = [](TapEvent&) { return false; };
  for (int i = 0; i < 10; ++i) Send(queue, mine, 0, i);
  for (int i = 0; i < 100; ++i) Send(queue, other, 0, i);
  Send(queue, mine, 0, 10);
  TapBatch batch = queue.Wait(TapQueue::kMostAtOnce);
  assert(GatherRun(batch, 4, all).count == 4);
  assert(GatherRun(batch, 10, all).count == 10);
  assert(GatherRun(batch, 20, all).count == 10);  // 80 looks do not reach the last
  TapEvent* last = batch.last;
  const TapRun run = GatherRun(batch, 30, all);
  assert(run.count == 11 && run.last == last && batch.last != last);
  assert(batch.last->next == nullptr);
  queue.Finish(batch.first, nullptr);
}

}  // namespace
}  // namespace hostcall

int main() {
  using namespace hostcall;  // NOLINT
  OrderOfEachDevice(1, 20'000);
  OrderOfEachDevice(1, 20'000, TapQueue::kMostAtOnce);
  OrderOfEachDevice(4, 5'000);
  OrderOfEachDevice(70, 100);  // more devices than lanes
  OrderBetweenDevices();
  for (int i = 0; i < 3; ++i) Stress();
  Waking();
  FlushTimesOutIfNobodyDelivers();
  DiscardDropsWhatIsQueued();
  AnOwnerLivesUntilItsEventsAreDelivered();
  for (uint32_t seed = 0; seed < 50; ++seed) RunsOfOneOwner(seed);
  RunsEnd();
  std::puts("tap_queue: ok");
}

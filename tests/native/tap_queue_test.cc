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
  auto queue = std::make_unique<TapQueue>();
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
  auto queue = std::make_unique<TapQueue>();
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
  auto queue = std::make_unique<TapQueue>();
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
  auto queue = std::make_unique<TapQueue>();
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
  auto queue = std::make_unique<TapQueue>();
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
  auto queue = std::make_unique<TapQueue>();
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
  TapQueue queue;
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
  std::puts("tap_queue: ok");
}

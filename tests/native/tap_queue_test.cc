// The tap queue, between threads that act as devices and one that acts as the
// worker.
#undef NDEBUG
#include "queue/tap_queue.h"

#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

using hostcall::Counted;
using hostcall::Graveyard;
using hostcall::TapBatch;
using hostcall::TapEvent;
using hostcall::TapLane;
using hostcall::TapOwner;
using hostcall::TapQueue;
using hostcall::WhenFull;
using std::chrono::milliseconds;

namespace {

std::atomic<int> g_buried{0};
struct Owner : TapOwner {
  Owner() { counts = &mine; }
  ~Owner() override { ++g_buried; }
  int64_t dropped() const { return mine.dropped.load(); }
  hostcall::TapCounts mine;
};
using OwnerPtr = Counted<Owner>;
OwnerPtr MakeOwner() { return OwnerPtr::Adopt(new Owner); }

constexpr int64_t kSmall = TapEvent::LinesFor(64) * TapEvent::kLine;

/// Takes a batch into an array; returns its size.
size_t Take(TapQueue& queue, TapEvent** batch, size_t most) {
  size_t n = 0;
  for (TapEvent* e = queue.Wait(most).first; e != nullptr; e = e->next) {
    batch[n++] = e;
  }
  return n;
}

/// The payload of an event: the device, a count for each device, and bytes that
/// follow from both, so that Read can check them.
struct Value {
  int32_t device;
  int32_t number;
  uint64_t bytes;
};

bool Send(TapQueue& queue, const OwnerPtr& owner, int device, int number,
          size_t bytes = 64, WhenFull when_full = WhenFull::kBlock,
          bool nested = false) {
  bytes = std::max(bytes, sizeof(Value));
  return queue.Push(device, 7, *owner, bytes, when_full, nested, [&](char* to) {
    const Value value{device, number, bytes};
    std::memset(to, static_cast<char>(device + number), bytes);
    std::memcpy(to, &value, sizeof value);
  });
}

Value Read(TapEvent* event) {
  Value value;
  std::memcpy(&value, event->payload(), sizeof value);
  assert(value.device == event->device && event->run == 7);
  assert(event->lines == TapEvent::LinesFor(value.bytes));
  for (size_t i = sizeof value; i < value.bytes; i += 1 + value.bytes / 64) {
    assert(event->payload()[i] == static_cast<char>(value.device + value.number));
  }
  return value;
}

/// A worker that records what it takes until the queue is stopped. At random it
/// finishes a part of a batch, and sometimes gives the rest back.
class Worker {
 public:
  explicit Worker(TapQueue& queue, size_t most = 16, int slow_us = 0)
      : thread_([this, &queue, most, slow_us] {
          std::mt19937 random(1);
          while (TapBatch batch = queue.Wait(most)) {
            TapEvent* event = batch.first;
            do {
              got.push_back(Read(event));
              event = event->next;
              if (slow_us != 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(slow_us));
              }
              if (event != nullptr && random() % 50 == 0) {
                queue.Finish(batch.first, event);
                batch.first = event;
                if (random() % 2 == 0) break;
              }
            } while (event != nullptr);
            if (event != nullptr) {
              queue.GiveBack(batch);
            } else {
              queue.Finish(batch.first, nullptr);
            }
          }
        }) {}
  void Join() { thread_.join(); }
  std::vector<Value> got;

 private:
  std::thread thread_;
};

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

void BlockingLosesNothing() {
  auto queue = std::make_unique<TapQueue>();
  queue->SetLimit(10 * kSmall);
  OwnerPtr owner = MakeOwner();
  Worker worker(*queue, 4, 20);
  std::vector<std::thread> threads;
  std::atomic<bool> over{false};
  for (int device = 0; device < 4; ++device) {
    threads.emplace_back([&, device] {
      for (int i = 0; i < 500; ++i) {
        assert(Send(*queue, owner, device, i));
        over = over || queue->bytes() > queue->limit();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  assert(queue->Flush(queue->Mark(), 60));
  queue->Stop();
  worker.Join();
  assert(!over);
  assert(worker.got.size() == 2000 && queue->dropped() == 0);
}

void AValueAboveTheLimitGoesAlone() {
  auto queue = std::make_unique<TapQueue>();
  queue->SetLimit(1000);
  OwnerPtr owner = MakeOwner();
  Worker worker(*queue);
  for (int i = 0; i < 20; ++i) {
    assert(Send(*queue, owner, 0, i, i % 2 == 0 ? 1'000'000 : 10));
  }
  assert(queue->Flush(queue->Mark(), 60));
  queue->Stop();
  worker.Join();
  assert(worker.got.size() == 20);
}

void DropNewest() {
  auto queue = std::make_unique<TapQueue>();
  queue->SetLimit(5 * kSmall);
  OwnerPtr owner = MakeOwner();
  int let_in = 0;
  for (int i = 0; i < 20; ++i) {
    let_in += Send(*queue, owner, 0, i, 64, WhenFull::kDropNewest);
  }
  assert(let_in == 5 && owner->dropped() == 15 && queue->dropped() == 15);
  Worker worker(*queue);
  assert(queue->Flush(queue->Mark(), 60));
  queue->Stop();
  worker.Join();
  for (int i = 0; i < 5; ++i)
    assert(worker.got[static_cast<size_t>(i)].number == i);
}

void DropOldest() {
  auto queue = std::make_unique<TapQueue>();
  queue->SetLimit(5 * kSmall);
  OwnerPtr owner = MakeOwner();
  for (int i = 0; i < 20; ++i) {
    assert(Send(*queue, owner, 0, i, 64, WhenFull::kDropOldest));
  }
  assert(owner->dropped() == 15);
  // Events that are being delivered are not dropped: if all are, the new one is.
  TapEvent* batch[TapQueue::kMostAtOnce];
  assert(Take(*queue, batch, 8) == 5);
  assert(!Send(*queue, owner, 0, 20, 64, WhenFull::kDropOldest));
  for (int i = 0; i < 5; ++i) assert(Read(batch[i]).number == 15 + i);
  queue->Finish(batch[0], nullptr);
  assert(queue->bytes() == 0);
  // Neither are events of the policy kBlock, of another device, or if that can't
  // make enough room.
  for (int i = 0; i < 3; ++i) Send(*queue, owner, 1, i);
  for (int i = 3; i < 5; ++i) Send(*queue, owner, 1, i, 64, WhenFull::kDropOldest);
  assert(!Send(*queue, owner, 2, 0, 64, WhenFull::kDropOldest));
  assert(!Send(*queue, owner, 1, 5, 100'000, WhenFull::kDropOldest));
  assert(Send(*queue, owner, 1, 5, 64, WhenFull::kDropOldest));
  assert(Send(*queue, owner, 1, 6, 64, WhenFull::kDropOldest));
  assert(Take(*queue, batch, 8) == 5);
  const int left[] = {0, 1, 2, 5, 6};
  for (int i = 0; i < 5; ++i) assert(Read(batch[i]).number == left[i]);
  queue->Finish(batch[0], nullptr);
  assert(queue->bytes() == 0);
}

void NestedPushesAreLetIn() {
  auto queue = std::make_unique<TapQueue>();
  queue->SetLimit(200);
  OwnerPtr owner = MakeOwner();
  for (int i = 0; i < 10; ++i) {
    assert(Send(*queue, owner, 0, i, 64, WhenFull::kBlock, true));
  }
  TapEvent* batch[TapQueue::kMostAtOnce];
  assert(Take(*queue, batch, 100) == 10);
  queue->Finish(batch[0], nullptr);
  assert(queue->bytes() == 0);
}

/// Threads that await space and then push without waiting, as a GPU's taps do. The
/// queue exceeds its limit by at most what is between the two.
void AwaitedSpace() {
  auto queue = std::make_unique<TapQueue>();
  queue->SetLimit(10 * kSmall);
  OwnerPtr owner = MakeOwner();
  Worker worker(*queue, 4, 20);
  std::vector<std::thread> threads;
  std::atomic<int64_t> most{0};
  for (int device = 0; device < 4; ++device) {
    threads.emplace_back([&, device] {
      for (int i = 0; i < 500; ++i) {
        queue->AwaitSpace(64);
        assert(Send(*queue, owner, device, i, 64, WhenFull::kBlock, true));
        const int64_t bytes = queue->bytes();
        int64_t seen = most.load();
        while (seen < bytes && !most.compare_exchange_weak(seen, bytes)) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  assert(queue->Flush(queue->Mark(), 60));
  assert(worker.got.size() == 2000 && queue->dropped() == 0);
  assert(most <= queue->limit() + 4 * kSmall);
  // A stopped queue lets nobody wait.
  queue->Stop();
  worker.Join();
  assert(Send(*queue, owner, 0, 0, 64, WhenFull::kBlock, true));
  queue->SetLimit(1);
  queue->AwaitSpace(64);
  Worker rest(*queue);
  rest.Join();
  assert(rest.got.size() == 1);
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
    std::this_thread::sleep_for(milliseconds(random() % 30));
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

/// Stop ends the waits for space, and what is queued is still delivered.
void StopWithAFullQueue() {
  auto queue = std::make_unique<TapQueue>();
  queue->SetLimit(200);
  OwnerPtr owner = MakeOwner();
  assert(Send(*queue, owner, 0, 0));
  std::thread blocked([&] { assert(!Send(*queue, owner, 0, 1)); });
  while (queue->blocked() == 0) std::this_thread::yield();
  queue->Stop();
  blocked.join();
  Worker worker(*queue);
  worker.Join();
  assert(worker.got.size() == 1);
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

void DiscardMakesSpaceForWaitingPushes() {
  TapQueue queue;
  queue.SetLimit(2 * kSmall);
  const OwnerPtr owner = MakeOwner();
  Send(queue, owner, 0, 0);
  Send(queue, owner, 0, 1);
  std::thread device([&] { assert(Send(queue, owner, 1, 2)); });
  while (queue.blocked() == 0) std::this_thread::yield();
  queue.Discard();
  device.join();
  assert(queue.dropped() == 2 && queue.bytes() == kSmall);
  Worker worker(queue);
  queue.Stop();
  worker.Join();
  assert(worker.got.size() == 1 && worker.got[0].number == 2);
}

void AnInterruptEndsTheWaitsUnderWay() {
  TapQueue queue;
  queue.SetLimit(kSmall);
  const OwnerPtr owner = MakeOwner();
  queue.Interrupt("nobody waits, and nobody is told later");
  Send(queue, owner, 0, 0);
  std::atomic<int> told{0};
  const auto interrupted = [&](auto wait) {
    try {
      wait();
    } catch (const hostcall::PushInterrupted& error) {
      assert(std::string(error.what()) == "now");
      ++told;
    }
  };
  std::thread first([&] { interrupted([&] { Send(queue, owner, 1, 1); }); });
  std::thread second([&] { interrupted([&] { queue.AwaitSpace(64); }); });
  while (queue.blocked() != 2) std::this_thread::yield();
  queue.Interrupt("now");
  first.join();
  second.join();
  assert(told == 2 && queue.pushed() == 1 && queue.dropped() == 0);
  std::thread third([&] { assert(Send(queue, owner, 1, 2)); });
  Worker worker(queue);
  third.join();
  queue.Stop();
  worker.Join();
  assert(worker.got.size() == 2);
}

}  // namespace

int main() {
  OrderOfEachDevice(1, 20'000);
  OrderOfEachDevice(1, 20'000, TapQueue::kMostAtOnce);
  OrderOfEachDevice(4, 5'000);
  OrderOfEachDevice(70, 100);  // more devices than lanes
  OrderBetweenDevices();
  BlockingLosesNothing();
  AValueAboveTheLimitGoesAlone();
  DropNewest();
  DropOldest();
  NestedPushesAreLetIn();
  AwaitedSpace();
  for (int i = 0; i < 3; ++i) Stress();
  Waking();
  FlushTimesOutIfNobodyDelivers();
  StopWithAFullQueue();
  DiscardDropsWhatIsQueued();
  DiscardMakesSpaceForWaitingPushes();
  AnInterruptEndsTheWaitsUnderWay();
  AnOwnerLivesUntilItsEventsAreDelivered();
  std::puts("tap_queue: ok");
}

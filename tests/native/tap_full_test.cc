// A full tap queue: its policies, waiting for space, and what ends the waits.
#undef NDEBUG
#include <atomic>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tap_events.h"

namespace hostcall {
namespace {

void BlockingLosesNothing() {
  TapQueue* queue = NewQueue();
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
  TapQueue* queue = NewQueue();
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
  TapQueue* queue = NewQueue();
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
  TapQueue* queue = NewQueue();
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
  TapQueue* queue = NewQueue();
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
  TapQueue* queue = NewQueue();
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

/// Stop ends the waits for space, and what is queued is still delivered.
void StopWithAFullQueue() {
  TapQueue* queue = NewQueue();
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

void DiscardMakesSpaceForWaitingPushes() {
  TapQueue& queue = *NewQueue();
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
  TapQueue& queue = *NewQueue();
  queue.SetLimit(kSmall);
  const OwnerPtr owner = MakeOwner();
  assert(!queue.Interrupt("nobody waits, and nobody is told later"));
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
  const bool any = queue.Interrupt("now");
  assert(any);
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
}  // namespace hostcall

int main() {
  using namespace hostcall;  // NOLINT
  BlockingLosesNothing();
  AValueAboveTheLimitGoesAlone();
  DropNewest();
  DropOldest();
  NestedPushesAreLetIn();
  AwaitedSpace();
  StopWithAFullQueue();
  DiscardMakesSpaceForWaitingPushes();
  AnInterruptEndsTheWaitsUnderWay();
  std::puts("tap_full: ok");
}

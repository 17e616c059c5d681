// Helpers of the tests of the tap queue: owners, senders, and a worker.
#pragma once

#undef NDEBUG
#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "queue/tap_queue.h"

namespace hostcall {

inline std::atomic<int> g_buried{0};
struct Owner : TapOwner {
  Owner() { counts = &mine; }
  ~Owner() override { ++g_buried; }
  int64_t dropped() const { return mine.dropped.load(); }
  TapCounts mine;
};
using OwnerPtr = RefPtr<Owner>;
inline OwnerPtr MakeOwner() { return OwnerPtr::Adopt(new Owner); }

constexpr int64_t kSmall = TapEvent::LinesFor(64) * TapEvent::kLine;

/// A queue, which is never destroyed, like the engine's.
inline TapQueue* NewQueue() {
  static auto* const queues = new std::vector<TapQueue*>;  // so that none is leaked
  queues->push_back(new TapQueue);
  return queues->back();
}

/// Takes a batch into an array; returns its size.
inline size_t Take(TapQueue& queue, TapEvent** batch, size_t most) {
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

inline bool Send(TapQueue& queue, const OwnerPtr& owner, int device, int number,
                 size_t bytes = 64, WhenFull when_full = WhenFull::kBlock,
                 bool nested = false) {
  bytes = std::max(bytes, sizeof(Value));
  const Pushed pushed =
      queue.Push(device, 7, *owner, bytes, when_full, nested, [&](char* to) {
        const Value value{device, number, bytes};
        std::memset(to, static_cast<char>(device + number), bytes);
        std::memcpy(to, &value, sizeof value);
      });
  return pushed.queued();
}

inline Value Read(TapEvent* event) {
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

}  // namespace hostcall

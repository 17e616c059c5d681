#include "invoke/taps.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/flight.h"
#include "base/guards.h"
#include "base/small_array.h"
#include "invoke/call_kind.h"
#include "invoke/invoke.h"
#include "invoke/profile.h"
#include "invoke/run_rows.h"
#include "plan/arrays.h"
#include "plan/call_scope.h"
#include "plan/packing.h"
#include "queue/tap_queue.h"

namespace hostcall {
namespace {

/// After this many nanoseconds the worker releases the GIL for a moment, and
/// finishes the events that it has delivered. A thread that dispatches a program
/// releases the GIL some twenty times. If the worker kept the GIL, the thread would
/// wait each time for Python's switch interval of 5 ms (20,000 lines of hc.print
/// took 130 ms to dispatch).
constexpr int64_t kHoldNs = 250'000;
/// If deliveries of single events take longer than this on average, the rest of the
/// batch goes back into the queue, where `when_full` can drop it. Runs do not
/// count: a slow function that gets many events at once should get as many as there
/// are.
constexpr int64_t kSlowNs = 50'000;

/// Runs the function on one event; false with a Python error set.
bool InvokeOne(const Plan& plan, ActiveCall& call, TapEvent& event) {
  const std::vector<size_t>& offsets = TapOf(plan).layout.offsets;
  SmallArray<const void*, 8> operands(offsets.size());
  for (size_t i = 0; i < offsets.size(); ++i) {
    operands.data()[i] = event.payload() + offsets[i];
  }
  // The plan has no result leaves: nobody takes a tap's return value.
  return Invoke({plan, event.device, event.run, operands.data(), nullptr}, call,
                nullptr);
}

/// Copies one leaf of the events, which begins at `offset` of their payloads, into
/// an array with an axis for the events in front.
void CopyRun(const Leaf& leaf, size_t offset, TapEvent& first, size_t count,
             char* to) {
  TapEvent* event = &first;
  const auto copy_all = [&](auto copy) {
    for (size_t i = 0; i < count; ++i, event = event->next) {
      copy(to, event->payload() + offset);
      to += leaf.row_bytes;
    }
  };
  if (leaf.bits != 0) {
    copy_all([&leaf](char* row, const char* packed) {
      UnpackBits(packed, row, leaf.count, leaf.bits, leaf.is_signed);
    });
  } else if (leaf.row_bytes == 4) {  // a copy of a known size is one instruction
    copy_all([](char* row, const char* value) { std::memcpy(row, value, 4); });
  } else if (leaf.row_bytes == 8) {
    copy_all([](char* row, const char* value) { std::memcpy(row, value, 8); });
  } else {
    const auto bytes = static_cast<size_t>(leaf.row_bytes);
    copy_all(
        [bytes](char* row, const char* value) { CopyBytes(row, value, bytes); });
  }
}

/// Runs the function on `count` events together. The events follow each other from
/// `first` on, and belong to this plan, whose taps have no rows and no masks of
/// several bools. False with a Python error set.
bool InvokeRun(const Plan& plan, TapEvent& first, size_t count) {
  const size_t n = plan.args.size(), masks = plan.masked ? 1 : 0;
  const auto rows = static_cast<int64_t>(count);
  const Layout& layout = TapOf(plan).layout;
  RowArrays run(n);
  for (size_t i = 0; i < n; ++i) {
    const Leaf& leaf = plan.args[i];
    Ref array = ArrayOfRows(leaf, {rows});
    if (!array) return false;
    {
      // Nobody else has a reference to the array, and the events are the worker's.
      GilRelease release(leaf.row_bytes * rows >= kReleaseBytes);
      CopyRun(leaf, layout.offsets[masks + i], first, count,
              PyArray_BYTES(reinterpret_cast<PyArrayObject*>(array.get())));
    }
    run.args()[i] = Converted(leaf, std::move(array)).release();
    if (run.args()[i] == nullptr) return false;
  }
  plan.counters->mine().calls.Add(rows);
  plan.counters->mine().bytes_in.Add(rows * plan.bytes_in);
  return static_cast<bool>(run.Pass(plan.function, n));
}

/// Runs the function on an event, or on a run of `count` events from this one on; 0
/// stands for one event that is not stacked. Returns the time when it ended
/// (NowNs). The GIL is held.
int64_t Deliver(TapEvent& event, size_t count) {
  const auto& plan = static_cast<const Plan&>(*event.owner);
  const int64_t start = Ticks();
  Event delivery =
      plan.NewEvent(EventKind::kDelivery, event.device, event.run, start);
  delivery.state = EventState::kRunning;  // the worker holds the GIL already
  delivery.number = event.sequence;
  delivery.bytes *= static_cast<int64_t>(std::max<size_t>(count, 1));
  Flight flight(delivery);
  Annotation annotation;
  if (IsProfiled(start)) annotation.Begin(plan.hooks, event.sequence, 0);
  bool ok;
  {
    ActiveCall active({plan, event.device, -1, nullptr, nullptr}, start);
    active.tap = &event;
    active.taps = count;
    const CallScope scope(active);
    try {
      ok = count == 0 ? InvokeOne(plan, active, event)
                      : InvokeRun(plan, event, count);
    } catch (const std::exception&) {  // std::bad_alloc
      PyErr_NoMemory();
      ok = false;
    }
    // The plan's on_error keeps the error for the next barrier. The text is not
    // needed, since no program fails.
    if (!ok) TakeError(plan, active);
  }
  const int64_t end = Ticks();
  plan.counters->mine().python_ticks.Add(end - start);
  flight.Ended(end, ok);
  return NowNs();
}

/// Copies the operands into the queue; false if the tap was dropped.
bool Push(const Plan& plan, int device, int64_t run, const void* const* operands,
          bool at_once) {
  const TapKind& tap = TapOf(plan);
  const Layout& layout = tap.layout;
  // A tap from inside a delivery would wait for space that only its own thread can
  // make; a nested one, for a worker that may wait for the program that taps.
  const bool never_waits = at_once || tap.nested || t_delivers_taps;
  const int64_t start = Ticks();
  Flight flight(plan.NewEvent(EventKind::kTap, device, run, start));
  // The const_cast is for the reference count: the queue retains the plan until the
  // worker has delivered the event.
  const Pushed pushed = TapQueue::Get().Push(
      device, run, const_cast<Plan&>(plan), layout.bytes, tap.when_full,
      never_waits, [&](char* to) {
        // Only copies, since this may run under a lock of the queue.
        size_t i = 0;
        if (plan.masked) {
          CopyBytes(to, operands[i++], static_cast<size_t>(plan.mask_rows));
        }
        for (const Leaf& leaf : plan.args) {
          CopyBytes(to + layout.offsets[i], operands[i], leaf.buffer_bytes());
          ++i;
        }
      });
  flight.Number(pushed.sequence);
  // A tap that did not wait takes less time than a reading of the clock.
  const int64_t end = pushed.waited != 0 ? Ticks() : start;
  flight.Ended(end, pushed.queued());
  if (pushed.waited != 0) {
    plan.counts->waited.fetch_add(pushed.waited, std::memory_order_relaxed);
  }
  return pushed.queued();
}

}  // namespace

std::unique_ptr<const Kind> TapKind::For(const Plan& plan) const {
  auto kind = std::make_unique<TapKind>(*this);
  kind->layout = Layout(plan.MaskAndArgumentBytes());  // the flag is not queued
  return kind;
}

bool TapKind::Run(const Execution& execution, ActiveCall& call, Progress*) const {
  const auto run_row = [&](char* const* args, char* const* targets) {
    return RunCopied(execution.plan, args, targets);
  };
  return RunRows(execution, call, FailedRow::kIsReported, run_row);
}

bool IsWanted(const TapKind& tap, int device) {
  const std::vector<int>& only = tap.only;
  return only.empty() || std::find(only.begin(), only.end(), device) != only.end();
}

bool IsMasked(const Plan& plan, const void* const* operands) {
  // A mask with several rows is queued with the values, and the worker applies it.
  if (!plan.masked || plan.mask_rows != 1) return false;
  if (*static_cast<const bool*>(operands[0])) return false;
  plan.counts->masked.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool IsSkipped(const Plan& plan, Throttle* throttle, int device, int64_t run,
               const void* const* operands) {
  // The throttle is asked first, so that it counts the execution in any case.
  if (throttle == nullptr || throttle->Lets(device, run)) return false;
  if (TapOf(plan).always && *static_cast<const bool*>(operands[plan.operands()])) {
    return false;
  }
  plan.counts->skipped.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void AwaitSpace(const Plan& plan, int device, int64_t run) {
  TapQueue& queue = TapQueue::Get();
  const size_t bytes = TapOf(plan).layout.bytes;
  if (queue.HasSpace(bytes)) return;
  const int64_t start = Ticks();
  Flight flight(plan.NewEvent(EventKind::kTap, device, run, start));
  queue.AwaitSpace(bytes);
  const int64_t end = Ticks();
  flight.Ended(end, true);
  plan.counts->waited.fetch_add(end - start, std::memory_order_relaxed);
}

void RunTapWorker() {
  struct Delivers {
    Delivers() { t_delivers_taps = true; }
    ~Delivers() { t_delivers_taps = false; }
  };
  const Delivers mark;
  TapQueue& queue = TapQueue::Get();
  size_t batch_size = 1;
  for (;;) {
    TapBatch batch;
    {
      // Python code has to go on while the worker waits for events.
      GilRelease unlocked(true);
      batch = queue.Wait(batch_size);
    }
    if (!batch) break;
    bool slow = false, runs = false;
    while (batch && !slow) {
      const int64_t start = NowNs();
      int64_t elapsed = 0, of_single = 0;
      int single = 0;
      TapEvent* event = batch.first;
      while (event != nullptr && elapsed < kHoldNs) {
        const auto discarded = [&queue](const TapEvent& e) {
          return queue.IsDiscarded(e);
        };
        const auto most = static_cast<size_t>(
            TapOf(static_cast<const Plan&>(*event->owner)).batch);
        TapRun run{event, 1};
        if (discarded(*event)) {
          queue.CountDiscarded(*event);
        } else if (most == 0) {
          const int64_t before = elapsed;
          elapsed = Deliver(*event, 0) - start;
          of_single += elapsed - before;
          ++single;
        } else {
          TapBatch rest{event, batch.last};
          run = GatherRun(rest, most, discarded);
          batch.last = rest.last;
          elapsed = Deliver(*event, run.count) - start;
          runs = true;
        }
        event = run.last->next;  // before Finish, which frees the events
      }
      queue.Finish(batch.first, event);
      batch.first = event;
      slow = of_single > single * kSlowNs;
      if (batch && !slow) {
        GilRelease unlocked(true);
        // A thread that waits for the GIL needs some time to wake up. Without the
        // pause, the worker would have taken the GIL again by then.
        std::this_thread::sleep_for(std::chrono::microseconds(1));
      }
    }
    if (batch) queue.GiveBack(batch);
    batch_size = slow   ? 1
                 : runs ? TapQueue::kMostAtOnce
                        : std::min(batch_size * 2, TapQueue::kMostAtOnce);
    Graveyard::Get().Bury();  // Finish may have released the last use of a plan
  }
}

bool PushTap(const Plan& plan, int device, int64_t run, const void* const* operands,
             bool at_once) {
  const bool queued = Push(plan, device, run, operands, at_once);
  // A tap inside a delivery is delivered after it, by this thread's loop below.
  if (!TapQueue::Get().stopped() || t_delivers_taps) return queued;
  // One at a time, as one worker delivers. A thread that waits for its turn is not
  // attached, since the deliveries need the GIL.
  static std::mutex* turn = new std::mutex;
  const GilRelease unlocked;
  const std::lock_guard<std::mutex> lock(*turn);
  const GilGuard gil;
  const PlainFloats plain;
  RunTapWorker();  // the queue is stopped, so this returns when it is empty
  return queued;
}

}  // namespace hostcall

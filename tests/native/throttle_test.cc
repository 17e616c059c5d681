// every= and sample=: which executions go through, for runs in sequence and in
// parallel.
#undef NDEBUG
#include "plan/throttle.h"

#include <cassert>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

using hostcall::DeviceRunCounts;
using hostcall::Throttle;

namespace {

using Steps = std::vector<int64_t>;

std::unique_ptr<Throttle> Every(int64_t n) { return Throttle::For(n, 0, 1); }

/// The steps that go through, of a run of `length` executions.
Steps Run(Throttle& throttle, int64_t run, int64_t length, int device = 0) {
  Steps through;
  for (int64_t i = 0; i < length; ++i) {
    if (throttle.Lets(device, run)) through.push_back(i);
  }
  return through;
}

Steps Multiples(int64_t of, int64_t length) {
  Steps steps;
  for (int64_t i = 0; i < length; i += of) steps.push_back(i);
  return steps;
}

void WithoutConditionsThereIsNoThrottle() {
  assert(Throttle::For(0, 0, 1) == nullptr && Throttle::For(1, 0, 1) == nullptr);
  assert(Throttle::For(2, 0, 1) && Throttle::For(0, 1, 1) &&
         Throttle::For(0, 0, .5));
}

void LongRunsBeginAtStepZero(int64_t every, int64_t length) {
  auto throttle = Every(every);
  for (int64_t run = 5; run < 30; ++run) {
    assert(Run(*throttle, run, length) == Multiples(every, length));
  }
}

void ShortRunsAreCountedTogether(int64_t every, int64_t length) {
  auto throttle = Every(every);
  int64_t seen = 0;
  for (int64_t run = 0; run < 100; ++run) {
    Steps wanted;
    for (int64_t i = 0; i < length; ++i, ++seen) {
      if (seen % every == 0) wanted.push_back(i);
    }
    assert(Run(*throttle, run, length) == wanted);
  }
}

void DevicesCountByThemselves() {
  auto throttle = Every(10);
  for (int device = -1; device < 63; ++device) {
    assert(Run(*throttle, 1, 25, device) == Multiples(10, 25));
    assert(Run(*throttle, 2, 25, device) == Multiples(10, 25));
  }
}

/// Runs that take turns, up to as many as are remembered.
void RunsThatOverlap(int64_t runs) {
  auto throttle = Every(3);
  Run(*throttle, -7, 5);  // from now on runs are counted separately
  for (int64_t step = 0; step < 100; ++step) {
    for (int64_t run = 0; run < runs; ++run) {
      assert(throttle->Lets(0, run) == (step % 3 == 0));
    }
  }
}

/// A long run keeps its count, however many other runs come and go.
void AmongManyRuns() {
  auto throttle = Every(10);
  Run(*throttle, 0, 11);
  for (int64_t step = 0; step < 1000; ++step) {
    assert(throttle->Lets(0, 1) == (step % 10 == 0));
    assert(throttle->Lets(0, 100 + step));
  }
}

void ThreadsAtOnce() {
  auto throttle = Every(100);
  Run(*throttle, -1, 101);
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&throttle, thread] {
      for (int64_t run = 0; run < 20; ++run) {
        assert(Run(*throttle, 1000 * thread + run, 1000) == Multiples(100, 1000));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void ThreadsTogether() {
  auto throttle = Every(100);
  std::vector<std::thread> threads;
  std::atomic<int64_t> through{0};
  for (int64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int64_t run = 0; run < 1000; ++run) {
        if (throttle->Lets(0, run)) through.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  assert(through == 40);
}

void SharesAndSeconds() {
  auto share = Throttle::For(0, 0, 0.25);
  const Steps chosen = Run(*share, 1, 4000);
  assert(chosen.size() > 850 && chosen.size() < 1150);
  auto again = Throttle::For(0, 0, 0.25);
  assert(Run(*again, 9, 4000) == chosen);
  auto hours = Throttle::For(0, int64_t{3600} * 1'000'000'000, 1);
  assert(Run(*hours, 1, 10) == Steps{0} && Run(*hours, 2, 10).empty());
}

/// An interval is never shorter than it should be, and ends.
void IntervalsEnd() {
  constexpr int64_t kNs = 5'000'000;
  auto throttle = Throttle::For(0, kNs, 1);
  int64_t before = 0;  // a moment before the execution that went through last
  for (int i = 0; i < 5; ++i) {
    int64_t asked = hostcall::NowNs();
    while (!throttle->Lets(0, 1)) asked = hostcall::NowNs();
    assert(i == 0 || hostcall::NowNs() - before >= kNs);
    before = asked;
  }
}

/// Runs that take turns, on devices that share a place or not, are counted apart.
void RunsAreCountedApart() {
  DeviceRunCounts counts;
  for (int64_t step = 0; step < 5; ++step) {
    for (int64_t run = 0; run < 60; ++run) assert(counts.Count(0, run) == step);
    assert(counts.Count(1, 7) == step);
  }
}

void CountsOfThreadsAtOnce() {
  DeviceRunCounts counts;
  std::vector<std::thread> threads;
  for (int64_t run = 0; run < 4; ++run) {
    threads.emplace_back([&counts, run] {
      for (int64_t step = 0; step < 2000; ++step) {
        assert(counts.Count(static_cast<int>(run % 2), run) == step);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  WithoutConditionsThereIsNoThrottle();
  for (int64_t length : {4, 5, 8, 10, 101}) LongRunsBeginAtStepZero(3, length);
  for (int64_t length : {1, 2, 3, 10}) ShortRunsAreCountedTogether(10, length);
  DevicesCountByThemselves();
  for (int64_t runs : {1, 2, 8, 128}) RunsThatOverlap(runs);
  AmongManyRuns();
  ThreadsAtOnce();
  ThreadsTogether();
  SharesAndSeconds();
  IntervalsEnd();
  RunsAreCountedApart();
  CountsOfThreadsAtOnce();
  std::puts("throttle: all held");
}

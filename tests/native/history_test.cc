// keep=: the last executions of a place, for runs in sequence and in parallel.
#undef NDEBUG
#include "plan/history.h"

#include <cassert>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

using hostcall::Before;
using hostcall::History;

namespace {

/// Notes an execution with two arguments, both of which tell `value`.
void Note(History& history, int device, int64_t run, int64_t value,
          Before* before = nullptr) {
  const char small = static_cast<char>(value);
  const void* args[] = {&small, &value};
  history.Pass(device, run, args, before);
}

History Of(size_t keep) { return History(keep, {1, 8}); }

std::vector<int64_t> Values(const History& history, const Before& before) {
  std::vector<int64_t> values;
  for (const auto& kept : before.kept) {
    int64_t value = 0;
    std::memcpy(&value, kept->bytes.data() + history.offsets()[1], 8);
    assert(kept->bytes[history.offsets()[0]] == static_cast<char>(value));
    values.push_back(value);
  }
  return values;
}

using Is = std::vector<int64_t>;

void TheLastOfARun() {
  for (size_t keep : {0, 1, 3}) {
    History history = Of(keep);
    for (int64_t step = 0; step < 10; ++step) {
      Before before;
      Note(history, 0, 7, step, &before);
      Is wanted;
      for (int64_t i = 0; i < step; ++i) {
        if (i >= step - static_cast<int64_t>(keep)) wanted.push_back(i);
      }
      assert(before.step == step && Values(history, before) == wanted);
    }
  }
}

void TheFirstOfARunFindsEarlierRuns() {
  History history = Of(3);
  Note(history, 0, 1, 10);
  Note(history, 0, 2, 20);
  Before first;
  Note(history, 0, 3, 30, &first);
  assert(first.step == 0 && (Values(history, first) == Is{10, 20}));
  Before second;
  Note(history, 0, 3, 31, &second);
  assert(second.step == 1 && Values(history, second) == Is{30});
}

void DevicesAreSeparate() {
  History history(2, {1, 8}, 1);  // all devices share a place
  for (int64_t step = 0; step < 3; ++step) {
    for (int device : {0, 1}) Note(history, device, device, 10 * device + step);
  }
  Before before;
  Note(history, 1, 1, 13, &before);
  assert(before.step == 3 && Values(history, before) == Is{12});
}

void RunsThatTakeTurnsAreCountedApart() {
  History history = Of(0);
  for (int64_t step = 0; step < 5; ++step) {
    for (int64_t run = 0; run < 60; ++run) {
      Before before;
      Note(history, 0, run, 0, &before);
      assert(before.step == step);
    }
  }
}

void WhatWasHandedOutNeverChanges() {
  History history = Of(2);
  Note(history, 0, 1, 1);
  Note(history, 0, 1, 2);
  Before before;
  Note(history, 0, 1, 3, &before);
  for (int64_t step = 4; step < 9; ++step) Note(history, 0, 1, step);
  assert((Values(history, before) == Is{1, 2}));
}

void Threads() {
  History history = Of(4);
  std::vector<std::thread> threads;
  for (int64_t run = 0; run < 4; ++run) {
    threads.emplace_back([&history, run] {
      for (int64_t step = 0; step < 2000; ++step) {
        Before before;
        Note(history, static_cast<int>(run % 2), run, step, &before);
        assert(before.step == step);
        for (int64_t value : Values(history, before)) assert(value <= 2000);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  TheLastOfARun();
  TheFirstOfARunFindsEarlierRuns();
  DevicesAreSeparate();
  RunsThatTakeTurnsAreCountedApart();
  WhatWasHandedOutNeverChanges();
  Threads();
  std::puts("history: the last executions of each run and device");
}

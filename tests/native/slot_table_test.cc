// Names, counted pointers and the graveyard, on one thread and on many.
#undef NDEBUG
#include "base/slot_table.h"

#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdio>
#include <random>
#include <thread>
#include <utility>
#include <vector>

using hostcall::Graveyard;
using hostcall::RefCounted;
using hostcall::RefPtr;
using hostcall::SlotTable;

namespace {

std::atomic<int> g_alive{0};
thread_local bool t_burying = false;

/// Like a plan, it may be destroyed only where somebody says so.
struct Thing : RefCounted {
  explicit Thing(int v) : value(v) { ++g_alive; }
  ~Thing() override {
    assert(t_burying);
    assert(value >= 0);
    value = -1;
    --g_alive;
  }
  int value;
};

RefPtr<Thing> Make(int value) { return RefPtr<Thing>::Adopt(new Thing(value)); }

void Bury() {
  t_burying = true;
  Graveyard::Get().Bury();
  t_burying = false;
}

constexpr uint64_t kKey = 0x9e3779b97f4a7c15ull;

void TheSmallestFreeCountIsGiven() {
  SlotTable<Thing> table;
  for (uint64_t i = 1; i <= 5; ++i) assert(table.Add(kKey, Make(1)) == i);
  table.Remove(kKey, 4);
  table.Remove(kKey, 2);
  assert(table.live() == 3);
  assert(table.Add(kKey, Make(1)) == 2);
  assert(table.Add(kKey, Make(1)) == 4);
  assert(table.Add(kKey, Make(1)) == 6);
  for (uint64_t i = 1; i <= 6; ++i) table.Remove(kKey, i);
  assert(table.live() == 0);
  assert(table.Add(kKey, Make(1)) == 1);
  table.Remove(kKey, 1);
  Bury();
  assert(g_alive == 0);
}

void KeysAreCountedApart() {
  SlotTable<Thing> table;
  assert(table.Add(1, Make(10)) == 1 && table.Add(2, Make(20)) == 1);
  assert(table.Add(1, Make(11)) == 2);
  table.Remove(1, 1);
  assert(table.Add(2, Make(21)) == 2 && table.Add(1, Make(12)) == 1);
  assert(table.Find(1, 1)->value == 12 && table.Find(1, 2)->value == 11);
  assert(table.Find(2, 1)->value == 20 && table.Find(2, 2)->value == 21);
  for (uint64_t key : {1, 2}) {
    for (uint64_t count : {1, 2}) table.Remove(key, count);
  }
  assert(table.live() == 0);
  Bury();
  assert(g_alive == 0);
}

void ALastingTableNeverReusesANameThatWasFound() {
  SlotTable<Thing> table(true);
  assert(table.Add(kKey, Make(1)) == 1 && table.Add(kKey, Make(2)) == 2);
  assert(table.Find(kKey, 1)->value == 1);
  table.Remove(kKey, 1);
  table.Remove(kKey, 2);  // it was never found, so it is free again
  assert(table.live() == 0 && !table.Find(kKey, 1));
  assert(table.Add(kKey, Make(3)) == 2 && table.Add(kKey, Make(4)) == 3);
  assert(!table.Find(kKey, 1));
  table.Remove(kKey, 2);
  table.Remove(kKey, 3);
  Bury();
  assert(g_alive == 0);
}

void UnknownNamesFindNothing() {
  SlotTable<Thing> table;
  assert(!table.Find(kKey, 0) && !table.Find(kKey, 1) && !table.Find(0, ~0ull));
  const uint64_t count = table.Add(kKey, Make(7));
  assert(table.Find(kKey, count)->value == 7);
  assert(!table.Find(kKey, count + 1) && !table.Find(kKey + 1, count));
  table.Remove(kKey, 0);
  table.Remove(kKey, count + 1);
  table.Remove(kKey + 1, count);
  assert(table.live() == 1);
  table.Remove(kKey, count);
  table.Remove(kKey, count);
  assert(table.live() == 0);
  assert(!table.Find(kKey, count));
  Bury();
  assert(g_alive == 0);
}

void WhatWasFoundOutlivesItsRemoval() {
  SlotTable<Thing> table;
  const uint64_t count = table.Add(kKey, Make(3));
  {
    RefPtr<Thing> found = table.Find(kKey, count);
    table.Remove(kKey, count);
    Bury();
    assert(g_alive == 1 && found->value == 3);
  }
  assert(g_alive == 1);  // in the graveyard, not yet buried
  Bury();
  assert(g_alive == 0);
}

void CountsSurviveCopyMoveAndAssignment() {
  {
    RefPtr<Thing> a = Make(1), b = Make(2);
    RefPtr<Thing> copy = a;
    RefPtr<Thing> moved = std::move(b);
    assert(!b && moved->value == 2);
    a = moved;
    assert(a.get() == moved.get() && copy->value == 1);
    RefPtr<Thing>& alias = a;
    a = alias;  // to itself
    assert(a->value == 2);
    copy = {};
    Bury();
    assert(g_alive == 1);
    a = std::move(moved);
    assert(a->value == 2 && !moved);
  }
  Bury();
  assert(g_alive == 0);
}

void BuryingTakesAllThatArePushed() {
  for (int i = 0; i < 1000; ++i) Make(i);
  assert(g_alive == 1000);
  Bury();
  assert(g_alive == 0);
  Bury();
}

/// One thread buries whenever Push asks it to, another one sometimes, unasked. What
/// is pushed while nobody else buries must reach the thread that is asked.
void EveryPushIsBuriedOnRequest() {
  static std::atomic<bool> asked{false};
  Graveyard::Get().AskBy([] { asked = true; });
  std::atomic<bool> stop{false};
  std::atomic<int> round{0};
  std::thread on_request([&] {
    while (!stop) {
      if (asked.exchange(false)) Bury();
      std::this_thread::yield();
    }
  });
  std::thread unasked([&] {
    for (int seen = 0; !stop;) {
      if (round != seen) {
        seen = round;
        Bury();
      }
      std::this_thread::yield();
    }
  });
  const auto gone = [] {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (g_alive != 0) {
      assert(std::chrono::steady_clock::now() < limit);
      std::this_thread::yield();
    }
  };
  for (int i = 0; i < 5000; ++i) {
    ++round;
    Make(i);
    gone();
    Make(i);
    gone();
  }
  stop = true;
  on_request.join();
  unasked.join();
  Graveyard::Get().AskBy(nullptr);
}

/// Threads add, find and remove entries, while one buries.
void ManyThreads() {
  constexpr int kThreads = 8, kSteps = 3000;
  SlotTable<Thing> table;
  // A few keys, so that threads share them.
  std::atomic<uint64_t> shared[16] = {};  // key * 2^32 + count
  std::atomic<bool> stop{false};
  std::thread burier([&stop] {
    while (!stop) Bury();
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&table, &shared, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      const auto key_of = [](int value) {
        return static_cast<uint64_t>(value % 5);
      };
      const auto find = [&](uint64_t name) {
        return table.Find(name >> 32, name & 0xffffffff);
      };
      const auto remove = [&](uint64_t name) {
        table.Remove(name >> 32, name & 0xffffffff);
      };
      std::vector<std::pair<uint64_t, int>> mine;
      for (int i = 0; i < kSteps; ++i) {
        const int value = t * kSteps + i;
        const uint64_t key = key_of(value);
        mine.emplace_back(key << 32 | table.Add(key, Make(value)), value);
        shared[random() % 16] = mine.back().first;
        // Another thread's name: its entry may be gone, but is never a dead
        // object.
        if (RefPtr<Thing> other = find(shared[random() % 16])) {
          assert(other->value >= 0);
        }
        if (random() % 4 != 0) {
          const size_t k = random() % mine.size();
          assert(find(mine[k].first)->value == mine[k].second);
          remove(mine[k].first);
          mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(k));
        }
      }
      for (const auto& entry : mine) {
        assert(find(entry.first)->value == entry.second);
        remove(entry.first);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  burier.join();
  assert(table.live() == 0);
  Bury();
  assert(g_alive == 0);
}

/// The race that slot_table.h describes: in each round, two threads find while one
/// removes.
void FindRacesRemove() {
  for (int round = 0; round < 500; ++round) {
    SlotTable<Thing> table;
    const uint64_t count = table.Add(kKey, Make(round));
    std::atomic<int> ready{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        ++ready;
        while (ready < 3) std::this_thread::yield();
        if (t == 0) return table.Remove(kKey, count);
        RefPtr<Thing> found = table.Find(kKey, count);
        Bury();
        if (found) assert(found->value == round);
      });
    }
    for (std::thread& thread : threads) thread.join();
    Bury();
    assert(g_alive == 0);
  }
}

/// The last reference destroys at once, if it is dropped where that may be; whoever
/// drops another one, on whatever thread, leaves nothing behind.
void TheLastReferenceMayDestroyHere() {
  const auto drop_here = [](RefPtr<Thing>& thing) {
    t_burying = true;
    thing.DropHere();
    t_burying = false;
  };
  RefPtr<Thing> one = Make(1), same = one, none;
  drop_here(none);
  drop_here(one);
  assert(!one && g_alive == 1 && same->value == 1);
  drop_here(same);
  assert(!same && g_alive == 0);
  for (int round = 0; round < 2000; ++round) {
    RefPtr<Thing> shared = Make(round);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([copy = shared, i, &drop_here]() mutable {
        assert(copy->value >= 0);
        if (i % 2 == 0) drop_here(copy);
      });
    }
    drop_here(shared);
    for (std::thread& thread : threads) thread.join();
    Bury();  // if a destructor dropped the last one
    assert(g_alive == 0);
  }
}

}  // namespace

int main() {
  TheSmallestFreeCountIsGiven();
  KeysAreCountedApart();
  ALastingTableNeverReusesANameThatWasFound();
  UnknownNamesFindNothing();
  WhatWasFoundOutlivesItsRemoval();
  CountsSurviveCopyMoveAndAssignment();
  BuryingTakesAllThatArePushed();
  EveryPushIsBuriedOnRequest();
  ManyThreads();
  FindRacesRemove();
  TheLastReferenceMayDestroyHere();
  std::puts("slot_table: ok");
}

// No call enters Python after the engine was closed and became idle.
#undef NDEBUG
#include "base/engine.h"

#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

using hostcall::Engine;
using hostcall::Entry;

namespace {

void EntersAreCounted() {
  Engine engine;
  assert(!engine.closed() && !engine.forked() && engine.in_flight() == 0);
  assert(engine.WaitIdle(0));
  assert(engine.Enter() && engine.Enter());
  assert(engine.in_flight() == 2);
  assert(!engine.WaitIdle(0.01));
  engine.Leave();
  assert(!engine.WaitIdle(0));
  engine.Leave();
  assert(engine.WaitIdle(0));
}

void AClosedEngineRefusesAndCountsNobody() {
  Engine engine;
  assert(engine.Enter());
  engine.Close();
  assert(engine.closed() && !engine.forked());
  assert(!engine.Enter());
  assert(engine.in_flight() == 1);
  assert(!engine.WaitIdle(0.01));
  engine.Leave();
  assert(engine.WaitIdle(0));
  engine.Close();
  assert(!engine.Enter());
}

void WaitIdleSeesTheLastOneLeave() {
  Engine engine;
  std::atomic<bool> left{false};
  assert(engine.Enter());
  std::thread call([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    left = true;
    engine.Leave();
  });
  engine.Close();
  assert(engine.WaitIdle(30));
  assert(left);
  call.join();
}

void AForkedChildWaitsForNobody() {
  Engine engine;
  assert(engine.Enter() && engine.Enter());
  engine.CloseAfterFork();
  assert(engine.forked() && engine.closed());
  assert(engine.in_flight() == 0);
  assert(engine.WaitIdle(0));
  assert(!engine.Enter());
  assert(engine.in_flight() == 0);
}

/// The guarantee of engine.h, many times: WaitIdle waits for every call that was
/// admitted.
void NobodyIsInsideOnceIdle() {
  for (int round = 0; round < 200; ++round) {
    auto engine = std::make_unique<Engine>();
    // Not atomic on purpose: if the guarantee failed, ThreadSanitizer would see
    // that a call reads what the closing thread writes.
    int python = 1;
    std::atomic<int> refused{0};
    std::atomic<bool> started{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 6; ++t) {
      threads.emplace_back([&] {
        started = true;
        while (engine->Enter()) {
          assert(python == 1);
          engine->Leave();
        }
        ++refused;
      });
    }
    while (!started) std::this_thread::yield();
    engine->Close();
    assert(engine->WaitIdle(30));
    python = 0;
    for (std::thread& thread : threads) thread.join();
    assert(refused == 6);
    assert(engine->in_flight() == 0);
  }
}

void EntriesLeaveByThemselves() {
  Engine& engine = Engine::Get();
  assert(&engine == &Engine::Get());
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 2000; ++i) {
        Entry outer;
        assert(outer);
        Entry inner;  // a callback inside a callback
        assert(inner);
        assert(Engine::Get().in_flight() >= 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  assert(engine.in_flight() == 0);
  {
    Entry before;
    engine.Close();
    Entry after;
    assert(before && !after);
    assert(engine.in_flight() == 1);
  }
  assert(engine.in_flight() == 0);
}

}  // namespace

int main() {
  EntersAreCounted();
  AClosedEngineRefusesAndCountsNobody();
  WaitIdleSeesTheLastOneLeave();
  AForkedChildWaitsForNobody();
  NobodyIsInsideOnceIdle();
  EntriesLeaveByThemselves();
  std::puts("engine: ok");
}

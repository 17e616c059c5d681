// Calls and taps on streams of the driver of tests/fakegpu.
#include "cuda/staging.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"

namespace hostcall {
namespace {

Span SpanOf(Array& array) { return {array.data(), array.size()}; }

/// Never destroyed: as in the engine, one object for the process.
TapStreams& Taps() {
  static TapStreams* const streams = new TapStreams;
  return *streams;
}
/// Waits for the stream and for the taps behind it.
void AwaitTaps(const Stream& stream) {
  stream.Wait();
  assert(Taps().Await(60));
}

/// A receiver whose values are never lost.
template <typename Deliver>
Receiver Whole(Deliver deliver) {
  return {deliver, [] { assert(false); }};
}

/// The function on the host: a result is its operand with one added to each byte.
void AddOne(const StagedCall& call, size_t index, size_t bytes) {
  const auto* from = static_cast<const char*>(call.operands()[index]);
  auto* to = static_cast<char*>(call.results()[index]);
  for (size_t i = 0; i < bytes; ++i) to[i] = static_cast<char>(from[i] + 1);
}

void Call(PinnedPool& pool, CudaStream stream, Array& operand, Array& result) {
  StagedCall call(pool, stream, {SpanOf(operand)}, {SpanOf(result)});
  call.Fetch();
  AddOne(call, 0, operand.size());
  call.Store();
}

/// A call without operands, which does not wait for the device.
void Produce(PinnedPool& pool, CudaStream stream, Array& result, int seed) {
  StagedCall call(pool, stream, {}, {SpanOf(result)});
  call.Fetch();
  std::memcpy(call.results()[0], Numbers(result.size(), seed).data(),
              result.size());
  call.Store();
}

// --- Calls ----------------------------------------------------------------------

void RoundTrips() {
  PinnedPool pool(size_t{64} << 20, kForEver);
  Stream stream, other(1);
  fakeSetDelayMicroseconds(100);
  for (CudaStream on :
       {CudaStream(stream), CudaStream(other), CudaStream(nullptr)}) {
    for (size_t bytes :
         {0, 1, 63, 64, 65, 4095, 4097, 100'000, 1 << 20, 3'200'001}) {
      Array x = Numbers(bytes, 1), y = Numbers(bytes / 2, 2);
      Array u(x.size()), v(y.size());
      StagedCall call(pool, on, {SpanOf(x), SpanOf(y)}, {SpanOf(u), SpanOf(v)});
      call.Fetch();
      for (int i = 0; i < 2; ++i) {
        const void* const both[] = {call.operands()[i], call.results()[i]};
        for (const void* at : both) {
          assert(at != nullptr && reinterpret_cast<uintptr_t>(at) % 64 == 0);
        }
        AddOne(call, static_cast<size_t>(i), i == 0 ? x.size() : y.size());
      }
      call.Store();
      assert(Driver().cuStreamSynchronize(on) == 0);
      for (char& value : x) ++value;
      for (char& value : y) ++value;
      assert(u == x && v == y);
    }
  }
  AssertClean(pool);
}

void ACallWaitsOnce() {
  PinnedPool pool(1 << 20, kForEver);
  Stream stream;
  Array x(100), y(5000), nothing;
  for (int i = 0; i < 20; ++i) {
    fakeReset();
    StagedCall call(pool, stream, {SpanOf(x), SpanOf(nothing), SpanOf(y)},
                    {SpanOf(x), SpanOf(nothing), SpanOf(y)});
    call.Fetch();
    call.Store();
    assert(Waits() == 1);
    assert(fakeCount("cuMemcpyDtoHAsync_v2") == 2);
    assert(fakeCount("cuMemcpyHtoDAsync_v2") == 2);
    // The block and its event are reused.
    assert(fakeCount("cuMemHostAlloc") == (i == 0) && pool.stats().reuses == i);
    assert(fakeCount("cuEventCreate") == (i == 0));
  }
  fakeReset();
  Produce(pool, stream, y, 1);
  StagedCall(pool, stream, {}, {}).Fetch();
  assert(Waits() == 0);
  AssertClean(pool);
}

/// On a device that is stopped until the gate opens.
void ABlockIsKeptUntilItsResultsAreCopied() {
  PinnedPool pool(1 << 20, kForEver);
  Stream stream;
  Gate gate;
  Array results[3] = {Array(4096), Array(4096), Array(4096)};
  stream.Block(gate);
  for (int i = 0; i < 3; ++i) Produce(pool, stream, results[i], i);
  assert(pool.stats().allocations == 3 && pool.stats().pending_bytes == 3 * 4096);
  gate.Open();
  stream.Wait();
  for (int i = 0; i < 3; ++i) assert(results[i] == Numbers(4096, i));
  Produce(pool, stream, results[0], 5);
  assert(pool.stats().allocations == 3 && pool.stats().pending_bytes == 4096);
  AssertClean(pool);
}

/// Streams and threads share few blocks; both kinds of call, and every value is
/// checked.
void ManyInFlight() {
  constexpr int kStreams = 4;
  constexpr size_t kCalls = 50;
  PinnedPool pool(5 * 8192, kForEver);
  fakeSetDelayMicroseconds(200);
  std::vector<std::thread> threads;
  for (int number = 0; number < kStreams; ++number) {
    threads.emplace_back([&pool, number] {
      Stream stream(number % 2);
      std::vector<Array> made(kCalls, Array(8000)), kept(kCalls, Array(3000));
      for (size_t i = 0; i < kCalls; ++i) {
        Produce(pool, stream, made[i], number * 50 + static_cast<int>(i));
        // Rarely, since it waits for the device, which otherwise falls far behind.
        if (i % 5 == 0) Call(pool, stream, kept[i], kept[i]);
      }
      stream.Wait();
      for (size_t i = 0; i < kCalls; ++i) {
        assert(made[i] == Numbers(8000, number * 50 + static_cast<int>(i)));
        assert(kept[i] == Array(3000, i % 5 == 0));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const PinnedPool::Stats stats = pool.stats();
  assert(stats.peak_bytes <= stats.limit && stats.overruns == 0 && stats.waits > 0);
  AssertClean(pool);
}

void ACapturingStreamIsRefused() {
  PinnedPool pool(1 << 20, kForEver);
  Stream stream;
  Array x(10);
  fakeSetCapturing(stream, 1);
  for (bool tap : {false, true}) {
    try {
      if (tap) StageTap(pool, Taps(), stream, {SpanOf(x)}, PoolIsFull::kWait, {});
      StagedCall call(pool, stream, {SpanOf(x)}, {});
      assert(false);
    } catch (const CudaError& error) {
      assert(std::strstr(error.what(), "CUDA graph"));
    }
  }
  assert(fakeCount("cuMemcpyDtoHAsync_v2") + fakeCount("cuLaunchHostFunc") == 0);
  AssertClean(pool);
  Call(pool, stream, x, x);
  AssertClean(pool);
}

/// Each function of the driver fails once: the call reports that, leaves nothing
/// behind, and the next call works. If only an event can't be recorded, the pool
/// waits for the stream, and the call succeeds.
void FailuresLeaveNothing() {
  const struct {
    const char *function, *text;
    bool call, tap;  // which of the two is expected to fail
  } kCases[] = {
      {"cuStreamGetCtx", "cuStreamGetCtx", true, true},
      {"cuCtxPushCurrent_v2", "cuCtxPushCurrent", true, true},
      {"cuStreamIsCapturing", "cuStreamIsCapturing", true, true},
      {"cuCtxGetCurrent", "cuCtxGetCurrent", true, true},
      {"cuMemHostAlloc", "cuMemHostAlloc", true, true},
      {"cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync", true, true},
      {"second operand", "cuMemcpyDtoHAsync", true, true},
      {"cuStreamSynchronize", "cuStreamSynchronize", true, false},
      {"cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync", true, false},
      {"second result", "cuMemcpyHtoDAsync", true, false},
      {"cuEventCreate", "", false, false},
      {"cuEventRecord", "cuEventRecord", false, true},
      {"cuStreamWaitEvent", "cuStreamWaitEvent", false, true},
      {"cuLaunchHostFunc", "cuLaunchHostFunc", false, true},
  };
  PinnedPool pool(1 << 20, kForEver);
  Stream stream;
  Array x = Numbers(5000, 1), y(5000);
  const auto held = std::make_shared<int>(0);
  for (const auto& one : kCases) {
    for (bool tap : {false, true}) {
      std::vector<Span> operands{SpanOf(x), SpanOf(x)},
          results{SpanOf(y), SpanOf(y)};
      if (std::string(one.function) == "second operand")
        operands[1].device = nullptr;
      if (std::string(one.function) == "second result") results[1].device = nullptr;
      fakeSetDelayMicroseconds(2000);  // so that enqueued copies are not done yet
      fakeFailNext(one.function, 2);
      std::string error;
      try {
        if (tap) {
          StageTap(pool, Taps(), stream, operands, PoolIsFull::kWait,
                   Whole([held](const void* const*) {}));
        } else {
          StagedCall call(pool, stream, operands, results);
          call.Fetch();
          call.Store();
        }
      } catch (const CudaError& caught) {
        error = caught.what();
      }
      assert(error.empty() == !(tap ? one.tap : one.call));
      const std::string text = "hostcall: " + std::string(one.text) + " failed: ";
      assert(error.empty() || error.compare(0, text.size(), text) == 0);
      Trim(pool);  // a block that is freed too early is a fault of AssertClean
      assert(Taps().Await(60));
      AssertClean(pool);
      assert(held.use_count() == 1);
      Call(pool, stream, x, y);
      stream.Wait();
      assert(y[0] == x[0] + 1 && y[4999] == static_cast<char>(x[4999] + 1));
      AssertClean(pool);
    }
  }
  {  // the user's function fails, so there is no Store
    StagedCall call(pool, stream, {SpanOf(x)}, {SpanOf(y)});
    call.Fetch();
  }
  assert(fakeCount("cuEventRecord") == 0);
  AssertClean(pool);
}

// --- Taps -----------------------------------------------------------------------

/// Each tap delivers the value that the memory had at the tap's place in the
/// stream.
void TapsOfAStreamComeInOrder() {
  constexpr int kTaps = 150;
  PinnedPool pool(16 * 4096, kForEver);
  std::vector<std::thread> threads;
  for (int number = 0; number < 3; ++number) {
    threads.emplace_back([&pool, number] {
      Stream stream(number % 2);
      ScopedContext current(stream);
      Array x(1000 * static_cast<size_t>(number) + 10), nothing;
      const auto device = reinterpret_cast<CudaDevicePtr>(x.data());
      std::vector<std::thread::id> on;
      int next = 0;
      for (int i = 0; i < kTaps; ++i) {
        assert(Driver().cuMemsetD8Async(device, i & 0x7f, x.size(), stream) == 0);
        StageTap(pool, Taps(), stream, {SpanOf(nothing), SpanOf(x)},
                 PoolIsFull::kWait, Whole([&, i](const void* const* data) {
                   assert(next++ == i && data[0] != nullptr);
                   const Array wanted(x.size(), static_cast<char>(i & 0x7f));
                   assert(!std::memcmp(data[1], wanted.data(), x.size()));
                   on.push_back(std::this_thread::get_id());
                 }));
      }
      AwaitTaps(stream);
      assert(next == kTaps && on.front() != std::this_thread::get_id());
      for (std::thread::id id : on) assert(id == on.front());
    });
  }
  for (std::thread& thread : threads) thread.join();
  assert(pool.stats().peak_bytes <= pool.stats().limit &&
         pool.stats().overruns == 0);
  assert(fakeCount("cuEventRecord") ==
         3 * kTaps);  // blocks come back without events
  AssertClean(pool);
}

/// On a device that is stopped until the gate opens.
void ATapDoesNotWaitForTheDevice() {
  PinnedPool pool(4 * 4096, kForEver);
  Stream stream;
  Gate gate;
  Array x(4096);
  std::atomic<int> delivered{0}, lost{0};
  const auto tap = [&](bool may_wait) {
    const int before = lost;
    StageTap(pool, Taps(), stream, {SpanOf(x)},
             may_wait ? PoolIsFull::kWait : PoolIsFull::kLoseNewest,
             {[&](const void* const*) { ++delivered; }, [&] { ++lost; }});
    return lost == before;
  };
  stream.Block(gate);
  for (int i = 0; i < 4; ++i) assert(tap(i % 2 == 0));
  const long launched = fakeCount("cuLaunchHostFunc");
  assert(!tap(false));  // the pool is full: nothing is enqueued
  assert(fakeCount("cuLaunchHostFunc") == launched);
  assert(delivered == 0 && Waits() == 0);
  std::thread waits([&] { assert(tap(true)); });
  WaitUntil([&] { return pool.stats().waits == 1; });
  gate.Open();
  waits.join();
  AwaitTaps(stream);
  assert(delivered == 5 && tap(false));
  AwaitTaps(stream);
  assert(delivered == 6);
  AssertClean(pool);
}

/// The device goes on while a tap is delivered, and Await tells when all are.
void TheDeviceDoesNotWaitForATap() {
  PinnedPool pool(1 << 20, kForEver);
  Stream stream;
  Gate gate;
  Array x = Numbers(4096, 1), y(4096);
  std::vector<int> seen;
  for (int i = 0; i < 3; ++i) {
    StageTap(pool, Taps(), stream, {SpanOf(x)}, PoolIsFull::kWait,
             Whole([&gate, &seen, i](const void* const*) {
               gate.Wait();
               seen.push_back(i);
             }));
  }
  Call(pool, stream, x, y);
  stream.Wait();
  assert(y[0] == x[0] + 1 && !Taps().Await(0.01));
  gate.Open();
  assert(Taps().Await(60) && seen == (std::vector<int>{0, 1, 2}));
  AssertClean(pool);
}

/// A tap that may lose older ones gets the block of the oldest on its stream that
/// is large enough. Each tap that is delivered has the values of its own place.
void ATapDisplacesTheOldestOfItsStream() {
  constexpr int kTaps = 10;
  PinnedPool pool(4 * 4096, kForEver);
  Stream stream, other;
  Gate gate;
  Array x(4096);
  const auto device = reinterpret_cast<CudaDevicePtr>(x.data());
  std::vector<int> delivered, lost;
  const auto tap = [&](const Stream& on, int number, PoolIsFull full) {
    ScopedContext current(on);
    if (&on == &stream) {
      assert(Driver().cuMemsetD8Async(device, static_cast<unsigned char>(number),
                                      x.size(), on) == 0);
    }
    StageTap(pool, Taps(), on, {SpanOf(x)}, full,
             {[&, number](const void* const* data) {
                const Array wanted(x.size(), static_cast<char>(number));
                assert(!std::memcmp(data[0], wanted.data(), x.size()));
                delivered.push_back(number);
              },
              [&lost, number] { lost.push_back(number); }});
  };
  stream.Block(gate);
  tap(stream, 0, PoolIsFull::kLoseNewest);  // which no other may displace
  for (int i = 1; i < kTaps; ++i) tap(stream, i, PoolIsFull::kLoseOldest);
  assert(lost.empty());  // it is told where they would have been delivered
  tap(stream, 10, PoolIsFull::kLoseNewest);
  tap(other, 11, PoolIsFull::kLoseOldest);  // another stream's are left alone
  assert(lost == (std::vector<int>{10, 11}));
  {
    ScopedContext current(stream);
    Array large(5000);  // in a block of 8,192 bytes, which none of them has
    StageTap(pool, Taps(), stream, {SpanOf(large)}, PoolIsFull::kLoseOldest,
             {[](const void* const*) { assert(false); },
              [&lost] { lost.push_back(12); }});
  }
  assert(lost.back() == 12);
  lost.clear();
  gate.Open();
  AwaitTaps(stream);
  assert(delivered == (std::vector<int>{0, 7, 8, 9}));
  assert(lost == (std::vector<int>{1, 2, 3, 4, 5, 6}));
  AssertClean(pool);
}

/// Taps that displace others on a device that is neither fast nor slow: each is
/// delivered with its values, or lost, and once.
void ATapThatIsDeliveredIsNotDisplaced() {
  constexpr int kTaps = 2000;
  PinnedPool pool(3 * 4096, kForEver);
  Stream stream;
  Array x(4096);
  const auto device = reinterpret_cast<CudaDevicePtr>(x.data());
  std::vector<int> ends(kTaps);
  int newest = -1;
  {
    ScopedContext current(stream);
    for (int i = 0; i < kTaps; ++i) {
      const auto value = static_cast<unsigned char>(i);
      assert(Driver().cuMemsetD8Async(device, value, x.size(), stream) == 0);
      StageTap(pool, Taps(), stream, {SpanOf(x)}, PoolIsFull::kLoseOldest,
               {[&, i, value](const void* const* data) {
                  const Array wanted(x.size(), static_cast<char>(value));
                  assert(!std::memcmp(data[0], wanted.data(), x.size()));
                  assert(i > newest);
                  newest = i;
                  ++ends[static_cast<size_t>(i)];
                },
                [&ends, i] { ++ends[static_cast<size_t>(i)]; }});
    }
  }
  AwaitTaps(stream);
  assert(newest == kTaps - 1 && ends == std::vector<int>(kTaps, 1));
  AssertClean(pool);
}

/// A call waits for the taps before it, and for none of a device that may need what
/// the program does behind the call.
void AwaitOfTapsThatAreReached() {
  PinnedPool pool(1 << 20, kForEver);
  Stream here, there(1);
  Gate reached, delivers;
  Array x(10), y(10);
  std::atomic<int> delivered{0};
  const auto tap = [&](const Stream& on, Gate* waits) {
    StageTap(pool, Taps(), on, {SpanOf(x)}, PoolIsFull::kWait,
             Whole([&delivered, waits](const void* const*) {
               if (waits != nullptr) waits->Wait();
               ++delivered;
             }));
  };
  there.Block(reached);
  tap(there, nullptr);
  for (int i = 0; i < 3; ++i) tap(here, &delivers);
  Call(pool, here, x, y);  // it has waited for its stream
  assert(!Taps().Await(0.01, WaitFor::kReachedTaps));
  delivers.Open();
  assert(Taps().Await(60, WaitFor::kReachedTaps) && delivered == 3);
  assert(!Taps().Await(0.01));
  reached.Open();
  assert(Taps().Await(60) && delivered == 4);
  here.Wait();
  AssertClean(pool);
}

/// If the context is lost, nothing tells that taps came: Await does not wait for
/// them.
void AwaitEndsWithTheContext() {
  for (const char* function : {"cuStreamQuery", "cuCtxPushCurrent_v2"}) {
    Stream stream;
    Gate gate;
    PinnedPool pool(1 << 20, kForEver);
    stream.Block(gate);
    Array x(10);
    StageTap(pool, Taps(), stream, {SpanOf(x)}, PoolIsFull::kWait,
             Whole([](const void* const*) {}));
    assert(!Taps().Await(0));
    fakeFailNext(function, 2);
    assert(Taps().Await(60));
    gate.Open();
    AwaitTaps(stream);
    AssertClean(pool);
  }
}

void DeliveriesThatThrowAreLost() {
  PinnedPool pool(4096, kForEver);
  Stream stream;
  Array x(10), nothing;
  std::atomic<int> lost{0};
  for (Array* array : {&x, &nothing}) {
    StageTap(pool, Taps(), stream, {SpanOf(*array)}, PoolIsFull::kWait,
             {[](const void* const*) { throw std::runtime_error("no"); },
              [&lost] { ++lost; }});
  }
  AwaitTaps(stream);
  assert(lost == 2 && pool.stats().in_use_bytes == 0);
  AssertClean(pool);
}

}  // namespace
}  // namespace hostcall

int main() {
  using namespace hostcall;  // NOLINT
  LoadFake();
  RoundTrips();
  ACallWaitsOnce();
  ABlockIsKeptUntilItsResultsAreCopied();
  for (int i = 0; i < 3; ++i) ManyInFlight();
  ACapturingStreamIsRefused();
  FailuresLeaveNothing();
  TapsOfAStreamComeInOrder();
  ATapDoesNotWaitForTheDevice();
  TheDeviceDoesNotWaitForATap();
  ATapDisplacesTheOldestOfItsStream();
  for (int i = 0; i < 3; ++i) ATapThatIsDeliveredIsNotDisplaced();
  AwaitOfTapsThatAreReached();
  AwaitEndsWithTheContext();
  DeliveriesThatThrowAreLost();
  std::puts("staging: ok");
}

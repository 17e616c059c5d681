// Values between a device and the host: copies on XLA's stream, through
// pinned memory, either side of the same call into Python that the CPU makes.
//
// Knows no Python and no XLA (tests/native/staging_test.cc).
//
// Guarantees
//   * A call waits for the device exactly once, when its operands are copied, and
//     not at all where it has no operand bytes. Its results are copied after the
//     call has returned, and nobody waits for that.
//   * A tap never waits for the device, but where the pool is full and it may; the
//     device waits for a tap only as long as `deliver` takes. Taps of one stream
//     are delivered in the order of StageTap.
//   * One block of pinned memory for each call or tap, back in the pool when the
//     device no longer uses it, whatever failed (pinned_pool.h says why that can't
//     deadlock and nothing is overwritten).
//   * No pageable memory: from that the driver would copy through a buffer of its
//     own, and wait for the device.
//   * No thread needs a current context.
//
// Why one wait, and none without operands. What must be over when the function runs
// is the copy of its operands, which stands behind all work that made them. The
// results' memory may still be in use by earlier work on the stream: by then
// nothing writes to it but the copies of Store, which stand behind that work. (So a
// function without operands runs when it is dispatched, maybe ahead of the device.)
//
// A stream that is being captured into a CUDA graph is refused before anything is
// enqueued: the function would run once, at capture, and not when the graph runs; a
// tap's would run at each, on a block that is long gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/cuda_driver.h"
#include "cuda/pinned_pool.h"

namespace hostcall {

/// Memory of a device.
struct Span {
  void* device;
  size_t bytes;
};

/// One call of a function on the host:
///
///   StagedCall call(driver, pool, stream, operands, results);
///   call.Fetch();
///   Invoke(call.operands(), call.results());
///   call.Store();  // or, if that failed: just let it go
///
/// All of it may throw CudaError, and all of it is one thread's.
class StagedCall {
 public:
  /// Takes the block; waits where the pool is full.
  StagedCall(const CudaDriver& driver, PinnedPool& pool, CudaStream stream,
             std::vector<Span> operands, std::vector<Span> results);
  ~StagedCall();
  StagedCall(const StagedCall&) = delete;
  StagedCall& operator=(const StagedCall&) = delete;

  /// Copies the operands to the host, and waits until they are there.
  void Fetch();

  /// Addresses on the host, on 64 bytes, none null; valid until Store.
  const void* const* operands() const { return operand_data_.data(); }
  void* const* results() const { return result_data_.data(); }

  /// Enqueues the copies of the results to the device, and gives the block back
  /// when they have ended.
  void Store();

 private:
  const CudaDriver& driver_;
  const CudaStream stream_;
  const std::vector<Span> operands_, results_;
  PinnedBlock block_;  ///< empty where there are no bytes, and after Store
  std::vector<void*> operand_data_, result_data_;
  bool in_flight_ = false;  ///< copies were enqueued that may not have ended
};

/// Gets the addresses of the values on the host, on 64 bytes, valid while it runs.
///
/// It runs on a thread of the driver's and must not call CUDA, nor wait for anybody
/// who does: the stream, and maybe others' taps, go on when it returns. It should
/// do no more than copy the values into a queue. What it throws ends here, and is
/// counted (FailedDeliveries): above it are only the driver's frames, which an
/// exception must not cross, and the program that sent the tap has gone on.
using Deliver = std::function<void(const void* const* data)>;

/// Sends values to the host, where `deliver` gets them when the device comes to
/// this point of the stream. False, with nothing enqueued, where the pool is full
/// and `may_wait` is not set. Throws CudaError; `deliver` is then never called.
///
/// After an error of the whole context the driver calls no functions any more: then
/// the values, and the block, are lost with the context.
[[nodiscard]] bool StageTap(const CudaDriver& driver, PinnedPool& pool,
                            CudaStream stream, const std::vector<Span>& spans,
                            bool may_wait, Deliver deliver);

/// Deliveries of this process that threw.
int64_t FailedDeliveries();

}  // namespace hostcall

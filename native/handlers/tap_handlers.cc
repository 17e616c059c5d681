// Taps on the CPU: the operands are copied into the queue, and XLA goes on.
//
// Nothing here knows the GIL: the thread waits for Python only where the queue is
// full and the tap is to block.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/engine.h"
#include "handlers/cpu_handlers.h"
#include "handlers/ffi.h"
#include "invoke/tap_worker.h"

namespace hostcall {

bool IsWanted(const PlanState& state, int device) {
  const std::vector<int>& only = state.plan->tap.only;
  return only.empty() || std::find(only.begin(), only.end(), device) != only.end();
}

bool IsMasked(const Plan& plan, const void* const* operands) {
  if (!plan.masked || plan.mask_rows != 1) return false;
  if (*static_cast<const bool*>(operands[0])) return false;
  plan.counts->masked.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool IsSkipped(const Plan& plan, Throttle* throttle, int device, int64_t run) {
  if (throttle == nullptr || throttle->Lets(device, run)) return false;
  plan.counts->skipped.fetch_add(1, std::memory_order_relaxed);
  return true;
}

namespace {

XLA_FFI_Error* Tap(XLA_FFI_CallFrame* frame) {
  const PlanState* state = nullptr;
  if (XLA_FFI_Error* error = StateOf(frame, &state)) return error;
  const Plan& plan = *state->plan;
  // A linked tap has one operand more, which is not data either (Pointers skips
  // it).
  Pointers operands(frame->args, frame->args.args, plan.operands());
  const size_t wanted =
      plan.tap.through ? plan.args.size() : static_cast<size_t>(plan.tap.linked);
  Pointers results(frame->rets, frame->rets.rets, wanted);
  if (!operands.ok() || !results.ok()) {
    return MakeError(frame->api,
                     "hostcall: the program passes another number of buffers "
                     "than it was lowered with");
  }
  if (plan.tap.through) {
    const size_t first = plan.masked ? 1 : 0;
    for (size_t i = 0; i < plan.args.size(); ++i) {
      void* out = results.data()[i];
      const void* in = operands.data()[first + i];
      if (out != in) std::memcpy(out, in, plan.args[i].buffer_bytes());
    }
  }
  if (plan.tap.linked) std::memset(results.data()[0], 0, sizeof(int32_t));
  // Where all devices tap, a masked one need not ask XLA which it is.
  if (plan.tap.only.empty() && IsMasked(plan, operands.data())) return nullptr;
  const int device = DeviceOrdinal(frame);
  if (!IsWanted(*state, device) || IsMasked(plan, operands.data())) return nullptr;
  const int64_t run = RunId(frame);
  if (IsSkipped(plan, state->throttle.get(), device, run)) return nullptr;
  Entry entry;
  if (!entry) {
    return MakeError(frame->api, ClosedText(),
                     XLA_FFI_Error_Code_FAILED_PRECONDITION);
  }
  PushTap(plan, device, run, operands.data());
  return nullptr;
}

}  // namespace

XLA_FFI_Error* ExecuteTap(XLA_FFI_CallFrame* frame) { return Guarded(frame, Tap); }

XLA_FFI_Error* ExecuteLink(XLA_FFI_CallFrame* frame) {
  return Guarded(frame, [](XLA_FFI_CallFrame* f) -> XLA_FFI_Error* {
    Pointers in(f->args, f->args.args, 1);
    Pointers out(f->rets, f->rets.rets, 1);
    if (!in.ok() || !out.ok()) {
      return MakeError(f->api, "hostcall: a link has one operand and one result");
    }
    std::memcpy(out.data()[0], in.data()[0], sizeof(int32_t));
    return nullptr;
  });
}

}  // namespace hostcall

// What a call with `keep=` does besides: it notes each execution, and tells the
// function of those before (plan/history.h).
#include <new>
#include <vector>

#include "invoke/invoke.h"
#include "plan/arrays.h"
#include "plan/packing.h"

namespace nb = nanobind;

namespace hostcall {

bool Masked(const Plan& plan, int device, int64_t run, const void* const* operands,
            void* const* results, Before* before) {
  if (plan.history) {
    // Of a team, any device may lead, but all pass with the same arguments.
    const int owner = plan.team && plan.team->mode == TeamMode::kOnce ? -1 : device;
    Before* told = plan.KeepsBack(operands) ? nullptr : before;
    try {
      plan.history->Pass(owner, run, operands + 1, told);
    } catch (const std::bad_alloc&) {
      // The history lacks this execution. A team must not be left by an exception:
      // its other devices would wait for ever.
    }
  }
  return FilledForMask(plan, operands, results);
}

nb::list ListOfKept(const ActiveCall& call) {
  const Plan& plan = *call.plan;
  nb::list list;
  for (const auto& kept : call.before->kept) {
    nb::list arrays;
    for (size_t i = 0; i < plan.args.size(); ++i) {
      const Leaf& leaf = plan.args[i];
      const char* data = kept->bytes.data() + plan.history->offsets()[i];
      std::vector<char> unpacked;
      if (leaf.bits != 0) {
        unpacked.resize(static_cast<size_t>(leaf.count * leaf.rows));
        UnpackBits(data, unpacked.data(), leaf.count * leaf.rows, leaf.bits,
                   leaf.is_signed);
        data = unpacked.data();
      }
      for (size_t axis = 0; call.row != nullptr && axis < plan.grid.size();
           ++axis) {
        data += leaf.grid_strides[axis] * (*call.row)[axis] * leaf.row_bytes;
      }
      PyObject* array = OwnedArray(leaf, data).release();
      if (array == nullptr || !Convert(leaf, &array)) throw nb::python_error();
      arrays.append(nb::steal(array));
    }
    list.append(nb::make_tuple(kept->run, kept->step, nb::tuple(arrays)));
  }
  return list;
}

}  // namespace hostcall

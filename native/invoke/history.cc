// What a call with `keep=` does besides: it notes each execution, and tells the
// function of those before (plan/history.h).
#include <new>
#include <vector>

#include "invoke/invoke.h"
#include "plan/arrays.h"
#include "plan/packing.h"

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

Ref ListOfKept(const ActiveCall& call) {
  const Plan& plan = *call.plan;
  Ref list = Ref::Steal(PyList_New(0));
  for (const auto& kept : call.before->kept) {
    Ref arrays = Ref::Steal(PyTuple_New(static_cast<Py_ssize_t>(plan.args.size())));
    if (!list || !arrays) return Ref();
    for (size_t i = 0; i < plan.args.size(); ++i) {
      const Leaf& leaf = plan.args[i];
      const char* data = kept->bytes.data() + plan.history->offsets()[i];
      std::vector<char> unpacked;
      if (leaf.bits != 0) {
        unpacked.resize(static_cast<size_t>(leaf.count * leaf.rows));
        UnpackBits(reinterpret_cast<const uint8_t*>(data),
                   reinterpret_cast<uint8_t*>(unpacked.data()),
                   leaf.count * leaf.rows, leaf.bits, leaf.is_signed);
        data = unpacked.data();
      }
      for (size_t axis = 0; call.row != nullptr && axis < plan.grid.size();
           ++axis) {
        data += leaf.grid_strides[axis] * (*call.row)[axis] * leaf.row_bytes;
      }
      PyObject* array = OwnedArray(leaf, data).release();
      if (array == nullptr || !Convert(leaf, &array)) return Ref();
      PyTuple_SET_ITEM(arrays.get(), static_cast<Py_ssize_t>(i), array);
    }
    Ref entry =
        Ref::Steal(Py_BuildValue("LLO", static_cast<long long>(kept->run),
                                 static_cast<long long>(kept->step), arrays.get()));
    if (!entry || PyList_Append(list.get(), entry.get()) != 0) return Ref();
  }
  return list;
}

}  // namespace hostcall

// How a function's return value is stored in XLA's buffers.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bytes.h"
#include "invoke/invoke.h"
#include "plan/arrays.h"

namespace hostcall {
namespace {

/// Whether arrays of these types have equal bytes. Comparing the pointers is not
/// enough: an array that was unpickled may have its own descriptor object.
bool IsSame(const PyArray_Descr* type, const PyArray_Descr* want) {
  return type == want ||
         (type->type_num == want->type_num && PyDataType_ISNOTSWAPPED(type) &&
          (PyTypeNum_ISNUMBER(type->type_num) || type->type_num == NPY_BOOL));
}

/// Stores a scalar. Always true.
template <typename T>
bool Put(char* target, T value) {
  std::memcpy(target, &value, sizeof value);
  return true;
}

/// Stores a double as a float; false if it is finite and too large for one.
bool PutNarrow(char* target, double value) {
  const auto narrow = static_cast<float>(value);
  if (std::isinf(narrow) && !std::isinf(value)) return false;
  return Put(target, narrow);
}

/// Stores a value that needs no conversion. Returns false, without a Python error,
/// if it needs one.
bool StoreFast(const Leaf& leaf, bool literals, PyObject* value, char* target) {
  PyArray_Descr* want = leaf.descr();
  // The values of a subclass may be more than its data, as in a masked array.
  // Python's `coerce` knows which subclasses are plain arrays.
  if (PyArray_CheckExact(value)) {
    auto* array = reinterpret_cast<PyArrayObject*>(value);
    if (!IsSame(PyArray_DESCR(array), want) || !PyArray_IS_C_CONTIGUOUS(array) ||
        PyArray_NDIM(array) != static_cast<int>(leaf.dims.size()) ||
        !std::equal(leaf.dims.begin(), leaf.dims.end(), PyArray_DIMS(array))) {
      return false;
    }
    const char* source = PyArray_BYTES(array);
    // Source and target are the same if the function returns its `out` array.
    if (source != target && leaf.row_bytes != 0) {
      // The caller owns a reference to the array, so its memory stays without the
      // GIL.
      GilRelease release(leaf.row_bytes >= kReleaseBytes);
      CopyBytes(target, source, static_cast<size_t>(leaf.row_bytes));
    }
    return true;
  }
  if (!leaf.dims.empty() || !literals) return false;
  switch (want->type_num) {
    case NPY_DOUBLE:  // PyFloat_Check is true for np.float64, a subclass
      return PyFloat_Check(value) && Put(target, PyFloat_AS_DOUBLE(value));
    case NPY_FLOAT:
      if (PyArray_IsScalar(value, Float)) {
        return Put(target, PyArrayScalar_VAL(value, Float));
      }
      return PyFloat_Check(value) && PutNarrow(target, PyFloat_AS_DOUBLE(value));
    case NPY_INT: {
      if (PyArray_IsScalar(value, Int)) {
        return Put(target, PyArrayScalar_VAL(value, Int));
      }
      if (!PyLong_CheckExact(value)) return false;
      int overflow;
      const long wide = PyLong_AsLongAndOverflow(value, &overflow);
      const int x = static_cast<int>(wide);
      return overflow == 0 && wide == x && Put(target, x);
    }
    case NPY_BOOL:
      return (value == Py_True || value == Py_False) &&
             Put(target, value == Py_True);
    default:
      return false;
  }
}

/// Stores a leaf, after `coerce` if needed. False with a Python error set.
bool StoreLeaf(const Plan& plan, size_t number, PyObject* value, char* target) {
  const Leaf& leaf = plan.results[number];
  if (StoreFast(leaf, plan.literals, value, target)) return true;
  Ref index = Ref::Steal(PyLong_FromSize_t(number));
  Ref array = Call(plan.coerce.get(), index, value);
  if (!array) return false;
  if (StoreFast(leaf, plan.literals, array.get(), target)) return true;
  PyErr_SetString(PyExc_SystemError,
                  "hostcall: a coerced result is not what its plan wants");
  return false;
}

}  // namespace

bool StoreResults(const Plan& plan, PyObject* value, char* const* targets) {
  if (plan.form == ResultForm::kLeaf) return StoreLeaf(plan, 0, value, targets[0]);
  if (plan.form == ResultForm::kIgnored) return true;
  if (plan.form == ResultForm::kNothing && value == Py_None) return true;
  const auto n = static_cast<Py_ssize_t>(plan.results.size());
  Ref leaves;
  // A list has no form of its own: other threads could change it while its items
  // are stored. flatten returns a new list.
  if (plan.form != ResultForm::kTuple || !PyTuple_CheckExact(value) ||
      PyTuple_GET_SIZE(value) != n) {
    leaves = Call(plan.flatten.get(), value);
    value = leaves.get();
    if (value == nullptr) return false;
    if (!PyList_CheckExact(value) || PyList_GET_SIZE(value) != n) {
      PyErr_SetString(PyExc_SystemError,
                      "hostcall: flatten returned a different number of leaves");
      return false;
    }
  }
  for (Py_ssize_t i = 0; i < n; ++i) {
    const Ref leaf = Ref::Borrow(PySequence_Fast_GET_ITEM(value, i));
    const auto number = static_cast<size_t>(i);
    if (!StoreLeaf(plan, number, leaf.get(), targets[number])) return false;
  }
  return true;
}

}  // namespace hostcall

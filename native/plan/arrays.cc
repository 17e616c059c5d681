#include "plan/arrays.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"

namespace hostcall {
namespace {

/// An array of the leaf's dtype over `data`, or with its own memory if that is
/// null.
Ref NewArray(const Leaf& leaf, const std::vector<npy_intp>& dims, char* data,
             int flags) {
  Py_INCREF(leaf.dtype.get());  // PyArray_NewFromDescr steals a reference
  return Ref::Steal(PyArray_NewFromDescr(&PyArray_Type, leaf.descr(),
                                         static_cast<int>(dims.size()), dims.data(),
                                         nullptr, data, flags, nullptr));
}

}  // namespace

char* HostAddress(char* data) {
  alignas(64) static char no_elements[1];
  return data != nullptr ? data : no_elements;
}

Ref ArrayOfRows(const Leaf& leaf, const std::vector<int64_t>& grid) {
  std::vector<npy_intp> dims(grid.begin(), grid.end());
  dims.insert(dims.end(), leaf.dims.begin(), leaf.dims.end());
  return NewArray(leaf, dims, nullptr, 0);
}

Ref LentArray(const Leaf& leaf, char* data, bool writeable) {
  Ref array = NewArray(leaf, leaf.dims, HostAddress(data),
                       writeable ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO);
  if (!array) return array;
  Merge(array.get());
  // A base that is not an array and exports no writable buffer (see arrays.h).
  Py_INCREF(Py_None);
  if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.get()),
                            Py_None) != 0) {
    return Ref();
  }
  return array;
}

void Disown(PyObject* array, const Leaf& leaf) {
  // NumPy has no function that replaces an array's memory, so its fields are set.
  auto* fields = reinterpret_cast<PyArrayObject_fields*>(array);
  // The error of a call that kept the array stays set.
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  // Without data: a bytes object of one known byte is shared with the whole
  // process.
  PyObject* copy = PyBytes_FromStringAndSize(nullptr, leaf.row_bytes);
  PyErr_Restore(type, value, trace);
  if (copy == nullptr) return;
  CopyBytes(PyBytes_AS_STRING(copy), fields->data,
            static_cast<size_t>(leaf.row_bytes));
  fields->data = PyBytes_AS_STRING(copy);
  // The base was None; from now on the copy dies with the array. Nobody else writes
  // into these bytes, or reads them as bytes.
  Py_XSETREF(fields->base, copy);
}

bool AsMade(PyObject* object, const Leaf& leaf) {
  // Whatever the function can change without keeping a reference: weak references,
  // and the shape, dtype, flags and base that NumPy lets it set in place.
  if (!IsSole(object) || Py_TYPE(object) != &PyArray_Type) return false;
  auto* fields = reinterpret_cast<PyArrayObject_fields*>(object);
  constexpr int kFlags = NPY_ARRAY_CARRAY | NPY_ARRAY_OWNDATA;
  return fields->weakreflist == nullptr && fields->base == nullptr &&
         fields->descr == leaf.descr() && (fields->flags & kFlags) == kFlags &&
         fields->nd == static_cast<int>(leaf.dims.size()) &&
         std::equal(leaf.dims.begin(), leaf.dims.end(), fields->dimensions);
}

Ref OwnedArray(const Leaf& leaf, const char* data, Ref spare) {
  Ref array = spare ? std::move(spare) : NewArray(leaf, leaf.dims, nullptr, 0);
  if (array && leaf.row_bytes != 0) {
    auto* target = reinterpret_cast<PyArrayObject*>(array.get());
    // Safe without the GIL: nobody else has a reference to the array yet.
    GilRelease release(leaf.row_bytes >= kReleaseBytes);
    CopyBytes(PyArray_DATA(target), data, static_cast<size_t>(leaf.row_bytes));
  }
  return array;
}

bool AllReturned(const Plan& plan,
                 const std::function<bool(size_t leaf)>& is_held) {
  const size_t result_count = plan.results.size();
  const size_t leaf_count = result_count + plan.args.size();
  const auto any_is_held = [&] {
    bool any = false;
    for (size_t leaf = 0; leaf < leaf_count; ++leaf)
      any |= is_held(leaf);  // ask for each
    return any;
  };
  if (!any_is_held()) return true;
  // The error is taken away while Python code runs below, which must not see it
  // set.
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  if (type != nullptr) PyErr_NormalizeException(&type, &value, &trace);
  if (value != nullptr && trace != nullptr) PyException_SetTraceback(value, trace);
  PyObject* error = value == nullptr ? Py_None : value;
  bool ok = true;
  bool goes_on = true;
  for (long step = 0; ok && goes_on; ++step) {
    const Ref number = Ref::Steal(PyLong_FromLong(step));
    const Ref answer = CallMethod(plan.hooks, "on_view_left", number, error);
    ok = static_cast<bool>(answer);
    goes_on = answer.get() == Py_True && any_is_held();
  }
  Ref held_leaves = Ref::Steal(PyList_New(0));
  ok = ok && held_leaves;
  for (size_t leaf = 0; ok && leaf < leaf_count; ++leaf) {
    if (!is_held(leaf)) continue;
    const bool out = leaf < result_count;
    Ref item = Ref::Steal(Py_BuildValue(
        "(nO)", static_cast<Py_ssize_t>(out ? leaf : leaf - result_count),
        out ? Py_True : Py_False));
    ok = item && PyList_Append(held_leaves.get(), item.get()) == 0;
  }
  if (ok && PyList_GET_SIZE(held_leaves.get()) != 0) {
    ok = static_cast<bool>(
        CallMethod(plan.hooks, "on_escape", held_leaves, error));  // it raises
  }
  if (ok) {
    PyErr_Restore(type, value, trace);
    return true;
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return false;
}

}  // namespace hostcall

// Ownership, the arguments.
//   copy   Each array is NumPy's own memory, filled before the call. The function
//          may keep it, write to it, give it to a thread.
//   lend   Each array is a view of XLA's memory, which XLA reuses when the handler
//          returns. Hazards: a write (the flag is off, and since the base is not
//          an array, NumPy refuses to switch it on); an escape (a derived view,
//          memoryview, DLPack capsule or tensor holds a reference to the array, so
//          a count above ours after the call is an escape: an error, while the
//          memory is still whole); the frames of a traceback (cleared, since they
//          would hold the arrays of a function that failed).
// Ownership, the results: copied into XLA's buffers before the reference to the
// function's value is dropped.

#include "invoke.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "buffers.h"

namespace hostcall {
namespace {

thread_local ActiveCall* t_current = nullptr;
// On threads that Python did not start, the settings of the last outermost call stay.
thread_local PyObject* t_device = nullptr;
thread_local PyObject* t_guard = nullptr;
thread_local bool t_foreign = false;
ActiveCall* g_calls = nullptr;  // guarded by the GIL

struct Setting {
  Ambient kind;
  PyObject* swap;
  PyObject* set;
  PyObject* value;
};
constexpr size_t kMaxAmbient = 4;
Setting g_ambient[kMaxAmbient];
size_t g_ambient_count = 0;

// Copies larger than this let other Python threads run meanwhile.
constexpr int64_t kReleaseBytes = 1 << 18;
// Results smaller than this are zeroed before they are lent for writing.
constexpr int64_t kZeroBytes = 4096;

/// Where the leaf's rows lie, as the host sees them: XLA's buffer, or a scratch
/// block with its elements unpacked.
using Bases = std::vector<char*>;

Ref NewArray(const Leaf& leaf, char* data, int flags) {
  Py_INCREF(leaf.dtype.get());
  return Ref::Steal(PyArray_NewFromDescr(
      &PyArray_Type, leaf.descr(), static_cast<int>(leaf.dims.size()),
      leaf.dims.data(), nullptr, data, flags, nullptr));
}

Ref OwnedArray(const Leaf& leaf, const char* data) {
  Ref array = NewArray(leaf, nullptr, 0);
  if (array && leaf.row_bytes != 0) {
    auto* target = reinterpret_cast<PyArrayObject*>(array.get());
    GilRelease release(leaf.row_bytes >= kReleaseBytes);
    std::memcpy(PyArray_DATA(target), data, static_cast<size_t>(leaf.row_bytes));
  }
  return array;
}

Ref LentArray(const Leaf& leaf, char* data, bool writeable) {
  Ref array = NewArray(leaf, data,
                       writeable ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO);
  if (!array) return array;
  // A base that is no array and exports no writable buffer: see the file's head.
  Py_INCREF(Py_None);
  if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.get()),
                            Py_None) != 0) {
    return Ref();
  }
  return array;
}

/// Points a lent array that escaped at a copy of its own, so that at least the
/// array itself stays safe to touch.
void Disown(PyObject* array, const Leaf& leaf) {
  auto* fields = reinterpret_cast<PyArrayObject_fields*>(array);
  const size_t bytes = static_cast<size_t>(std::max<int64_t>(leaf.row_bytes, 1));
  char* copy = static_cast<char*>(PyMem_Malloc(bytes));
  if (copy == nullptr) return;
  std::memcpy(copy, fields->data, static_cast<size_t>(leaf.row_bytes));
  PyObject* owner = PyCapsule_New(copy, nullptr, [](PyObject* capsule) {
    PyMem_Free(PyCapsule_GetPointer(capsule, nullptr));
  });
  if (owner == nullptr) {
    PyErr_Clear();
    PyMem_Free(copy);
    return;
  }
  fields->data = copy;
  Py_XSETREF(fields->base, owner);
}

/// Words that a function which fills its `out` overwrites.
class Canaries {
 public:
  Canaries(char* data, int64_t bytes) : data_(data), words_(bytes / kWord) {
    if (bytes <= kZeroBytes) std::memset(data, 0, static_cast<size_t>(bytes));
    static uint64_t seed = 0x9E3779B97F4A7C15ull;  // guarded by the GIL
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    value_ = seed ^ static_cast<uint64_t>(NowNs());
    for (int i = 0; i < count(); ++i) std::memcpy(At(i), &value_, kWord);
  }
  bool Overwritten() const {
    for (int i = 0; i < count(); ++i) {
      if (std::memcmp(At(i), &value_, kWord) == 0) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kWord = 8;
  static constexpr int64_t kMost = 16;
  int count() const { return static_cast<int>(std::min(words_, kMost)); }
  char* At(int i) const {
    const int64_t last = count() - 1;
    const int64_t word = last == 0 ? 0 : (words_ - 1) * i / last;
    return data_ + word * kWord;
  }
  char* data_;
  int64_t words_;
  uint64_t value_;
};

/// Stores a value that is already what the leaf wants; false: it is not.
bool StoreFast(const Leaf& leaf, PyObject* value, char* target) {
  PyArray_Descr* want = leaf.descr();
  if (PyArray_Check(value)) {
    auto* array = reinterpret_cast<PyArrayObject*>(value);
    if (PyArray_DESCR(array) != want || !PyArray_IS_C_CONTIGUOUS(array) ||
        PyArray_NDIM(array) != static_cast<int>(leaf.dims.size()) ||
        !std::equal(leaf.dims.begin(), leaf.dims.end(), PyArray_DIMS(array))) {
      return false;
    }
    const char* source = PyArray_BYTES(array);
    if (source != target && leaf.row_bytes != 0) {
      GilRelease release(leaf.row_bytes >= kReleaseBytes);
      std::memcpy(target, source, static_cast<size_t>(leaf.row_bytes));
    }
    return true;
  }
  if (!leaf.dims.empty()) return false;
  switch (want->type_num) {
    case NPY_DOUBLE: {
      if (!PyFloat_Check(value)) return false;  // np.float64 is a float
      const double x = PyFloat_AS_DOUBLE(value);
      std::memcpy(target, &x, sizeof x);
      return true;
    }
    case NPY_FLOAT: {
      float x;
      if (PyArray_IsScalar(value, Float)) {
        x = PyArrayScalar_VAL(value, Float);
      } else if (PyFloat_Check(value)) {
        x = static_cast<float>(PyFloat_AS_DOUBLE(value));
      } else {
        return false;
      }
      std::memcpy(target, &x, sizeof x);
      return true;
    }
    case NPY_INT: {
      int x;
      if (PyArray_IsScalar(value, Int)) {
        x = PyArrayScalar_VAL(value, Int);
      } else if (PyLong_CheckExact(value)) {
        int overflow;
        const long wide = PyLong_AsLongAndOverflow(value, &overflow);
        if (overflow != 0 || wide != static_cast<int>(wide)) return false;
        x = static_cast<int>(wide);
      } else {
        return false;
      }
      std::memcpy(target, &x, sizeof x);
      return true;
    }
    case NPY_BOOL:
      if (value != Py_True && value != Py_False) return false;
      *target = value == Py_True;
      return true;
    default:
      return false;
  }
}

bool StoreLeaf(const Plan& plan, size_t number, PyObject* value, char* target) {
  const Leaf& leaf = plan.results[number];
  if (StoreFast(leaf, value, target)) return true;
  Ref index = Ref::Steal(PyLong_FromSize_t(number));
  if (!index) return false;
  PyObject* stack[] = {index.get(), value};
  Ref array =
      Ref::Steal(PyObject_Vectorcall(plan.coerce.get(), stack, 2, nullptr));
  if (!array) return false;
  if (StoreFast(leaf, array.get(), target)) return true;
  PyErr_SetString(PyExc_SystemError,
                  "hostcall: a coerced result is not what its plan wants");
  return false;
}

/// Takes a return value apart and stores its leaves at `targets`.
bool StoreResults(const Plan& plan, PyObject* value, char* const* targets) {
  const size_t n = plan.results.size();
  switch (plan.form) {
    case ResultForm::kLeaf:
      return StoreLeaf(plan, 0, value, targets[0]);
    case ResultForm::kTuple:
      if (!PyTuple_CheckExact(value)) break;
      if (static_cast<size_t>(PyTuple_GET_SIZE(value)) != n) break;
      for (size_t i = 0; i < n; ++i) {
        if (!StoreLeaf(plan, i, PyTuple_GET_ITEM(value, i), targets[i])) {
          return false;
        }
      }
      return true;
    case ResultForm::kNothing:
      if (value == Py_None) return true;
      break;
    case ResultForm::kList:  // can change under us: through flatten
    case ResultForm::kTree:
      break;
  }
  PyObject* stack[] = {value};
  Ref leaves =
      Ref::Steal(PyObject_Vectorcall(plan.flatten.get(), stack, 1, nullptr));
  if (!leaves) return false;
  if (!PyList_CheckExact(leaves.get()) ||
      static_cast<size_t>(PyList_GET_SIZE(leaves.get())) != n) {
    PyErr_SetString(PyExc_SystemError,
                    "hostcall: flatten gave another number of leaves");
    return false;
  }
  for (size_t i = 0; i < n; ++i) {
    Ref leaf = Ref::Borrow(PyList_GET_ITEM(leaves.get(), i));
    if (!StoreLeaf(plan, i, leaf.get(), targets[i])) return false;
  }
  return true;
}

/// The arrays of one row, on the stack where they are few.
class RowArrays {
 public:
  explicit RowArrays(size_t n) : n_(n) {
    if (n + 2 > kInline) heap_.reset(new PyObject*[n + 2]);
    std::fill(all(), all() + n + 2, nullptr);
  }
  ~RowArrays() {
    for (size_t i = 0; i < n_ + 2; ++i) Py_XDECREF(all()[i]);
  }
  RowArrays(const RowArrays&) = delete;
  RowArrays& operator=(const RowArrays&) = delete;
  /// Room for `self` before the first, which a vectorcall may borrow.
  PyObject** args() { return all() + 1; }

 private:
  static constexpr size_t kInline = 10;
  PyObject** all() { return heap_ ? heap_.get() : inline_; }
  size_t n_;
  PyObject* inline_[kInline];
  std::unique_ptr<PyObject*[]> heap_;
};

PyObject* OutKeyword() {
  static PyObject* names = [] {
    PyObject* name = PyUnicode_InternFromString("out");
    PyObject* tuple = PyTuple_Pack(1, name);
    Py_XDECREF(name);
    return tuple;
  }();
  return names;
}

/// The lent arrays of one call: made, watched, and found again at its end.
class Loan {
 public:
  explicit Loan(const Plan& plan) : plan_(plan) {}

  PyObject* Lend(size_t number, bool is_result, char* data) {
    const Leaf& leaf = is_result ? plan_.results[number] : plan_.args[number];
    Ref array = LentArray(leaf, data, is_result);
    if (!array) return nullptr;
    PyObject* borrowed = array.get();
    entries_.push_back({number, is_result, std::move(array)});
    return borrowed;
  }

  /// Called when only these entries should hold the arrays. With a Python error
  /// set it stays set; without one, an escape sets one.
  bool End() {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    const bool failed = type != nullptr;
    if (failed) PyErr_NormalizeException(&type, &value, &trace);
    if (failed && trace != nullptr) PyException_SetTraceback(value, trace);
    bool ok = true;
    if (AnyHeld()) ok = Report(failed ? value : Py_None);
    if (failed) {
      PyErr_Clear();
      PyErr_Restore(type, value, trace);
      return false;
    }
    return ok;
  }

 private:
  struct Entry {
    size_t number;
    bool is_result;
    Ref array;
  };
  static bool Held(const Entry& entry) { return Py_REFCNT(entry.array.get()) > 1; }
  bool AnyHeld() const {
    return std::any_of(entries_.begin(), entries_.end(), Held);
  }

  /// Python clears the frames of a failed call first, and raises for what is then
  /// still held.
  bool Report(PyObject* exception) {
    Ref held = Ref::Steal(PyList_New(0));
    if (!held) return false;
    PyObject* stack[] = {plan_.info.get(), Py_None, exception};
    Ref cleared = Ref::Steal(
        PyObject_Vectorcall(plan_.on_escape.get(), stack, 3, nullptr));
    if (!cleared) return false;
    for (Entry& entry : entries_) {
      if (!Held(entry)) continue;
      Disown(entry.array.get(), entry.is_result ? plan_.results[entry.number]
                                                : plan_.args[entry.number]);
      Ref item = Ref::Steal(Py_BuildValue("(nO)", static_cast<Py_ssize_t>(entry.number),
                                          entry.is_result ? Py_True : Py_False));
      if (!item || PyList_Append(held.get(), item.get()) != 0) return false;
    }
    if (PyList_GET_SIZE(held.get()) == 0 || exception != Py_None) return true;
    stack[1] = held.get();
    Ref ignored = Ref::Steal(
        PyObject_Vectorcall(plan_.on_escape.get(), stack, 3, nullptr));
    return static_cast<bool>(ignored);
  }

  const Plan& plan_;
  std::vector<Entry> entries_;
};

bool Convert(const Leaf& leaf, PyObject** array) {
  if (!leaf.convert) return true;
  PyObject* stack[] = {*array};
  PyObject* converted =
      PyObject_Vectorcall(leaf.convert.get(), stack, 1, nullptr);
  Py_DECREF(*array);
  *array = converted;
  return converted != nullptr;
}

/// One row whose arguments the function owns.
bool RunCopied(const Plan& plan, char* const* args, char* const* targets) {
  const size_t n = plan.args.size();
  RowArrays row(n);
  for (size_t i = 0; i < n; ++i) {
    row.args()[i] = OwnedArray(plan.args[i], args[i]).release();
    if (row.args()[i] == nullptr) return false;
    if (!Convert(plan.args[i], &row.args()[i])) return false;
  }
  Ref value = Ref::Steal(PyObject_Vectorcall(
      plan.function.get(), row.args(), n | PY_VECTORCALL_ARGUMENTS_OFFSET,
      nullptr));
  return value && StoreResults(plan, value.get(), targets);
}

bool CallLent(const Plan& plan, Loan& loan, char* const* args,
              char* const* targets) {
  const size_t n = plan.args.size();
  RowArrays row(n);
  for (size_t i = 0; i < n; ++i) {
    PyObject* array = loan.Lend(i, false, args[i]);
    if (array == nullptr) return false;
    Py_INCREF(array);
    row.args()[i] = array;
    if (!Convert(plan.args[i], &row.args()[i])) return false;
  }
  std::vector<Canaries> canaries;
  Ref outs;
  if (plan.lend == Lend::kOut) {
    outs = Ref::Steal(PyList_New(static_cast<Py_ssize_t>(plan.results.size())));
    if (!outs) return false;
    for (size_t i = 0; i < plan.results.size(); ++i) {
      canaries.emplace_back(targets[i], plan.results[i].row_bytes);
      PyObject* array = loan.Lend(i, true, targets[i]);
      if (array == nullptr) return false;
      Py_INCREF(array);
      PyList_SET_ITEM(outs.get(), static_cast<Py_ssize_t>(i), array);
    }
    PyObject* stack[] = {outs.get()};
    row.args()[n] =
        PyObject_Vectorcall(plan.out_tree.get(), stack, 1, nullptr);
    if (row.args()[n] == nullptr) return false;
  }
  Ref value = Ref::Steal(PyObject_Vectorcall(
      plan.function.get(), row.args(), n | PY_VECTORCALL_ARGUMENTS_OFFSET,
      plan.lend == Lend::kOut ? OutKeyword() : nullptr));
  if (!value) return false;
  if (plan.lend == Lend::kOut && value.get() == Py_None) {
    for (size_t i = 0; i < canaries.size(); ++i) {
      if (canaries[i].Overwritten()) continue;
      Ref number = Ref::Steal(PyLong_FromSize_t(i));
      PyObject* stack[] = {plan.info.get(), number.get()};
      Ref ignored = Ref::Steal(
          PyObject_Vectorcall(plan.on_unwritten.get(), stack, 2, nullptr));
      return false;
    }
    return true;
  }
  return StoreResults(plan, value.get(), targets);
}

bool RunLent(const Plan& plan, char* const* args, char* const* targets) {
  Loan loan(plan);
  const bool ok = CallLent(plan, loan, args, targets);
  return loan.End() && ok;
}

/// The buffers as the host sees them, with packed elements unpacked.
class HostView {
 public:
  HostView(const Plan& plan, const void* const* operands, void* const* results)
      : plan_(plan), results_(results) {
    const size_t first = plan.masked ? 1 : 0;
    for (size_t i = 0; i < plan.args.size(); ++i) {
      const Leaf& leaf = plan.args[i];
      char* data = static_cast<char*>(const_cast<void*>(operands[first + i]));
      if (leaf.bits != 0) {
        const int64_t count = leaf.count * leaf.rows;
        char* bytes = Scratch(count);
        UnpackBits(reinterpret_cast<uint8_t*>(data),
                   reinterpret_cast<uint8_t*>(bytes), count, leaf.bits,
                   leaf.is_signed);
        data = bytes;
      }
      args.push_back(data);
    }
    for (size_t i = 0; i < plan.results.size(); ++i) {
      const Leaf& leaf = plan.results[i];
      targets.push_back(leaf.bits != 0 ? Scratch(leaf.count * leaf.rows)
                                       : static_cast<char*>(results[i]));
    }
  }

  /// Packs the results that have small elements.
  void Finish() {
    for (size_t i = 0; i < plan_.results.size(); ++i) {
      const Leaf& leaf = plan_.results[i];
      if (leaf.bits == 0) continue;
      PackBits(reinterpret_cast<uint8_t*>(targets[i]),
               static_cast<uint8_t*>(results_[i]), leaf.count * leaf.rows,
               leaf.bits);
    }
  }

  Bases args, targets;

 private:
  char* Scratch(int64_t bytes) {
    scratch_.emplace_back(new char[static_cast<size_t>(bytes)]());
    return scratch_.back().get();
  }
  const Plan& plan_;
  void* const* results_;
  std::vector<std::unique_ptr<char[]>> scratch_;
};

bool RunRow(const Plan& plan, char* const* args, char* const* targets) {
  Counters& counters = *plan.counters;
  ++counters.calls;
  counters.bytes_in += plan.bytes_in;
  const bool ok = plan.lend == Lend::kCopy ? RunCopied(plan, args, targets)
                                           : RunLent(plan, args, targets);
  if (ok) counters.bytes_out += plan.bytes_out;
  return ok;
}

void FillRow(const Leaf& leaf, char* target) {
  if (leaf.fill) {
    std::memcpy(target, PyBytes_AS_STRING(leaf.fill.get()),
                static_cast<size_t>(leaf.row_bytes));
  } else {
    std::memset(target, 0, static_cast<size_t>(leaf.row_bytes));
  }
}

/// Rows in row order, each before the next.
class Rows {
 public:
  Rows(const Plan& plan, const bool* mask, HostView& view)
      : plan_(plan), mask_(mask), view_(view), walker_(plan.grid) {
    args_.resize(plan.args.size());
    targets_.resize(plan.results.size());
  }
  const std::vector<int64_t>& index() const { return walker_.index(); }
  bool wanted() const {
    return mask_ == nullptr || mask_[walker_.RowOf(plan_.mask_strides)];
  }
  bool Next() { return walker_.Next(); }
  char* const* args() {
    for (size_t i = 0; i < args_.size(); ++i) {
      const Leaf& leaf = plan_.args[i];
      args_[i] = view_.args[i] + walker_.RowOf(leaf.grid_strides) * leaf.row_bytes;
    }
    return args_.data();
  }
  char* const* targets() {
    for (size_t i = 0; i < targets_.size(); ++i) {
      const Leaf& leaf = plan_.results[i];
      targets_[i] =
          view_.targets[i] + walker_.RowOf(leaf.grid_strides) * leaf.row_bytes;
    }
    return targets_.data();
  }
  void Fill() {
    ++plan_.counters->masked;
    targets();
    for (size_t i = 0; i < targets_.size(); ++i) {
      FillRow(plan_.results[i], targets_[i]);
    }
  }

 private:
  const Plan& plan_;
  const bool* mask_;
  HostView& view_;
  RowWalker walker_;
  Bases args_, targets_;
};

bool RunInOrder(const Plan& plan, ActiveCall& call, const bool* mask,
                HostView& view) {
  Rows rows(plan, mask, view);
  call.row = &rows.index();
  bool ok = true;
  do {
    if (!rows.wanted()) {
      rows.Fill();
    } else if (!RunRow(plan, rows.args(), rows.targets())) {
      ok = false;
    } else if (PyErr_CheckSignals() != 0) {  // Ctrl-C between rows
      ok = false;
    }
  } while (ok && rows.Next());
  if (!ok) call.failed_row = rows.index();
  call.row = nullptr;
  return ok;
}

Ref IndexTuple(const std::vector<int64_t>& index) {
  Ref tuple = Ref::Steal(PyTuple_New(static_cast<Py_ssize_t>(index.size())));
  for (size_t i = 0; tuple && i < index.size(); ++i) {
    PyObject* item = PyLong_FromLongLong(index[i]);
    if (item == nullptr) return Ref();
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), item);
  }
  return tuple;
}

/// All rows at once through the plan's runner.
bool RunTogether(const Plan& plan, const bool* mask, HostView& view) {
  Ref rows = Ref::Steal(PyList_New(0)), indices = Ref::Steal(PyList_New(0));
  if (!rows || !indices) return false;
  std::vector<Bases> targets;
  Rows walk(plan, mask, view);
  do {
    if (!walk.wanted()) {
      walk.Fill();
      continue;
    }
    const size_t n = plan.args.size();
    Ref row = Ref::Steal(PyTuple_New(static_cast<Py_ssize_t>(n)));
    if (!row) return false;
    char* const* args = walk.args();
    for (size_t i = 0; i < n; ++i) {
      PyObject* array = OwnedArray(plan.args[i], args[i]).release();
      if (array == nullptr || !Convert(plan.args[i], &array)) return false;
      PyTuple_SET_ITEM(row.get(), static_cast<Py_ssize_t>(i), array);
    }
    Ref index = IndexTuple(walk.index());
    if (!index || PyList_Append(rows.get(), row.get()) != 0 ||
        PyList_Append(indices.get(), index.get()) != 0) {
      return false;
    }
    char* const* out = walk.targets();
    targets.emplace_back(out, out + plan.results.size());
    ++plan.counters->calls;
    plan.counters->bytes_in += plan.bytes_in;
  } while (walk.Next());
  if (targets.empty()) return true;
  PyObject* stack[] = {rows.get(), indices.get()};
  Ref values =
      Ref::Steal(PyObject_Vectorcall(plan.runner.get(), stack, 2, nullptr));
  if (!values) return false;
  if (!PyList_CheckExact(values.get()) ||
      static_cast<size_t>(PyList_GET_SIZE(values.get())) != targets.size()) {
    PyErr_SetString(PyExc_SystemError,
                    "hostcall: the runner gave another number of rows");
    return false;
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    Ref value = Ref::Borrow(PyList_GET_ITEM(values.get(), i));
    if (!StoreResults(plan, value.get(), targets[i].data())) return false;
    plan.counters->bytes_out += plan.bytes_out;
  }
  return true;
}

}  // namespace

ActiveCall* CurrentCall() { return t_current; }
ActiveCall* AllCalls() { return g_calls; }
void ForgetCallsAfterFork() {
  g_calls = nullptr;
  t_current = nullptr;
}

void AddAmbientSetting(Ambient kind, PyObject* swap, PyObject* set,
                       PyObject* value) {
  if (g_ambient_count == kMaxAmbient) return;
  Py_INCREF(swap);
  Py_INCREF(set);
  Py_XINCREF(value);
  g_ambient[g_ambient_count++] = {kind, swap, set, value};
}

CallScope::CallScope(const Plan& plan, int device_ordinal) {
  call_.plan = &plan;
  call_.device_ordinal = device_ordinal;
  call_.thread_id = PyThread_get_thread_ident();
  call_.outer = t_current;
  t_current = &call_;
  call_.next = g_calls;
  if (g_calls != nullptr) g_calls->prev = &call_;
  g_calls = &call_;
  const bool stays = t_foreign && call_.outer == nullptr;
  if (stays) {
    if (t_device == plan.device.get() && t_guard == plan.guard.get()) return;
    t_device = plan.device.get();
    t_guard = plan.guard.get();
  }
  for (size_t i = 0; i < g_ambient_count; ++i) {
    const Setting& setting = g_ambient[i];
    PyObject* value = setting.kind == Ambient::kFixed    ? setting.value
                      : setting.kind == Ambient::kDevice ? plan.device.get()
                                                         : plan.guard.get();
    if (value == nullptr) continue;
    PyObject* stack[] = {value};
    Ref before =
        Ref::Steal(PyObject_Vectorcall(setting.swap, stack, 1, nullptr));
    if (!before) PyErr_WriteUnraisable(setting.swap);
    if (!stays) saved_[i] = std::move(before);
  }
}

CallScope::~CallScope() {
  // A failing call leaves its error set; putting back must not disturb it.
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  const bool failed = PyErr_Occurred() != nullptr;
  if (failed) PyErr_Fetch(&type, &value, &trace);
  for (size_t i = g_ambient_count; i-- > 0;) {
    if (!saved_[i]) continue;
    PyObject* stack[] = {saved_[i].get()};
    Ref done =
        Ref::Steal(PyObject_Vectorcall(g_ambient[i].set, stack, 1, nullptr));
    if (!done) PyErr_WriteUnraisable(g_ambient[i].set);
  }
  if (failed) PyErr_Restore(type, value, trace);
  t_current = call_.outer;
  if (call_.prev != nullptr) call_.prev->next = call_.next;
  if (call_.next != nullptr) call_.next->prev = call_.prev;
  if (g_calls == &call_) g_calls = call_.next;
}

void MarkForeignThread() { t_foreign = true; }

bool Invoke(const Plan& plan, ActiveCall& call, const void* const* operands,
            void* const* results) {
  Graveyard::Get().Bury();
  const bool* mask =
      plan.masked ? static_cast<const bool*>(operands[0]) : nullptr;
  if (plan.rows == 0) return true;
  // The common case: one row, nothing packed, nothing masked.
  if (plan.grid.empty() && !plan.packed && !plan.runner) {
    if (mask != nullptr && !mask[0]) {
      ++plan.counters->masked;
      for (size_t i = 0; i < plan.results.size(); ++i) {
        FillRow(plan.results[i], static_cast<char*>(results[i]));
      }
      return true;
    }
    // Only lent arrays alias the operands, and those are read-only.
    auto* args = const_cast<char* const*>(
        reinterpret_cast<const char* const*>(operands) + (mask ? 1 : 0));
    return RunRow(plan, args, reinterpret_cast<char* const*>(results));
  }
  HostView view(plan, operands, results);
  const bool ok = plan.runner ? RunTogether(plan, mask, view)
                              : RunInOrder(plan, call, mask, view);
  if (ok) view.Finish();
  return ok;
}

std::string TakeError(const Plan& plan, const ActiveCall& call) {
  ++plan.counters->errors;
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Ref held_type = Ref::Steal(type), held = Ref::Steal(value),
      held_trace = Ref::Steal(trace);
  Ref row = IndexTuple(call.failed_row);
  PyObject* stack[] = {held.get(), plan.info.get(), row.get()};
  Ref text =
      Ref::Steal(PyObject_Vectorcall(plan.on_error.get(), stack, 3, nullptr));
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  if (utf8 == nullptr) {
    PyErr_WriteUnraisable(plan.on_error.get());
    return std::string("hostcall: a callback failed with ") +
           (held ? Py_TYPE(held.get())->tp_name : "an error") +
           ", and reporting it failed too";
  }
  return utf8;
}

}  // namespace hostcall

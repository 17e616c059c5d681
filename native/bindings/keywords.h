// Structs that Python makes by keyword: `_native.Leaf(dtype=..., shape=..., ...)`.
//
// Each struct has one table of its fields. Python must give all fields, by these
// names and with values of their types; otherwise a TypeError names the wrong
// field. For a wrong field nanobind's own keyword arguments would print the whole
// signature, in which a reader has to find one field among 25.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/guards.h"

namespace hostcall {

/// Of a field for which Python may give None, which leaves it as it was made.
constexpr bool kOrNone = true;

/// The table of the fields of T. Used with the GIL held.
template <typename T>
class Keywords {
 public:
  /// `type` is Python's name of the struct, which errors begin with; not owned.
  explicit Keywords(const char* type) : type_(type) {}

  /// Adds a field of a type that nanobind converts.
  template <auto kMember>
  Keywords& Field(const char* name, bool or_none = false) {
    return Add(name, &Set<kMember>, or_none);
  }
  /// Adds a Ref, to an object for which `kFits` is true.
  template <auto kMember, auto kFits>
  Keywords& Object(const char* name, bool or_none = false) {
    return Add(name, &SetObject<kMember, kFits>, or_none);
  }

  const char* type() const { return type_; }

  /// Makes the struct from keyword arguments. Throws python_error (a TypeError) if
  /// a field is missing, unknown or of a wrong type.
  T Read(const nanobind::kwargs& keywords) const {
    T fields;
    for (const Entry& field : fields_) {
      PyObject* value = PyDict_GetItemWithError(keywords.ptr(), field.name);
      if (value == nullptr) Refuse("needs the field", field.name);
      if (field.or_none && value == Py_None) continue;
      if (!field.set(fields, value)) RefuseValue(field.name, value);
    }
    if (keywords.size() != fields_.size()) RefuseUnknown(keywords);
    return fields;
  }

 private:
  struct Entry {
    PyObject* name;  ///< owned, and never released, since tables live for ever
    /// Converts the value into its member; false if it has a wrong type.
    bool (*set)(T& to, nanobind::handle value);
    bool or_none;
  };

  Keywords& Add(const char* name, decltype(Entry::set) set, bool or_none) {
    // Interned, as the names in calls are, so that looking a field up only compares
    // addresses.
    fields_.push_back({PyUnicode_InternFromString(name), set, or_none});
    return *this;
  }

  template <auto kMember>
  static bool Set(T& to, nanobind::handle value) {
    using Member = std::remove_reference_t<decltype(to.*kMember)>;
    // An enum is not converted: nanobind would accept a bare number for it.
    constexpr bool kConvert = !std::is_enum_v<Member>;
    // nanobind makes a null pointer of None, which only kOrNone allows.
    if (std::is_pointer_v<Member> && value.is_none()) return false;
    return nanobind::try_cast(value, to.*kMember, kConvert);
  }
  template <auto kMember, auto kFits>
  static bool SetObject(T& to, nanobind::handle value) {
    to.*kMember = Ref::Borrow(value.ptr());
    return kFits(value.ptr());
  }

  [[noreturn]] void Refuse(const char* what, PyObject* name) const {
    PyErr_Format(PyExc_TypeError, "%s() %s '%S'", type_, what, name);
    throw nanobind::python_error();
  }
  [[noreturn]] void RefuseValue(PyObject* name, PyObject* value) const {
    PyErr_Clear();  // the failed conversion may have left an error set
    PyErr_Format(PyExc_TypeError, "%s(): the field '%S' can't be %R, of type %s",
                 type_, name, value, Py_TYPE(value)->tp_name);
    throw nanobind::python_error();
  }
  [[noreturn]] void RefuseUnknown(const nanobind::kwargs& keywords) const {
    for (const Entry& field : fields_) PyDict_DelItem(keywords.ptr(), field.name);
    for (auto [name, value] : keywords) Refuse("has no field", name.ptr());
    Py_UNREACHABLE();  // Read has found each field, and there are more names
  }

  const char* type_;
  std::vector<Entry> fields_;
};

/// Adds the class T to the module, with a base class of it if one is named. Its
/// constructor takes the fields, of which `make` makes it.
template <typename T, typename... Base, typename Fields>
nanobind::class_<T, Base...> BindMade(nanobind::module_& m, Keywords<Fields> fields,
                                      T (*make)(Fields)) {
  // Never deleted: the class lives as long as the interpreter.
  const auto* table = new Keywords<Fields>(std::move(fields));
  nanobind::class_<T, Base...> type(m, table->type());
  type.def("__init__", [table, make](T* self, nanobind::kwargs keywords) {
    new (self) T(make(table->Read(keywords)));
  });
  return type;
}
/// The same for a class that has the fields themselves.
template <typename... Base, typename T>
nanobind::class_<T, Base...> BindStruct(nanobind::module_& m, Keywords<T> fields) {
  return BindMade<T, Base...>(
      m, std::move(fields), +[](T fields_of_t) { return fields_of_t; });
}

/// Adds an enum whose values count from 0, by the names that Python has for them.
template <typename T>
void BindEnum(nanobind::module_& m, const char* type,
              std::initializer_list<const char*> names) {
  nanobind::enum_<T> type_object(m, type);
  int value = 0;
  for (const char* name : names) type_object.value(name, static_cast<T>(value++));
}

}  // namespace hostcall

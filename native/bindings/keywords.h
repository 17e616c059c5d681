// Structs that Python makes by keyword: `_native.Leaf(dtype=..., shape=..., ...)`.
//
// Each struct has one table of its fields. All must be given, by these names and
// with values of their types; else a TypeError names the field. nanobind's own
// keyword arguments would answer a wrong field with all signatures and all types,
// in which a reader has to find it among 25.
#pragma once

#include <nanobind/nanobind.h>

#include <type_traits>
#include <utility>
#include <vector>

namespace hostcall {

template <typename T>
class Keywords {
 public:
  /// `type` is the name that errors have, a literal.
  explicit Keywords(const char* type) : type_(type) {}

  template <auto kMember>
  Keywords& Field(const char* name) {
    // Interned, as the names in calls are: the look-up compares addresses.
    fields_.push_back({PyUnicode_InternFromString(name), &Set<kMember>});
    return *this;
  }

  const char* type() const { return type_; }

  T Read(const nanobind::kwargs& given) const {
    T made;
    for (const Entry& field : fields_) {
      PyObject* value = PyDict_GetItemWithError(given.ptr(), field.name);
      if (value == nullptr) Refuse("needs the field", field.name);
      if (!field.set(made, value)) RefuseValue(field.name, value);
    }
    if (given.size() != fields_.size()) RefuseUnknown(given);
    return made;
  }

 private:
  struct Entry {
    PyObject* name;  // kept for good, as tables are
    bool (*set)(T& to, nanobind::handle value);
  };

  template <auto kMember>
  static bool Set(T& to, nanobind::handle value) {
    using Member = std::remove_reference_t<decltype(to.*kMember)>;
    // Converting, nanobind would take a bare number for an enum.
    constexpr bool kConvert = !std::is_enum_v<Member>;
    return nanobind::try_cast(value, to.*kMember, kConvert);
  }

  [[noreturn]] void Refuse(const char* what, PyObject* name) const {
    PyErr_Format(PyExc_TypeError, "%s() %s '%S'", type_, what, name);
    throw nanobind::python_error();
  }
  [[noreturn]] void RefuseValue(PyObject* name, PyObject* value) const {
    PyErr_Clear();  // a conversion may have set another
    PyErr_Format(PyExc_TypeError, "%s(): the field '%S' can't be %R, of type %s",
                 type_, name, value, Py_TYPE(value)->tp_name);
    throw nanobind::python_error();
  }
  [[noreturn]] void RefuseUnknown(const nanobind::kwargs& given) const {
    for (auto [name, value] : given) {
      bool known = false;
      for (const Entry& field : fields_) {
        known |= PyUnicode_Compare(name.ptr(), field.name) == 0;
      }
      if (!known) Refuse("has no field", name.ptr());
    }
    Py_UNREACHABLE();  // there are more names than fields, and each is there once
  }

  const char* type_;
  std::vector<Entry> fields_;
};

/// Adds the struct to the module, made by its keywords.
template <typename T>
nanobind::class_<T> BindStruct(nanobind::module_& m, Keywords<T> fields) {
  const auto* kept = new Keywords<T>(std::move(fields));  // as long as the module
  return nanobind::class_<T>(m, kept->type())
      .def("__init__", [kept](T* self, nanobind::kwargs given) {
        new (self) T(kept->Read(given));
      });
}

}  // namespace hostcall

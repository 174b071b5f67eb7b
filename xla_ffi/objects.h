#pragma once
// Loops over Python objects that a save runs on the training thread: two calls for thousands of
// leaves. Only functions of the limited API are used, because wheels are built with it.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>

namespace deltacheck {

// Writes the number that each object gives to out: the result of the first function, or of the
// second one called with that. Throws what a function raises.
inline void read_numbers(nanobind::list objects, nanobind::handle first, nanobind::handle second,
                         uint64_t* out, size_t count) {
  // Objects lie apart in memory that no cache has, so the next ones are loaded ahead.
  constexpr size_t kAhead = 8;
  if (objects.size() != count) throw std::invalid_argument("out must have one entry per object");
  for (size_t i = 0; i < count; ++i) {
    // A function may run Python code, which may change the list. Bounds are checked by the call.
    PyObject* object = PyList_GetItem(objects.ptr(), static_cast<Py_ssize_t>(i));
    if (object == nullptr) throw nanobind::python_error();
    if (i + kAhead < count) {
      const PyObject* next = PyList_GetItem(objects.ptr(), static_cast<Py_ssize_t>(i + kAhead));
      if (next == nullptr) throw nanobind::python_error();
      __builtin_prefetch(next);
    }
    nanobind::object argument = nanobind::borrow(object);
    PyObject* arguments[] = {argument.ptr()};
    nanobind::object result =
        nanobind::steal(PyObject_Vectorcall(first.ptr(), arguments, 1, nullptr));
    if (!result.is_valid()) throw nanobind::python_error();
    if (!second.is_none()) {
      arguments[0] = result.ptr();
      result = nanobind::steal(PyObject_Vectorcall(second.ptr(), arguments, 1, nullptr));
      if (!result.is_valid()) throw nanobind::python_error();
    }
    const unsigned long long number = PyLong_AsUnsignedLongLong(result.ptr());
    if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr)
      throw nanobind::python_error();
    out[i] = number;
  }
}

// Starts to load memory into the cache, a line at each address. Nothing is read, so an address of
// memory that is gone does no harm.
inline void load_ahead(const uint64_t* addresses, size_t count) {
  for (size_t i = 0; i < count; ++i) __builtin_prefetch(reinterpret_cast<void*>(addresses[i]));
}

// Returns the children of plain containers in order, or None if a length, a key or a type differs.
// Nothing here runs code of a program: keys are compared only if their types are the expected ones,
// which must be text and integers.
class ChildMatcher {
 public:
  ChildMatcher(nanobind::list containers, nanobind::list lengths, nanobind::list keys,
               nanobind::list types)
      : containers_(containers),
        lengths_(lengths),
        keys_(keys),
        types_(types),
        children_(nanobind::steal(PyList_New(PyList_Size(types.ptr())))) {
    if (!children_.is_valid()) throw nanobind::python_error();
  }

  nanobind::object match() {
    if (containers_.size() != lengths_.size()) return nanobind::none();
    for (size_t i = 0; i < containers_.size(); ++i) {
      PyObject* container = PyList_GetItem(containers_.ptr(), static_cast<Py_ssize_t>(i));
      PyObject* length = PyList_GetItem(lengths_.ptr(), static_cast<Py_ssize_t>(i));
      if (!take_all(container, PyLong_AsSsize_t(length))) return nanobind::none();
    }
    const bool is_whole = child_ == types_.size() && key_ == keys_.size();
    return is_whole ? children_ : nanobind::none();
  }

 private:
  bool take_all(PyObject* container, Py_ssize_t length) {
    if (PyDict_CheckExact(container)) {
      if (PyDict_Size(container) != length) return false;
      PyObject *key = nullptr, *value = nullptr;
      for (Py_ssize_t place = 0; PyDict_Next(container, &place, &key, &value);) {
        if (!take_key(key) || !take(value)) return false;
      }
      return true;
    }
    const bool is_list = PyList_CheckExact(container);
    if (!is_list && !PyTuple_CheckExact(container))
      throw std::invalid_argument("containers must be dictionaries, lists or tuples");
    if ((is_list ? PyList_Size(container) : PyTuple_Size(container)) != length) return false;
    for (Py_ssize_t i = 0; i < length; ++i) {
      if (!take(is_list ? PyList_GetItem(container, i) : PyTuple_GetItem(container, i)))
        return false;
    }
    return true;
  }

  bool take_key(PyObject* key) {
    if (key_ == keys_.size()) return false;
    PyObject* expected = PyList_GetItem(keys_.ptr(), static_cast<Py_ssize_t>(key_++));
    if (key == expected) return true;
    if (Py_TYPE(key) != Py_TYPE(expected)) return false;
    const int is_equal = PyObject_RichCompareBool(key, expected, Py_EQ);
    if (is_equal < 0) throw nanobind::python_error();
    return is_equal == 1;
  }

  bool take(PyObject* value) {
    if (child_ == types_.size()) return false;
    const auto place = static_cast<Py_ssize_t>(child_++);
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != PyList_GetItem(types_.ptr(), place))
      return false;
    Py_INCREF(value);
    PyList_SetItem(children_.ptr(), place, value);  // takes the reference
    return true;
  }

  nanobind::list containers_, lengths_, keys_, types_;
  nanobind::object children_;
  size_t key_ = 0, child_ = 0;
};

}  // namespace deltacheck

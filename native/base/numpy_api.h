// NumPy's C API. All files of the engine share one table of its functions, which
// module.cc defines and fills (HOSTCALL_IMPORT_NUMPY); the others only declare it.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL hostcall_numpy_api
#ifndef HOSTCALL_IMPORT_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

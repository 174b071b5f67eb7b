// The handlers of a module as Python objects. Used by module.cc and module_cuda.cc.

#pragma once

#include <nanobind/nanobind.h>

#ifdef DELTACHECK_HANDLERS
#  include "handlers/handlers.h"
#endif

namespace deltacheck {

// Returns [(target name, capsule, platform)] for jax.ffi.register_ffi_target; empty in builds
// without handlers.
inline nanobind::list registrations() {
  nanobind::list all;
#ifdef DELTACHECK_HANDLERS
  int count = 0;
  const Handler* list = handlers(&count);
  for (int i = 0; i < count; ++i) {
    nanobind::capsule target(list[i].function, "xla._CUSTOM_CALL_TARGET");
    all.append(nanobind::make_tuple(list[i].name, target, list[i].platform));
  }
#endif
  return all;
}

}  // namespace deltacheck

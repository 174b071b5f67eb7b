// The XLA FFI handlers of this build. registrations.h passes them to Python for jax.ffi.

#pragma once

namespace deltacheck {

struct Handler {
  const char* name;      // the target name for jax.ffi.ffi_call
  const char* platform;  // "cpu" or "CUDA", for jax.ffi.register_ffi_target
  void* function;        // an XLA_FFI_Handler
};

// Returns the handlers. `count` receives their number.
const Handler* handlers(int* count);

}  // namespace deltacheck

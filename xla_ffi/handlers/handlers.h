// The XLA FFI handlers of this build, for one nanobind module to hand to jax.ffi.

#pragma once

namespace deltacheck {

struct Handler {
  const char* name;      // of the target, as jax.ffi.ffi_call names it
  const char* platform;  // "cpu" or "CUDA", as jax.ffi.register_ffi_target names it
  void* function;        // an XLA_FFI_Handler
};

// `count` becomes their number.
const Handler* handlers(int* count);

}  // namespace deltacheck

// What kernels and launchers use of CUDA. With DELTACHECK_EMULATOR the same sources are compiled
// for the host, where tests/emulator/emulator.h runs them: one fiber a thread.

#pragma once

#ifdef DELTACHECK_EMULATOR
#  include "emulator.h"  // cudaStream_t, cudaError_t, cudaMemcpyAsync, .., the built-in variables and functions of kernels
#  define DELTACHECK_LAUNCH(kernel, blocks, threads, stream, ...) \
    emulator::launch(#kernel, blocks, threads, stream, [=] { kernel(__VA_ARGS__); })
#  define DELTACHECK_SHARED(type, name) type& name = emulator::shared<type>()
#else
#  include <cuda_runtime.h>
#  define DELTACHECK_LAUNCH(kernel, blocks, threads, stream, ...) \
    kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)
// All shared memory of a kernel is one object; a kernel has at most one.
#  define DELTACHECK_SHARED(type, name) __shared__ type name
#endif

// The parts of CUDA that kernels and launchers use, included by all files of this folder. With
// DELTACHECK_EMULATOR, the same sources are compiled for the host, and tests/emulator/emulator.h
// executes them with one fiber per thread.

#pragma once

#ifdef DELTACHECK_EMULATOR
#  include "emulator.h"  // CUDA types, runtime functions and kernel built-ins
#  define DELTACHECK_LAUNCH(kernel, blocks, threads, stream, ...) \
    emulator::launch(#kernel, blocks, threads, stream, [=] { kernel(__VA_ARGS__); })
#  define DELTACHECK_SHARED(type, name) type& name = emulator::shared<type>()
#else
#  include <cuda_runtime.h>
#  define DELTACHECK_LAUNCH(kernel, blocks, threads, stream, ...) \
    kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)
// All shared memory of a kernel is one object, and a kernel has at most one.
#  define DELTACHECK_SHARED(type, name) __shared__ type name
#endif

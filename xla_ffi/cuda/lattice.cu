// Puts values on the lattice of encoder/lattice.h: the same bits as on the host.

#include <cstdint>

#include "cuda/block.cuh"
#include "cuda/device.h"
#include "encoder/lattice.h"

namespace deltacheck {
namespace device {
namespace {

constexpr uint32_t kResident = 4;       // blocks that a processor should hold: 64 registers a thread
constexpr uint32_t kMostBlocks = 1024;  // some for each processor: each goes through the values in strides

struct Shared {
  BlockScratch scratch;
};

static_assert(sizeof(Quantised) == 2 * sizeof(uint64_t));

__global__ void __launch_bounds__(kBlockThreads, kResident) quantise_values(QuantiseArguments arguments) {
  DELTACHECK_SHARED(Shared, shared);
  uint64_t nonfinite = 0;
  double largest = 0;
  const uint64_t stride = uint64_t{gridDim.x} * kBlockThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kBlockThreads + threadIdx.x; i < arguments.count; i += stride) {
    const float value = arguments.values[i];
    const bool finite = (bits_of(value) & kMagnitude) < kInfinity;
    nonfinite += !finite;
    if (!finite) {
      arguments.out[i] = value;
      continue;
    }
    float moved = on_lattice(value, arguments.step, phase(arguments.seed, i));
    if (arguments.weights != nullptr) moved = float_of(in_cell(bits_of(moved), arguments.weights[i]));
    const double error = fabs(static_cast<double>(moved) - static_cast<double>(value));
    largest = error > largest ? error : largest;
    arguments.out[i] = moved;
  }
  nonfinite = block_sum(nonfinite, shared.scratch);
  uint64_t bits;  // which order magnitudes as their values do
  memcpy(&bits, &largest, sizeof bits);
  bits = block_max(bits, shared.scratch);
  if (threadIdx.x != 0) return;
  unsigned long long* const results = reinterpret_cast<unsigned long long*>(arguments.result);
  atomicAdd(results, nonfinite);
  atomicMax(results + 1, bits);
}

}  // namespace

cudaError_t quantise(const QuantiseArguments& arguments, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(arguments.result, 0, sizeof(Quantised), stream);
  if (error != cudaSuccess || arguments.count == 0) return error;
  const uint64_t blocks = (arguments.count + kBlockThreads - 1) / kBlockThreads;
  const uint32_t launched = static_cast<uint32_t>(blocks < kMostBlocks ? blocks : kMostBlocks);
  DELTACHECK_LAUNCH(quantise_values, launched, kBlockThreads, stream, arguments);
  return cudaGetLastError();
}

}  // namespace device
}  // namespace deltacheck

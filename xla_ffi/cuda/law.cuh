// The prediction of a chunk by the law of Adam (encoder/adam.h; docs/reference/format.md, 4.6), as
// encoder/adam_parts.h has it on the host.

#pragma once

#include <cstdint>

#include "cuda/block.cuh"
#include "cuda/device.h"

namespace deltacheck {
namespace device {

// Returns true if a chunk has the form of a group: three equal parts of weights, m and v.
DELTACHECK_HD bool is_group(const Chunk& chunk) {
  return is_law(chunk.method) && chunk.base != nullptr && chunk.word_bytes == kLawWordBytes &&
         chunk.words % kLawParts == 0;
}

// Writes the prediction of a chunk, and under the gradient law its gradients. Under the mean law,
// the prediction of m is m. Returns true if the chunk differs from its base: otherwise it needs
// none. Each thread computes the same elements of all parts.
__device__ inline bool predict_chunk(const Chunk& chunk, uint32_t* prediction,
                                     uint16_t* gradients) {
  const AdamLaw law = chunk.law;
  const uint32_t* const current = reinterpret_cast<const uint32_t*>(chunk.current);
  const uint32_t* const base = reinterpret_cast<const uint32_t*>(chunk.base);
  const uint32_t count = chunk.words / kLawParts;
  bool differs = false;
  for (uint32_t i = threadIdx.x; i < count; i += kBlockThreads) {
    const uint32_t w = base[i], m = base[count + i], v = base[2 * count + i];
    const uint32_t next_m = current[count + i], next_v = current[2 * count + i];
    differs = differs || w != current[i] || m != next_m || v != next_v;
    const float w0 = float_of(w), m0 = float_of(m), v0 = float_of(v);
    uint32_t weight, mean, square;
    if (chunk.method == kStepsLaw) {
      mean = m;
      square = canonical(law.beta2 * v0);
      const float update = later_update_of(law, m0, v0, float_of(next_m), float_of(next_v));
      weight = canonical(weight_of(law.weight, law, w0, update));
    } else {
      mean = next_m;
      float gradient = gradient_of(law, m0, float_of(next_m));
      if (chunk.method == kGradientLaw) {
        gradients[i] = short_gradient_of(law, m0, float_of(next_m));
        gradient = clipped(law, gradients[i]);
        mean = canonical(mean_of(law.mean, law, m0, gradient));
      }
      square = canonical(square_of(law.square, law, v0, gradient));
      const float update = update_of(law, float_of(mean), float_of(square));
      weight = canonical(weight_of(law.weight, law, w0, update));
    }
    prediction[i] = weight;
    prediction[count + i] = mean;
    prediction[2 * count + i] = square;
  }
  return __syncthreads_or(differs) != 0;
}

}  // namespace device
}  // namespace deltacheck

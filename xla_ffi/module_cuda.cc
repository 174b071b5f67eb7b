// deltacheck._native_cuda: the device encoder for memory that a framework owns, passed as
// addresses. deltacheck/backends/torch/capture calls it. Every function only enqueues work on the
// stream, on the current device of the calling thread. It loads without a driver. Compiled with
// DELTACHECK_EMULATOR, it is deltacheck._native_emulated, whose device is the processor, for tests.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "cuda/call.h"
#include "handlers/registrations.h"

namespace nb = nanobind;

namespace deltacheck {
namespace {

// Incremented together with INTERFACE in deltacheck/backends/torch/capture/windows.py whenever a
// function here changes.
constexpr int kInterface = 4;

// Throws std::runtime_error with the message of CUDA, which nanobind turns into RuntimeError.
void must_succeed(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

template <typename T>
// Addresses are passed as numbers, because torch tensors offer data_ptr() and no common buffer
// type.
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// Returns the reason why there is no usable device, or None.
std::optional<std::string> problem() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return std::string(cudaGetErrorString(error));
  if (count == 0) return "there is no CUDA device";
  return std::nullopt;
}

uint64_t workspace_bytes(uint32_t chunks, uint64_t bytes) {
  return device::Workspace(chunks, bytes).all_bytes;
}

void encode_table(uint64_t table, uint32_t chunks, uint64_t bytes, uint64_t workspace,
                  uint64_t rows, uint64_t head, uint64_t payload, uint64_t payload_bytes,
                  uint64_t digests, uint64_t stream) {
  device::EncodeArguments call{};
  call.chunks = chunks;
  call.rows = at<Row>(rows);
  call.head = at<uint64_t>(head);
  call.payload = at<uint8_t>(payload);
  call.payload_bytes = payload_bytes;
  call.digests = at<uint64_t>(digests);
  nb::gil_scoped_release released;
  must_succeed(device::encode_from_host(at<device::Chunk>(table), at<uint8_t>(workspace),
                                        device::Workspace(chunks, bytes), call,
                                        reinterpret_cast<cudaStream_t>(stream)));
}

// Sources, sizes and offsets are arrays of `count` numbers in host memory.
void copy_all(uint64_t sources, uint64_t sizes, uint64_t offsets, uint64_t count, uint64_t target,
              uint64_t stream) {
  nb::gil_scoped_release released;
  for (uint64_t i = 0; i < count; ++i) {
    if (at<const uint64_t>(sizes)[i] == 0) continue;  // it may have no address
    must_succeed(cudaMemcpyAsync(at<uint8_t>(target + at<const uint64_t>(offsets)[i]),
                                 at<const uint8_t>(at<const uint64_t>(sources)[i]),
                                 at<const uint64_t>(sizes)[i], cudaMemcpyDeviceToDevice,
                                 reinterpret_cast<cudaStream_t>(stream)));
  }
}

void digest_table(uint64_t table, uint32_t chunks, uint64_t digests, uint64_t stream) {
  nb::gil_scoped_release released;
  must_succeed(device::digest(at<device::Chunk>(table), chunks, at<uint64_t>(digests),
                              reinterpret_cast<cudaStream_t>(stream)));
}

}  // namespace
}  // namespace deltacheck

NB_MODULE(DELTACHECK_MODULE, m) {
  using namespace deltacheck;
  m.attr("INTERFACE") = kInterface;
  m.attr("CHUNK_BYTES") = sizeof(device::Chunk);
  m.attr("HEAD_ENTRIES") = static_cast<int>(kHeadEntries);
  m.def("problem", problem, "Return the reason why no device is usable, or None.");
  m.def("workspace_bytes", workspace_bytes, nb::arg("chunks"), nb::arg("bytes"));
  m.def("encode", encode_table, nb::arg("table"), nb::arg("chunks"), nb::arg("bytes"),
        nb::arg("workspace"), nb::arg("rows"), nb::arg("head"), nb::arg("payload"),
        nb::arg("payload_bytes"), nb::arg("digests"), nb::arg("stream"),
        "Enqueue device::encode of cuda/device.h. Only table is host memory.");
  m.def("copy", copy_all, nb::arg("sources"), nb::arg("sizes"), nb::arg("offsets"),
        nb::arg("count"), nb::arg("target"), nb::arg("stream"),
        "Enqueue copies from many places to offsets of one.");
  m.def("digest", digest_table, nb::arg("table"), nb::arg("chunks"), nb::arg("digests"),
        nb::arg("stream"), "Enqueue device::digest. All addresses are device memory.");
  m.def("registrations", registrations, "Return the handlers, as deltacheck._native does.");
}

// The assumptions of graph.cpp about `at::cuda::CUDAGraph` in libtorch 2.11; cuda/graph_abi.cpp checks
// them against its header.
#pragma once

#include <cstddef>

namespace overdrive {

// The storage of the object, twice as large as needed.
struct GraphStorage {
  alignas(16) std::byte bytes[512];
};

constexpr int CAPTURE_MODE_GLOBAL = 0;  // cudaStreamCaptureModeGlobal, PyTorch's default

namespace graph_names {
constexpr auto construct = "_ZN2at4cuda9CUDAGraphC1Eb";
constexpr auto destroy = "_ZN2at4cuda9CUDAGraphD1Ev";
constexpr auto capture_begin =
    "_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode";
constexpr auto capture_end = "_ZN2at4cuda9CUDAGraph11capture_endEv";
constexpr auto replay = "_ZN2at4cuda9CUDAGraph6replayEv";
constexpr auto reset = "_ZN2at4cuda9CUDAGraph5resetEv";
constexpr auto pool = "_ZN2at4cuda9CUDAGraph4poolEv";
}  // namespace graph_names

}  // namespace overdrive

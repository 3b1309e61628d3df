// The assumptions of graph.cpp about `at::cuda::CUDAGraph` in libtorch 2.11 and 2.13; cuda/graph_abi.cpp checks
// them against its header.
#pragma once

#include <cstddef>

namespace overdrive {

// The storage of the object, twice as large as libtorch 2.13 needs.
struct GraphStorage {
  alignas(16) std::byte bytes[1024];
};

constexpr int CAPTURE_MODE_GLOBAL = 0;  // cudaStreamCaptureModeGlobal, PyTorch's default

// The entries of a table of virtual functions before the first function: the offset to the top and the type.
constexpr size_t TABLE_HEAD = 2;
// The bound of the search in a table: below the 50 functions of libtorch 2.11 and the 55 of 2.13, so that the search
// stays inside the table.
constexpr size_t MOST_VIRTUAL_FUNCTIONS = 48;

namespace graph_names {
constexpr auto construct = "_ZN2at4cuda9CUDAGraphC1Eb";
constexpr auto destroy = "_ZN2at4cuda9CUDAGraphD1Ev";
constexpr auto capture_begin =
    "_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode";
constexpr auto capture_end = "_ZN2at4cuda9CUDAGraph11capture_endEv";
constexpr auto replay = "_ZN2at4cuda9CUDAGraph6replayEv";
constexpr auto reset = "_ZN2at4cuda9CUDAGraph5resetEv";
constexpr auto pool = "_ZN2at4cuda9CUDAGraph4poolEv";
constexpr auto new_pool = "_ZN2at4cuda17graph_pool_handleEv";
// An allocator that implements the interface of libtorch's caching allocator.
constexpr auto allocator_table =
    "_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE";
constexpr auto end_allocate_to_pool =
    "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator17endAllocateToPoolEaSt4pairIyyE";
constexpr auto release_pool =
    "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator11releasePoolEaSt4pairIyyE";
}  // namespace graph_names

}  // namespace overdrive

// Checks the assumptions of graph.cpp against the CUDA headers; compiled with the feature `cuda`. A name
// in the Itanium ABI follows from the class, the function and the types of its arguments, so if these are
// right, the names are too.
#include "../graph_abi.h"

#include <ATen/cuda/CUDAGraph.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <type_traits>
#include <utility>

namespace {

using Graph = at::cuda::CUDAGraph;
using Pool = std::pair<unsigned long long, unsigned long long>;

static_assert(sizeof(Graph) <= sizeof(overdrive::GraphStorage), "CUDAGraph has grown");
static_assert(alignof(Graph) <= alignof(overdrive::GraphStorage), "CUDAGraph is aligned otherwise");
static_assert(std::is_same_v<c10::MempoolId_t, Pool>);
static_assert(sizeof(cudaStreamCaptureMode) == sizeof(int));
static_assert(cudaStreamCaptureModeGlobal == overdrive::CAPTURE_MODE_GLOBAL);
static_assert(std::is_constructible_v<Graph, bool>);
static_assert(!std::is_polymorphic_v<Graph>);
static_assert(std::is_same_v<decltype(&Graph::capture_begin),
                             void (Graph::*)(Pool, cudaStreamCaptureMode)>);
static_assert(std::is_same_v<decltype(&Graph::capture_end), void (Graph::*)()>);
static_assert(std::is_same_v<decltype(&Graph::replay), void (Graph::*)()>);
static_assert(std::is_same_v<decltype(&Graph::reset), void (Graph::*)()>);
static_assert(std::is_same_v<decltype(&Graph::pool), Pool (Graph::*)()>);
static_assert(std::is_same_v<decltype(&at::cuda::graph_pool_handle), Pool (*)()>);

using Allocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;
using Pluggable = torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

// The index of a function in the table of one subclass is its index in that of the other, if both begin with the
// table of the interface.
static_assert(std::is_base_of_v<c10::DeviceAllocator, Allocator>);
static_assert(std::is_base_of_v<Allocator, Pluggable>);
static_assert(std::is_same_v<decltype(&Allocator::endAllocateToPool),
                             void (Allocator::*)(c10::DeviceIndex, Pool)>);
static_assert(std::is_same_v<decltype(&Allocator::releasePool),
                             void (Allocator::*)(c10::DeviceIndex, Pool)>);
static_assert(std::is_same_v<decltype(&Pluggable::endAllocateToPool),
                             void (Pluggable::*)(c10::DeviceIndex, Pool)>);
static_assert(std::is_same_v<decltype(&Pluggable::releasePool),
                             void (Pluggable::*)(c10::DeviceIndex, Pool)>);

}  // namespace

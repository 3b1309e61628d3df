// Nodes of the autograd graph. libtorch counts the references of a node in a `std::shared_ptr` before version 2.13,
// and in the node itself since.
#pragma once

#include "version.h"

#include <torch/csrc/autograd/function.h>

#include <utility>

#define OVERDRIVE_INTRUSIVE_NODES OVERDRIVE_TORCH_AT_LEAST(2, 13)

namespace overdrive {

// Returns a new node, which frees a deep graph without deep recursion: by libtorch's deleter before 2.13, and by
// `Node::release_resources` since.
template <class T, class... Arguments>
auto make_node(Arguments&&... arguments) {
#if OVERDRIVE_INTRUSIVE_NODES
  return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
#else
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode);
#endif
}

}  // namespace overdrive

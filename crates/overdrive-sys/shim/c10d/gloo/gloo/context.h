// Stands in for Gloo's header, which the wheels of libtorch leave out. Contexts are made and freed by
// libtorch; here they are only pointed at, and these two functions of libtorch_cpu called.
#pragma once
#include <chrono>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  void closeConnections();
};
}  // namespace gloo

// Rust closures that C++ calls, and their failures on the way through libtorch back to Rust.
#pragma once

#include "guard.h"

#include <memory>

namespace overdrive {

inline void throw_if_failed(const od_failure& failure) {
  if (failure.payload) throw RustFailure(failure);
}

// Takes ownership of a Rust closure: `drop` is called once, when the last copy is destroyed.
inline std::shared_ptr<void> own(const od_closure& closure) {
  return std::shared_ptr<void>(closure.self, closure.drop);
}

}  // namespace overdrive

// The C++ side of the handles of c10d.h.
#pragma once

#include "../guard.h"
#include "c10d.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace overdrive {

// Runs a function that frees something; its error could be reported to nobody.
template <class Body>
void discard(Body&& body) noexcept {
  try {
    body();
  } catch (...) {
  }
}

}  // namespace overdrive

struct od_store {
  c10::intrusive_ptr<c10d::Store> store;
};

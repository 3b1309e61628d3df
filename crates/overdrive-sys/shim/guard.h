// Turns C++ exceptions into status values.
#pragma once

#include "shim.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

struct od_status {
  int32_t kind;
  std::string message;
  std::shared_ptr<void> payload;  // of an error that a Rust callback raised
};

namespace overdrive {

// Thrown for what the caller did wrong, as against what libtorch refused.
struct BadArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct NotFound : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The error or panic of a Rust callback on its way through C++. libtorch's engine keeps an exception
// as it is (`std::exception_ptr`), so the value arrives whole at the call of ours that started it; a
// caller that knows nothing of it, such as tch's own `backward`, reads the message.
struct RustFailure : std::runtime_error {
  explicit RustFailure(const od_failure& failure)
      : std::runtime_error(std::string(failure.message, failure.message_len)),
        payload(failure.payload, failure.release) {}
  std::shared_ptr<void> payload;
};

// Allocates without throwing: when even that fails, a static status is returned.
od_status* make_status(int32_t kind, const char* message,
                       std::shared_ptr<void> payload = nullptr) noexcept;

template <class Body>
od_status* guard(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::OutOfMemoryError& e) {
    return make_status(OD_OUT_OF_MEMORY, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    return make_status(OD_ERROR, e.what_without_backtrace());
  } catch (const RustFailure& e) {
    return make_status(OD_RUST, e.what(), e.payload);
  } catch (const BadArgument& e) {
    return make_status(OD_BAD_ARGUMENT, e.what());
  } catch (const NotFound& e) {
    return make_status(OD_NOT_FOUND, e.what());
  } catch (const std::bad_alloc&) {
    return make_status(OD_OUT_OF_MEMORY, "out of memory (std::bad_alloc)");
  } catch (const std::exception& e) {
    return make_status(OD_ERROR, e.what());
  } catch (...) {
    return make_status(OD_ERROR, "an exception of unknown type came out of libtorch");
  }
}

inline char* copy_string(const std::string& text) {
  char* out = new char[text.size() + 1];
  std::memcpy(out, text.c_str(), text.size() + 1);
  return out;
}

}  // namespace overdrive

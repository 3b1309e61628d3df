// Converts C++ exceptions into status values.
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

// Thrown for a mistake of the caller that the shim detects, as opposed to an error of libtorch.
struct BadArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct NotFound : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The error or panic of a Rust callback on its way through C++. libtorch's engine passes an exception on
// unchanged (`std::exception_ptr`), so the value reaches the shim function that started the pass; a
// caller that does not know this type, such as tch's own `backward`, reads the message.
struct RustFailure : std::runtime_error {
  explicit RustFailure(const od_failure& failure)
      : std::runtime_error(std::string(failure.message, failure.message_len)),
        payload(failure.payload, failure.release) {}
  std::shared_ptr<void> payload;
};

// Returns a new status without throwing; if its allocation fails, a static one.
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

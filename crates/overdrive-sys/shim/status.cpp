#include "guard.h"

namespace overdrive {

static od_status* out_of_memory_status() noexcept {
  // Never freed: see od_status_free.
  static od_status status{OD_OUT_OF_MEMORY, "out of memory", nullptr};
  return &status;
}

od_status* make_status(int32_t kind, const char* message, std::shared_ptr<void> payload) noexcept {
  try {
    return new od_status{kind, message, std::move(payload)};
  } catch (...) {
    return out_of_memory_status();
  }
}

}  // namespace overdrive

extern "C" int32_t od_status_kind(const od_status* status) noexcept { return status->kind; }

extern "C" const char* od_status_message(const od_status* status) noexcept {
  return status->message.c_str();
}

extern "C" void* od_status_payload(const od_status* status) noexcept { return status->payload.get(); }

extern "C" void od_status_free(od_status* status) noexcept {
  if (status != overdrive::out_of_memory_status()) {
    delete status;
  }
}

extern "C" void od_string_free(char* text) noexcept { delete[] text; }

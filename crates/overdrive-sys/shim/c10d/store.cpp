// The key-value store for the rendezvous of the processes of a group.
#include "c10d.h"
#include "handles.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

using overdrive::guard;

namespace {

std::vector<uint8_t> bytes(const uint8_t* value, size_t len) {
  return len == 0 ? std::vector<uint8_t>() : std::vector<uint8_t>(value, value + len);
}

void give(const std::vector<uint8_t>& value, char** out, size_t* out_len) {
  *out = overdrive::copy_string(std::string(value.begin(), value.end()));
  *out_len = value.size();
}

std::vector<std::string> list(const char* const* keys, size_t n) {
  return std::vector<std::string>(keys, keys + n);
}

}  // namespace

extern "C" od_status* od_store_tcp(const char* host, uint16_t port, int32_t is_server,
                                   int32_t listener, int64_t timeout_ms, od_store** out,
                                   uint16_t* out_port) noexcept {
  return guard([&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = is_server != 0;
    if (listener >= 0) {
      options.masterListenFd = listener;
    }
    options.waitWorkers = false;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    const auto bound = store->getPort();
    *out = new od_store{std::move(store)};
    *out_port = bound;
  });
}

extern "C" od_status* od_store_prefix(const od_store* store, const char* prefix,
                                      od_store** out) noexcept {
  return guard([&] {
    *out = new od_store{c10::make_intrusive<c10d::PrefixStore>(prefix, store->store)};
  });
}

extern "C" od_status* od_store_clone(const od_store* store, od_store** out) noexcept {
  return guard([&] { *out = new od_store{store->store->clone()}; });
}

extern "C" od_status* od_store_set(od_store* store, const char* key, const uint8_t* value,
                                   size_t len) noexcept {
  return guard([&] { store->store->set(key, bytes(value, len)); });
}

extern "C" od_status* od_store_get(od_store* store, const char* key, char** out,
                                   size_t* out_len) noexcept {
  return guard([&] { give(store->store->get(key), out, out_len); });
}

extern "C" od_status* od_store_compare_set(od_store* store, const char* key,
                                           const uint8_t* expected, size_t expected_len,
                                           const uint8_t* desired, size_t desired_len, char** out,
                                           size_t* out_len) noexcept {
  return guard([&] {
    give(store->store->compareSet(key, bytes(expected, expected_len), bytes(desired, desired_len)),
         out, out_len);
  });
}

extern "C" od_status* od_store_add(od_store* store, const char* key, int64_t amount,
                                   int64_t* out) noexcept {
  return guard([&] { *out = store->store->add(key, amount); });
}

extern "C" od_status* od_store_check(od_store* store, const char* const* keys, size_t n,
                                     int32_t* out) noexcept {
  return guard([&] { *out = store->store->check(list(keys, n)) ? 1 : 0; });
}

extern "C" od_status* od_store_wait(od_store* store, const char* const* keys, size_t n,
                                    int64_t timeout_ms) noexcept {
  return guard([&] { store->store->wait(list(keys, n), std::chrono::milliseconds(timeout_ms)); });
}

extern "C" od_status* od_store_delete(od_store* store, const char* key, int32_t* out) noexcept {
  return guard([&] { *out = store->store->deleteKey(key) ? 1 : 0; });
}

extern "C" void od_store_free(od_store* store) noexcept {
  // libtorch's destructor may throw, and a free function cannot report it.
  overdrive::discard([&] { delete store; });
}

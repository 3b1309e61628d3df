// Device events, named ranges, libtorch's Kineto profiler, the memory of the process, and the identity of
// a CUDA device. No CUDA headers are needed: events use the device-generic guard, and names come from the
// driver library that CUDA has loaded.
#include "guard.h"

#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <dlfcn.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <vector>

#ifdef __APPLE__
#include <mach/mach.h>
#else
#include <unistd.h>
#endif

namespace {

namespace kineto = torch::autograd::profiler;
namespace profiler = torch::profiler::impl;

// Kineto collects one trace at a time in a process.
std::atomic<bool> profiling{false};

std::string shapes_text(const kineto::KinetoEvent& event) {
  std::string text;
  if (!event.hasShapes()) return text;
  for (const auto& shape : event.shapes()) {
    text += text.empty() ? "[" : ", [";
    for (size_t k = 0; k < shape.size(); ++k) {
      if (k > 0) text += ", ";
      text += std::to_string(shape[k]);
    }
    text += "]";
  }
  return text;
}

std::set<profiler::ActivityType> activities_of(const od_profiler_options& options) {
  std::set<profiler::ActivityType> activities;
  if (options.cpu) activities.insert(profiler::ActivityType::CPU);
  if (options.cuda) activities.insert(profiler::ActivityType::CUDA);
  return activities;
}

// Returns the name of the last error of CUPTI on this thread and forgets it; empty without an error and without
// CUPTI. Kineto only logs such an error, and goes on without the GPU.
std::string take_cupti_error() {
  const auto last = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "cuptiGetLastError"));
  const auto name = reinterpret_cast<int (*)(int, const char**)>(dlsym(RTLD_DEFAULT, "cuptiGetResultString"));
  const int code = last ? last() : 0;
  if (code == 0) return {};
  const char* text = nullptr;
  if (name && name(code, &text) == 0 && text) return text;
  return "error " + std::to_string(code);
}

}  // namespace

struct od_event {
  c10::Event event;
};

struct od_range {
  at::RecordFunction function;
};

struct od_profile {
  std::unique_ptr<kineto::ProfilerResult> result;
  std::vector<std::string> names;
  std::vector<std::string> shapes;
};

extern "C" od_status* od_event_new(int32_t device_type, od_event** out) noexcept {
  return overdrive::guard([&] {
    // BACKEND_DEFAULT makes the event store the time; PYTORCH_DEFAULT does not.
    *out = new od_event{
        c10::Event(static_cast<c10::DeviceType>(device_type), c10::EventFlag::BACKEND_DEFAULT)};
  });
}

extern "C" void od_event_free(od_event* event) noexcept { delete event; }

extern "C" od_status* od_event_record(od_event* event, int32_t device_index) noexcept {
  return overdrive::guard([&] {
    const auto type = event->event.device_type();
    const c10::impl::VirtualGuardImpl device(type);
    event->event.record(
        device.getStream(c10::Device(type, static_cast<c10::DeviceIndex>(device_index))));
  });
}

extern "C" od_status* od_event_query(const od_event* event, int32_t* done) noexcept {
  return overdrive::guard([&] { *done = event->event.query(); });
}

extern "C" od_status* od_event_wait(const od_event* event) noexcept {
  return overdrive::guard([&] { event->event.synchronize(); });
}

extern "C" od_status* od_event_elapsed(const od_event* start, const od_event* end,
                                       double* milliseconds) noexcept {
  return overdrive::guard([&] { *milliseconds = start->event.elapsedTime(end->event); });
}

extern "C" od_status* od_range_begin(const char* name, size_t length, od_range** out) noexcept {
  return overdrive::guard([&] {
    // Without a profiler a range costs only this check.
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) {
      *out = nullptr;
      return;
    }
    auto range = std::unique_ptr<od_range>(new od_range{at::RecordFunction(std::move(*callbacks))});
    range->function.before(std::string_view(name, length));
    *out = range.release();
  });
}

extern "C" void od_range_end(od_range* range) noexcept {
  // The destructor calls the callbacks that end the range; they are libtorch's own and do not throw.
  delete range;
}

extern "C" od_status* od_profiler_start(const od_profiler_options* options, char** cupti) noexcept {
  return overdrive::guard([&] {
    if (profiling.exchange(true)) {
      throw overdrive::BadArgument(
          "another profile is being taken in this process; stop it first");
    }
    try {
      const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO, options->record_shapes,
                                            options->profile_memory, /*with_stack=*/false,
                                            options->with_flops);
      const auto activities = activities_of(*options);
      take_cupti_error();  // of earlier calls
      kineto::prepareProfiler(config, activities);
      kineto::enableProfiler(config, activities);
      *cupti = overdrive::copy_string(take_cupti_error());
    } catch (...) {
      profiling = false;
      throw;
    }
  });
}

extern "C" od_status* od_profiler_stop(od_profile** out) noexcept {
  return overdrive::guard([&] {
    // Reset even if stopping throws: a second attempt would fail too.
    profiling = false;
    auto profile = std::make_unique<od_profile>();
    profile->result = kineto::disableProfiler();
    TORCH_CHECK(profile->result, "the profiler was not running on this thread");
    const auto& events = profile->result->events();
    profile->names.reserve(events.size());
    profile->shapes.reserve(events.size());
    for (const auto& event : events) {
      profile->names.push_back(event.name());
      profile->shapes.push_back(shapes_text(event));
    }
    *out = profile.release();
  });
}

extern "C" od_status* od_nvtx_start(int32_t record_shapes) noexcept {
  return overdrive::guard([&] {
    if (profiling.exchange(true)) {
      throw overdrive::BadArgument(
          "another profile is being taken in this process; stop it first");
    }
    try {
      const profiler::ProfilerConfig config(profiler::ProfilerState::NVTX, record_shapes != 0);
      kineto::enableProfiler(config, {});
    } catch (...) {
      profiling = false;
      throw;
    }
  });
}

extern "C" void od_nvtx_stop() noexcept {
  profiling = false;
  try {
    kineto::disableProfiler();
  } catch (...) {
    // The caller is a destructor, which cannot report an error.
  }
}

extern "C" size_t od_profile_len(const od_profile* profile) noexcept { return profile->names.size(); }

extern "C" od_status* od_profile_event(const od_profile* profile, size_t index,
                                       od_profile_entry* out) noexcept {
  return overdrive::guard([&] {
    if (index >= profile->names.size()) {
      throw overdrive::BadArgument("event " + std::to_string(index) + " of " +
                                   std::to_string(profile->names.size()));
    }
    const auto& event = profile->result->events()[index];
    od_profile_entry entry{};
    entry.name = profile->names[index].c_str();
    entry.shapes = profile->shapes[index].c_str();
    entry.start_ns = event.startNs();
    entry.end_ns = event.endNs();
    entry.thread = event.startThreadId();
    entry.end_thread = event.endThreadId();
    entry.correlation = event.correlationId();
    entry.linked_correlation = event.linkedCorrelationId();
    entry.flops = event.flops();
    entry.bytes = event.nBytes();
    entry.sequence = event.sequenceNr();
    entry.device_type = static_cast<int32_t>(event.deviceType());
    entry.device_index = event.deviceIndex();
    entry.scope = event.scope();
    entry.is_async = event.isAsync();
    entry.is_hidden = event.isHiddenEvent();
    *out = entry;
  });
}

extern "C" od_status* od_profile_start_ns(const od_profile* profile, uint64_t* out) noexcept {
  return overdrive::guard([&] { *out = profile->result->trace_start_ns(); });
}

extern "C" od_status* od_profile_save(od_profile* profile, const char* path) noexcept {
  return overdrive::guard([&] { profile->result->save(path); });
}

extern "C" void od_profile_free(od_profile* profile) noexcept { delete profile; }

extern "C" od_status* od_process_memory(uint64_t* resident, uint64_t* peak_resident) noexcept {
  return overdrive::guard([&] {
#ifdef __APPLE__
    mach_task_basic_info info{};
    mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
    TORCH_CHECK(task_info(mach_task_self(), MACH_TASK_BASIC_INFO,
                          reinterpret_cast<task_info_t>(&info), &count) == KERN_SUCCESS,
                "the kernel does not report this process's memory");
    *peak_resident = info.resident_size_max;
    *resident = info.resident_size;
#else
    std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen("/proc/self/statm", "r"), &std::fclose);
    TORCH_CHECK(file, "/proc/self/statm cannot be read");
    unsigned long long total = 0, pages = 0;
    TORCH_CHECK(std::fscanf(file.get(), "%llu %llu", &total, &pages) == 2,
                "/proc/self/statm has an unknown format");
    rusage usage{};
    TORCH_CHECK(getrusage(RUSAGE_SELF, &usage) == 0, "the kernel does not report this process's memory");
    const uint64_t now = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    // The kernel updates the peak in batches, so it can lag slightly behind the current value.
    *peak_resident = std::max(now, static_cast<uint64_t>(usage.ru_maxrss) * 1024);
    *resident = now;
#endif
  });
}

extern "C" od_status* od_cuda_identity(int32_t device, char** name, char** pci_bus_id) noexcept {
  return overdrive::guard([&] {
    // The driver's interface: its handles are integers, so no header is needed, and it respects
    // CUDA_VISIBLE_DEVICES as the runtime does.
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(driver, "no CUDA driver is installed (libcuda.so.1)");
    const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
    const auto get = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
    const auto get_name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
    const auto get_bus = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetPCIBusId"));
    TORCH_CHECK(init && get && get_name && get_bus, "the CUDA driver does not have cuInit, cuDeviceGet, cuDeviceGetName and cuDeviceGetPCIBusId");
    int handle = 0;
    char text[256] = {}, bus[32] = {};
    int failed = init(0);
    if (failed == 0) failed = get(&handle, device);
    if (failed == 0) failed = get_name(text, sizeof(text), handle);
    if (failed == 0) failed = get_bus(bus, sizeof(bus), handle);
    TORCH_CHECK(failed == 0, "the CUDA driver does not know device ", device, " (its error ", failed, ")");
    std::unique_ptr<char[]> first(overdrive::copy_string(text));
    *pci_bus_id = overdrive::copy_string(bus);
    *name = first.release();
  });
}

// The handles of process groups.
#pragma once

#include "watch.h"

#include <functional>

struct od_group {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<overdrive::Watch> watch;
  // Here, not in the watch, which a thread of the backend may be the last to let go of.
  std::function<void()> close_connections;
};

struct od_work {
  c10::intrusive_ptr<c10d::Work> work;
};

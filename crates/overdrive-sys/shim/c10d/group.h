// The handles of process groups.
#pragma once

#include "watch.h"

#include <functional>

struct od_group {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<overdrive::Watch> watch;
  // Here, not in the watch, which a thread of the backend may be the last to release.
  std::function<void()> close_connections;
  // Ends a group that has not failed, after the collectives that run.
  std::function<void()> leave = [] {};
  // Set if the backend does not report to the watch: its collectives ask the watch whether the group has failed.
  bool asks_watch = false;
};

struct od_work {
  c10::intrusive_ptr<c10d::Work> work;
  // Asked after waiting; null if the work reports failures itself.
  std::shared_ptr<overdrive::Watch> watch;
};

#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "start/deadline.h"

namespace tessera {

/// Waits until `store` has `key`; returns false if the deadline passes first. Asks again and again:
/// c10d logs two warnings for each `wait()` that reaches its limit.
bool wait_for_key(c10d::Store& store, const std::string& key, const Deadline& deadline);

}  // namespace tessera

#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/start/deadline.h"

namespace tessera {

/// Returns the least time between two questions of a rank to a store that `askers` ranks ask: the
/// store gets no more questions a second from many than from a few.
std::chrono::milliseconds pause_between_questions(int askers);

/// Waits until `store` has `key`, as `askers` ranks may do at a time; returns false if the deadline
/// passes first. Asks again and again: c10d logs two warnings for each `wait()` that reaches its
/// limit.
bool wait_for_key(c10d::Store& store, const std::string& key, const Deadline& deadline, int askers);

}  // namespace tessera

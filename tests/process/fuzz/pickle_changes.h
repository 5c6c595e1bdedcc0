#pragma once

#include <string>

#include "support/draw.h"

namespace tessera::testing {

/// A pickle of a dict of tensors, all of the storages "0" and "1" of 24 floats each, which is
/// whole, or changed in a few of its operations.
std::string some_pickle(Draw& draw);

/// One that would take a lot of memory or time: deep, wide, or shared many times.
std::string costly_pickle(Draw& draw);

}  // namespace tessera::testing

#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <string_view>

#include "checkpoint/shortened.h"

namespace tessera {

/// Throws `c10::ValueError` unless `name`, taken from an index, can name a file beside it.
inline void check_file_name(const std::string& name) {
  constexpr size_t kMostBytes = 255;  // the limit of Linux's file systems
  const bool is_plain = name.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
  TORCH_CHECK_VALUE(is_plain && !name.empty() && name.size() <= kMostBytes && name != "." &&
                        name != "..",
                    "'", shortened(name), "' must be the name of a file beside the index");
}

}  // namespace tessera

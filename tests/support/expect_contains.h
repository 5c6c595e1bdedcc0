#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::testing {

/// Expects that `text` has all of `parts`.
inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

}  // namespace tessera::testing

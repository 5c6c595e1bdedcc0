#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tessera::testing {

constexpr int64_t kPage = 4096;

/// Returns the number of resident pages of `memory`, which begins at the start of a page.
inline int64_t resident_pages(const torch::Tensor& memory) {
  std::vector<unsigned char> pages((memory.nbytes() + kPage - 1) / kPage);
  EXPECT_EQ(::mincore(memory.mutable_data_ptr(), memory.nbytes(), pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; });
}

}  // namespace tessera::testing

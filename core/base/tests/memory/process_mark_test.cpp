#include "base/memory/process_mark.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/forked.h"

namespace tessera::process_mark_test {

TEST(ProcessMark, IsInheritedByAChildOnly) {
  const ProcessMark parents;
  EXPECT_FALSE(parents.is_inherited());
  EXPECT_EQ(status_of_child([&] {
              TORCH_CHECK(parents.is_inherited());
              const ProcessMark childs;
              TORCH_CHECK(!childs.is_inherited());
              TORCH_CHECK(status_of_child([&] { TORCH_CHECK(childs.is_inherited()); }) == 0);
              TORCH_CHECK(!childs.is_inherited());
            }),
            0);
  EXPECT_FALSE(parents.is_inherited());
}

}  // namespace tessera::process_mark_test

// Buffers that a model leaves out of its checkpoints.
#include "checkpoint/tests/saved_model.h"

namespace tessera::testing::left_out_test {

const std::string kMean = "norm.running_mean", kVariance = "norm.running_var";

std::set<std::string> buffers_of(const std::filesystem::path& checkpoint) {
  std::set<std::string> names;
  for (const CheckpointTensor& tensor : inspect_checkpoint(checkpoint).tensors)
    if (tensor.kind != "param") names.insert(tensor.names.begin(), tensor.names.end());
  return names;
}

TEST(LeftOutBuffers, AreNeitherSavedNorNeededNorRefused) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    const auto net = make_picture(1);
    auto sharded = fully_shard(net);
    save_checkpoint(scratch / "all", sharded, nullptr, {.random_state = false});
    sharded.leave_out_of_checkpoints({kMean});
    for (const bool whole : {false, true}) {
      const auto path = scratch / (whole ? "whole" : "parts");
      save_checkpoint(path, sharded, nullptr, {.whole_parameters = whole, .random_state = false});
      EXPECT_FALSE(buffers_of(path).contains(kMean)) << path;
      EXPECT_TRUE(buffers_of(path).contains(kVariance)) << path;
    }
    for (const char* path : {"all", "parts", "whole"}) {
      net->norm->running_mean.fill_(7);
      net->norm->running_var.fill_(7);
      EXPECT_EQ(load_checkpoint(scratch / path, sharded, nullptr).missing.size(), 0u);
      EXPECT_EQ(net->norm->running_mean.min().item<double>(), 7);
      EXPECT_EQ(net->norm->running_var.max().item<double>(), 1);
    }
  });
}

TEST(LeftOutBuffers, AreThoseOfTheModelAndTheSameOnAllRanks) {
  run_world(2, [](World& world) {
    const auto net = make_picture(1);
    auto sharded = fully_shard(net);
    expect_error(
        [&] {
          sharded.leave_out_of_checkpoints({kMean, "norm.mask"});
        },
        {"[leave_out_of_checkpoints]", "none is 'norm.mask'"});
    sharded.leave_out_of_checkpoints({world.rank() == 0 ? kMean : kVariance});
    const auto loss = sharded.forward(picture_batch(0).first).sum();
    expect_error([&] { loss.backward(); }, {"leave_out_of_checkpoints"});
  });
}

}  // namespace tessera::testing::left_out_test

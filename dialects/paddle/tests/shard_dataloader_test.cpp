// `shard_dataloader` over loaders of torch::data.

#include <torch/data.h>

#include "dialects/paddle/tests/shard_layer.h"

namespace tessera::testing::shard_dataloader_test {

using paddle::shard_dataloader;

struct Rows : torch::data::datasets::Dataset<Rows> {
  explicit Rows(int64_t rows, int64_t first = 0) : rows_(rows), first_(first) {}
  torch::data::Example<> get(size_t index) override {
    const auto row = static_cast<double>(index) + static_cast<double>(first_);
    return {on_test_device(torch::full({3}, row)), on_test_device(torch::full({1}, 2 * row))};
  }
  std::optional<size_t> size() const override { return rows_; }

 private:
  int64_t rows_, first_;
};

auto make_loader(int64_t rows, int64_t batch, int64_t first = 0) {
  return torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Rows(rows, first).map(torch::data::transforms::Stack<>()), batch);
}

at::Tensor rows_from(int64_t begin, int64_t end) {
  return on_test_device(torch::arange(begin, end).to(torch::kFloat).view({-1, 1}))
      .expand({end - begin, 3});
}

TEST(ShardDataloader, SL_56_WholeBatchesAreSplitOverAMeshDim) {
  run_world(4, [](World& world) {
    const ProcessMesh mesh({{0, 1}, {2, 3}}, {"dp", "mp"});
    for (const paddle::MeshDim& dim :
         {paddle::MeshDim("dp"), paddle::MeshDim(int64_t{0}), paddle::MeshDim(int64_t{-2})}) {
      auto loader = shard_dataloader(make_loader(7, 4), {mesh}, {.shard_dims = {dim}});
      for (int epoch = 0; epoch < 2; ++epoch) {
        int64_t begin = 0, batches = 0;
        for (auto& batch : loader) {
          const int64_t end = std::min<int64_t>(begin + 4, 7);
          EXPECT_EQ(placements_of(batch.data), (Placements{Shard{0}, Replicate{}}));
          expect_values(batch.data, rows_from(begin, end));
          expect_values(batch.target, 2 * rows_from(begin, end).slice(1, 0, 1));
          EXPECT_TRUE(to_local(batch.data).equal(rows_from(begin, end).chunk(2)[world.rank() / 2]));
          begin = end;
          ++batches;
        }
        EXPECT_EQ(batches, 2);
      }
    }
  });
}

TEST(ShardDataloader, SL_56_WithoutDimsBatchesAreReplicated) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    auto inner = make_loader(4, 4);
    auto loader = shard_dataloader(*inner, {mesh});
    for (auto& batch : loader) {
      EXPECT_EQ(placements_of(batch.data), Placements{Replicate{}});
      expect_values(batch.data, rows_from(0, 4));
    }
  });
}

TEST(ShardDataloader, SL_56_RanksMayLoadTheirOwnPart) {
  run_world(2, [](World& world) {
    const ProcessMesh mesh({0, 1}, {"dp"});
    const paddle::ShardDataloaderOptions options{.shard_dims = {"dp"}, .is_dataset_splitted = true};
    // Rank 0 has 4 and 2 rows, rank 1 has 4 and 1.
    auto loader = shard_dataloader(make_loader(world.rank() == 0 ? 6 : 5, 4, 10 * world.rank()),
                                   {mesh}, options);
    auto it = loader.begin();
    expect_values(it->data, torch::cat({rows_from(0, 4), rows_from(10, 14)}));
    ++it;
    expect_values(it->data, torch::cat({rows_from(4, 6), rows_from(14, 15)}));
    auto uneven = shard_dataloader(make_loader(3, world.rank() == 0 ? 1 : 3), {mesh}, options);
    expect_error([&] { uneven.begin()->data.sizes(); },
                 {"as torch::chunk cuts", "[1, 3]", "rank 0"});
  });
}

struct Dicts {
  using Batch = std::map<std::string, at::Tensor>;
  std::vector<Batch> batches;
  auto begin() { return batches.begin(); }
  auto end() { return batches.end(); }
};

TEST(ShardDataloader, SL_56_ListsAndMapsOverMeshes) {
  run_world(4, [](World&) {
    const ProcessMesh first({0, 1}, {"dp"}), last({2, 3}, {"dp"});
    std::vector<std::vector<at::Tensor>> lists = {{rows_from(0, 4), rows_from(4, 8)}};
    auto loader = shard_dataloader(lists, {first, last}, {.shard_dims = {"dp", paddle::MeshDim()}});
    for (auto& batch : loader) {
      EXPECT_EQ(mesh_of(batch[0]), first);
      EXPECT_EQ(placements_of(batch[0]), Placements{Shard{0}});
      EXPECT_EQ(mesh_of(batch[1]), last);
      EXPECT_EQ(placements_of(batch[1]), Placements{Replicate{}});
    }
    Dicts dicts{{{{"label", rows_from(4, 8)}, {"image", rows_from(0, 4)}}}};
    auto named = shard_dataloader(dicts, {first, last},
                                  {.input_keys = {"image", "label"}, .shard_dims = {"dp"}});
    for (auto& batch : named) {
      EXPECT_EQ(mesh_of(batch.at("image")), first);
      EXPECT_EQ(mesh_of(batch.at("label")), last);
      if (mesh_of(batch.at("label")).is_member()) expect_values(batch.at("label"), rows_from(4, 8));
    }
  });
}

TEST(ShardDataloader, SL_56_WhatDoesNotFitIsRefused) {
  run_world(2, [](World& world) {
    const ProcessMesh mesh({0, 1}, {"dp"});
    expect_error(
        [&] {
          shard_dataloader(make_loader(4, 2), {mesh, mesh}, {.shard_dims = {"dp", "dp", "dp"}});
        },
        {"one for all meshes, or one for each", "expected 2, got 3"});
    expect_error([&] { shard_dataloader(make_loader(4, 2), {}); }, {"there must be a mesh"});
    expect_error([&] { shard_dataloader(make_loader(4, 2), {mesh}, {.shard_dims = {"mp"}}); },
                 {"mp", "dp"});
    Dicts dicts{{{{"image", rows_from(0, 4)}}}};
    auto named = shard_dataloader(dicts, {mesh}, {.input_keys = {"label"}});
    expect_error([&] { named.begin()->at("image").sizes(); }, {"'image' is not one of"});
    std::vector<std::vector<at::Tensor>> lists = {{rows_from(0, 4)}};
    auto few = shard_dataloader(lists, {mesh, mesh});
    expect_error([&] { few.begin()->at(0).sizes(); }, {"an item for each", "expected 2, got 1"});
    auto differing = shard_dataloader(make_loader(4, 2, world.rank()), {mesh},
                                      {.shard_dims = {"dp"}, .check_values = true});
    expect_error([&] { differing.begin()->data.sizes(); }, {"same values on all ranks", "rank 1"});
  });
}

TEST(ShardDataloader, SL_56_AModelTrainsOnItAsOnWholeBatches) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1}, {"dp"});
    auto model = on_test_device(nn::Linear(3, 1)), plain = on_test_device(nn::Linear(3, 1));
    {
      torch::NoGradGuard no_grad;
      for (nn::Linear* layer : {&model, &plain}) {
        (*layer)->weight.copy_(values({1, 3}));
        (*layer)->bias.zero_();
      }
    }
    auto layer = paddle::shard_layer(model, mesh);
    torch::optim::SGD inner(model->parameters(), 0.001), expected(plain->parameters(), 0.001);
    auto optimizer = paddle::shard_optimizer(inner);
    for (auto& batch : shard_dataloader(make_loader(8, 4), {mesh}, {.shard_dims = {"dp"}})) {
      optimizer.zero_grad();
      torch::mse_loss(layer(batch.data), batch.target).backward();
      optimizer.step();
    }
    auto loader = make_loader(8, 4);
    for (auto& batch : *loader) {
      expected.zero_grad();
      torch::mse_loss(plain(batch.data), batch.target).backward();
      expected.step();
    }
    expect_values(model->weight, plain->weight, 1e-5);
  });
}

}  // namespace tessera::testing::shard_dataloader_test

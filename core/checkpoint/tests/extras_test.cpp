// Extras in checkpoints: schedulers, random numbers, samplers, the ranks' own state, and parts that
// may be missing.
#include "checkpoint/tests/saved_job.h"

namespace tessera::testing::extras_test {

using torch::data::samplers::DistributedRandomSampler;

TEST(CheckpointExtras, SchedulersGoOnWhereTheyWere) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    const auto lr = [](Job& job) { return job.inner.param_groups()[0].options().get_lr(); };
    const auto run = [&](Job& job, auto& steps, auto& plateau, int first, int last) {
      std::vector<double> rates;
      for (int step = first; step < last; ++step) {
        job.train(step, step + 1);
        steps.step();
        plateau.step(step < 3 ? 1.0F / static_cast<float>(step + 1) : 1.0F);
        rates.push_back(lr(job));
      }
      return rates;
    };
    const auto with = [&](auto&& use) {
      Job job(1, plans()[3], 0.1);
      torch::optim::StepLR steps(job.inner, 3, 0.5);
      torch::optim::ReduceLROnPlateauScheduler plateau(
          job.inner, torch::optim::ReduceLROnPlateauScheduler::min, 0.1F, 2);
      use(job, steps, plateau);
    };
    std::vector<double> expected;
    with([&](Job& job, auto& steps, auto& plateau) {
      run(job, steps, plateau, 0, 5);
      save_checkpoint(scratch / "one", job.sharded, &job.optimizer,
                      {.schedulers = {&steps, &plateau}});
      expected = run(job, steps, plateau, 5, 12);
    });
    with([&](Job& job, auto& steps, auto& plateau) {
      load_checkpoint(scratch / "one", job.sharded, &job.optimizer,
                      {.schedulers = {&steps, &plateau}});
      EXPECT_EQ(run(job, steps, plateau, 5, 12), expected);
      EXPECT_LT(expected.back(), expected.front());
      // Other schedulers than the saved ones, or in another order.
      expect_contains(error_of([&] {
                        load_checkpoint(scratch / "one", job.sharded, &job.optimizer,
                                        {.schedulers = {&steps}});
                      }),
                      {"schedulers: 1 (the checkpoint's: 2)"});
      expect_contains(error_of([&] {
                        load_checkpoint(scratch / "one", job.sharded, &job.optimizer,
                                        {.schedulers = {&plateau, &steps}});
                      }),
                      {"number 0", "number 1: the checkpoint's has no 'step_count'"});
    });
  });
}

TEST(CheckpointExtras, EachRankDrawsOnWhereItWas) {
  const ScratchDirectory scratch;
  std::vector<torch::Tensor> expected(3);
  const auto draw = [] {
    const at::Device device = test_device();
    return torch::cat({torch::randn({4}, device), torch::rand({4}, device)}).cpu();
  };
  run_world(3, [&](World& world) {
    Filled model(1);
    manual_seed(static_cast<uint64_t>(world.rank()));
    torch::rand({7}, test_device());
    torch::randn({3}, test_device());  // leaves a second normal number cached
    save_checkpoint(scratch / "one", *model.sharded, nullptr);
    expected[static_cast<size_t>(world.rank())] = draw();
  });
  for (const int ranks : {2, 3, 4}) {
    run_world(ranks, [&](World& world) {
      Filled model(2);
      manual_seed(77);
      load_checkpoint(scratch / "one", *model.sharded, nullptr);
      const auto drawn = draw();
      manual_seed(77);
      const auto untouched = draw();
      const auto rank = static_cast<size_t>(world.rank());
      EXPECT_TRUE(torch::equal(drawn, rank < 3 ? expected[rank] : untouched)) << rank;
      manual_seed(77);
      load_checkpoint(scratch / "one", *model.sharded, nullptr, {.random_state = false});
      EXPECT_TRUE(torch::equal(draw(), untouched));
    });
  }
}

struct Numbers : torch::data::Dataset<Numbers, torch::Tensor> {
  torch::Tensor get(size_t index) override { return torch::tensor(static_cast<int64_t>(index)); }
  std::optional<size_t> size() const override { return 23; }
};

// Returns the numbers that a loader gives in the rest of its epoch, up to the batch that makes
// `most`.
template <class Loader>
std::vector<int64_t> rest_of(Loader& loader, std::optional<size_t> most = std::nullopt) {
  std::vector<int64_t> numbers;
  for (const auto& batch : loader) {
    for (const auto& example : batch) numbers.push_back(example.template item<int64_t>());
    if (most && numbers.size() >= *most) break;
  }
  return numbers;
}

TEST(CheckpointExtras, SamplersGoOnBehindTheLastBatch) {
  const ScratchDirectory scratch;
  std::vector<std::vector<int64_t>> expected(2);
  const auto make_loader = [](auto& sampler) {
    return torch::data::make_data_loader(Numbers(), sampler, torch::data::DataLoaderOptions(2));
  };
  run_world(2, [&](World& world) {
    Filled model(1);
    const auto rank = static_cast<size_t>(world.rank());
    ResumableSampler sampler(DistributedRandomSampler(23, 2, rank));
    const auto loader = make_loader(sampler);
    rest_of(*loader, 4);
    save_checkpoint(scratch / "one", *model.sharded, nullptr,
                    {.rank_state = {{"sampler", sampler.state()}}});
    // A new iteration would start over; with the state loaded, it continues like the resumed one.
    sampler.load_state(sampler.state());
    expected[rank] = rest_of(*loader);
    EXPECT_EQ(expected[rank].size(), 12u - 4u);
    for (const int64_t number : rest_of(*loader)) expected[rank].push_back(number);
  });
  run_world(2, [&](World& world) {
    Filled model(2);
    const auto rank = static_cast<size_t>(world.rank());
    ResumableSampler sampler(DistributedRandomSampler(23, 2, rank));
    const auto loader = make_loader(sampler);
    const auto loaded = load_checkpoint(scratch / "one", *model.sharded, nullptr);
    sampler.load_state(loaded.rank_state.at("sampler"));
    std::vector<int64_t> numbers = rest_of(*loader);
    for (const int64_t number : rest_of(*loader)) numbers.push_back(number);
    EXPECT_EQ(numbers, expected[rank]);
  });
}

TEST(CheckpointExtras, WhatMayDifferIsListedAndTheRestIsLoaded) {
  const ScratchDirectory scratch;
  const auto make = [](std::initializer_list<const char*> names, double value) {
    auto bag = std::make_shared<Bag>();
    for (const char* name : names) bag->add(name, torch::full({5}, value));
    bag->add_buffer(names.begin()[0] + std::string("_buffer"), torch::full({2}, value));
    return on_test_device(bag);
  };
  run_world(2, [&](World&) {
    auto saved = make({"a", "b"}, 1);
    auto sharded = fully_shard(saved);
    torch::optim::AdamW inner(saved->parameters());
    ShardedOptimizer optimizer(sharded, inner);
    save_checkpoint(scratch / "one", sharded, &optimizer);

    auto other = make({"b", "c"}, 2);
    auto other_sharded = fully_shard(other);
    torch::optim::AdamW other_inner(other->parameters());
    ShardedOptimizer other_optimizer(other_sharded, other_inner);
    const auto load = [&](const LoadOptions& options) {
      return load_checkpoint(scratch / "one", other_sharded, &other_optimizer, options);
    };
    expect_contains(error_of([&] { load({}); }),
                    {"missing in the checkpoint: 'c', buffer 'b_buffer'",
                     "not in the model: 'a', buffer 'a_buffer'"});
    expect_contains(error_of([&] { load({.allow_missing = true}); }), {"not in the model"});
    expect_contains(error_of([&] { load({.allow_unexpected = true}); }), {"missing"});
    const auto loaded = load({.allow_missing = true, .allow_unexpected = true});
    EXPECT_EQ(loaded.missing, (std::vector<std::string>{"c", "b_buffer"}));
    EXPECT_EQ(loaded.unexpected, (std::vector<std::string>{"a", "a_buffer", "optimizer: a"}));
    for (const NamedTensor& item : other_sharded.full_state())
      EXPECT_TRUE((item.tensor == (item.name == "b" ? 1 : 2)).all().item<bool>()) << item.name;
  });
}

// LibTorch may only mark a tensor as conjugated or negated: its memory holds other values.
StateDict noted_tensors(double scale, const DeviceMesh& mesh) {
  const auto z = on_test_device(torch::complex(torch::arange(5.), torch::ones({5})));
  const auto own = torch::full({2}, 1. + mesh.process_group()->rank(), test_device());
  return {{"conjugate", torch::conj(z * scale)},
          {"negative", at::_neg_view(on_test_device(torch::arange(6.)) * scale)},
          {"parts", from_local(at::_neg_view(own * scale), mesh, {Shard{0}})}};
}

at::Tensor plain(const at::Tensor& tensor) {
  return (is_dist(tensor) ? full_tensor(tensor) : tensor).resolve_conj().resolve_neg();
}

TEST(CheckpointExtras, ConjugatedAndNegatedTensorsKeepTheirValues) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    const auto mesh = DeviceMesh::over_world(world);
    const StateDict saved = noted_tensors(1, mesh), noted = noted_tensors(3, mesh);
    ASSERT_TRUE(saved.at("conjugate").is_conj() && saved.at("negative").is_neg());
    StateDict loaded;
    for (const auto& [name, tensor] : saved) loaded[name] = torch::zeros_like(plain(tensor));
    save_state_dict(scratch / "one", saved);
    load_state_dict(scratch / "one", noted);
    load_state_dict(scratch / "one", loaded);
    for (const auto& [name, tensor] : saved) {
      EXPECT_TRUE(torch::equal(loaded.at(name), plain(tensor))) << name;
      EXPECT_TRUE(torch::equal(plain(noted.at(name)), plain(tensor))) << name;
    }
    auto bag = std::make_shared<Bag>(), other = std::make_shared<Bag>();
    for (const char* name : {"negative", "conjugate"}) {
      bag->add_buffer(name, saved.at(name));
      other->add_buffer(name, torch::zeros_like(plain(saved.at(name))));
    }
    AsyncCheckpointer checkpointer;
    checkpointer.save(scratch / "async", *bag, nullptr);
    checkpointer.wait();
    load_checkpoint(scratch / "async", *other, nullptr);
    for (const auto& item : other->named_buffers())
      EXPECT_TRUE(torch::equal(item.value(), plain(saved.at(item.key())))) << item.key();
  });
  EXPECT_EQ(verify_checkpoint(scratch / "one"), std::vector<std::string>());
}

}  // namespace tessera::testing::extras_test

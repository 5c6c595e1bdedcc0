// A model built in a DeferredInit scope equals the model built without one, but for its memory.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "engine/model/sharded_state.h"
#include "support/models.h"

namespace tessera::testing::deferred_init_test {

using Maker = std::function<std::shared_ptr<torch::nn::Module>()>;

torch::Tensor generator_state() { return default_generator().get_state(); }

// Memory of the host is deferred, wherever tests of numbers run.
template <class F>
auto from_seed(uint64_t seed, F&& make) {
  manual_seed(seed);
  return make();
}

template <class F>
auto deferred(F&& make) {
  const DeferredInit scope;
  return make();
}

// A module with one parameter.
std::shared_ptr<torch::nn::Module> holder_of(const torch::Tensor& value) {
  auto module = std::make_shared<torch::nn::Module>("holder");
  module->register_parameter("value", value, value.is_floating_point());
  return module;
}

Maker holder(const std::function<torch::Tensor()>& make) {
  return [=] { return holder_of(make()); };
}

// An uninitialized parameter of 20 KB and more, then changed by `init`.
Maker initialized(const std::function<void(torch::Tensor)>& init,
                  const std::vector<int64_t>& sizes = {90, 70}) {
  return holder([=] {
    const torch::NoGradGuard no_grad;
    auto tensor = torch::empty(sizes);
    init(tensor);
    return tensor;
  });
}

template <class Module, class... Args>
Maker module_of(Args... args) {
  return [=] { return Module(args...).ptr(); };
}

// Reads the values in reverse order, so that nothing depends on the order.
void expect_as_eager(const std::string& what, const Maker& make, bool defers = true) {
  SCOPED_TRACE(what);
  torch::Tensor eager_end, deferred_end;
  const auto eager = from_seed(5, [&] {
    auto module = make();
    eager_end = generator_state();
    return module;
  });
  const auto module = from_seed(5, [&] {
    auto result = deferred(make);
    deferred_end = generator_state();
    return result;
  });
  EXPECT_TRUE(torch::equal(eager_end, deferred_end)) << "state of the generator";
  const auto want = eager->named_parameters().pairs(), got = module->named_parameters().pairs();
  ASSERT_EQ(want.size(), got.size());
  bool any_deferred = false;
  for (const auto& item : got) any_deferred |= is_deferred(item.second);
  EXPECT_EQ(any_deferred, defers);
  for (size_t i = want.size(); i-- > 0;) {
    EXPECT_EQ(want[i].second.requires_grad(), got[i].second.requires_grad());
    EXPECT_EQ(want[i].second.strides(), got[i].second.strides());
    EXPECT_EQ(want[i].second.scalar_type(), got[i].second.scalar_type());
    EXPECT_TRUE(torch::equal(want[i].second, got[i].second)) << want[i].first;
    EXPECT_FALSE(is_deferred(got[i].second));
  }
  const auto buffers = eager->buffers();
  for (size_t i = 0; i < buffers.size(); ++i) {
    EXPECT_TRUE(torch::equal(buffers[i], module->buffers()[i])) << "buffer " << i;
  }
  EXPECT_TRUE(torch::equal(generator_state(), deferred_end)) << "evaluating draws from elsewhere";
}

TEST(DeferredInit, ModulesHaveTheirEagerValues) {
  using namespace torch::nn;
  expect_as_eager("Linear", module_of<Linear>(100, 70));
  expect_as_eager("Embedding with padding",
                  [] { return Embedding(EmbeddingOptions(300, 32).padding_idx(3)).ptr(); });
  expect_as_eager("Conv2d", [] { return Conv2d(Conv2dOptions(64, 48, 3)).ptr(); });
  expect_as_eager("BatchNorm1d", module_of<BatchNorm1d>(5000));
  expect_as_eager("LayerNorm", [] { return LayerNorm(LayerNormOptions({70, 80})).ptr(); });
  expect_as_eager("LSTM", [] { return LSTM(LSTMOptions(64, 80).num_layers(2)).ptr(); });
  expect_as_eager("GRU", [] { return GRU(GRUOptions(64, 80).bidirectional(true)).ptr(); });
  expect_as_eager("MultiheadAttention", module_of<MultiheadAttention>(96, 4));
  expect_as_eager("TransformerEncoder", [] {
    const auto layer = TransformerEncoderLayer(TransformerEncoderLayerOptions(96, 4));
    return TransformerEncoder(TransformerEncoderOptions(layer, 2)).ptr();
  });
  expect_as_eager("Mlp", [] { return std::make_shared<Mlp>(80, 3, 5); });
}

TEST(DeferredInit, InitializersHaveTheirEagerValues) {
  namespace init = torch::nn::init;
  expect_as_eager("xavier_normal_", initialized([](auto t) { init::xavier_normal_(t); }));
  expect_as_eager("xavier_uniform_", initialized([](auto t) { init::xavier_uniform_(t); }));
  expect_as_eager("kaiming_normal_", initialized([](auto t) { init::kaiming_normal_(t); }));
  expect_as_eager("constant_", initialized([](auto t) { init::constant_(t, 0.3); }));
  expect_as_eager("eye_", initialized([](auto t) { init::eye_(t); }), false);
  expect_as_eager("orthogonal_", initialized([](auto t) { init::orthogonal_(t); }), false);
  expect_as_eager("sparse_", initialized([](auto t) { init::sparse_(t, 0.2); }), false);
  expect_as_eager("dirac_", initialized([](auto t) { init::dirac_(t); }, {70, 70, 3}), false);
}

TEST(DeferredInit, ChangesInPlaceHaveTheirEagerValues) {
  namespace init = torch::nn::init;
  expect_as_eager("several in a row", initialized([](auto t) {
                    init::kaiming_uniform_(t);
                    t.mul_(0.5).add_(1).clamp_(0, 1.2);
                    t[3].zero_();
                    t.t()[2].normal_();
                    t.narrow(0, 10, 20).bernoulli_(0.3);
                    t.mul_(torch::linspace(0, 1, 70));
                  }));
  expect_as_eager("values are read", initialized([](auto t) {
                    t.normal_();
                    t.sub_(t.mean()).div_(t.std().template item<double>());
                    t.copy_(t.clone().flip(0));
                    t.mul_(t);
                  }),
                  false);
  expect_as_eager("row by row", initialized([](auto t) {
                    t.normal_();
                    for (int64_t i = 0; i < t.size(0); ++i) t[i].fill_(static_cast<double>(i));
                  }),
                  false);
  expect_as_eager("a generator of its own", initialized([](auto t) {
                    const auto generator = at::detail::createCPUGenerator(31);
                    torch::randn({100}, generator);
                    t.normal_(0, 1, generator);
                    t.add_(torch::rand({90, 70}, generator));
                  }));
}

TEST(DeferredInit, MadeTensorsHaveTheirEagerValues) {
  expect_as_eager("randn * 0.02", holder([] { return torch::randn({90, 70}) * 0.02; }));
  expect_as_eager("transposed", holder([] { return torch::rand({90, 70}).t().contiguous(); }));
  expect_as_eager("a transposed view", holder([] { return torch::rand({90, 70}).t(); }));
  expect_as_eager("numbers and types", holder([] { return torch::arange(6000) / 10 + 1.5; }));
  expect_as_eager("arange", holder([] { return torch::arange(6000); }));
  expect_as_eager("randint", holder([] { return torch::randint(100, {5000}); }));
  expect_as_eager("randperm", holder([] { return torch::randperm(5000); }));
  expect_as_eager("dropout", holder([] { return torch::dropout(torch::rand(9000), 0.4, true); }));
  expect_as_eager("like", holder([] { return torch::randn_like(torch::zeros({90, 70})) + 1; }));
  expect_as_eager("of small ones",
                  holder([] { return torch::outer(torch::rand(90), torch::rand(70)); }));
  expect_as_eager("small ones change", holder([] {
                    auto scale = torch::ones({70});
                    auto product = torch::rand({90, 70}) * scale;
                    scale.fill_(3);
                    return product;
                  }));
  expect_as_eager("channels_last", holder([] {
                    return torch::rand({8, 16, 10, 10}).to(torch::MemoryFormat::ChannelsLast);
                  }));
  expect_as_eager("complex", holder([] {
                    return torch::randn({80, 80}, torch::kComplexFloat).conj() * 2;
                  }));
}

TEST(DeferredInit, TensorsThatNoSingleOperatorMakesHaveTheirEagerValues) {
  std::vector<float> data(6000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i) / 7;
  expect_as_eager("stacked", holder([] {
                    return torch::stack({torch::rand(6000), torch::rand(6000)});
                  }),
                  false);
  expect_as_eager("several results", holder([] {
                    return std::get<0>(torch::rand({80, 80}).max(0)).repeat({80});
                  }));
  expect_as_eager("tensor(vector)", holder([&] { return torch::tensor(data); }), false);
  expect_as_eager("from_blob",
                  holder([&] { return torch::from_blob(data.data(), {6000}).clone(); }), false);
  expect_as_eager("raw writes", holder([&] {
                    auto tensor = torch::empty({6000});
                    std::copy(data.begin(), data.end(), tensor.data_ptr<float>());
                    return tensor;
                  }),
                  false);
  expect_as_eager("a graph", holder([] {
                    const auto leaf = torch::rand({90, 70}, torch::requires_grad());
                    return (leaf * 2).detach();
                  }));
  expect_as_eager("another shape in place", holder([] {
                    auto tensor = torch::rand({90, 70}).mul_(2);
                    tensor.t_().unsqueeze_(0);
                    return tensor.resize_({100, 60});
                  }),
                  false);
  expect_as_eager("another storage", holder([] {
                    auto tensor = torch::empty({0});
                    tensor.set_(torch::rand({90, 70}));
                    return tensor;
                  }),
                  false);
}

TEST(DeferredInit, ModelsMayBeChangedInTheScope) {
  expect_as_eager("two initializations", [] {
    auto net = std::make_shared<Mlp>(80, 3, 5);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.normal_(0, 0.02);
    return net;
  });
  expect_as_eager("another dtype", [] {
    auto net = std::make_shared<Mlp>(100, 3, 5);
    net->to(torch::kBFloat16);
    return net;
  });
  expect_as_eager("a copy of a module", [] {
    return torch::nn::Linear(torch::nn::LinearOptions(90, 70)).ptr()->clone();
  });
  expect_as_eager("tied and frozen", [] {
    auto net = std::make_shared<Mlp>(80, 3, 5);
    net->fcs[1]->register_parameter("other", net->fcs[0]->weight);
    net->fcs[2]->weight.requires_grad_(false);
    return net;
  });
  expect_as_eager("another default dtype", [] {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    auto module = holder_of(torch::rand({90, 70}) + torch::arange(70) / 3);
    torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
    return module;
  });
  expect_as_eager("parameters in one storage", [] {
    auto module = std::make_shared<torch::nn::Module>("halves");
    auto both = torch::rand({180, 70});
    module->register_parameter("first", both.narrow(0, 0, 90));
    module->register_parameter("second", both.narrow(0, 90, 90));
    both.mul_(2);
    return module;
  });
}

TEST(DeferredInit, ModelsMayBeUsedInTheScope) {
  expect_as_eager("used in the scope", [] {
    auto net = std::make_shared<Mlp>(80, 3, 5);
    net->forward(torch::ones({2, 80})).sum().backward();
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.sub_(parameter.grad());
    net->forward(torch::rand({300, 80}));
    return net;
  });
}

TEST(DeferredInit, RunningStatisticsAreUpdatedInTheScope) {
  const auto run = [] {
    torch::nn::BatchNorm1d norm(5000);
    norm->forward(torch::rand({4, 5000}));
    return norm.ptr();
  };
  expect_as_eager("BatchNorm1d", run);
}

TEST(DeferredInit, ScopesNestAndEndWithExceptions) {
  {
    const DeferredInit outer;
    EXPECT_THROW(deferred([]() -> int { throw std::runtime_error("in a constructor"); }),
                 std::runtime_error);
    EXPECT_TRUE(is_deferred(torch::rand({100, 100})));
    expect_error([] { torch::rand({100, 100}).mul_(torch::ones({7})); }, {"must match"});
    expect_error([] { torch::empty({100, 100}).uniform_(3, 1); }, {"uniform_"});
    std::thread([] { EXPECT_FALSE(is_deferred(torch::rand({100, 100}))); }).join();
  }
  EXPECT_FALSE(is_deferred(torch::rand({100, 100})));
  EXPECT_FALSE(torch::rand({100, 100}).key_set().has(kUnitKey));
}

TEST(DeferredInit, OperatorsAfterTheScopeMakeTheValuesForGood) {
  auto net = deferred([] { return std::make_shared<Mlp>(80, 3, 5); });
  const auto& weight = net->fcs[1]->weight;
  const auto view = weight.t().narrow(0, 3, 5);
  EXPECT_TRUE(is_deferred(weight));
  EXPECT_TRUE(is_deferred(view));
  expect_error([&] { weight.data_ptr<float>(); }, {"DeferredInit", "tessera::materialize"});
  EXPECT_GT(view.abs().sum().item<float>(), 0);
  EXPECT_FALSE(is_deferred(weight));
  EXPECT_TRUE(is_deferred(net->fcs[0]->weight));
  EXPECT_EQ(weight.data_ptr<float>()[3], view[0][0].item<float>());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  net->forward(torch::ones({2, 80})).sum().backward();
  const auto before = weight.detach().clone();
  optimizer.step();
  EXPECT_TRUE(torch::equal(weight, before.add(weight.grad(), -0.1)));
}

TEST(DeferredInit, MaterializeTakesModulesAndHolders) {
  auto net = deferred([] { return std::make_shared<Mlp>(80, 3, 5); });
  materialize(net->fcs[0]);
  EXPECT_FALSE(is_deferred(net->fcs[0]->weight));
  materialize(*net);
  for (const auto& parameter : net->parameters()) EXPECT_NO_THROW(parameter.data_ptr());
}

TEST(DeferredInit, ThreadsMayUseADeferredTensorAtTheSameTime) {
  const auto tensor = deferred([] { return torch::rand({300, 300}); });
  std::vector<torch::Tensor> seen(4);
  std::vector<std::thread> threads;
  for (auto& value : seen) threads.emplace_back([&] { value = tensor.clone(); });
  for (auto& thread : threads) thread.join();
  for (const auto& value : seen) EXPECT_TRUE(torch::equal(value, seen[0]));
}

TEST(DeferredInit, NothingIsKeptOnceTheModuleIsGone) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  {
    auto net = deferred([] {
      auto net = std::make_shared<Mlp>(80, 3, 5);
      net->to(torch::kDouble);
      return net;
    });
    for (const auto& parameter : net->parameters()) {
      storages.emplace_back(parameter.storage().getWeakStorageImpl());
    }
    materialize(net->fcs[0]->weight);
  }
  for (const auto& storage : storages) EXPECT_TRUE(storage.expired());
}

// An Mlp whose values were made in several ways, with a buffer.
struct Various : Net {
  Various() {
    mlp = register_module("mlp", std::make_shared<Mlp>(80, 3, 5));
    const torch::NoGradGuard no_grad;
    mlp->fcs[0]->weight.normal_(0, 0.2);
    mlp->fcs[2]->register_parameter("other", mlp->fcs[1]->weight);
    scale = register_parameter("scale", torch::rand({80, 80}) * 0.1 + 1);
    shift = register_buffer("shift", torch::rand({80, 80}) * 0.1);
  }
  torch::Tensor forward(torch::Tensor x) override {
    return mlp->forward(torch::mm(x, scale * 0.1 + shift));
  }
  std::shared_ptr<Mlp> mlp;
  torch::Tensor scale, shift;
};

TEST(DeferredInit, ShardedModelsStartAndTrainAsEagerOnes) {
  TrainingRun eager = sgd_run<Various>();
  eager.in = 80;
  eager.steps = 2;
  TrainingRun later = eager;
  later.make_net = [] {
    return deferred([] { return from_seed(7, [] { return std::make_shared<Various>(); }); });
  };
  for (const int ranks : {1, 2, 3}) {
    for (const auto level : {ShardLevel::kNone, ShardLevel::kOptimizerState, ShardLevel::kGradients,
                             ShardLevel::kParameters}) {
      run_world(ranks, [&](World& world) {
        const ShardPlan plan{.level = level, .unit_bytes = 30000, .device = test_device()};
        const auto what = fmt::format("{} ranks, level {}", ranks, static_cast<int>(level));
        auto model = later.make_net();
        EXPECT_TRUE(is_deferred(model->parameters()[0]));
        expect_same_state(fully_shard(model, plan).full_state(), plain_state(*eager.make_net()), 0,
                          what + ", start");
        for (const auto& buffer : model->buffers()) EXPECT_FALSE(is_deferred(buffer));
        expect_same_state(train_sharded(later, world, plan), train_sharded(eager, world, plan), 0,
                          what + ", trained");
      });
    }
  }
}

TEST(DeferredInit, ShardingInTheScopeIsRefused) {
  run_world(2, [&](World&) {
    const DeferredInit scope;
    auto net = seeded(7, [] { return std::make_shared<Mlp>(80, 3, 5); });
    expect_error([&] { fully_shard(net); }, {"[fully_shard]", "DeferredInit"});
  });
}

TEST(DeferredInit, ShardedParametersWorkInAScope) {
  run_world(2, [&](World&) {
    const auto make = [] { return seeded(7, [] { return std::make_shared<Mlp>(80, 3, 5); }); };
    auto sharded = fully_shard(make(), {.unit_bytes = 30000});
    const auto plain = make();
    const DeferredInit scope;
    const auto x = torch::ones({2, 80}, test_device());
    EXPECT_TRUE(torch::equal(sharded.forward(x), plain->forward(x)));
    const torch::NoGradGuard no_grad;
    sharded->fcs[0]->weight.copy_(torch::full({80, 80}, 0.5));
    EXPECT_TRUE(same_values(sharded->fcs[0]->weight * 2, torch::ones({80, 80})));
  });
}

// Counts the bytes of tensors that this thread makes.
struct CountedBytes : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    now += bytes;
    peak = std::max(peak, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now = 0, peak = 0;
};

constexpr int64_t kMiB = int64_t{1} << 20;

std::shared_ptr<torch::nn::SequentialImpl> make_64_mib() {
  torch::nn::Sequential model;
  for (int i = 0; i < 16; ++i) model->push_back(torch::nn::Linear(1024, 1024));
  return model.ptr();
}

TEST(DeferredInit, StartNeedsTheShardAUnitAndATensor) {
  run_world(2, [&](World&) {
    for (const bool defer : {false, true}) {
      const auto bytes = std::make_shared<CountedBytes>();
      const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, bytes);
      auto model =
          defer ? deferred([] { return from_seed(7, make_64_mib); }) : from_seed(7, make_64_mib);
      const int64_t built = bytes->now, building = bytes->peak;
      const auto sharded = fully_shard(model, {.unit_bytes = 8 * kMiB});
      if (!defer) {
        EXPECT_GT(bytes->peak, 64 * kMiB);
        continue;
      }
      EXPECT_LT(built, kMiB);
      EXPECT_LT(building, (4 + 1) * kMiB);
      EXPECT_GT(bytes->now, 31 * kMiB);
      EXPECT_LT(bytes->peak, (32 + 8 + 4 + 2) * kMiB);
    }
  });
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(DeferredInit, TheProcessDoesNotGrowByTheModel) {
  if (!use_page_heap()) GTEST_SKIP() << "malloc keeps what is dropped";
  materialize(*deferred(module_of<torch::nn::Linear>(200, 200)));  // loads the code
  const int64_t before = resident_bytes();
  const auto model = deferred(make_64_mib);
  EXPECT_LT(resident_bytes() - before, 16 * kMiB);
}

}  // namespace tessera::testing::deferred_init_test

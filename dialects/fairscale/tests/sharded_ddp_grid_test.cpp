// All options of `ShardedDataParallel` with each other: after every step, the ranks hold the values
// that one process computes for them.

#include <fmt/format.h>

#include <tuple>

#include "dialects/fairscale/tests/fairscale.h"
#include "engine/tests/optim/saved_optimizers.h"

namespace tessera::testing::sharded_ddp_grid_test {

constexpr int kSteps = 3;
constexpr double kMaxNorm = 0.3;

struct Combination {
  int64_t buffer = 0;
  int accumulate = 1;  // backwards per step
  bool clip = false, manual = false, several = false, changing = false, broadcast = false;

  std::string describe() const {
    return fmt::format("buffer {}, {} backwards{}{}{}{}{}", buffer, accumulate,
                       clip ? ", clipped" : "", manual ? ", reduce()" : "",
                       several ? ", two forwards" : "", changing ? ", frozen in turn" : "",
                       broadcast ? ", buffers broadcast" : "");
  }
};

// A quarter of all combinations, in which each value of each option, and each pair of them, has its
// share. Each `which` gives another quarter.
std::vector<Combination> some_combinations(int which) {
  std::vector<Combination> some;
  for (int bits = 0; bits < 128; ++bits) {
    if ((bits + bits / 4 + bits / 16 + bits / 64) % 4 != which % 4) continue;
    const auto has = [&](int bit) { return (bits >> bit & 1) != 0; };
    some.push_back({.buffer = has(0) ? int64_t{1} << 20 : 0,
                    .accumulate = has(1) ? 3 : 1,
                    .clip = has(2),
                    .manual = has(3),
                    .several = has(4),
                    .changing = has(5),
                    .broadcast = has(6)});
  }
  return some;
}

struct Kind {
  std::string name;
  bool is_exact = true;  // false: its fused kernel rounds otherwise
  std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)> plain;
  std::function<std::unique_ptr<AnyOss>(std::vector<at::Tensor>)> sharded;
};

template <class Wrapped, class Options>
Kind kind(std::string name, bool is_exact, Options options) {
  using Params = std::vector<at::Tensor>;
  return {
      std::move(name), is_exact,
      [=](Params params) { return std::make_unique<Wrapped>(std::move(params), options); },
      [=](Params params) { return std::make_unique<OSS<Wrapped>>(std::move(params), options); }};
}

const Kind& kind_of(int index) {
  static const std::vector<Kind> kinds = {
      kind<SGD>("Sgd", false, SGDOptions(0.05).momentum(0.9)),
      kind<AdamW>("AdamW", false, AdamWOptions(0.01).eps(1e-3)),
      kind<HeavyBall>("HeavyBall", true, HeavyBallOptions(0.05))};
  return kinds.at(index);
}

// Freezes one layer of four in each step, a different one each time.
void freeze(NormNet& net, const Combination& options, int step) {
  const auto params = net->parameters();
  for (size_t i = 0; i < params.size(); ++i)
    params[i].requires_grad_(!options.changing || static_cast<int>(i / 2 + step) % 4 != 0);
}

// A layer may be frozen from the start.
NormNet start(const Combination& options) {
  NormNet net = make_net<NormNet>();
  if (options.broadcast) freeze(net, options, 0);
  return net;
}

int forwards_of(const Combination& options) { return options.several ? 2 : 1; }
int64_t batch_index(const Combination& options, int step, int backward, int forward) {
  return (step * options.accumulate + backward) * 2 + forward;
}
bool syncs(const Combination& options, int backward) {
  return !options.manual && backward + 1 == options.accumulate;
}

struct Moment {
  std::vector<std::vector<NamedTensor>> states;  // by rank
  double norm = 0;
};

// Does the work of all ranks in one process, with a net for each.
class OneProcess {
 public:
  OneProcess(const Combination& options, const Kind& kind, int ranks) : options_(options) {
    for (int rank = 0; rank < ranks; ++rank) {
      nets_.push_back(start(options));
      optimizers_.push_back(kind.plain(nets_.back()->parameters()));
    }
  }

  Moment step(int step) {
    for (size_t rank = 0; rank < nets_.size(); ++rank) {
      optimizers_[rank]->zero_grad();
      freeze(nets_[rank], options_, step);
    }
    for (int backward = 0; backward < options_.accumulate; ++backward) run(step, backward);
    average();
    Moment moment;
    for (size_t rank = 0; rank < nets_.size(); ++rank) {
      if (options_.clip)
        moment.norm = torch::nn::utils::clip_grad_norm_(nets_[rank]->parameters(), kMaxNorm);
      optimizers_[rank]->step();
      moment.states.push_back(plain_state(*nets_[rank]));
    }
    return moment;
  }

 private:
  void run(int step, int backward) {
    const int ranks = static_cast<int>(nets_.size());
    std::vector<at::Tensor> losses(ranks, on_test_device(torch::zeros({})));
    for (int forward = 0; forward < forwards_of(options_); ++forward) {
      if (options_.broadcast && syncs(options_, backward)) take_buffers();
      for (int rank = 0; rank < ranks; ++rank)
        losses[rank] =
            losses[rank] +
            loss_of(*nets_[rank], batch_index(options_, step, backward, forward), rank, ranks);
    }
    for (const at::Tensor& loss : losses) loss.backward();
  }

  void take_buffers() {
    const auto first = nets_[0]->buffers();
    for (size_t rank = 1; rank < nets_.size(); ++rank) {
      const auto own = nets_[rank]->buffers();
      for (size_t i = 0; i < own.size(); ++i) own[i].data().copy_(first[i]);
    }
  }

  // Adds up in the order of ranks, as reductions do.
  void average() {
    for (size_t i = 0; i < nets_[0]->parameters().size(); ++i) {
      at::Tensor sum = nets_[0]->parameters()[i].grad();
      if (!sum.defined()) continue;
      for (size_t rank = 1; rank < nets_.size(); ++rank)
        sum = sum + nets_[rank]->parameters()[i].grad();
      sum = sum / static_cast<double>(nets_.size());
      for (NormNet& net : nets_) net->parameters()[i].mutable_grad() = sum.clone();
    }
  }

  const Combination options_;
  std::vector<NormNet> nets_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;
};

class Ranks {
 public:
  Ranks(const Combination& options, const Kind& kind, World& world)
      : options_(options),
        world_(world),
        net_(start(options)),
        optimizer_(kind.sharded(net_->parameters())),
        model_(net_, *optimizer_,
               {.broadcast_buffers = options.broadcast,
                .reduce_buffer_size = options.buffer,
                .warn_on_trainable_params_changed = false}) {}

  void expect_step(int step, const Moment& expected, double tolerance, const std::string& what) {
    optimizer_->zero_grad();
    freeze(net_, options_, step);
    for (int backward = 0; backward < options_.accumulate; ++backward) {
      if (syncs(options_, backward)) {
        run(step, backward);
      } else {
        const auto guard = model_.no_sync();
        run(step, backward);
      }
    }
    if (options_.manual) model_.reduce();
    if (options_.clip) {
      EXPECT_NEAR(optimizer_->clip_grad_norm(kMaxNorm), expected.norm, 1e-5 * expected.norm)
          << what;
    }
    optimizer_->step();
    expect_same_state(plain_state(*net_), expected.states[world_.rank()], tolerance, what);
    expect_replicas(*world_.process_group(), net_->parameters());
  }

 private:
  void run(int step, int backward) {
    at::Tensor loss = on_test_device(torch::zeros({}));
    for (int forward = 0; forward < forwards_of(options_); ++forward)
      loss = loss + loss_of(model_, batch_index(options_, step, backward, forward), world_.rank(),
                            world_.size());
    loss.backward();
  }

  const Combination options_;
  World& world_;
  NormNet net_;
  std::unique_ptr<AnyOss> optimizer_;
  ShardedDataParallel<NormNet> model_;
};

// Bit for bit where there is only one order of sums, and averaging is exact.
double tolerance_for(const Combination& options, const Kind& kind, int ranks) {
  if (!kind.is_exact || ranks == 3) return 2e-5;
  return options.clip ? 1e-5 : 0;
}

void expect_grid(int ranks, const Kind& kind, const std::vector<Combination>& combinations) {
  std::vector<std::vector<Moment>> expected;
  double most_norm = 0;
  for (const Combination& options : combinations) {
    OneProcess one(options, kind, ranks);
    expected.emplace_back();
    for (int step = 0; step < kSteps; ++step) {
      const Moment& moment = expected.back().emplace_back(one.step(step));
      most_norm = std::max(most_norm, moment.norm);
    }
  }
  EXPECT_GT(most_norm, kMaxNorm) << "something is clipped";
  run_world(ranks, [&](World& world) {
    for (size_t i = 0; i < combinations.size(); ++i) {
      const double tolerance = tolerance_for(combinations[i], kind, ranks);
      Ranks some(combinations[i], kind, world);
      for (int step = 0; step < kSteps && !::testing::Test::HasFailure(); ++step) {
        const std::string what = fmt::format("{}, {} ranks, {}, after step {}", kind.name, ranks,
                                             combinations[i].describe(), step);
        some.expect_step(step, expected[i][step], tolerance, what);
      }
    }
  });
}

class ShardedDdpGrid : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(ShardedDdpGrid, IsWhatOneProcessComputes) {
  const auto [ranks, index] = GetParam();
  expect_grid(ranks, kind_of(index), some_combinations(ranks + index));
}

INSTANTIATE_TEST_SUITE_P(Options, ShardedDdpGrid,
                         ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Values(0, 1, 2)),
                         [](const auto& info) {
                           return fmt::format("{}RanksWith{}", std::get<0>(info.param),
                                              kind_of(std::get<1>(info.param)).name);
                         });

}  // namespace tessera::testing::sharded_ddp_grid_test

// Mistakes that users make. None may end without an error and with other numbers than one
// process's.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <sstream>
#include <thread>

#include "support/models.h"
#include "support/warnings.h"

namespace tessera::testing::mistakes_test {

constexpr int64_t kWidth = 9, kOut = 3, kRows = 8;

// A training program, sharded on one rank of a world, or plain, in one process that computes the
// ranks' losses one after the other.
struct Training {
  explicit Training(World* world, int ranks) : world(world), ranks(ranks) {
    const ShardPlan plan = {.level = ShardLevel::kParameters, .unit_bytes = 300};
    if (world) sharded.emplace(fully_shard(net, plan));
    inner = std::make_unique<torch::optim::AdamW>(net->parameters(), 0.01);
    if (world) optimizer.emplace(*sharded, *inner, ShardedOptimizerOptions{.fused = false});
  }

  int rank() const { return world ? world->rank() : 0; }
  bool is_rank_1() const { return world && rank() == 1; }
  torch::Tensor loss_of(int rank) {
    const Batch batch = global_batch(batches, kRows, kWidth, kOut);
    return rank_loss(*net, batch, rank, ranks, batches);
  }
  void backward() {
    if (world) {
      loss_of(rank()).backward();
    } else {
      for (int r = 0; r < ranks; ++r) (loss_of(r) / ranks).backward();
    }
    ++batches;
  }
  void step() { world ? optimizer->step() : static_cast<void>(inner->step()); }
  void zero_grad() { world ? optimizer->zero_grad() : inner->zero_grad(); }
  void train(int steps) {
    for (int i = 0; i < steps; ++i) backward(), step(), zero_grad();
  }
  std::vector<NamedTensor> state() { return world ? sharded->full_state() : plain_state(*net); }

  World* world;
  int ranks;
  int batches = 0;
  std::shared_ptr<Mlp> net = seeded(7, [] { return std::make_shared<Mlp>(kWidth, 2, kOut); });
  std::unique_ptr<torch::optim::AdamW> inner;
  std::optional<Sharded<Mlp>> sharded;
  std::optional<ShardedOptimizer> optimizer;
};

// How a mistake may end.
enum class End {
  kError,           // with an error at any number of ranks
  kErrorOfSeveral,  // with an error where there are several ranks; one rank has the right numbers
  kErrorOrRight,    // where ranks share memory it may be no mistake
  kRight,           // with the numbers of one process
};

struct Mistake {
  const char* name;
  End end;
  const char* message;  // a part of the error
  std::function<void(Training&)> make;
};

std::ostream& operator<<(std::ostream& out, const Mistake& mistake) { return out << mistake.name; }

at::Tensor& first_parameter(Training& t) { return t.net->fcs[0]->weight; }

const std::vector<Mistake> kMistakes = {
    // --- the optimizer
    {"PlainStepInPlaceOfTheWrappedOne", End::kError, "must be stepped by ShardedOptimizer::step()",
     [](Training& t) {
       t.backward();
       if (t.world) t.inner->step();
     }},
    {"OptimizerNotWrapped", End::kError, "ShardedOptimizer",
     [](Training& t) {
       t.optimizer.reset();
       torch::optim::SGD sgd(t.net->parameters(), 0.1);
       t.backward();
       if (t.world) sgd.step();
     }},
    {"StepBeforeTheFirstBackward", End::kError, "there must be a backward",
     [](Training& t) {
       if (t.world) t.step();
     }},
    {"StepWithoutABackward", End::kError, "there must be a backward",
     [](Training& t) {
       t.train(1);
       if (t.world) t.step();
     }},
    {"StepBetweenForwardAndBackward", End::kError, "modified by an inplace operation",
     [](Training& t) {
       t.train(1);
       t.backward();
       auto loss = t.loss_of(t.rank());
       if (!t.world) return;
       t.step();
       loss.backward();
     }},
    {"OptimizerOfAnotherModel", End::kError, "the optimizer's parameters must be the model's",
     [](Training& t) {
       Mlp other(kWidth, 2, kOut);
       torch::optim::SGD sgd(other.parameters(), 0.1);
       if (t.world) ShardedOptimizer(*t.sharded, sgd);
     }},
    {"Lbfgs", End::kError, "must be elementwise",
     [](Training& t) {
       torch::optim::LBFGS lbfgs(t.net->parameters());
       t.optimizer.reset();
       if (t.world) ShardedOptimizer(*t.sharded, lbfgs);
     }},
    {"OptimizerMadeBeforeTheWrap", End::kRight, "",
     [](Training& t) {
       auto net = seeded(5, [] { return std::make_shared<Mlp>(kWidth, 2, kOut); });
       torch::optim::SGD sgd(net->parameters(), 0.1);
       if (!t.world) return;
       auto sharded = fully_shard(net, {.unit_bytes = 300});
       ShardedOptimizer optimizer(sharded, sgd);
       net->forward(torch::ones({2, kWidth}, test_device())).sum().backward();
       optimizer.step();
       EXPECT_FALSE(sharded.full_state()[0].tensor.equal(
           plain_state(*seeded(5, [] { return std::make_shared<Mlp>(kWidth, 2, kOut); }))[0]
               .tensor));
     }},
    {"GradientSetByHand", End::kError, "has a gradient that backward did not give it",
     [](Training& t) {
       t.backward();
       if (!t.world) return;
       first_parameter(t).mutable_grad() = torch::ones_like(first_parameter(t));
       t.step();
     }},
    {"ALearningRateOfOneRank", End::kErrorOfSeveral,
     "must make the same calls, with the same values",
     [](Training& t) {
       if (t.is_rank_1()) t.inner->param_groups()[0].options().set_lr(0.5);
       t.train(2);
     }},
    {"ClippingOnOneRank", End::kErrorOfSeveral, "",
     [](Training& t) {
       t.backward();
       if (t.is_rank_1()) t.optimizer->clip_grad_norm_(1);
       t.step();
       t.backward();
     }},
    {"ABoundForClippingOfOneRank", End::kErrorOfSeveral,
     "must make the same calls, with the same values",
     [](Training& t) {
       t.backward();
       if (t.world) t.optimizer->clip_grad_norm_(t.rank() == 1 ? 1e3 : 2e3);
       t.step();
       t.backward();
     }},
    {"ZeroGradOnOneRank", End::kErrorOfSeveral, "must make the same calls, with the same values",
     [](Training& t) {
       t.backward();
       t.step();
       if (t.is_rank_1()) t.zero_grad();
       t.backward();
       t.step();
     }},
    {"LibTorchsOwnClip", End::kError, "clip_grad_norm_() of the sharded",
     [](Training& t) {
       t.backward();
       if (t.world) torch::nn::utils::clip_grad_norm_(t.net->parameters(), 1.0);
     }},
    {"ReadingAGradient", End::kError, "full_grad",
     [](Training& t) {
       t.backward();
       if (t.world) first_parameter(t).grad().sum();
     }},
    {"ClippingBeforeBackward", End::kRight, "",
     [](Training& t) {
       if (t.world) t.optimizer->clip_grad_norm_(1.0);
       t.train(1);
     }},
    {"ScalerStepWithoutScale", End::kError, "",
     [](Training& t) {
       t.backward();
       GradScaler scaler;
       if (t.world) scaler.step(*t.optimizer);
     }},
    {"StepWhileAnAverageIsIn", End::kError, "the model has the values of an ExponentialAverage",
     [](Training& t) {
       t.train(1);
       if (!t.world) return;
       ExponentialAverage average(*t.sharded);
       average.update();
       average.swap();
       t.train(1);
     }},
    {"SavingTheInnerOptimizer", End::kError, "",
     [](Training& t) {
       t.train(1);
       if (!t.world) return;
       torch::serialize::OutputArchive archive;
       t.inner->save(archive);
     }},
    // --- what ranks do alone
    {"TrainingOnOneRank", End::kErrorOfSeveral, "",
     [](Training& t) {
       if (!t.world || t.rank() == 0) t.train(1);
     }},
    {"EvaluationOnOneRank", End::kErrorOrRight, "",
     [](Training& t) {
       t.train(1);
       torch::NoGradGuard no_grad;
       if (t.rank() == 0) t.loss_of(0);
     }},
    {"ABatchSkippedOnOneRank", End::kErrorOfSeveral, "",
     [](Training& t) {
       t.train(1);
       if (!t.is_rank_1()) t.train(1);
       t.train(1);
     }},
    {"FullStateOnOneRank", End::kErrorOfSeveral, "",
     [](Training& t) {
       t.train(1);
       if (t.world && t.rank() == 0) t.state();
       t.train(1);
     }},
    {"AnExceptionOnOneRank", End::kErrorOfSeveral, "by mistake",
     [](Training& t) {
       t.train(1);
       if (t.is_rank_1()) throw std::runtime_error("by mistake");
       t.train(1);
     }},
    {"AWriteOnOneRank", End::kErrorOfSeveral, "",
     [](Training& t) {
       t.train(1);
       if (t.is_rank_1()) {
         torch::NoGradGuard no_grad;
         first_parameter(t).mul_(2);
       }
       t.train(2);
     }},
    {"AnAverageOnOneRank", End::kErrorOfSeveral, "must make the same calls, with the same values",
     [](Training& t) {
       t.train(1);
       if (!t.world) return t.train(1);
       ExponentialAverage average(*t.sharded);
       if (t.rank() == 1) average.update();
       t.train(1);
     }},
    {"OtherValuesToLoadOnOneRank", End::kErrorOfSeveral, "the values must be the same on all ranks",
     [](Training& t) {
       t.train(1);
       if (!t.world) return;
       auto state = t.state();
       if (t.rank() == 1) state[0].tensor.add_(1);
       t.sharded->load_full_state(state);
     }},
    {"OtherBatchSizes", End::kRight, "",
     [](Training& t) {
       t.train(1);
       if (t.is_rank_1()) {
         torch::NoGradGuard no_grad;
         torch::ones({5, kWidth}).sum();
       }
       t.train(1);
     }},
    // --- wrapping
    {"ModelsDiffer", End::kErrorOfSeveral, "the models and plans must be the same on all ranks",
     [](Training& t) {
       if (t.world) fully_shard(std::make_shared<Mlp>(kWidth, t.rank() == 1 ? 2 : 1, kOut));
     }},
    {"PlansDiffer", End::kErrorOfSeveral, "the models and plans must be the same on all ranks",
     [](Training& t) {
       if (t.world)
         fully_shard(std::make_shared<Mlp>(kWidth, 1, kOut), {.unit_bytes = 100 + t.rank()});
     }},
    {"ShardedTwice", End::kError, "sharded already",
     [](Training& t) {
       if (t.world) fully_shard(t.net);
     }},
    {"APartShardedBefore", End::kError, "sharded already",
     [](Training& t) {
       auto net = std::make_shared<Mlp>(kWidth, 1, kOut);
       if (t.world) fully_shard(net->head.ptr()), fully_shard(net);
     }},
    {"NoParameters", End::kError, "parameter",
     [](Training& t) {
       if (t.world) fully_shard(std::make_shared<torch::nn::Module>());
     }},
    {"AllFrozen", End::kError, "",
     [](Training& t) {
       for (auto& p : t.net->parameters()) p.requires_grad_(false);
       if (t.world) t.backward();
     }},
    {"AStepWithAllFrozen", End::kError, "all of the sharded model are frozen",
     [](Training& t) {
       for (auto& p : t.net->parameters()) p.requires_grad_(false);
       if (t.world) t.step();
     }},
    {"AnUnknownNameInIgnored", End::kError, "which the model does not have",
     [](Training& t) {
       if (t.world) fully_shard(std::make_shared<Mlp>(kWidth, 1, kOut), {.ignored = {"nothing"}});
     }},
    {"HybridOfThreeRanks", End::kError, "must divide the number of ranks",
     [](Training& t) {
       if (t.world) t.world->hybrid_process_groups(3);
     }},
    {"OffloadWithoutADirectory", End::kError, "plan.offload_directory must name a directory",
     [](Training& t) {
       if (t.world)
         fully_shard(std::make_shared<Mlp>(kWidth, 1, kOut), {.offload = Offload::kDirectory});
     }},
    {"OuterStepsWithoutAGroup", End::kError, "plan.outer needs plan.replicate_group",
     [](Training& t) {
       if (t.world)
         fully_shard(std::make_shared<Mlp>(kWidth, 1, kOut), {.outer = OuterStep{.every = 2}});
     }},
    {"GradientsBeforeTheWrap", End::kRight, "",
     [](Training& t) {
       auto net = seeded(5, [] { return std::make_shared<Mlp>(kWidth, 1, kOut); });
       net->forward(torch::ones({2, kWidth}, test_device())).sum().backward();
       if (!t.world) return;
       const at::Tensor before = net->head->bias.grad().clone();
       auto sharded = fully_shard(net);
       sharded.reduce();
       EXPECT_TRUE(sharded.full_grad("head.bias").equal(before));
     }},
    // --- the model's tensors
    {"AnUnknownName", End::kError, "has no parameter 'nothing'",
     [](Training& t) {
       t.backward();
       if (t.world) t.sharded->full_grad("nothing");
     }},
    {"AWrongShape", End::kError, "",
     [](Training& t) {
       if (t.world) t.sharded->forward(torch::ones({2, kWidth + 1}, test_device()));
     }},
    {"AWrongDtype", End::kError, "",
     [](Training& t) {
       if (t.world)
         t.sharded->forward(
             torch::ones({2, kWidth}, torch::dtype(torch::kDouble).device(test_device())));
     }},
    {"BackwardTwice", End::kError, "second time",
     [](Training& t) {
       auto loss = t.loss_of(t.rank());
       if (t.world) loss.backward(), loss.backward();
     }},
    {"SavingTheModule", End::kErrorOfSeveral, "",
     [](Training& t) {
       if (t.world) {
         torch::serialize::OutputArchive archive;
         t.net->save(archive);
         archive.save_to([](const void*, size_t n) { return n; });
       }
     }},
    {"LoadingOtherShapes", End::kError, "the state must be that of the model",
     [](Training& t) {
       if (t.world)
         t.sharded->load_full_state(plain_state(*std::make_shared<Mlp>(kWidth + 1, 2, kOut)));
     }},
    {"LoadingAMissingCheckpoint", End::kError, "nothing-there",
     [](Training& t) {
       if (t.world) load_checkpoint("/nothing-there", *t.sharded, &*t.optimizer);
     }},
    {"AnAssignedWeight", End::kRight, "",
     [](Training& t) {
       t.train(1);
       {
         torch::NoGradGuard no_grad;
         first_parameter(t).copy_(torch::full_like(first_parameter(t), 0.25));
       }
       t.train(1);
     }},
    {"OldViews", End::kRight, "",
     [](Training& t) {
       auto view = first_parameter(t).view({-1});
       t.train(2);
       view.sum();
     }},
    {"ACloneOfTheModule", End::kErrorOrRight, "",
     [](Training& t) {
       t.train(1);
       first_parameter(t).clone().add_(1);
       t.train(1);
     }},
    {"PrintingTheModule", End::kRight, "",
     [](Training& t) {
       std::ostringstream out;
       t.train(1);
       out << *t.net;
       t.train(1);
     }},
    {"PrintingAParameter", End::kRight, "",
     [](Training& t) {
       std::ostringstream out;
       t.train(1);
       out << first_parameter(t);
       t.train(1);
     }},
    {"AnotherThread", End::kRight, "",
     [](Training& t) {
       t.train(1);
       auto group = t.world ? std::optional(t.world->process_group()) : std::nullopt;
       std::exception_ptr error;
       std::thread([&] {
         try {
           t.train(1);
         } catch (...) {
           error = std::current_exception();
         }
       }).join();
       if (error) std::rethrow_exception(error);
     }},
    {"ANanLoss", End::kRight, "",
     [](Training& t) {
       (t.loss_of(t.rank()) * NAN).backward();
       t.zero_grad();
       t.train(1);
     }},
    {"UsedAfterUnwrap", End::kError, "the model was unwrapped",
     [](Training& t) {
       if (!t.world) return;
       t.optimizer->unwrap();
       t.sharded->unwrap();
       t.sharded->full_state();
     }},
    {"UnwrapBeforeTheOptimizer", End::kError, "a ShardedOptimizer steps on parts of the parameters",
     [](Training& t) {
       if (t.world) t.sharded->unwrap();
     }},
    // --- meshes
    {"AMeshOfAWrongSize", End::kError, "there must be one rank for each place",
     [](Training& t) {
       if (t.world) DeviceMesh::over_world({3, 5});
     }},
    {"ATensorParallelPatternThatMatchesNothing", End::kError, "each pattern must match a module",
     [](Training& t) {
       if (t.world)
         parallelize_module(*std::make_shared<Mlp>(kWidth, 1, kOut), DeviceMesh::over_world(),
                            {{"nothing.*", ColwiseParallel{}}});
     }},
    {"TensorParallelThenSharded", End::kErrorOfSeveral, "mesh_dim",
     [](Training& t) {
       if (!t.world) return;
       auto net = seeded(3, [] { return std::make_shared<Mlp>(8, 2, 4); });
       parallelize_module(*net, DeviceMesh::over_world(), {{"fc0", ColwiseParallel{}}});
       fully_shard(net);
     }},
    // --- process groups and worlds
    {"SpawnInsideAJob", End::kError, "must not be called by a rank that was spawned",
     [](Training& t) {
       if (t.world) spawn(2, [] {});
     }},
};

// What a rank's program ended with: the state, or an error.
struct Outcome {
  std::vector<NamedTensor> state;
  std::string error;
};

std::vector<Outcome> outcomes(const Mistake& mistake, int ranks, Transport transport) {
  std::vector<Outcome> all(ranks);
  const auto program = [&](World& world) {
    Outcome& own = all[world.rank()];
    Training training(&world, ranks);
    try {
      mistake.make(training);
      own.state = training.state();
    } catch (const std::exception& error) {
      own.error = error.what();
      throw;
    }
  };
  try {
    run_over(transport, ranks, program, std::chrono::seconds(3));
  } catch (const std::exception& error) {
    for (const Outcome& outcome : all)
      if (!outcome.error.empty()) return all;
    all[0].error = error.what();
  }
  return all;
}

class Mistakes : public ::testing::TestWithParam<Mistake> {};

TEST_P(Mistakes, EndsWithAnErrorOrTheNumbersOfOneProcess) {
  const Mistake& mistake = GetParam();
  for (const int ranks : {1, 2, 4}) {
    for (const Transport transport : kTransports) {
      SCOPED_TRACE(fmt::format("{} ranks over {}", ranks,
                               transport == Transport::kGloo ? "Gloo" : "the arena"));
      const auto all = outcomes(mistake, ranks, transport);
      bool has_error = false, has_message = false;
      std::string errors;
      for (const Outcome& outcome : all) {
        has_error = has_error || !outcome.error.empty();
        has_message = has_message || (!outcome.error.empty() &&
                                      outcome.error.find(mistake.message) != std::string::npos);
        errors += outcome.error + "\n";
      }
      const bool must_fail =
          mistake.end == End::kError || (mistake.end == End::kErrorOfSeveral && ranks > 1);
      const bool may_fail = must_fail || (mistake.end == End::kErrorOrRight && ranks > 1);
      EXPECT_TRUE(has_error || !must_fail) << "no error";
      EXPECT_TRUE(has_message || !must_fail) << "no '" << mistake.message << "' in:\n" << errors;
      EXPECT_TRUE(!has_error || may_fail) << errors;
      if (has_error) continue;
      Training plain(nullptr, ranks);
      mistake.make(plain);
      for (const Outcome& outcome : all)
        expect_same_state(outcome.state, plain.state(), 0, mistake.name);
    }
  }
}

TEST(Mistakes, SpawnWithoutInitIsWarnedOf) {
  const c10::WarningUtils::WarnAlways always;
  spawn(2, [] {
    const auto said = warnings_of([] { fully_shard(std::make_shared<Mlp>(kWidth, 1, kOut)); });
    ASSERT_EQ(said.size(), 1U);
    EXPECT_NE(said[0].find("started as one of 2, and shards a model over itself alone"),
              std::string::npos)
        << said[0];
  });
}

INSTANTIATE_TEST_SUITE_P(OfUsers, Mistakes, ::testing::ValuesIn(kMistakes),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace tessera::testing::mistakes_test

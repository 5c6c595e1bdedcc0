// The phase of training that a rank is in, as its process group can tell the other ranks.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "comm/group/progress.h"
#include "support/models.h"
#include "support/scratch_directory.h"

namespace tessera::testing::phases_test {

using Phases = std::set<Phase>;

// The collective that tells all ranks of an error of one.
constexpr std::string_view kCheck = "check of the arguments";

// Notes the phase in which each collective is issued.
class Watched : public ProcessGroupDecorator, public HasProgress {
 public:
  using ProcessGroupDecorator::ProcessGroupDecorator;
  ProcessGroup& transport() override { return *this; }
  Progress* progress() override { return &progress_; }

  Phase phase() const { return progress_.state().phase; }
  /// The phases of the collectives of this kind or subject since the last call.
  Phases phases_of(std::string_view name) {
    Phases phases;
    std::erase_if(noted_, [&](const Note& note) {
      const bool fits = note.kind == name || note.subject == name;
      if (fits) phases.insert(note.phase);
      return fits;
    });
    return phases;
  }

 private:
  struct Note {
    std::string kind, subject;
    Phase phase;
  };
  WorkPtr issue(Collective collective) override {
    noted_.push_back({collective.name(), std::string(collective.tag.subject), phase()});
    return pass_on(std::move(collective));
  }

  Progress progress_;
  std::vector<Note> noted_;
};

struct Job {
  Job(World& world, ShardPlan plan) : watched(std::make_shared<Watched>(world.process_group())) {
    plan.process_group = watched;
    sharded.emplace(fully_shard(seeded(7, [] { return std::make_shared<Mlp>(8, 2, 3); }), plan));
    sgd.emplace((*sharded)->parameters(), 0.1);
    optimizer.emplace(*sharded, *sgd);
  }
  torch::Tensor forward() { return (*sharded)->forward(torch::ones({2, 8}, test_device())); }
  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      optimizer->zero_grad();
      forward().sum().backward();
      optimizer->step();
    }
  }

  std::shared_ptr<Watched> watched;
  std::optional<Sharded<Mlp>> sharded;
  std::optional<torch::optim::SGD> sgd;
  std::optional<ShardedOptimizer> optimizer;
};

// Whole models, and models of one unit, in which backward ends with the unit that forward uses
// next.
void on_plans(const std::function<void(Job&, const ShardPlan&)>& f) {
  for (const int64_t unit_bytes : {300, 1 << 20}) {
    const auto on_rank = [&](World& world, const ShardPlan& plan) {
      Job job(world, plan);
      f(job, plan);
    };
    on_worlds({2}, at_each_level({.unit_bytes = unit_bytes}), on_rank, Transport::kGloo);
  }
}

TEST(Phases, FollowEachOther) {
  on_plans([](Job& job, const ShardPlan&) {
    for (int step = 0; step < 3; ++step) {
      for (int backward = 0; backward < 2; ++backward) {
        EXPECT_EQ(job.watched->phase(), Phase::kUserCode);
        const auto loss = job.forward().sum();
        EXPECT_EQ(job.watched->phase(), Phase::kForward) << "the module's own ends unseen";
        loss.backward();
      }
      EXPECT_EQ(job.watched->progress()->state().step, step + 1);
      job.optimizer->step();
      EXPECT_EQ(job.watched->phase(), Phase::kUserCode);
      EXPECT_EQ(job.watched->progress()->state().step, step + 2);
      job.optimizer->zero_grad();
    }
  });
}

TEST(Phases, HoldDuringCollectives) {
  on_plans([](Job& job, const ShardPlan& plan) {
    job.train(2);
    job.watched->phases_of("all_gather");
    job.watched->phases_of("all_reduce");
    job.watched->phases_of("reduce_scatter");
    job.optimizer->zero_grad();
    job.forward().sum().backward();
    EXPECT_EQ(job.watched->phases_of("reduce_scatter"), Phases{Phase::kBackward});
    EXPECT_EQ(job.watched->phases_of("which parameters were used"), Phases{Phase::kBackward});
    if (plan.level < ShardLevel::kParameters) {
      EXPECT_EQ(job.watched->phases_of("all_gather"), Phases{});
    }
    job.optimizer->clip_grad_norm_(1);
    EXPECT_EQ(job.watched->phases_of("gradient norm"), Phases{Phase::kStep});
    job.optimizer->step();
    const Phases gathers = job.watched->phases_of("all_gather");
    if (plan.level == ShardLevel::kParameters) {
      EXPECT_FALSE(gathers.contains(Phase::kUserCode));
    } else {
      EXPECT_EQ(gathers, Phases{Phase::kStep});
    }
  });
}

TEST(Phases, OfAStepThatAScalerMakesOrSkips) {
  on_plans([](Job& job, const ShardPlan&) {
    GradScaler scaler;
    for (const double factor : {1., double{INFINITY}}) {
      scaler.scale(job.forward().sum() * factor).backward();
      EXPECT_EQ(scaler.step(*job.optimizer), factor == 1);
      EXPECT_EQ(job.watched->phases_of("found inf"), Phases{Phase::kStep});
      EXPECT_EQ(job.watched->phase(), Phase::kUserCode);
      EXPECT_EQ(job.watched->progress()->state().step, 2);
      scaler.update();
      job.optimizer->zero_grad();
    }
  });
}

TEST(Phases, EndWithAnException) {
  on_plans([](Job& job, const ShardPlan&) {
    expect_error([&] { job.optimizer->step(); }, {"[step]", "backward"});
    EXPECT_EQ(job.watched->phase(), Phase::kUserCode);
    EXPECT_EQ(job.watched->progress()->state().step, 1);
  });
}

TEST(Phases, EndWithAForwardUnlessItThrows) {
  on_plans([](Job& job, const ShardPlan&) {
    const auto loss = job.sharded->forward(torch::ones({2, 8}, test_device())).sum();
    EXPECT_EQ(job.watched->phase(), Phase::kUserCode);
    loss.backward();
    EXPECT_THROW(job.sharded->forward(torch::ones({2, 9}, test_device())), c10::Error);
    EXPECT_EQ(job.watched->phase(), Phase::kForward);
  });
}

TEST(Phases, OfCheckpoints) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    Job job(world, {.level = ShardLevel::kGradients});
    job.train(3);
    save_checkpoint(scratch / "plain", *job.sharded, &*job.optimizer);
    EXPECT_EQ(job.watched->phases_of("checkpoint"), Phases{Phase::kSave});
    EXPECT_EQ(job.watched->phase(), Phase::kUserCode);

    AsyncCheckpointer checkpointer({.bytes_per_second = 2000});
    checkpointer.save(scratch / "async", *job.sharded, &*job.optimizer);
    EXPECT_EQ(job.watched->phase(), Phase::kUserCode) << "while the thread writes";
    job.forward().sum().backward();
    EXPECT_EQ(job.watched->phases_of("checkpoint"), Phases{Phase::kSave});
    job.watched->phases_of(kCheck);
    checkpointer.wait();
    EXPECT_EQ(job.watched->phases_of(kCheck), Phases{Phase::kSave});

    Job next(world, {.level = ShardLevel::kParameters});
    load_checkpoint(scratch / "plain", *next.sharded, &*next.optimizer);
    EXPECT_EQ(next.watched->phases_of("checkpoint"), Phases{Phase::kLoad});
    EXPECT_EQ(next.watched->phase(), Phase::kUserCode);
    EXPECT_EQ(next.watched->progress()->state().step, 4) << "three steps are in the checkpoint";
  });
}

}  // namespace tessera::testing::phases_test

// Stages of all kinds, failures, and what is refused.

#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/parallel/pipeline.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "support/error_of.h"
#include "support/expect_contains.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::pipeline_stages_test {

using testing::error_of;
using testing::expect_contains;
using testing::on_test_device;
namespace nn = torch::nn;

// Layers and functions of them.
struct Net {
  std::vector<nn::Linear> layers;
  std::vector<PipelineStage> stages;
  nn::Linear& layer(int64_t in, int64_t out) {
    layers.push_back(on_test_device(nn::Linear(in, out)));
    return layers.back();
  }
};

using Build = std::function<void(Net&)>;

Net built(const Build& build) {
  manual_seed(11);
  Net net;
  build(net);
  return net;
}

// The function of a stage that ends in a loss.
PipelineStage stage_of(std::function<StageTensors(const StageTensors&)> forward) {
  return {std::move(forward), nullptr, std::nullopt, {}};
}
PipelineStage layer_stage(Net& net, int64_t in, int64_t out) {
  return make_stage(net.layer(in, out).ptr());
}
PipelineStage loss_stage(Net& net, int64_t in) {
  nn::Linear layer = net.layer(in, 3);
  return stage_of([layer](const StageTensors& x) mutable -> StageTensors {
    return {layer(x[0]).square().mean()};
  });
}

std::vector<PipelineSchedule> schedules(int64_t places, int64_t count) {
  return {gpipe_schedule(places, count), one_f_one_b_schedule(places, count),
          zero_bubble_schedule(places, count)};
}

std::vector<DeviceMesh> all_places() { return stage_meshes(DeviceMesh::over_world()); }

// Trains on 7 rows in 3 micro-batches and expects the bits of one process: a gradient wherever
// that one has one.
void expect_bits(const Build& build, const PipelineSchedule& schedule) {
  Net plain = built(build), net = built(build);
  const at::Tensor x = on_test_device(torch::randn({7, 4}));
  for (const at::Tensor& rows : x.tensor_split(3)) {
    StageTensors tensors = {rows};
    for (const PipelineStage& stage : plain.stages) tensors = stage.forward(tensors);
    const at::Tensor loss = tensors[0] * (static_cast<double>(rows.size(0)) / 7.0);
    if (loss.requires_grad()) loss.backward();
  }
  Pipeline pipeline(net.stages, schedule, all_places());
  pipeline.step({x});
  // Each rank has the gradients of its stages: the layers of place p have the number p.
  const auto place = static_cast<size_t>(default_process_group()->rank());
  const auto own = net.layers[place]->parameters(), expected = plain.layers[place]->parameters();
  for (size_t i = 0; i < own.size(); ++i) {
    ASSERT_EQ(own[i].grad().defined(), expected[i].grad().defined()) << place << " " << i;
    if (!own[i].grad().defined()) continue;
    EXPECT_TRUE(testing::same_values(own[i].grad(), expected[i].grad())) << place << " " << i;
  }
}

void expect_bits_of(const Build& build, int places = 3) {
  for (const Transport transport : kTransports)
    run_over(transport, places, [&](World&) {
      for (const auto& schedule : schedules(places, 3)) expect_bits(build, schedule);
    });
}

TEST(PipelineStages, AFrozenOneSendsNoGradients) {
  for (const size_t frozen : {0, 1, 2}) {
    expect_bits_of([=](Net& net) {
      net.stages = {layer_stage(net, 4, 6), layer_stage(net, 6, 5), loss_stage(net, 5)};
      for (const at::Tensor& each : net.layers[frozen]->parameters()) each.set_requires_grad(false);
      if (frozen == 2)
        for (const at::Tensor& each : net.layers[0]->parameters()) each.set_requires_grad(false);
    });
  }
}

TEST(PipelineStages, AllMayBeFrozen) {
  expect_bits_of([](Net& net) {
    net.stages = {layer_stage(net, 4, 6), layer_stage(net, 6, 5), loss_stage(net, 5)};
    for (nn::Linear& layer : net.layers)
      for (const at::Tensor& each : layer->parameters()) each.set_requires_grad(false);
  });
}

TEST(PipelineStages, OneMayHaveNoParameters) {
  expect_bits_of([](Net& net) {
    net.stages = {layer_stage(net, 4, 6)};
    net.layer(1, 1);  // used by no stage
    net.stages.push_back(
        stage_of([](const StageTensors& x) -> StageTensors { return {x[0].tanh()}; }));
    net.stages.push_back(loss_stage(net, 6));
  });
}

// Tensors of several dtypes, shapes and strides, one that needs no gradient, one that nobody uses,
// one that is passed on as it came, and one twice.
TEST(PipelineStages, PassOnTuplesOfTensors) {
  expect_bits_of([](Net& net) {
    nn::Linear first = net.layer(4, 6), second = net.layer(6, 6), third = net.layer(6, 3);
    net.stages = {stage_of([=](const StageTensors& x) mutable -> StageTensors {
                    const at::Tensor y = first(x[0]);
                    return {y, (y > 0), y.sum().to(torch::kDouble), y.t(), y * 2, torch::arange(3),
                            y};
                  }),
                  stage_of([=](const StageTensors& x) mutable -> StageTensors {
                    const at::Tensor y = second(x[0]) * x[1] + x[3].t() * x[6];
                    return {y, x[2], x[0], x[5]};
                  }),
                  stage_of([=](const StageTensors& x) mutable -> StageTensors {
                    EXPECT_TRUE(torch::equal(x[3], torch::arange(3)));
                    return {third(x[0] + x[2]).square().mean() + x[1].to(torch::kFloat)};
                  })};
  });
}

TEST(PipelineStages, AStageMayCutTheGraph) {
  expect_bits_of([](Net& net) {
    nn::Linear last = net.layer(4, 6);
    net.stages = {make_stage(last.ptr()), layer_stage(net, 6, 5)};
    nn::Linear third = net.layer(5, 3);
    net.stages.push_back(stage_of([=](const StageTensors& x) mutable -> StageTensors {
      return {third(x[0].detach()).square().mean()};
    }));
  });
}

// A backward that throws.
struct Mine : torch::autograd::Function<Mine> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    TORCH_CHECK(false, "the backward fails");
  }
};

TEST(PipelineStages, AFailureIsOneOnAllRanksAndTheNextStepIsRight) {
  for (const Transport transport : kTransports) {
    run_over(transport, 3, [&](World& world) {
      for (const auto& schedule : schedules(3, 4)) {
        for (int64_t failing = 0; failing < 3; ++failing) {
          for (const bool in_backward : {false, true}) {
            for (const int64_t after : {0, 2}) {
              Net net = built([](Net& net) {
                net.stages = {layer_stage(net, 4, 6), layer_stage(net, 6, 5), loss_stage(net, 5)};
              });
              int64_t left = after;
              auto& forward = net.stages[failing].forward;
              forward = [=, inner = forward, &left](const StageTensors& x) -> StageTensors {
                const bool fails = left-- == 0;
                TORCH_CHECK(!fails || in_backward, "the forward fails");
                StageTensors out = inner(x);
                if (fails) out[0] = Mine::apply(out[0]);
                return out;
              };
              Pipeline pipeline(net.stages, schedule, all_places());
              const at::Tensor x = on_test_device(torch::randn({8, 4}));
              const std::string what = in_backward ? "the backward fails" : "the forward fails";
              std::string error = error_of<c10::Error>([&] { pipeline.step({x}); });
              expect_contains(error, {what});
              if (world.rank() != failing)
                expect_contains(error, {"on rank " + std::to_string(failing) + " of 3"});
              left = -1;
              for (nn::Linear& layer : net.layers) layer->zero_grad();
              const at::Tensor again = pipeline.step({x}), forwards = pipeline.step({x});
              EXPECT_TRUE(torch::equal(again, forwards));
            }
          }
        }
      }
    });
  }
}

TEST(PipelineStages, MayReturnOtherTensorsEachTime) {
  run_world(2, [](World&) {
    Net net = built([](Net& net) { net.stages = {layer_stage(net, 4, 6), loss_stage(net, 6)}; });
    int64_t calls = 0, received = 0;
    net.stages[0].forward = [inner = net.stages[0].forward, &calls](const StageTensors& x) {
      ++calls;
      return StageTensors(calls, inner(x)[0].narrow(0, 0, calls % 3));
    };
    net.stages[1].forward = [inner = net.stages[1].forward, &received](const StageTensors& x) {
      EXPECT_EQ(std::ssize(x), ++received);
      EXPECT_EQ(x[0].size(0), received % 3);
      return inner(x);
    };
    Pipeline pipeline(net.stages, one_f_one_b_schedule(2, 2), all_places());
    for (const int64_t rows : {4, 7, 4}) pipeline.step({on_test_device(torch::randn({rows, 4}))});
  });
}

TEST(PipelineStages, ReturnTensorsWhoseSizesFitIntoAMessage) {
  run_world(2, [](World&) {
    Net net = built([](Net& net) { net.stages = {layer_stage(net, 4, 6), loss_stage(net, 6)}; });
    net.stages[0].forward = [](const StageTensors& x) { return StageTensors(100, x[0]); };
    Pipeline pipeline(net.stages, one_f_one_b_schedule(2, 2), all_places());
    expect_contains(error_of<c10::Error>([&] {
                      pipeline.step({on_test_device(torch::randn({4, 4}))});
                    }),
                    {"[Pipeline]", "512 numbers at most; got 803"});
  });
}

struct Shared : nn::Module {
  explicit Shared(const at::Tensor& values) : weight(register_parameter("weight", values)) {}
  at::Tensor forward(const at::Tensor& x) { return x.mm(weight); }
  at::Tensor weight;
};

nn::Sequential model_of(const at::Tensor& first, const at::Tensor& last) {
  manual_seed(2);
  nn::Sequential model;
  model->push_back("first", Shared(first));
  model->push_back("middle", on_test_device(nn::Linear(5, 5)));
  model->push_back("last", Shared(last));
  return model;
}

PipelineOptions square_loss() {
  return {
      .loss = [](const StageTensors& out, const StageTensors&) { return out[0].square().mean(); }};
}

TEST(PipelineStages, CopiesOfATiedParameterGetTheSumOfTheirGradients) {
  for (const int size : {1, 2, 3}) {
    run_world(size, [size](World& world) {
      manual_seed(4);
      const at::Tensor values = on_test_device(torch::randn({5, 5})),
                       x = on_test_device(torch::randn({4, 5})),
                       first = values.clone().set_requires_grad(true),
                       last = values.clone().set_requires_grad(true),
                       shared = values.clone().set_requires_grad(true);
      nn::Sequential plain = model_of(first, last), model = model_of(shared, shared);
      for (const at::Tensor& rows : x.tensor_split(2))
        (plain->forward(rows).square().mean() * 0.5).backward();
      std::vector<std::vector<std::string>> names = {{"first", "middle"}, {"last"}};
      if (size == 3) names = {{"first"}, {"middle"}, {"last"}};
      auto stages = cut_stages(*model, names);
      EXPECT_EQ(stages.back().tied.count("first.weight"), 1u);
      const auto places = static_cast<int64_t>(size);
      const auto schedule =
          size == 1 ? interleaved_schedule(1, 2, 2) : one_f_one_b_schedule(places, 2);
      Pipeline pipeline(std::move(stages), schedule, all_places(), square_loss());
      pipeline.step({x});
      const at::Tensor expected = first.grad() + last.grad();
      const bool has_none = size == 3 && world.rank() == 1;
      if (has_none) {
        EXPECT_FALSE(shared.grad().defined());
      } else if (size == 1) {
        EXPECT_TRUE(testing::close_values(shared.grad(), expected, 1e-6));
      } else {
        EXPECT_TRUE(testing::same_values(shared.grad(), expected));
      }
      pipeline.step({x});  // adds to them
      EXPECT_TRUE(has_none || testing::close_values(shared.grad(), 2 * expected, 1e-6));
    });
  }
}

// All ranks get the error, as they get that of a collective that only one of them calls wrongly.
TEST(Pipeline, RefusesWhatDoesNotFitOnAllRanks) {
  run_world(2, [](World& world) {
    const auto make = [](PipelineSchedule schedule, std::vector<DeviceMesh> meshes,
                         bool has_forward = true) {
      return error_of([&] {
        Net net = built([](Net& net) {
          net.stages = {layer_stage(net, 4, 6), loss_stage(net, 6)};
        });
        if (!has_forward) net.stages[0].forward = nullptr;
        Pipeline(net.stages, std::move(schedule), std::move(meshes));
      });
    };
    const auto meshes = all_places();
    expect_contains(make(gpipe_schedule(3, 2), meshes), {"[Pipeline]", "expected 2 stages at 2"});
    expect_contains(make(interleaved_schedule(2, 2, 2), meshes), {"4 stages at 2 places"});
    expect_contains(make(gpipe_schedule(2, 2 + world.rank()), meshes), {"equal schedules"});
    expect_contains(make({{{PipelinePart::kForward, 0, 0}}, {}}, meshes), {"[check_schedule]"});
    expect_contains(make(gpipe_schedule(2, 2), meshes, false), {"`forward`", "stage 0 at place 0"});
    expect_contains(make(gpipe_schedule(2, 2), {meshes[0], meshes[0]}), {"disjoint"});
    expect_contains(make(gpipe_schedule(2, 2), {}), {"must be in one of `meshes`"});
    const auto only_rank_one = [&] {
      return world.rank() == 1 ? PipelineSchedule{} : gpipe_schedule(2, 2);
    };
    expect_contains(make(only_rank_one(), meshes), {"[check_schedule]", "expected 0 actions"});
  });
}

TEST(Pipeline, RefusesBatchesThatDoNotFitOnAllRanks) {
  run_world(3, [](World&) {
    Net net = built([](Net& net) {
      net.stages = {layer_stage(net, 4, 6), layer_stage(net, 6, 5), layer_stage(net, 5, 3)};
    });
    PipelineOptions options = square_loss();
    Pipeline pipeline(net.stages, gpipe_schedule(3, 4), all_places(), options);
    const auto refused = [&](const StageTensors& inputs, const StageTensors& targets) {
      return error_of([&] { pipeline.step(inputs, targets); });
    };
    const at::Tensor x = on_test_device(torch::randn({4, 4}));
    expect_contains(refused({x.narrow(0, 0, 3)}, {}), {"each of 4 micro-batches; got 3"});
    expect_contains(refused({}, {}), {"got 0"});
    expect_contains(refused({x}, {torch::ones(5)}), {"equally many rows; got 4 and 5"});
    expect_contains(refused({x, torch::ones(5)}, {}), {"`inputs`"});
    expect_contains(refused({torch::scalar_tensor(1)}, {}), {"`inputs`"});
    const int64_t rank = default_process_group()->rank();
    expect_contains(error_of<c10::Error>([&] {
                      if (rank == 0) {
                        pipeline.step({x});
                      } else {
                        pipeline.forward({x});
                      }
                    }),
                    {"step() on some ranks and forward() on others"});
    pipeline.step({x}, {on_test_device(torch::ones(4))});
  });
}

TEST(CutStages, RefusesNamesThatAreNotThoseOfTheChildren) {
  nn::Sequential model;
  for (const char* const name : {"a", "b", "c"}) model->push_back(name, nn::Linear(2, 2));
  const std::vector<std::vector<std::string>> wrong[] = {
      {{"a"}, {"b", "d"}}, {{"a", "b"}, {"b", "c"}}, {{"a"}, {"b"}},
      {{"b", "a"}, {"c"}}, {{"a", "b", "c"}, {}},    {}};
  for (const auto& names : wrong)
    expect_contains(error_of([&] { cut_stages(*model, names); }),
                    {"[cut_stages]", "expected [a, b, c]"});
  EXPECT_EQ(cut_stages(*model, {{"a", "b"}, {"c"}})[1].module->named_parameters()[0].key(),
            "c.weight");
}

}  // namespace tessera::pipeline_stages_test

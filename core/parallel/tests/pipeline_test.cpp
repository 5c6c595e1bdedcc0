// Pipelines: schedules, and gradients to the bit of one process on the same micro-batches.

#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/parallel/pipeline.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::pipeline_test {

using testing::on_test_device;
namespace nn = torch::nn;

nn::Sequential some_model(int64_t layers) {
  tessera::manual_seed(3);
  nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) {
    model->push_back("fc" + std::to_string(i), nn::Linear(i == 0 ? 5 : 9, 9));
    model->push_back("act" + std::to_string(i), nn::Tanh());
  }
  return on_test_device(model);
}

std::vector<std::vector<std::string>> names_of(int64_t stages) {
  std::vector<std::vector<std::string>> names;
  for (int64_t i = 0; i < stages; ++i)
    names.push_back({"fc" + std::to_string(i), "act" + std::to_string(i)});
  return names;
}

at::Tensor loss_of(const at::Tensor& out, const at::Tensor& target) {
  return (out - target).square().mean();
}

// One process that accumulates the micro-batches in order.
at::Tensor accumulate(nn::Sequential& model, const at::Tensor& x, const at::Tensor& y,
                      int64_t count) {
  const auto xs = x.tensor_split(count), ys = y.tensor_split(count);
  at::Tensor total;
  for (int64_t m = 0; m < count; ++m) {
    const double weight = static_cast<double>(xs[m].size(0)) / static_cast<double>(x.size(0));
    const at::Tensor loss = loss_of(model->forward(xs[m]), ys[m]) * weight;
    loss.backward();
    total = total.defined() ? total + loss.detach() : loss.detach();
  }
  return total;
}

struct Case {
  std::string name;
  PipelineSchedule schedule;
  int64_t stages, micro_batches, rows;
};

std::vector<Case> some_cases(int64_t places) {
  return {{"gpipe", gpipe_schedule(places, 6), places, 6, 12},
          {"1f1b", one_f_one_b_schedule(places, 6), places, 6, 12},
          {"1f1b of uneven micro-batches", one_f_one_b_schedule(places, 5), places, 5, 13},
          {"interleaved", interleaved_schedule(places, 3, 2 * places), 3 * places, 2 * places, 25},
          {"zero bubble", zero_bubble_schedule(places, 6), places, 6, 12},
          {"zero bubble of few", zero_bubble_schedule(places, 2), places, 2, 3}};
}

PipelineOptions with_loss() {
  return {.loss = [](const StageTensors& out, const StageTensors& target) {
    return loss_of(out.at(0), target.at(0));
  }};
}

void expect_bits_of_one_process(const Case& each) {
  SCOPED_TRACE(each.name + " at " + std::to_string(default_process_group()->rank()));
  nn::Sequential plain = some_model(each.stages), model = some_model(each.stages);
  const at::Tensor x = on_test_device(torch::randn({each.rows, 5})),
                   y = on_test_device(torch::randn({each.rows, 9}));
  const auto meshes = stage_meshes(DeviceMesh::over_world());
  Pipeline pipeline(cut_stages(*model, names_of(each.stages)), each.schedule, meshes, with_loss());
  for (int step = 0; step < 2; ++step) {
    const at::Tensor expected = accumulate(plain, x, y, each.micro_batches);
    const at::Tensor loss = pipeline.step({x}, {y});
    EXPECT_TRUE(testing::same_values(loss, expected)) << loss << expected;
  }
  const int64_t place = default_process_group()->rank();
  const auto mine = stages_at(each.schedule, place);
  auto own = cut_stages(*model, names_of(each.stages));
  const auto expected = plain->named_parameters();
  for (int64_t s = 0; s < each.stages; ++s) {
    const bool is_mine = std::ranges::find(mine, s) != mine.end();
    for (const auto& item : own[s].module->named_parameters()) {
      ASSERT_EQ(item.value().grad().defined(), is_mine) << item.key();
      if (!is_mine) continue;
      EXPECT_TRUE(testing::same_values(item.value().grad(), expected[item.key()].grad()))
          << item.key();
    }
  }
  EXPECT_EQ(pipeline.counts(), check_schedule(each.schedule)[place]);
  const StageTensors out = pipeline.forward({x});
  ASSERT_EQ(out.size(), std::ranges::find(mine, each.stages - 1) != mine.end() ? 1u : 0u);
  at::NoGradGuard no_grad;
  for (const at::Tensor& each : out)
    EXPECT_TRUE(testing::close_values(each, plain->forward(x), 1e-5));
}

TEST(Pipeline, HasTheBitsOfOneProcessThatAccumulates) {
  for (const Transport transport : kTransports) {
    for (const int size : {1, 2, 3, 4}) {
      run_over(transport, size, [&](World&) {
        for (const Case& each : some_cases(size)) expect_bits_of_one_process(each);
      });
    }
  }
}

}  // namespace tessera::pipeline_test

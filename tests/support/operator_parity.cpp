#include "support/operator_parity.h"

#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/tensor/dist_tensor.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <numeric>

#include "support/counted.h"
#include "support/run_world.h"

namespace tessera::testing {
namespace {

constexpr size_t kSample = 25;

std::vector<Placement> choices(const std::vector<int64_t>& sizes, const DeviceMesh& mesh) {
  constexpr int64_t kFactor = 2;
  std::vector<Placement> all = {Replicate{}, Partial{}};
  for (size_t d = 0; d < sizes.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    all.push_back(Shard{dim});
    if (mesh.ndim() == 1 && sizes[d] > 0 && sizes[d] % (kFactor * mesh.size()) == 0)
      all.push_back(Shard{dim, kFactor});
  }
  return all;
}

// Splits are tried with inputs that are split or whole: conversions have tests of their own.
bool is_mixed_with_splits(const std::vector<Placements>& inputs) {
  bool any_split = false, any_other = false;
  for (const Placements& placements : inputs) {
    any_split |= is_split(placements[0]);
    any_other |= !is_split(placements[0]) && !is_replicate(placements[0]);
  }
  return any_split && any_other;
}

Tensors make_inputs(const OperatorCase& test) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  Tensors inputs;
  for (const auto& sizes : test.sizes)
    inputs.push_back(on_test_device(torch::randn(sizes, generator)));
  return inputs;
}

at::Tensor factors(const at::Tensor& output) {
  return torch::linspace(0.5, 2, std::max<int64_t>(output.numel(), 1), at::kDouble)
      .slice(0, 0, output.numel())
      .view(output.sizes())
      .to(output.options().requires_grad(false));
}

// The gradient of a DistTensor is placed as `placements` say.
Tensors gradients_of(const Tensors& inputs, const at::Tensor& output,
                     const Placements& placements = {}) {
  output.backward(is_dist(output) ? distribute(factors(output), mesh_of(output), placements)
                                  : factors(output));
  Tensors gradients;
  for (const at::Tensor& input : inputs) gradients.push_back(input.grad());
  return gradients;
}

// Makes the terms differ, none of them the sum: a nonlinear operator on the terms would show.
void spread_terms(const at::Tensor& tensor, const DeviceMesh& mesh) {
  torch::NoGradGuard no_grad;
  const Placements& placements = placements_of(tensor);
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    if (!mesh.is_member() || !is_partial(placements[i]) || mesh.size(i) == 1) continue;
    const int64_t at = (*mesh.coordinate())[i];
    if (at == 0) to_local(tensor.detach()).add_(0.75);
    if (at == mesh.size(i) - 1) to_local(tensor.detach()).sub_(0.75);
  }
}

void expect_close(const at::Tensor& dist, const at::Tensor& plain, const std::string& what) {
  ASSERT_EQ(dist.sizes(), plain.sizes()) << what;
  ASSERT_EQ(dist.scalar_type(), plain.scalar_type()) << what;
  if (!mesh_of(dist).is_member()) return;
  const at::Tensor whole = full_tensor(dist);
  EXPECT_TRUE(torch::allclose(whole.to(at::kDouble), plain.to(at::kDouble), 1e-4, 2e-5,
                              /*equal_nan=*/true))
      << what << "\n"
      << whole << "\n"
      << plain;
}

// The placements of all inputs for combination number `index`.
class PlacementCounter {
 public:
  PlacementCounter(const OperatorCase& test, const DeviceMesh& mesh) {
    for (const auto& sizes : test.sizes) {
      choices_.emplace_back();
      for (int64_t i = 0; i < mesh.ndim(); ++i) {
        choices_.back().push_back(choices(sizes, mesh));
        count_ *= choices_.back().back().size();
      }
    }
  }
  size_t count() const { return count_; }
  std::vector<Placements> at(size_t index) const {
    std::vector<Placements> result;
    for (const auto& of_input : choices_) {
      result.emplace_back();
      for (const auto& choices : of_input) {
        result.back().push_back(choices[index % choices.size()]);
        index /= choices.size();
      }
    }
    return result;
  }

 private:
  std::vector<std::vector<std::vector<Placement>>> choices_;  // by input and mesh dim
  size_t count_ = 1;
};

// The results of a case on ordinary tensors.
struct Expected {
  explicit Expected(const OperatorCase& test) {
    Tensors inputs = make_inputs(test);
    for (at::Tensor& input : inputs) input.requires_grad_(test.differentiable);
    const at::Tensor result = test.run(inputs);
    output = result.detach();
    if (test.differentiable) gradients = gradients_of(inputs, result);
  }
  at::Tensor output;
  Tensors gradients;
};

// A tensor with one more dim: next to each element in memory lies another number.
at::Tensor beside_others(const at::Tensor& tensor) {
  return torch::stack({tensor, torch::full_like(tensor, 77)}, -1);
}

Tensors distributed_inputs(const OperatorCase& test, const DeviceMesh& mesh,
                           const std::vector<Placements>& placements, bool are_strided = false) {
  Tensors inputs = make_inputs(test);
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs[i] = distribute(are_strided ? beside_others(inputs[i]) : inputs[i], mesh, placements[i]);
    spread_terms(inputs[i], mesh);
    if (are_strided) inputs[i] = inputs[i].select(-1, 0).detach();
    inputs[i].requires_grad_(test.differentiable);
  }
  return inputs;
}

void expect_gradients(const Tensors& gradients, const Tensors& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(gradients[i].defined(), expected[i].defined()) << i;
    if (gradients[i].defined())
      expect_close(gradients[i], expected[i], "gradient " + std::to_string(i));
  }
}

// For a rank outside of the mesh, where the result depends on values.
const std::string kNotKnown = "not known";

// Placements of the gradient of the output. Where all inputs are whole, or if `every` says so,
// these are all that there are; else one after the other.
std::vector<Placements> gradient_placements(const at::Tensor& output, const DeviceMesh& mesh,
                                            size_t combination, bool every) {
  const auto all = choices(output.sizes().vec(), mesh);
  const size_t count = combination == 0 || every ? all.size() : 1;
  std::vector<Placements> result;
  for (size_t i = combination; i < combination + count; ++i) {
    result.emplace_back();
    for (int64_t d = 0; d < mesh.ndim(); ++d) result.back().push_back(all[(i + d) % all.size()]);
  }
  return result;
}

// Runs the case with inputs of these placements, number `combination`, and returns the placements
// of the outputs and gradients, which ranks outside of the mesh must know as well.
std::string expect_as_plain(const OperatorCase& test, const DeviceMesh& mesh,
                            const Expected& expected, const std::vector<Placements>& placements,
                            size_t combination, bool every) {
  std::string told;
  bool are_strided = false;
  for (const Placements& of_gradient :
       gradient_placements(expected.output, mesh, combination, every)) {
    SCOPED_TRACE("gradient " + to_string(of_gradient));
    const Tensors inputs = distributed_inputs(test, mesh, placements, are_strided);
    if (every && test.takes_strided) are_strided = !are_strided;
    const at::Tensor output = test.run(inputs);
    TORCH_CHECK(is_dist(output), test.name);
    // Of some operators only the values tell the sizes.
    if (!mesh.is_member()) TORCH_CHECK(output.sizes() == expected.output.sizes(), test.name);
    expect_close(output, expected.output, "output");
    told += to_string(placements_of(output));
    if (!test.differentiable) break;
    const Tensors gradients = gradients_of(inputs, output, of_gradient);
    expect_gradients(gradients, expected.gradients);
    for (const at::Tensor& gradient : gradients)
      told += gradient.defined() ? to_string(placements_of(gradient)) : "none";
  }
  return told;
}

std::vector<std::string> expect_as_plain(const OperatorCase& test, const DeviceMesh& mesh,
                                         Combinations combinations) {
  const Expected expected(test);
  const PlacementCounter counter(test, mesh);
  // An odd step, so that the sample contains all choices of each input.
  const bool samples = mesh.ndim() > 1 && combinations == Combinations::kSample;
  const size_t step = samples ? std::max<size_t>(counter.count() / kSample, 1) | 1 : 1;
  std::vector<std::string> told;
  for (size_t n = 0; n < counter.count(); n += step) {
    const auto placements = counter.at(n);
    if (mesh.ndim() == 1 && is_mixed_with_splits(placements)) continue;
    std::string text = test.name;
    for (const Placements& some : placements) text.append(" ").append(to_string(some));
    SCOPED_TRACE(text);
    try {
      told.push_back(text + ": " +
                     expect_as_plain(test, mesh, expected, placements, n,
                                     combinations == Combinations::kEvery));
    } catch (const c10::Error&) {
      if (mesh.is_member()) throw;
      told.push_back(kNotKnown);
    }
  }
  return told;
}

void expect_quiet(const QuietCase& quiet, World& world, const DeviceMesh& mesh) {
  SCOPED_TRACE(quiet.test.name);
  const Expected expected(quiet.test);
  std::vector<Placements> placements;
  for (const Placement& placement : quiet.placements) placements.push_back({placement});
  const Tensors inputs = distributed_inputs(quiet.test, mesh, placements);
  at::Tensor output;
  Tensors gradients;
  const auto forward = count(world, [&] {
    output = quiet.test.run(inputs);
    const bool is_pending = is_partial(placements_of(output)[0]);
    if (is_pending) output = redistribute(output, {});
  });
  EXPECT_LE(forward.calls(), quiet.forward) << "forward";
  int64_t bytes = forward.bytes_sent();
  if (quiet.test.differentiable) {
    const auto backward = count(world, [&] { gradients = gradients_of(inputs, output); });
    EXPECT_LE(backward.calls(), quiet.backward) << "backward";
    bytes += backward.bytes_sent();
  }
  EXPECT_LE(bytes, quiet.bytes);
  expect_close(output, expected.output, "output");
  expect_gradients(gradients, expected.gradients);
}

}  // namespace

at::Tensor whole_numbers(const at::Tensor& like, int64_t count) {
  return (like.detach().abs() * 7).to(at::kLong).remainder(count);
}

void expect_as_plain(const std::vector<OperatorCase>& cases, const std::vector<int64_t>& mesh_shape,
                     Combinations combinations) {
  int64_t ranks = 1;
  for (const int64_t size : mesh_shape) ranks *= size;
  const std::chrono::seconds timeout(combinations == Combinations::kAll ? 1700 : 110);
  std::vector<int> members(ranks);
  std::iota(members.begin(), members.end(), 0);
  std::mutex mutex;
  std::vector<std::vector<std::string>> told;  // by each rank, of which one is not in the mesh
  run_world(
      static_cast<int>(ranks) + 1,
      [&](World&) {
        const DeviceMesh mesh(mesh_shape, members);
        std::vector<std::string> own;
        for (const OperatorCase& test : cases) {
          const auto some = expect_as_plain(test, mesh, combinations);
          own.insert(own.end(), some.begin(), some.end());
        }
        const std::lock_guard lock(mutex);
        told.push_back(std::move(own));
      },
      timeout);
  for (const auto& own : told) {
    ASSERT_EQ(own.size(), told[0].size());
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i] == kNotKnown || told[0][i] == kNotKnown) continue;
      EXPECT_EQ(own[i], told[0][i]);
    }
  }
}

void expect_rule(const std::string& name,
                 const std::vector<std::vector<std::vector<int64_t>>>& samples,
                 const std::function<at::Tensor(const Tensors&)>& run) {
  std::vector<OperatorCase> cases;
  for (const auto& sizes : samples) {
    OperatorCase test{name, sizes, run};
    Tensors inputs = make_inputs(test);
    for (at::Tensor& input : inputs) input.requires_grad_();
    test.differentiable = run(inputs).requires_grad();
    for (at::Tensor& input : inputs) input = beside_others(input.detach()).select(-1, 0);
    try {
      run(inputs);
    } catch (const c10::Error&) {
      test.takes_strided = false;
    }
    cases.push_back(std::move(test));
  }
  for (const int64_t ranks : {2, 3}) expect_as_plain(cases, {ranks}, Combinations::kEvery);
}

void expect_quiet(const std::vector<QuietCase>& cases) {
  run_world(2, [&](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto mesh = DeviceMesh::over_world();
    for (const QuietCase& quiet : cases) expect_quiet(quiet, world, mesh);
  });
}

}  // namespace tessera::testing

#pragma once

#include <tessera/base/generator.h>

#include <map>
#include <optional>
#include <span>

#include "differential/bounds.h"
#include "differential/plain_scaler.h"
#include "differential/state_items.h"
#include "differential/training.h"

namespace tessera::differential {

/// All ranks' training in plain LibTorch. Each rank has a replica of the model, for its gradients,
/// buffers and random numbers. The optimizers step one further copy of the parameters, in the dtype
/// of master weights, which is then copied into the replicas. With outer steps, the training of the
/// ranks `first` and following of one replica.
class PlainTraining : public Training {
 public:
  PlainTraining(const Program& program, std::span<const Trace> traces, int first);

  void forward(const Op& op) override;
  void backward(const Op& op) override;
  void zero_grad(const Op& op) override;
  void clip(const Op& op) override;
  void clamp_grad(const Op& op) override;
  void step(const Op& op) override;
  void advance_schedule(const Op& op) override {
    if (schedules_[op.value]) schedules_[op.value]->step();
  }
  void evaluate(const Op& op) override;
  void rewrite_state() override {
    for (size_t i = 0; i < main_.size(); ++i) {
      write(main_[i], params_[0][i]);
      publish(i);
    }
    starts_.clear();  // a round ends
    outer_steps_.clear();
  }
  void edit_parameter(const Op& op) override;
  void average(const Op& op) override;
  void save(const Op& op) override;
  void load() override;
  void throw_in(const Op& op) override;
  void thaw() override;
  void reduce() override;
  void see_used() override;
  void finish() override { compare_state(); }
  void set_position(const int& at) { at_ = &at; }
  /// The outer step of an optimizer, which has made another step in each of the replicas.
  static void step_outer(std::span<const std::unique_ptr<PlainTraining>> replicas, const Op& op);

 private:
  static size_t index_of(const std::vector<torch::Tensor>& tensors, const torch::Tensor& tensor) {
    const auto is_same = [&](const torch::Tensor& other) { return other.is_same(tensor); };
    return std::find_if(tensors.begin(), tensors.end(), is_same) - tensors.begin();
  }
  static void write(const torch::Tensor& to, const torch::Tensor& from) {
    torch::NoGradGuard no_grad;
    torch::Tensor(to).copy_(from.detach());
  }
  // Writes to parameters as they are used, which autograd does not see.
  void write_used(size_t param, const torch::Tensor& from) {
    for (auto& replica : params_) write(replica[param].data(), from);
  }
  // Calls `f` with each rank that has not finished, which draws from its own random numbers.
  template <class F>
  void for_each_rank(const F& f) {
    auto generator = default_generator();
    for (int rank = 0; rank < ranks(); ++rank) {
      if (is_done(program_, rank, *at_)) continue;
      generator.set_state(random_[rank]);
      f(rank);
      random_[rank] = generator.get_state();
    }
  }
  int ranks() const { return static_cast<int>(traces_.size()); }
  void sync_buffers();
  torch::Tensor run(int rank, const Op& op);
  at::ScalarType used_dtype(at::ScalarType dtype) const {
    return program_.plan.precision.param_dtype.value_or(dtype);
  }
  at::ScalarType main_dtype(size_t param) const;
  at::ScalarType gathered_dtype(size_t param) const;
  void wait_to_send(int rank, size_t param);
  torch::Tensor sum(size_t param, int first, int count, bool is_live) const;
  void sum_ranks(size_t param);
  void clear(size_t param, bool to_zeros);
  static double largest(const at::Tensor& values);
  void take_narrow_sums(const std::vector<size_t>& params);
  bool can_sum(size_t param) const;
  void check_accepted() const;
  std::vector<torch::Tensor> parameters_of_optimizer(size_t index) const;
  bool has_gradient() const;
  void check_backward() const;
  bool begins_step(const Op& op);
  void step_fused(const Op& op);
  void begin_round(size_t optimizer);
  void publish(size_t param);
  std::map<std::string, torch::Tensor> compare_used(
      const std::map<std::string, torch::Tensor>& bounds);
  void compare_state(const std::map<std::string, torch::Tensor>& bounds = {});
  torch::Tensor compare(int rank, const std::string& name, const torch::Tensor& value,
                        const torch::Tensor& bound = {});
  torch::Tensor compare_all(const std::string& name, const torch::Tensor& value,
                            const torch::Tensor& bound = {}) {
    torch::Tensor got;
    for (int rank = 0; rank < ranks(); ++rank) got = compare(rank, name, value, bound);
    return got;
  }
  static torch::Tensor number(double value) { return torch::scalar_tensor(value, torch::kDouble); }

  struct Saved {
    std::vector<torch::Tensor> main, random;
    std::vector<std::vector<torch::Tensor>> buffers;  // by rank
    std::optional<OptimizerStateDict> optimizer;
    std::vector<unsigned> schedule_steps;
    std::optional<PlainScaler> scaler;
  };

  const Program& program_;
  const std::span<const Trace> traces_;
  const int first_;
  const int* at_ = nullptr;   // the operation that is run
  std::vector<size_t> seen_;  // items of each rank's trace that were compared
  std::vector<std::shared_ptr<Model>> replicas_;
  std::vector<std::vector<torch::Tensor>> params_;  // of each replica
  std::vector<std::string> names_;                  // of parameters
  std::vector<at::ScalarType> made_;                // dtypes of the parameters as they were made
  std::vector<bool> is_trained_;                    // as they were made
  std::vector<torch::Tensor> main_;
  std::vector<std::vector<torch::Tensor>> waiting_;  // gradients that were not sent, by rank
  std::vector<torch::Tensor> losses_;
  std::vector<torch::Tensor> random_;  // state of each rank's generator
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::vector<std::unique_ptr<Schedule>> schedules_;
  std::vector<torch::Tensor> averages_;
  std::map<std::pair<size_t, size_t>, torch::Tensor> starts_, momenta_;  // by optimizer, parameter
  std::optional<NarrowSums> narrow_;
  std::optional<PlainScaler> scaler_;
  std::optional<Saved> saved_;
  std::map<int, int> outer_steps_;  // that optimizers have made; of the first replica
  bool is_zeroed_ = false;          // gradients, and no backward has been since
};

}  // namespace tessera::differential

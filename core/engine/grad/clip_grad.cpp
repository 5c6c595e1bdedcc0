#include "engine/grad/clip_grad.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "comm/group/blocking_all_reduce.h"

namespace tessera {
namespace {

// Calls `f` with each live gradient that takes part: those of its unit, and its parameter.
template <class F>
void for_each_counted(const AllGradients& gradients, const IsCounted& is_counted, F&& f) {
  for (const auto& unit : gradients) {
    const auto& slots = unit->unit().layout().slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      if (unit->is_live(slot) && is_counted(unit->unit().index(), slot)) f(*unit, slots[slot]);
    }
  }
}

at::Tensor local_norm(const at::Tensor& part, double norm_type) {
  const bool is_low_precision = c10::isReducedFloatingType(part.scalar_type());
  const auto dtype = is_low_precision ? std::optional(at::kFloat) : std::nullopt;
  return at::linalg_vector_norm(part, norm_type, at::OptionalIntArrayRef(), false, dtype);
}

// Returns the values of tensors of one element each. From a device, they are copied together.
std::vector<double> values_of(const std::vector<at::Tensor>& scalars) {
  std::vector<double> values;
  for (size_t i = 0; i < scalars.size();) {
    const at::Device device = scalars[i].device();
    std::vector<at::Tensor> run;
    for (; i < scalars.size() && scalars[i].device() == device; ++i)
      run.push_back(scalars[i].to(at::kDouble));
    const at::Tensor all = at::stack(run).to(at::kCPU);
    const auto* const data = all.const_data_ptr<double>();
    values.insert(values.end(), data, data + run.size());
  }
  return values;
}

// Adds up norms, or takes the highest; over tensors, and then over ranks.
class TotalNorm {
 public:
  explicit TotalNorm(double norm_type) : type_(norm_type) {}

  void add(const std::vector<at::Tensor>& norms) {
    for (const double norm : values_of(norms)) add_term(is_max() ? norm : std::pow(norm, type_));
  }
  void add(const TotalNorm& other) { add_term(other.total_); }
  void reduce(ProcessGroup& ranks) {
    // Infinity is sent as it is; NaN is sent as a separate flag, because MAX may drop it.
    const at::Tensor sums = at::empty({2}, at::kDouble);
    auto* data = sums.mutable_data_ptr<double>();
    data[0] = std::isnan(total_) ? 0 : total_;
    data[1] = std::isnan(total_) ? 1 : 0;
    blocking_all_reduce(ranks, sums, is_max() ? ReduceOp::kMax : ReduceOp::kSum,
                        {"gradient norm", Channel::kControl});
    total_ = data[1] > 0 ? NAN : data[0];
  }
  double value() const {
    return is_max() || std::isnan(total_) ? total_ : std::pow(total_, 1.0 / type_);
  }

 private:
  bool is_max() const { return std::isinf(type_); }
  // A NaN must win over any number, as it does in one process; std::max would drop it.
  void add_term(double term) {
    if (!is_max()) {
      total_ += term;
    } else {
      total_ = std::isnan(term) || std::isnan(total_) ? NAN : std::max(total_, term);
    }
  }

  const double type_;
  double total_ = 0;
};

}  // namespace

double grad_norm(const AllGradients& gradients, const ShardMesh& mesh, double norm_type,
                 const IsCounted& is_counted) {
  at::NoGradGuard no_grad;
  const bool has_groups = std::ranges::any_of(
      gradients, [](const auto& unit) { return unit->unit().layout().group > 0; });
  // Replicas have the units of the model in common, and not those of process groups.
  std::vector<at::Tensor> norms, norms_of_groups;
  for_each_counted(gradients, is_counted, [&](const UnitGradients& unit, const ParamSlot& param) {
    // This rank's own shard counts, even where it holds the whole gradient. A part of a DistTensor
    // that several ranks hold counts on one of them.
    const bool is_first = param.dist ? param.dist->is_first_replica : mesh.parts().rank() == 0;
    const int rank = unit.unit().mesh().shard().rank();
    const auto& bounds = unit.unit().layout().bounds;
    const auto [begin, end] = overlap(param, bounds[rank], bounds[rank + 1]);
    if (!is_first || begin == end) return;
    (unit.unit().layout().group > 0 ? norms_of_groups : norms)
        .push_back(local_norm(unit.reduced(begin, end), norm_type));
  });
  TotalNorm total(norm_type);
  total.add(norms);
  if (has_groups) {
    TotalNorm groups(norm_type);
    groups.add(norms_of_groups);
    groups.reduce(mesh.replicate());
    total.add(groups);
  }
  total.reduce(mesh.shard());
  total.reduce(mesh.parts());
  return total.value();
}

void scale_gradients(const AllGradients& gradients, double factor, const IsCounted& is_counted) {
  at::NoGradGuard no_grad;
  for_each_counted(gradients, is_counted, [&](const UnitGradients& unit, const ParamSlot& param) {
    const auto [begin, end] = unit.unit().updated_range(param);
    if (begin < end) unit.reduced(begin, end).mul_(factor);
  });
}

}  // namespace tessera

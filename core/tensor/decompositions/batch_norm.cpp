#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>

#include <string>
#include <utility>
#include <vector>

#include "base/device/device.h"
#include "tensor/decompositions.h"
#include "tensor/dist_meta.h"
#include "tensor/placed.h"
#include "tensor/redistribute.h"

namespace tessera {

// [Note: Batch norm in training]
//
// Statistics are those of the whole batch, along whichever dims it is cut. Every rank computes the
// sums of its part, in double; these are reduced in one message; then each rank normalizes its
// part. Running statistics change alike on all ranks. The backward pass needs two sums for each
// channel, also in one message.
namespace {

// Placements of the input, of tensors with one value per channel, and of terms of two sums.
struct Layout {
  DistSpecPtr input, channels, terms;
  Placements whole_sums;  // of the reduced terms
};

Layout layout_of(const DeviceMesh& mesh, Placements input) {
  Placements channels(mesh.ndim(), Replicate{}), terms = channels, whole_sums = channels;
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    if (is_partial(input[i])) input[i] = Replicate{};
    if (is_shard(input[i], 1)) {
      const int64_t factor = std::get<Shard>(input[i]).split_factor;
      channels[i] = Shard{0, factor};
      terms[i] = whole_sums[i] = Shard{1, factor};
    } else if (is_shard(input[i])) {
      terms[i] = Partial{};
    }
  }
  return {intern(mesh, std::move(input)), intern(mesh, std::move(channels)),
          intern(mesh, std::move(terms)), std::move(whole_sums)};
}

std::vector<int64_t> all_but_channels(const at::Tensor& tensor) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < tensor.dim(); ++d) dims.push_back(d);
  return dims;
}

// One value for each channel, reshaped to broadcast to `like`.
at::Tensor spread(const at::Tensor& values, const at::Tensor& like) {
  std::vector<int64_t> sizes(like.dim(), 1);
  sizes[1] = -1;
  return values.view(sizes);
}

struct BatchNorm {
  BatchNorm(const at::Tensor& input, const DeviceMesh& mesh, const Placements& placements)
      : layout(layout_of(mesh, placements)),
        channels(input.size(1)),
        count(static_cast<double>(input.numel()) / static_cast<double>(channels)),
        sizes(input.sizes().vec()),
        dtype(input.scalar_type()),
        wide(sum_dtype(dtype)),
        input(local(input, *layout.input)) {}

  // This rank's part of `tensor`, in the dtype of the computation.
  at::Tensor local(const at::Tensor& tensor, const DistSpec& spec) const {
    return tensor.defined() ? placed(tensor, spec, "argument").to(wide) : tensor;
  }
  at::Tensor per_channel(const at::Tensor& tensor) const { return local(tensor, *layout.channels); }
  at::Tensor channel_result(const at::Tensor& part, at::ScalarType dtype) const {
    return make_dist(part.to(dtype), layout.channels, {channels});
  }
  at::Tensor result(const at::Tensor& part) const {
    return make_dist(part.to(dtype), layout.input, sizes);
  }

  // Reduces two terms for each channel over the ranks; the result has a row for each of the two.
  at::Tensor added_up(const at::Tensor& terms) const {
    return convert(terms, *layout.terms, layout.whole_sums, {2, channels}, "batch norm");
  }

  // Returns the sums of the values of this rank's part and of their squares. Computed from its own
  // mean and variance, they lose less precision.
  at::Tensor sums() const {
    const auto options = input.options().dtype(at::kDouble);
    if (input.numel() == 0) return at::zeros({2, input.size(1)}, options);
    const auto [variance, mean] =
        at::var_mean(input, all_but_channels(input), /*correction=*/at::Scalar(0));
    const at::Tensor m = mean.to(at::kDouble);
    const auto count = static_cast<double>(input.numel()) / static_cast<double>(input.size(1));
    return at::stack({m.mul(count), variance.to(at::kDouble).add(m.mul(m)).mul(count)});
  }

  at::Tensor normalized(const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& mean,
                        const at::Tensor& variance, double eps) const {
    if (input.numel() == 0) return at::empty_like(input);
    const auto optional = [](const at::Tensor& tensor) {
      return tensor.defined() ? std::optional(tensor) : std::nullopt;
    };
    return std::get<0>(at::native_batch_norm(input, optional(weight), optional(bias), mean,
                                             variance, /*training=*/false, 0, eps));
  }

  const Layout layout;
  const int64_t channels;
  const double count;  // number of values for each channel
  const std::vector<int64_t> sizes;
  const at::ScalarType dtype, wide;
  const at::Tensor input;  // this rank's part
};

// Changes `running` itself, because the module holds it. On a rank that is not in the mesh, an
// ordinary tensor stays as it is, as in all operators.
void update(const at::Tensor& running, const at::Tensor& now, double momentum) {
  if (running.defined()) running.copy_(running.mul(1 - momentum).add(now, momentum));
}

// The operator's forms: `_functional` ones return new running statistics in place of changing them,
// and `_with_update` ones are always in training and return memory that is theirs.
struct Form {
  explicit Form(const DecomposedCall& call)
      : is_functional(call.schema.name().ends_with("_functional")),
        is_update(call.schema.name().find("_with_update") != std::string::npos),
        is_training(is_update || call.argument("training").toBool()) {}
  bool is_functional, is_update, is_training;
};

struct Normalized {
  at::Tensor output, mean, variance, inverse_deviation;
};

Normalized normalize_part(const BatchNorm& norm, const DecomposedCall& call) {
  const double eps = call.argument("eps").toDouble();
  const at::Tensor sums = norm.added_up(norm.sums()).div(norm.count);
  const at::Tensor mean = sums.select(0, 0);
  const at::Tensor variance = sums.select(0, 1).sub(mean.mul(mean)).clamp_min(0);
  const at::Tensor weight = norm.per_channel(call.tensor("weight"));
  const at::Tensor bias = norm.per_channel(call.tensor("bias"));
  return {norm.normalized(weight, bias, mean.to(norm.wide), variance.to(norm.wide), eps), mean,
          variance, variance.add(eps).rsqrt()};
}

// The dtype in which LibTorch returns statistics: float on accelerators; else that of the input, or
// float beside parameters of another one.
at::ScalarType dtype_of_statistics(const BatchNorm& norm, const DecomposedCall& call) {
  if (has_kernels_of_accelerators(norm.input.device())) return norm.wide;
  for (const char* const name : {"weight", "bias", "running_mean", "running_var"}) {
    const at::Tensor parameter = call.find(name) ? call.tensor(name) : at::Tensor();
    if (parameter.defined()) return parameter.scalar_type() == norm.dtype ? norm.dtype : norm.wide;
  }
  return norm.dtype;
}

bool batch_norm(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor input = call.tensor("input");
  const DistMeta* const meta = find_dist_meta(input);
  const Form form(call);
  if (!meta || !form.is_training || !call.any_not_whole() || input.numel() == 0) return false;
  const BatchNorm norm(input, meta->spec->mesh, meta->spec->placements);
  const at::Tensor none = at::empty({0}, input.options());
  const Normalized found = meta->spec->mesh.is_member() ? normalize_part(norm, call)
                                                        : Normalized{none, none, none, none};
  const at::Tensor mean = norm.channel_result(found.mean, norm.wide);
  const at::Tensor variance =
      norm.channel_result(found.variance.mul(norm.count / (norm.count - 1)), norm.wide);
  const at::ScalarType kept = dtype_of_statistics(norm, call);
  std::vector<at::Tensor> results = {norm.result(found.output),
                                     norm.channel_result(found.mean, kept),
                                     norm.channel_result(found.inverse_deviation, kept)};
  if (form.is_update) results.push_back(at::empty({0}, input.options().dtype(at::kByte)));
  for (const auto& [name, now] : {std::pair{"running_mean", mean}, {"running_var", variance}}) {
    at::Tensor running = call.find(name) ? call.tensor(name) : at::Tensor();
    if (form.is_functional) results.push_back(running = running.clone());
    update(running, now, call.argument("momentum").toDouble());
  }
  return finish(op, stack, results);
}

struct Gradients {
  at::Tensor input, weight, bias;
};

Gradients gradients_of_part(const BatchNorm& norm, const DecomposedCall& call) {
  const at::Tensor gradient = norm.local(call.tensor("grad_out"), *norm.layout.input);
  const at::Tensor inverse = norm.per_channel(call.tensor("save_invstd"));
  const at::Tensor weight = norm.per_channel(call.tensor("weight"));
  const at::Tensor deviation =
      norm.input.sub(spread(norm.per_channel(call.tensor("save_mean")), norm.input));
  const auto dims = all_but_channels(gradient);
  const at::Tensor sums =
      norm.added_up(at::stack({gradient.sum(dims), gradient.mul(deviation).sum(dims)}));
  const at::Tensor bias_gradient = sums.select(0, 0);
  const at::Tensor weight_gradient = sums.select(0, 1).mul(inverse);
  const at::Tensor scale = weight.defined() ? inverse.mul(weight) : inverse;
  const at::Tensor along = weight_gradient.mul(inverse).div(norm.count);
  const at::Tensor input_gradient = gradient.sub(spread(bias_gradient.div(norm.count), gradient))
                                        .sub_(deviation.mul(spread(along, gradient)))
                                        .mul_(spread(scale, gradient));
  return {input_gradient, weight_gradient, bias_gradient};
}

// Returns the input's placements; along a mesh dim that does not cut it, the gradient's.
Placements placements_of(const DistMeta* input, const DistMeta* gradient) {
  Placements placements = (input ? input : gradient)->spec->placements;
  for (size_t i = 0; i < placements.size() && gradient; ++i) {
    if (!is_shard(placements[i])) placements[i] = gradient->spec->placements[i];
  }
  return placements;
}

bool batch_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor input = call.tensor("input"), weight = call.tensor("weight");
  const DistMeta* const meta = find_dist_meta(input);
  const DistMeta* const gradient = find_dist_meta(call.tensor("grad_out"));
  if ((!meta && !gradient) || !call.argument("train").toBool() || !call.any_not_whole() ||
      input.numel() == 0)
    return false;
  const DeviceMesh& mesh = (meta ? meta : gradient)->spec->mesh;
  const BatchNorm norm(input, mesh, placements_of(meta, gradient));
  const at::Tensor none = at::empty({0}, input.options());
  const Gradients found =
      mesh.is_member() ? gradients_of_part(norm, call) : Gradients{none, none, none};
  const auto wanted = call.argument("output_mask").toBoolList();
  const at::ScalarType dtype = weight.defined() ? weight.scalar_type() : input.scalar_type();
  return finish(op, stack,
                {wanted[0] ? norm.result(found.input) : at::Tensor(),
                 wanted[1] ? norm.channel_result(found.weight, dtype) : at::Tensor(),
                 wanted[2] ? norm.channel_result(found.bias, dtype) : at::Tensor()});
}

constexpr DecompositionEntry kBatchNorms[] = {
    {"native_batch_norm", batch_norm},
    {"_native_batch_norm_legit", batch_norm},
    {"_native_batch_norm_legit_functional", batch_norm},
    {"_batch_norm_with_update", batch_norm},
    {"_batch_norm_with_update_functional", batch_norm},
    {"native_batch_norm_backward", batch_norm_backward},
};

}  // namespace

std::span<const DecompositionEntry> batch_norm_decompositions() { return kBatchNorms; }

}  // namespace tessera

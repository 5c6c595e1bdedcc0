#include "tensor/result_strides.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "base/dispatch/each_tensor.h"
#include "tensor/placed.h"

namespace tessera {

// [Note: Strides of results]
//
// A program sees the strides of a result: `reshape()` views or copies by them, random numbers are
// drawn in the order of memory, and a kernel gets its parts as the strides say. LibTorch's
// functions on tensors without data don't know all: they can't tell which library computes a
// convolution, some follow the input where the kernel on the CPU gives contiguous results, and some
// operators have none.
namespace {

using Names = std::set<std::string>;

// Their kernels on the CPU give contiguous results.
const Names& contiguous_on_cpu() {
  static const Names names{
      "aten::_log_softmax_backward_data", "aten::glu_backward",       "aten::huber_loss_backward",
      "aten::log_sigmoid_forward",        "aten::masked_fill.Scalar", "aten::masked_fill.Tensor",
      "aten::mse_loss_backward",          "aten::nll_loss2d_forward", "aten::pow.Scalar",
      "aten::smooth_l1_loss_backward"};
  return names;
}

// Their kernels on the CPU give results in the memory format that `self` or `input` has.
const Names& formatted_on_cpu() {
  static const Names names{
      "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit.no_stats",
      "aten::channel_shuffle",          "aten::max_unpool2d",
      "aten::native_batch_norm",        "aten::pixel_shuffle",
      "aten::reflection_pad2d",         "aten::reflection_pad2d_backward",
      "aten::reflection_pad3d",         "aten::reflection_pad3d_backward",
      "aten::replication_pad2d",        "aten::replication_pad2d_backward",
      "aten::replication_pad3d",        "aten::replication_pad3d_backward"};
  return names;
}

// Their kernels on the CPU write to a clone of `self`.
const Names& cloned_on_cpu() {
  static const Names names{"aten::index_fill.int_Scalar", "aten::index_fill.int_Tensor"};
  return names;
}

// Elementwise operators that are computed as several others, also on tensors without data.
const Names& composed() {
  static const Names names{"aten::ldexp.Tensor", "aten::mvlgamma"};
  return names;
}

// A tensor on a device without the memory that it says to have.
at::Tensor stand_in(const at::Tensor& like, at::IntArrayRef strides) {
  const at::Tensor made =
      at::empty({0}, at::TensorOptions(like.scalar_type()).device(like.device()));
  made.storage().set_nbytes(
      at::detail::computeStorageNbytes(like.sizes(), strides, like.element_size()));
  return made.as_strided(like.sizes(), strides);
}

std::vector<int64_t> strides_in(at::MemoryFormat format, at::IntArrayRef sizes) {
  if (format == at::MemoryFormat::ChannelsLast3d && sizes.size() == 5)
    return c10::get_channels_last_strides_3d(sizes);
  if (format == at::MemoryFormat::ChannelsLast && sizes.size() == 4)
    return c10::get_channels_last_strides_2d(sizes);
  if (format == at::MemoryFormat::ChannelsLast && sizes.size() == 3)
    return {sizes[1] * sizes[2], 1, sizes[1]};
  const auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}

// Convolutions along one dim are computed as such along two, of a contiguous input.
std::vector<int64_t> convolution_strides(const c10::FunctionSchema& schema,
                                         at::ArrayRef<c10::IValue> arguments,
                                         at::IntArrayRef sizes) {
  const auto argument = [&](const char* name) {
    return arguments[*schema.argumentIndexWithName(name)];
  };
  const at::Tensor given = argument("input").toTensor(), weights = argument("weight").toTensor();
  const auto ints = [&](const char* name) {
    std::vector<int64_t> values = argument(name).toIntVector();
    if (values.size() == 1) values.resize(given.dim() - 2, values[0]);
    return values;
  };
  const bool is_line = given.dim() == 3;
  at::Tensor input =
      stand_in(given, is_line ? strides_in(at::MemoryFormat::Contiguous, given.sizes())
                              : given.strides().vec());
  at::Tensor weight = stand_in(weights, weights.strides());
  const auto stride = ints("stride"), padding = ints("padding"), dilation = ints("dilation"),
             output_padding = ints("output_padding");
  const auto symbolic = [](const std::vector<int64_t>& values) {
    return c10::fromIntArrayRefSlow(values);
  };
  const auto backend = at::native::select_conv_backend(
      input, weight, std::nullopt, symbolic(stride), symbolic(padding), symbolic(dilation),
      argument("transposed").toBool(), symbolic(output_padding), argument("groups").toInt(),
      std::nullopt);
  if (is_line) input = input.unsqueeze(2), weight = weight.unsqueeze(2);
  return strides_in(at::native::_determine_backend_memory_format(input, weight, backend), sizes);
}

// Kernels of elementwise operators lay their results out as this class does.
std::vector<int64_t> elementwise_strides(at::ArrayRef<c10::IValue> arguments) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).check_all_same_dtype(false);
  config.declare_static_dtype_and_device(at::kByte, at::kMeta).add_owned_output(at::Tensor());
  for (const c10::IValue& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) {
      config.add_owned_const_input(at::empty_strided(
          tensor.sizes(), tensor.strides(), at::TensorOptions(at::kByte).device(at::kMeta)));
    });
  return config.build().output().strides().vec();
}

// Fourier transforms by MKL put the dims that they transform last, and the others in the order of
// their strides. LibTorch has no function for tensors without data, and that of its Python package
// orders dims of equal strides, in views that show elements several times, in another way.
std::vector<int64_t> transform_strides(const at::Tensor& self, std::vector<int64_t> dims,
                                       bool sorts_last, at::IntArrayRef sizes) {
  const auto is_farther = [&](int64_t a, int64_t b) { return self.stride(a) > self.stride(b); };
  std::vector<int64_t> order(sizes.size()), strides(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto transformed = std::partition(
      order.begin(), order.end(), [&](int64_t dim) { return std::ranges::count(dims, dim) == 0; });
  std::sort(order.begin(), transformed, is_farther);
  std::sort(dims.begin(), dims.end() - (sorts_last ? 0 : 1), is_farther);
  std::ranges::copy(dims, transformed);
  int64_t next = 1;
  for (size_t i = order.size(); i-- > 0; next *= sizes[order[i]]) strides[order[i]] = next;
  return strides;
}

}  // namespace

std::optional<std::vector<int64_t>> strides_by_kernel(const c10::OperatorHandle& op,
                                                      at::ArrayRef<c10::IValue> arguments,
                                                      at::IntArrayRef sizes, bool is_elementwise) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.is_mutable() || schema.returns()[0].alias_info()) return std::nullopt;
  const std::string name = c10::toString(op.operator_name());
  if (name == "aten::convolution" || name == "aten::convolution_backward")
    return convolution_strides(schema, arguments, sizes);
  const bool is_on_cpu = device_of(arguments).is_cpu();
  const bool is_real = name == "aten::_fft_r2c";
  if (is_on_cpu && at::hasMKL() && (is_real || name == "aten::_fft_c2c")) {
    const at::Tensor self = arguments[0].toTensor();
    const auto dims = arguments[1].toIntVector();
    if (!dims.empty()) return transform_strides(self, dims, !is_real, sizes);
  }
  const bool is_complex_angle = name == "aten::angle" && arguments[0].toTensor().is_complex();
  if (is_on_cpu && (contiguous_on_cpu().contains(name) || is_complex_angle))
    return strides_in(at::MemoryFormat::Contiguous, sizes);
  if (is_on_cpu && cloned_on_cpu().contains(name))
    return at::infer_dense_strides(sizes, arguments[0].toTensor().strides());
  if (is_on_cpu && formatted_on_cpu().contains(name)) {
    const auto self = schema.argumentIndexWithName("self");
    const at::Tensor like = arguments[self ? *self : 0].toTensor();
    return strides_in(like.suggest_memory_format(), sizes);
  }
  const bool is_simple = schema.returns().size() == 1 &&
                         !schema.argumentIndexWithName("memory_format") &&
                         !composed().contains(name);
  if (!is_elementwise || !is_simple) return std::nullopt;
  if (name == "aten::rsub.Tensor") return elementwise_strides({{arguments[1], arguments[0]}});
  return elementwise_strides(arguments);
}

}  // namespace tessera

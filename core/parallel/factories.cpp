#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <tessera/tensor/dist_factories.h>
#include <tessera/tensor/dist_tensor.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "base/device/device.h"
#include "init/recorder.h"
#include "parallel/owned_runs.h"
#include "tensor/dist_dispatch.h"
#include "tensor/dist_meta.h"
#include "tensor/generators.h"
#include "tensor/gradient_placement.h"
#include "tensor/redistribute.h"

namespace tessera {

// [Note: Numbers in blocks]
//
// LibTorch's CPU kernels draw one number after the other in row-major order, so a tensor can be
// drawn block by block. But `normal_` computes normal numbers 16 at a time, and where the number of
// elements is not a multiple of 16, it draws the last 16 a second time; below 16 elements, it uses
// another formula. So blocks are multiples of 16, and the last one, of at least 16 elements, ends
// the tensor: these numbers are then computed as for the whole.
namespace {

constexpr int64_t kBlock = 1 << 20;  // elements
constexpr int64_t kGroup = 16;

using Make = std::function<at::Tensor(at::IntArrayRef sizes, at::TensorOptions options)>;
// Overwrites a contiguous tensor with the generator's next numbers.
using Draw = void (*)(at::Tensor& numbers, const std::optional<at::Generator>& generator);

struct Wanted {
  const char* function;
  DistSpecPtr spec;
  at::IntArrayRef sizes;
  at::TensorOptions options;  // without requires_grad
  bool requires_grad;

  Wanted(const char* name, at::IntArrayRef global_sizes, const DeviceMesh& mesh,
         Placements placements, const at::TensorOptions& given)
      : function(name),
        sizes(global_sizes),
        options(given.requires_grad(false)),
        requires_grad(given.requires_grad()) {
    TORCH_CHECK(!in_deferred_init(), "[", function,
                "] must be called outside of a DeferredInit scope: it makes parts only, and needs "
                "no memory for the whole");
    TORCH_CHECK_VALUE(std::ranges::none_of(sizes, [](int64_t size) { return size < 0; }), "[",
                      function, "] sizes must not be negative; got ", sizes);
    const auto format = given.memory_format_opt().value_or(at::MemoryFormat::Contiguous);
    TORCH_CHECK_VALUE(
        given.layout() == at::kStrided &&
            (format == at::MemoryFormat::Contiguous || format == at::MemoryFormat::Preserve),
        "[", function, "] `options` must be those of a dense, contiguous tensor; got ", given);
    options = options.memory_format(std::nullopt);
    spec = checked_spec(function, mesh, std::move(placements), sizes);
  }

  // The placements with the pending reductions done.
  DistSpec values() const { return {spec->mesh, without_partial(spec->placements)}; }
};

// Makes the tensor from this rank's part of its values.
at::Tensor finish(const Wanted& wanted, const at::Tensor& values) {
  at::Tensor local = values;
  if (wanted.spec->mesh.is_member() && wanted.values() != *wanted.spec)
    local =
        convert(values, wanted.values(), wanted.spec->placements, wanted.sizes, wanted.function);
  register_dist_operators();
  const at::Tensor made = make_dist(std::move(local), wanted.spec, wanted.sizes);
  if (wanted.requires_grad) {
    made.set_requires_grad(true);
    place_gradients(made);
  }
  return made;
}

at::Tensor make(const Wanted& wanted, const Make& make_part) {
  const at::NoGradGuard no_grad;
  return finish(wanted, make_part(local_sizes_of(wanted.values(), wanted.sizes), wanted.options));
}

// Copies the elements of this rank's part out of the blocks of the whole as these are drawn.
class Part {
 public:
  Part(const Wanted& wanted)
      : runs_(wanted.values(), wanted.sizes),
        values_(at::empty(local_sizes_of(wanted.values(), wanted.sizes), wanted.options)),
        run_(runs_.next()),
        next_(static_cast<char*>(values_.mutable_data_ptr())) {}

  // `block` begins at element `begin` of the whole.
  void take(const at::Tensor& block, int64_t begin) {
    const auto* const data = static_cast<const char*>(block.const_data_ptr());
    const int64_t end = begin + block.numel(), item = static_cast<int64_t>(block.itemsize());
    for (; run_ && run_->begin < end; run_ = runs_.next()) {
      const int64_t stop = std::min(run_->end, end), nbytes = (stop - run_->begin) * item;
      std::memcpy(next_, data + (run_->begin - begin) * item, nbytes);
      next_ += nbytes;
      run_->begin = stop;
      if (stop < run_->end) return;
    }
  }
  const at::Tensor& values() const { return values_; }

 private:
  OwnedRuns runs_;
  at::Tensor values_;
  std::optional<Range> run_;  // what is left of the current one
  char* next_;
};

int64_t numel_of(at::IntArrayRef sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return numel;
}

// Draws the whole in blocks, and calls `take` with each and its first index.
template <class Take>
void draw_blocks(const Wanted& wanted, Draw draw, const std::optional<at::Generator>& generator,
                 const Take& take) {
  const int64_t numel = numel_of(wanted.sizes);
  const at::Tensor room = at::empty({std::min(numel, kBlock + kGroup)}, wanted.options);
  for (int64_t begin = 0; begin < numel;) {
    const int64_t rest = numel - begin;
    at::Tensor block = room.narrow(0, 0, rest < kBlock + kGroup ? rest : kBlock);
    draw(block, generator);
    take(block, begin);
    begin += block.numel();
  }
}

at::Tensor drawn_part(const Wanted& wanted, Draw draw,
                      const std::optional<at::Generator>& generator) {
  const bool is_member = wanted.spec->mesh.is_member();
  const bool is_cut = std::ranges::any_of(
      wanted.spec->placements, [](const Placement& placement) { return is_shard(placement); });
  if (!is_host(wanted.options.device()) || (is_member && !is_cut)) {
    at::Tensor whole = at::empty(wanted.sizes, wanted.options);
    draw(whole, generator);
    if (!is_member) return at::empty({0}, wanted.options);
    const DistSpec everywhere{wanted.spec->mesh, replicated(wanted.spec->mesh)};
    const at::Tensor part =
        convert(whole, everywhere, wanted.values().placements, wanted.sizes, wanted.function);
    // The part must not keep the memory of the whole.
    return part.numel() < whole.numel() ? part.clone(at::MemoryFormat::Contiguous) : part;
  }
  if (!is_member) {
    draw_blocks(wanted, draw, generator, [](const at::Tensor&, int64_t) {});
    return at::empty({0}, wanted.options);
  }
  Part part(wanted);
  draw_blocks(wanted, draw, generator,
              [&](const at::Tensor& block, int64_t begin) { part.take(block, begin); });
  return part.values();
}

at::Tensor make_random(const Wanted& wanted, Draw draw, std::optional<at::Generator> generator) {
  const at::NoGradGuard no_grad;
  const c10::Device device = with_index(wanted.options.device());
  // Ranks of spawn() have generators in place of the process's.
  const bool is_default =
      generator &&
      (!generator->defined() || *generator == at::globalContext().defaultGenerator(at::kCPU));
  if (is_default) generator.reset();
  check_generators_agree(wanted.spec->mesh, generator.value_or(generator_on(device)),
                         wanted.function);
  return finish(wanted, drawn_part(wanted, draw, generator));
}

}  // namespace

at::Tensor dist_zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                      at::TensorOptions options) {
  return make({"dist_zeros", sizes, mesh, std::move(placements), options},
              [](at::IntArrayRef part, at::TensorOptions own) { return at::zeros(part, own); });
}

at::Tensor dist_ones(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                     at::TensorOptions options) {
  return make({"dist_ones", sizes, mesh, std::move(placements), options},
              [](at::IntArrayRef part, at::TensorOptions own) { return at::ones(part, own); });
}

at::Tensor dist_full(at::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh,
                     Placements placements, at::TensorOptions options) {
  return make(
      {"dist_full", sizes, mesh, std::move(placements), options},
      [&](at::IntArrayRef part, at::TensorOptions own) { return at::full(part, value, own); });
}

at::Tensor dist_empty(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                      at::TensorOptions options) {
  return make({"dist_empty", sizes, mesh, std::move(placements), options},
              [](at::IntArrayRef part, at::TensorOptions own) { return at::empty(part, own); });
}

at::Tensor dist_rand(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                     at::TensorOptions options, std::optional<at::Generator> generator) {
  return make_random(
      {"dist_rand", sizes, mesh, std::move(placements), options},
      [](at::Tensor& numbers, const std::optional<at::Generator>& own) {
        numbers.uniform_(0, 1, own);
      },
      std::move(generator));
}

at::Tensor dist_randn(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                      at::TensorOptions options, std::optional<at::Generator> generator) {
  return make_random(
      {"dist_randn", sizes, mesh, std::move(placements), options},
      [](at::Tensor& numbers, const std::optional<at::Generator>& own) {
        numbers.normal_(0, 1, own);
      },
      std::move(generator));
}

}  // namespace tessera

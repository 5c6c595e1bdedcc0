#include "parallel/ring_blocks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <string_view>
#include <utility>

#include "tensor/chunks.h"

namespace tessera {
namespace {

constexpr CollectiveTag kBlocks{"aten::scaled_dot_product_attention", Channel::kControl};
constexpr CollectiveTag kGradientsOfBlocks{"aten::scaled_dot_product_attention_backward",
                                           Channel::kControl};

void finish_exchange(Work& work) {
  work.wait();
  work.wait_inputs();
}

// A buffer that goes to the next rank of a line while another comes from the rank before.
class Rotation {
 public:
  Rotation(ProcessGroup& line, const BlockLayout& layout, at::TensorOptions options,
           const CollectiveTag& tag)
      : line_(line), layout_(layout), options_(std::move(options)), tag_(tag) {}

  int ranks() const { return line_.size(); }
  const at::TensorOptions& options() const { return options_; }

  // Sends the buffer of `step` on.
  void start(int step, const at::Tensor& flat) {
    const int count = line_.size();
    std::vector<at::Tensor> from(count), to(count);
    arriving_ = at::empty({layout_.numel(block_owner(line_, step + 1))}, options_);
    from[(line_.rank() + count - 1) % count] = arriving_;
    to[(line_.rank() + 1) % count] = flat;
    work_ = line_.all_to_all(std::move(from), std::move(to), tag_);
  }

  // Returns the buffer of the next step.
  at::Tensor receive() {
    finish_exchange(*std::exchange(work_, nullptr));
    return std::exchange(arriving_, at::Tensor());
  }

  KeysValues view(const at::Tensor& flat, int step) const {
    return layout_.view(flat, block_owner(line_, step));
  }
  at::Tensor zeros() const { return at::zeros({layout_.numel(line_.rank())}, options_); }
  at::Tensor packed(const KeysValues& own) const {
    at::Tensor flat = at::empty({layout_.numel(line_.rank())}, options_);
    const KeysValues place = layout_.view(flat, line_.rank());
    place.k.copy_(own.k);
    place.v.copy_(own.v);
    return flat;
  }

 private:
  ProcessGroup& line_;
  const BlockLayout& layout_;
  const at::TensorOptions options_;
  const CollectiveTag tag_;
  at::Tensor arriving_;
  WorkPtr work_;
};

class PassedBlocks : public BlockSource {
 public:
  PassedBlocks(ProcessGroup& line, const BlockLayout& layout, KeysValues own)
      : rotation_(line, layout, own.k.options().requires_grad(false), kBlocks),
        own_(std::move(own)) {}

  KeysValues take(int step) override {
    const bool is_last = step + 1 == rotation_.ranks();
    // Replaced, and so freed, only when it was sent.
    if (step > 0) {
      held_ = rotation_.receive();
    } else if (!is_last) {
      held_ = rotation_.packed(own_);
    }
    if (!is_last) rotation_.start(step, held_);
    return step > 0 ? rotation_.view(held_, step) : own_;
  }

 private:
  Rotation rotation_;
  const KeysValues own_;
  at::Tensor held_;
};

class GatheredBlocks : public BlockSource {
 public:
  GatheredBlocks(ProcessGroup& line, const BlockLayout& layout, KeysValues own)
      : line_(line), layout_(layout), own_(std::move(own)) {
    if (line.size() == 1) return;
    all_ = at::empty({layout.bounds().back()}, own_.k.options().requires_grad(false));
    const at::Tensor flat = part(line.rank());
    const KeysValues place = layout.view(flat, line.rank());
    place.k.copy_(own_.k);
    place.v.copy_(own_.v);
    work_ = line.all_gather(all_, flat, layout.bounds(), kBlocks);
  }

  KeysValues take(int step) override {
    if (step == 0) return own_;
    if (const WorkPtr work = std::exchange(work_, nullptr)) finish_exchange(*work);
    const int owner = block_owner(line_, step);
    return layout_.view(part(owner), owner);
  }

 private:
  at::Tensor part(int rank) const {
    return all_.narrow(0, layout_.bounds()[rank], layout_.numel(rank));
  }

  ProcessGroup& line_;
  const BlockLayout& layout_;
  const KeysValues own_;
  at::Tensor all_;
  WorkPtr work_;
};

class PassedGradients : public BlockGradients {
 public:
  PassedGradients(ProcessGroup& line, const BlockLayout& layout, const at::TensorOptions& options)
      : rotation_(line, layout, options, kGradientsOfBlocks) {}

  KeysValues sums(int step) override {
    held_ = step > 0 ? rotation_.receive() : rotation_.zeros();
    return rotation_.view(held_, step);
  }
  void pass_on(int step) override {
    if (rotation_.ranks() > 1) rotation_.start(step, held_);
  }
  KeysValues own() override {
    if (rotation_.ranks() > 1) held_ = rotation_.receive();
    return rotation_.view(held_, rotation_.ranks());
  }

 private:
  Rotation rotation_;
  at::Tensor held_;
};

class ReducedGradients : public BlockGradients {
 public:
  ReducedGradients(ProcessGroup& line, const BlockLayout& layout, const at::TensorOptions& options)
      : line_(line), layout_(layout), all_(at::zeros({layout.bounds().back()}, options)) {}

  KeysValues sums(int step) override {
    const int owner = block_owner(line_, step);
    return layout_.view(all_.narrow(0, layout_.bounds()[owner], layout_.numel(owner)), owner);
  }
  void pass_on(int /*step*/) override {}
  KeysValues own() override {
    if (line_.size() == 1) return layout_.view(all_, 0);
    const at::Tensor sum = at::empty({layout_.numel(line_.rank())}, all_.options());
    line_
        .reduce_scatter(sum, {{0, all_, all_.numel()}}, layout_.bounds(), ReduceScatterOptions{},
                        kGradientsOfBlocks)
        ->wait();
    return layout_.view(sum, line_.rank());
  }

 private:
  ProcessGroup& line_;
  const BlockLayout& layout_;
  const at::Tensor all_;
};

std::vector<int64_t> sizes_with(std::vector<int64_t> sizes, int64_t keys) {
  sizes[2] = keys;
  return sizes;
}

}  // namespace

BlockLayout::BlockLayout(const KeysValues& own, int64_t keys, int64_t ranks)
    : k_sizes_(own.k.sizes().vec()), v_sizes_(own.v.sizes().vec()), bounds_{0} {
  for (int64_t rank = 0; rank < ranks; ++rank) {
    lengths_.push_back(chunk(keys, ranks, rank).size());
    bounds_.push_back(bounds_.back() +
                      c10::multiply_integers(sizes_with(k_sizes_, lengths_.back())) +
                      c10::multiply_integers(sizes_with(v_sizes_, lengths_.back())));
  }
}

KeysValues BlockLayout::view(const at::Tensor& flat, int rank) const {
  const auto k_sizes = sizes_with(k_sizes_, lengths_[rank]),
             v_sizes = sizes_with(v_sizes_, lengths_[rank]);
  const int64_t k_numel = c10::multiply_integers(k_sizes);
  return {flat.narrow(0, 0, k_numel).view(k_sizes),
          flat.narrow(0, k_numel, flat.numel() - k_numel).view(v_sizes)};
}

int block_owner(const ProcessGroup& line, int step) {
  return (line.rank() + line.size() - step % line.size()) % line.size();
}

std::unique_ptr<BlockSource> make_block_source(RotateMethod rotate, ProcessGroup& line,
                                               const BlockLayout& layout, const KeysValues& own) {
  if (rotate == RotateMethod::kAllGather)
    return std::make_unique<GatheredBlocks>(line, layout, own);
  return std::make_unique<PassedBlocks>(line, layout, own);
}

std::unique_ptr<BlockGradients> make_block_gradients(RotateMethod rotate, ProcessGroup& line,
                                                     const BlockLayout& layout,
                                                     const at::TensorOptions& options) {
  if (rotate == RotateMethod::kAllGather)
    return std::make_unique<ReducedGradients>(line, layout, options);
  return std::make_unique<PassedGradients>(line, layout, options);
}

}  // namespace tessera

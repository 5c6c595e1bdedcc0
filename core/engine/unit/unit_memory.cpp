#include "engine/unit/unit_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "base/device/device.h"
#include "comm/group/capability.h"
#include "engine/unit/unit.h"

namespace tessera {
namespace {

/// A buffer of this rank's own that is there while it is used.
class FreedMemory final : public UnitMemory {
 public:
  using UnitMemory::UnitMemory;
  bool frees() const override { return true; }

  void allocate() override {
    if (!full_.defined()) full_ = at::empty({layout_.numel()}, layout_.options());
    count_gathered(true);
  }

  void free() override {
    full_.reset();
    count_gathered(false);
  }
};

/// One buffer for the ranks of this host, of which each writes its shard.
class HostSharedMemory final : public UnitMemory {
 public:
  HostSharedMemory(const UnitLayout& layout, UnitContext& context, SharesMemory& sharing,
                   SharedBuffer buffer)
      : UnitMemory(layout, context), sharing_(sharing), buffer_(std::move(buffer)) {}

  // Where all ranks are on this host, all shards are always here.
  bool frees() const override {
    return layout_.level == ShardLevel::kParameters && !buffer_.stays_whole;
  }
  bool is_shared() const override { return true; }
  at::Tensor shown() const override { return view(buffer_.read_only); }

  // All ranks have been given the same values: each writes its shard.
  void adopt(const at::Tensor& full) override {
    const at::Tensor shared = view(buffer_.bytes);
    const int rank = context_.mesh_of(layout_).shard().rank();
    const int64_t begin = layout_.bounds[rank], numel = layout_.shard_numel(rank);
    shared.narrow(0, begin, numel).copy_(full.narrow(0, begin, numel));
    full_ = shared;
  }

  void allocate() override {
    if (frees()) count_gathered(true);
  }

  void free() override {
    if (!frees()) return;
    sharing_.release(buffer_);
    count_gathered(false);
  }

  // The others have read the old values when they have come as far as this.
  void wait_for_readers() override {
    context_.mesh_of(layout_)
        .shard()
        .arrive({name_after_write(layout_), Channel::kControl})
        ->wait();
  }

 private:
  at::Tensor view(const at::Tensor& bytes) const {
    return bytes.narrow(0, 0, layout_.nbytes()).view(layout_.dtype);
  }

  SharesMemory& sharing_;
  const SharedBuffer buffer_;
};

}  // namespace

std::string name_after_write(const UnitLayout& layout) {
  return layout.name + " (an operator wrote to it)";
}

void UnitMemory::leave() {
  count_gathered(false);
  full_.reset();
}

void UnitMemory::count_gathered(bool is_gathered) {
  if (std::exchange(is_gathered_, is_gathered) == is_gathered) return;
  context_.unsharded_bytes += is_gathered ? layout_.nbytes() : -layout_.nbytes();
  context_.peak_unsharded_bytes = std::max(context_.peak_unsharded_bytes, context_.unsharded_bytes);
}

std::unique_ptr<UnitMemory> make_unit_memory(const UnitLayout& layout, UnitContext& context) {
  // Where nothing is sharded, all ranks write to everything.
  const bool may_share = layout.level != ShardLevel::kNone && computes_on_host(layout.device);
  auto* const sharing =
      may_share ? capability<SharesMemory>(context.mesh_of(layout).shard()) : nullptr;
  if (sharing) {
    if (auto buffer = sharing->share(layout.nbytes(), {layout.name, Channel::kControl}))
      return std::make_unique<HostSharedMemory>(layout, context, *sharing, std::move(*buffer));
  }
  // Alone, a rank's shard is everything: there is nothing to free.
  if (layout.level == ShardLevel::kParameters && context.mesh_of(layout).shard().size() > 1)
    return std::make_unique<FreedMemory>(layout, context);
  return std::make_unique<UnitMemory>(layout, context);
}

void MasterCopy::make(const at::Tensor& part, at::ScalarType dtype,
                      const std::shared_ptr<StateMemory>& offload) {
  is_offloaded_ = offload != nullptr;
  const auto options = part.options().dtype(dtype);
  const at::Tensor values =
      offload ? offload->empty(part.numel(), dtype) : at::empty(part.sizes(), options);
  values_ = values.copy_(part);
}

void MasterCopy::bring_back(at::Device device) {
  TORCH_INTERNAL_ASSERT(is_offloaded_);
  values_ = values_.to(device, values_.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  is_offloaded_ = false;
}

void MasterCopy::take_changed(const at::Tensor& before, const at::Tensor& after) {
  const at::Tensor is_new = after.ne(before).to(values_.device());
  values_.copy_(at::where(is_new, after.to(values_.options()), values_));
}

}  // namespace tessera

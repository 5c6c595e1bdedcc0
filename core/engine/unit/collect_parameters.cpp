#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "base/memory/dense_strides.h"
#include "engine/unit/layout.h"
#include "engine/unit/unit_storage.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

// The bytes between the first and the last element of a tensor, both included.
struct MemoryRange {
  // Null: `begin` and `end` are addresses. Else they count from the start of this storage without
  // memory.
  const void* storage = nullptr;
  uint64_t begin = 0, end = 0;

  bool overlaps(const MemoryRange& other) const {
    return storage == other.storage && begin < other.end && other.begin < end;
  }
  auto operator<=>(const MemoryRange&) const = default;
};

// Empty for a tensor without elements, or without memory that could be shared (sparse ones).
std::optional<MemoryRange> memory_range(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) return std::nullopt;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  // Other ways to read the pointer compute the values of a deferred tensor, or throw.
  const void* const memory = storage._mutable_data_ptr_no_checks().get();
  const auto start = reinterpret_cast<uintptr_t>(memory);
  const auto item = static_cast<int64_t>(tensor.element_size());
  return MemoryRange{.storage = memory ? nullptr : &storage,
                     .begin = start + static_cast<uint64_t>(tensor.storage_offset() * item),
                     .end = start + static_cast<uint64_t>((last + 1) * item)};
}

// Two tensors that are the same values: same memory, same shape.
bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

void check_parameter(const NamedTensor& named) {
  TORCH_CHECK_VALUE(named.tensor.defined(), "[fully_shard] parameter '", named.name,
                    "' is undefined");
  const DistMeta* const meta = find_dist_meta(named.tensor);
  TORCH_CHECK_VALUE(!meta || meta->spec->mesh.is_member(), "[fully_shard] parameter '", named.name,
                    "' must have a part on each rank; this rank is not in its mesh ",
                    meta ? meta->spec->mesh.to_string() : "");
  const at::Tensor& tensor = local_of(named.tensor);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "[fully_shard] parameter '", named.name,
                    "' must be a dense tensor; got layout ", tensor.layout());
  // Those of a model that is only planned carry the key already.
  TORCH_CHECK_VALUE(
      !tensor.is_meta() || tensor.key_set().has(kUnitKey), "[fully_shard] parameter '", named.name,
      "' has no data (device meta): give it values before sharding, or build the model in a scope "
      "of DeferredInit and not on the meta device");
  TORCH_CHECK_VALUE(unit_of(tensor) == nullptr, "[fully_shard] parameter '", named.name,
                    "' is sharded already: a module can be wrapped only once");
  TORCH_CHECK_VALUE(named.tensor.is_leaf(), "[fully_shard] parameter '", named.name,
                    "' must be a leaf, so that gradients reach it; got the result of an operator (",
                    named.tensor.grad_fn()->name(),
                    "). Register the tensor that it was computed from, or detach() it");
}

class Collector {
 public:
  void add(const NamedTensor& named) {
    check_parameter(named);
    const at::Tensor& handle = named.tensor;
    const auto [known, is_new] = by_impl_.try_emplace(handle.unsafeGetTensorImpl());
    if (is_new) known->second = slot_of(named);
    ParamSlot& slot = slots_[known->second];
    slot.names.push_back(named.name);
    slot.requires_grad |= handle.requires_grad();
    if (is_new) slot.handles.emplace_back(handle.getIntrusivePtr());
  }

  std::vector<ParamSlot> take() && { return std::move(slots_); }

 private:
  // The index of the parameter with the memory of a tensor: a new one if there is none.
  size_t slot_of(const NamedTensor& named) {
    const at::Tensor& tensor = local_of(named.tensor);
    const auto range = memory_range(tensor);
    const ParamSlot* const other = range ? in_memory(*range) : nullptr;
    TORCH_CHECK_VALUE(!other || is_same_memory(tensor, other->local()),
                      "[fully_shard] parameters '", other ? other->name() : "", "' and '",
                      named.name, "' overlap in memory without being the same tensor");
    if (other) return other - slots_.data();
    if (range) by_memory_[*range] = slots_.size();
    ParamSlot& slot = slots_.emplace_back();
    slot.sizes = tensor.sizes().vec();
    slot.strides = dense_strides(tensor);
    slot.dtype = tensor.scalar_type();
    slot.device = tensor.device();
    slot.requires_grad = false;
    slot.numel = tensor.numel();
    if (const DistMeta* meta = find_dist_meta(named.tensor))
      slot.dist = DistSlot{.spec = meta->spec,
                           .sizes = named.tensor.sizes().vec(),
                           .strides = named.tensor.strides().vec(),
                           .is_first_replica = is_first_replica(*meta->spec)};
    return slots_.size() - 1;
  }

  // The first parameter that lies there, if only in part. No two overlap.
  const ParamSlot* in_memory(const MemoryRange& range) const {
    const auto next = by_memory_.lower_bound({range.storage, range.end});
    if (next == by_memory_.begin()) return nullptr;
    const auto& [memory, slot] = *std::prev(next);
    return memory.overlaps(range) ? &slots_[slot] : nullptr;
  }

  std::vector<ParamSlot> slots_;
  std::map<const c10::TensorImpl*, size_t> by_impl_;
  std::map<MemoryRange, size_t> by_memory_;
};

}  // namespace

bool is_first_replica(const DistSpec& spec) {
  for (int64_t i = 0; i < spec.mesh.ndim(); ++i) {
    if (is_replicate(spec.placements[i]) && (*spec.mesh.coordinate())[i] != 0) return false;
  }
  return true;
}

void check_own_memory(const std::vector<ParamSlot>& params, const char* kind,
                      const std::vector<NamedTensor>& others) {
  std::vector<std::pair<MemoryRange, const ParamSlot*>> ranges;
  for (const ParamSlot& param : params)
    if (const auto range = memory_range(param.local())) ranges.emplace_back(*range, &param);
  for (const NamedTensor& other : others) {
    if (!other.tensor.defined()) continue;
    const at::Tensor& tensor = local_of(other.tensor);
    TORCH_CHECK_VALUE(unit_of(tensor) == nullptr, "[fully_shard] ", kind, " '", other.name,
                      "' is sharded already, or is a view of a sharded parameter. Shard the whole "
                      "module in one call");
    const auto range = memory_range(tensor);
    if (!range) continue;
    for (const auto& [memory, param] : ranges) {
      TORCH_CHECK_VALUE(
          !memory.overlaps(*range), "[fully_shard] ", kind, " '", other.name,
          "' lies in the memory of parameter '", param->name(),
          "', which moves to its unit: it would keep the parameter's present values. Give it "
          "memory of its own (clone() it), or register the parameter itself under both names");
    }
  }
}

std::vector<ParamSlot> collect_parameters(const std::vector<NamedTensor>& named_parameters) {
  TORCH_CHECK_VALUE(!named_parameters.empty(),
                    "[fully_shard] the model must have parameters; it has none");
  Collector collector;
  for (const NamedTensor& named : named_parameters) collector.add(named);
  return std::move(collector).take();
}

}  // namespace tessera

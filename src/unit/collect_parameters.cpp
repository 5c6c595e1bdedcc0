#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "mesh/dist_meta.h"
#include "unit/layout.h"
#include "unit/unit_storage.h"

namespace tessera {
namespace {

// Strides of the parameter in the flat buffer: its own if it fills its memory without gaps
// (whatever the order of dims, as channels_last does), else those of a contiguous tensor.
std::vector<int64_t> flat_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  const auto strides = c10::contiguous_strides(tensor.sizes());
  return {strides.begin(), strides.end()};
}

// Two tensors that are the same values: same memory, same shape.
bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

std::pair<int64_t, int64_t> memory_range(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {tensor.storage_offset(), last + 1};
}

void check_parameter(const NamedTensor& named) {
  TORCH_CHECK_VALUE(named.tensor.defined(), "[fully_shard] parameter '", named.name,
                    "' is undefined");
  const DistMeta* const meta = find_dist_meta(named.tensor);
  TORCH_CHECK_VALUE(!meta || meta->spec->mesh.is_member(), "[fully_shard] parameter '", named.name,
                    "' must lie on this rank, too; its mesh is ", meta ? meta->spec->mesh.to_string() : "");
  const at::Tensor& tensor = local_of(named.tensor);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "[fully_shard] parameter '", named.name,
                    "' must be a dense tensor; got layout ", tensor.layout());
  TORCH_CHECK_VALUE(!tensor.is_meta(), "[fully_shard] parameter '", named.name,
                    "' has no data (device meta): give it values before sharding");
  TORCH_CHECK_VALUE(unit_of(tensor) == nullptr, "[fully_shard] parameter '", named.name,
                    "' is sharded already: a module can be wrapped only once");
}

class Collector {
 public:
  void add(const NamedTensor& named) {
    check_parameter(named);
    const at::Tensor& handle = named.tensor;
    const at::Tensor& tensor = local_of(handle);
    if (ParamSlot* slot = find_tie(named)) {
      slot->names.push_back(named.name);
      slot->requires_grad |= handle.requires_grad();
      const auto* impl = handle.unsafeGetTensorImpl();
      for (size_t i = 0; i < slot->handles.size(); ++i) {
        if (slot->tensor(i).unsafeGetTensorImpl() == impl) return;
      }
      slot->handles.emplace_back(handle.getIntrusivePtr());
      return;
    }
    ParamSlot slot;
    slot.names = {named.name};
    slot.handles.emplace_back(handle.getIntrusivePtr());
    slot.sizes = tensor.sizes().vec();
    slot.strides = flat_strides(tensor);
    slot.dtype = tensor.scalar_type();
    slot.device = tensor.device();
    slot.requires_grad = handle.requires_grad();
    slot.numel = tensor.numel();
    if (const DistMeta* meta = find_dist_meta(handle))
      slot.dist = DistSlot{.spec = meta->spec,
                           .sizes = handle.sizes().vec(),
                           .strides = handle.strides().vec(),
                           .is_first_replica = is_first_replica(*meta->spec)};
    if (tensor.numel() > 0)
      by_storage_[tensor.storage().unsafeGetStorageImpl()].push_back(slots_.size());
    by_impl_[handle.unsafeGetTensorImpl()] = slots_.size();
    slots_.push_back(std::move(slot));
  }

  std::vector<ParamSlot> take() && { return std::move(slots_); }

 private:
  ParamSlot* find_tie(const NamedTensor& named) {
    const at::Tensor& tensor = local_of(named.tensor);
    const auto same_impl = by_impl_.find(named.tensor.unsafeGetTensorImpl());
    if (same_impl != by_impl_.end()) return &slots_[same_impl->second];
    if (tensor.numel() == 0) return nullptr;
    const auto same_storage = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
    if (same_storage == by_storage_.end()) return nullptr;
    for (const size_t index : same_storage->second) {
      const at::Tensor other = slots_[index].local();
      if (is_same_memory(tensor, other)) return &slots_[index];
      const auto [a_begin, a_end] = memory_range(tensor);
      const auto [b_begin, b_end] = memory_range(other);
      TORCH_CHECK_VALUE(a_end <= b_begin || b_end <= a_begin, "[fully_shard] parameters '",
                        slots_[index].name(), "' and '", named.name,
                        "' overlap in memory without being the same tensor");
    }
    return nullptr;
  }

  std::vector<ParamSlot> slots_;
  std::map<const c10::TensorImpl*, size_t> by_impl_;
  std::map<const c10::StorageImpl*, std::vector<size_t>> by_storage_;
};

}  // namespace

bool is_first_replica(const DistSpec& spec) {
  for (int64_t i = 0; i < spec.mesh.ndim(); ++i) {
    if (is_replicate(spec.placements[i]) && (*spec.mesh.coordinate())[i] != 0) return false;
  }
  return true;
}

std::vector<ParamSlot> collect_parameters(const std::vector<NamedTensor>& named_parameters) {
  TORCH_CHECK_VALUE(!named_parameters.empty(),
                    "[fully_shard] the model must have parameters; it has none");
  Collector collector;
  for (const NamedTensor& named : named_parameters) collector.add(named);
  return std::move(collector).take();
}

}  // namespace tessera

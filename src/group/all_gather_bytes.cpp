#include <ATen/ops/empty.h>
#include <tessera/process_group.h>

#include <cstring>
#include <vector>

namespace tessera {
namespace {

// Gathers host memory, through tensors on the device that the process group transfers from.
std::vector<char> gather(ProcessGroup& process_group, const void* data,
                         std::span<const int64_t> byte_bounds, const CollectiveTag& tag) {
  const int64_t own = byte_bounds[process_group.rank() + 1] - byte_bounds[process_group.rank()];
  const auto options = at::TensorOptions().dtype(at::kByte);
  at::Tensor shard = at::empty({own}, options);
  at::Tensor flat = at::empty({byte_bounds.back()}, options);
  if (own > 0) {
    std::memcpy(shard.mutable_data_ptr(), data, own);
  }
  if (process_group.backend_name() == "nccl") {
    at::Tensor device_flat = flat.to(at::kCUDA);
    process_group.all_gather(device_flat, shard.to(at::kCUDA), byte_bounds, tag)->wait();
    flat.copy_(device_flat);
  } else {
    process_group.all_gather(flat, shard, byte_bounds, tag)->wait_inputs();
  }
  const char* begin = static_cast<const char*>(flat.const_data_ptr());
  return flat.numel() > 0 ? std::vector<char>(begin, begin + flat.numel()) : std::vector<char>();
}

}  // namespace

std::vector<std::string> all_gather_bytes(ProcessGroup& process_group, const std::string& bytes,
                                          const CollectiveTag& tag) {
  const int size = process_group.size();
  std::vector<int64_t> bounds(size + 1);
  for (int r = 0; r <= size; ++r) {
    bounds[r] = r * static_cast<int64_t>(sizeof(int64_t));
  }
  const int64_t own = static_cast<int64_t>(bytes.size());
  const std::vector<char> raw_sizes = gather(process_group, &own, bounds, tag);
  std::vector<int64_t> sizes(size);
  std::memcpy(sizes.data(), raw_sizes.data(), raw_sizes.size());
  for (int r = 0; r < size; ++r) {
    bounds[r + 1] = bounds[r] + sizes[r];
  }
  const std::vector<char> all = gather(process_group, bytes.data(), bounds, tag);
  std::vector<std::string> result;
  for (int r = 0; r < size; ++r) {
    result.emplace_back(all.data() + bounds[r], sizes[r]);
  }
  return result;
}

}  // namespace tessera

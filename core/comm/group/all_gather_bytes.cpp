#include <ATen/ops/empty.h>
#include <tessera/comm/process_group.h>

#include <cstring>
#include <numeric>

namespace tessera {
namespace {

void gather(ProcessGroup& process_group, const at::Tensor& flat, std::span<const int64_t> bounds,
            const CollectiveTag& tag) {
  const int64_t begin = bounds[process_group.rank()], end = bounds[process_group.rank() + 1];
  const at::Tensor shard = flat.narrow(0, begin, end - begin);
  process_group.all_gather(flat, shard, bounds, tag)->wait_inputs();
}

}  // namespace

std::vector<std::string> all_gather_bytes(ProcessGroup& process_group, const std::string& bytes,
                                          const CollectiveTag& tag) {
  const int size = process_group.size(), rank = process_group.rank();
  std::vector<int64_t> bounds(size + 1);
  std::iota(bounds.begin(), bounds.end(), 0);
  const at::Tensor lengths = at::empty({size}, at::TensorOptions().dtype(at::kLong));
  auto* const length = static_cast<int64_t*>(lengths.mutable_data_ptr());
  length[rank] = static_cast<int64_t>(bytes.size());
  gather(process_group, lengths, bounds, tag);
  std::partial_sum(length, length + size, bounds.begin() + 1);
  const at::Tensor all = at::empty({bounds.back()}, at::TensorOptions().dtype(at::kByte));
  auto* const data = static_cast<char*>(all.mutable_data_ptr());
  if (!bytes.empty()) std::memcpy(data + bounds[rank], bytes.data(), bytes.size());
  gather(process_group, all, bounds, tag);
  std::vector<std::string> result;
  for (int r = 0; r < size; ++r) result.emplace_back(data + bounds[r], length[r]);
  return result;
}

}  // namespace tessera

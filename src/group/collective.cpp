#include "group/collective.h"

#include "group/peer_message.h"

namespace tessera {
namespace {

int64_t nbytes_of(const AllGather& call) { return static_cast<int64_t>(call.flat.nbytes()); }
int64_t nbytes_of(const ReduceScatter& call) { return call.bounds.back() * item_size(call); }
int64_t nbytes_of(const AllReduce& call) { return static_cast<int64_t>(call.tensor.nbytes()); }
int64_t nbytes_of(const Broadcast& call) { return static_cast<int64_t>(call.tensor.nbytes()); }
int64_t nbytes_of(const AllToAll& call) {
  int64_t bytes = 0;
  for (const at::Tensor& message : call.to) bytes += message_bytes(message);
  return bytes;
}
int64_t nbytes_of(const Barrier& /*call*/) { return 0; }

}  // namespace

const char* Collective::name() const {
  return std::visit([](const auto& call) { return call.kName; }, call);
}

int64_t Collective::nbytes() const {
  return std::visit([](const auto& call) { return nbytes_of(call); }, call);
}

std::vector<int64_t> even_bounds(int64_t numel, int size) {
  std::vector<int64_t> bounds(size + 1);
  for (int r = 0; r <= size; ++r) bounds[r] = numel * r / size;
  return bounds;
}

}  // namespace tessera

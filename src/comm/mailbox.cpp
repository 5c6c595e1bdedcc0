#include "comm/mailbox.h"

#include <ATen/ops/from_blob.h>

#include <utility>
#include <vector>

namespace tessera {
namespace {

// c10d takes tensors; this one only carries pointer and size.
std::vector<at::Tensor> as_bytes(void* data, int64_t bytes) {
  return {at::from_blob(data, {bytes}, at::TensorOptions().dtype(at::kByte))};
}

}  // namespace

Mailbox::Mailbox(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

Transfer Mailbox::send(const void* data, int64_t bytes, int peer, int tag) const {
  auto tensors = as_bytes(const_cast<void*>(data), bytes);
  return {peer, backend_->send(tensors, peer, tag)};
}

Transfer Mailbox::receive(void* data, int64_t bytes, int peer, int tag) const {
  auto tensors = as_bytes(data, bytes);
  return {peer, backend_->recv(tensors, peer, tag)};
}

}  // namespace tessera

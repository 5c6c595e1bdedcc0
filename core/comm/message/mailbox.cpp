#include "comm/message/mailbox.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace tessera {
namespace {

// c10d takes tensors; this one only carries pointer and size.
std::vector<at::Tensor> as_bytes(void* data, int64_t bytes) {
  return {at::from_blob(data, {bytes}, at::TensorOptions().dtype(at::kByte))};
}

}  // namespace

Mailbox::Mailbox(c10::intrusive_ptr<c10d::Backend> backend)
    : backend_(std::make_shared<c10::intrusive_ptr<c10d::Backend>>(std::move(backend))),
      rank_((*backend_)->getRank()),
      size_((*backend_)->getSize()) {}

void Mailbox::leave_to_parent() noexcept {
  if (backend_->defined()) static_cast<void>(backend_->release());
}

c10d::Backend& Mailbox::open_backend() const {
  TORCH_CHECK_WITH(DistBackendError, backend_->defined(),
                   "the process group was closed when its world was destroyed");
  return **backend_;
}

int Mailbox::tag_for(int tag, int from, int to) {
  return tag / kConnections * kConnections + (from < to ? 1 : 0);
}

Transfer Mailbox::send(const void* data, int64_t bytes, int peer, int tag) const {
  auto tensors = as_bytes(const_cast<void*>(data), bytes);
  sent_->count.fetch_add(1, std::memory_order_relaxed);
  sent_->nbytes.fetch_add(bytes, std::memory_order_relaxed);
  return {peer, open_backend().send(tensors, peer, tag_for(tag, rank_, peer))};
}

Transfer Mailbox::receive(void* data, int64_t bytes, int peer, int tag) const {
  auto tensors = as_bytes(data, bytes);
  return {peer, open_backend().recv(tensors, peer, tag_for(tag, peer, rank_))};
}

}  // namespace tessera

#pragma once

#include <functional>
#include <span>
#include <vector>

#include "message/exchange.h"

namespace tessera {

/// A collective that only moves data: its messages go directly from and into the tensors.
class TransferExchange : public Exchange {
 public:
  /// With `wait_for_sends`, the outputs are done only when the inputs are.
  TransferExchange(CollectiveName name, std::chrono::milliseconds timeout, bool wait_for_sends);

  /// Keeps a tensor until it has been sent, or until it has been received: a unit's gathered
  /// parameters must not live until the slowest peer has read this rank's shard.
  void keep_input(const at::Tensor& tensor) { inputs_.push_back(tensor); }
  void keep_output(const at::Tensor& tensor) { outputs_.push_back(tensor); }
  void add_receive(Transfer transfer) { receives_.push_back(std::move(transfer)); }
  void add_send(Transfer transfer) { sends_.push_back(std::move(transfer)); }

 private:
  void complete_outputs() override;
  void complete_inputs() override;

  const bool wait_for_sends_;
  // Destroyed after the transfers that use their memory.
  std::vector<at::Tensor> inputs_, outputs_;
  std::vector<Transfer> receives_;
  std::vector<Transfer> sends_;
};

/// Posts the messages of an all-gather. See `ProcessGroup::all_gather()`.
void post_all_gather(TransferExchange& exchange, const Mailbox& mailbox, int tag,
                     const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds);

/// Posts the messages of a broadcast. See `ProcessGroup::broadcast()`.
void post_broadcast(TransferExchange& exchange, const Mailbox& mailbox, int tag,
                    const at::Tensor& tensor, int root);

/// Posts the messages of an all-to-all. See `ProcessGroup::all_to_all()`. `tag_of` returns the tag
/// of a message, which encodes facts that its two ranks must agree on, and other ranks can't know.
void post_all_to_all(TransferExchange& exchange, const Mailbox& mailbox,
                     const std::function<int(const at::Tensor& message)>& tag_of,
                     std::span<const at::Tensor> from, std::span<const at::Tensor> to);

}  // namespace tessera

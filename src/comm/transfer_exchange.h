#pragma once

#include <vector>

#include "comm/exchange.h"

namespace tessera {

/// A collective that only moves data: its messages go straight from and into the tensors.
class TransferExchange : public Exchange {
 public:
  /// With `wait_for_sends`, the outputs count as done when the inputs are.
  TransferExchange(CollectiveName name, std::chrono::milliseconds timeout, bool wait_for_sends);

  void keep(const at::Tensor& tensor) { kept_.push_back(tensor); }
  void add_receive(Transfer transfer) { receives_.push_back(std::move(transfer)); }
  void add_send(Transfer transfer) { sends_.push_back(std::move(transfer)); }

 private:
  void complete_outputs() override;
  void complete_inputs() override;

  const bool wait_for_sends_;
  std::vector<at::Tensor> kept_;  // destroyed after the transfers that use their memory
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

}  // namespace tessera

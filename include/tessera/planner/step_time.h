#pragma once

#include <tessera/engine/shard_plan.h>
#include <tessera/export.h>
#include <tessera/planner/plan_report.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// Hosts, the links between them, and the computation of a rank. See `step_time()`.
struct StepTimeOptions {
  int hosts = 1;
  int ranks_per_host = 1;

  /// Bandwidth of each host's link, in bytes per second and direction; its ranks share it. 0: no
  /// limit.
  double link_bandwidth = 0;
  double link_latency = 0;  ///< seconds until a message's last byte has arrived, once it is sent

  /// The part of the link's bytes that is payload. Default: TCP over Ethernet, with 1448 of 1514.
  double payload_share = 1448.0 / 1514.0;

  /// Bytes per second that a rank moves through the memory which its host's ranks share, to sum
  /// gradients or to copy from each other. 0: no limit.
  double host_bandwidth = 0;

  double compute_seconds = 0;       ///< of forward and backward, on one rank alone
  double backward_share = 2.0 / 3;  ///< the part of them that backward takes

  /// Seconds of the optimizer's step for the whole model, on one rank. At `ShardLevel::kNone` each
  /// rank does all of it, at the others its share.
  double optimizer_seconds = 0;

  /// Seconds of a rank's processor for each byte of payload that it sends, to send and receive it
  /// and to sum it. They are taken from the rank's computation: at most half of its time while it
  /// computes. 0: messages take no processor time.
  double processor_seconds_per_byte = 0;

  /// Indices of the units in the order of their use; see `PlanReportOptions`.
  std::vector<int> forward_order, backward_order;

  int ranks() const { return hosts * ranks_per_host; }
};

/// The time of a step in steady state, in seconds.
struct StepTime {
  double seconds = 0;  ///< the sum of the next three
  double forward = 0;
  double backward = 0;  ///< with the agreement on the parameters used
  double optimizer = 0;

  double compute = 0;  ///< of one rank alone: the step's time if nothing were sent
  double link = 0;     ///< of the link, for the step's bytes at full bandwidth
  /// Payload that each host sends in a step, and receives.
  double link_nbytes = 0;
};

/// Predicts the time of a training step over links between hosts, from sizes alone.
///
/// Runs the engine as one rank, with parameters that have no memory, by a clock that collectives
/// and computation advance; all ranks are taken to be equal. The rank computes the units in the
/// order of use, each in proportion to its elements.
///
/// - With one rank on each host, ranks send messages.
/// - With several, ranks share memory inside their host. A unit crosses a host's link once for a
///   gather and once for a reduction, after the sum inside the host.
/// - With one host there is no link.
///
/// A collective's bytes follow those of the one before it on its channel at once. Collectives on
/// different channels share the link equally. Throws `c10::ValueError` and
/// `c10::NotImplementedError` as `plan_report()` does, and for numbers that are negative or not
/// finite; `ShardPlan::offload` is not supported.
TESSERA_API StepTime step_time(const std::vector<ParameterSize>& parameters, const ShardPlan& plan,
                               const StepTimeOptions& options);

}  // namespace tessera

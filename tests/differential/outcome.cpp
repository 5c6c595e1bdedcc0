#include "differential/outcome.h"

#include <algorithm>
#include <span>
#include <tuple>

namespace tessera::differential {
namespace {

constexpr auto kOtherRecomputation = "the function must do the same when backward runs it again";
constexpr auto kChangedParameter = "a parameter was changed in place between forward and backward";
// Where the program reduces, each step writes to all parameters, also without gradients.
constexpr auto kStepped = "has been modified by an inplace operation";

// True if operation `at` is a backward since whose forward there was one of kind `change`.
bool has_since_forward(const Program& program, int at, OpKind change) {
  if (program.ops[at].kind != OpKind::kBackward) return false;
  while (--at >= 0 && program.ops[at].kind != OpKind::kForward)
    if (program.ops[at].kind == change) return true;
  return false;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string text_of(const std::exception& error) {
  const auto* const own = dynamic_cast<const c10::Error*>(&error);
  return own ? own->what_without_backtrace() : error.what();
}

// True if a rank failed by itself, and not because another has gone, nor after its last batch.
bool is_cause(const Program& program, const std::vector<Trace>& ranks, const Trace& trace) {
  const int rank = static_cast<int>(&trace - ranks.data());
  return !is_done(program, rank, trace.op) && !trace.error.empty() &&
         trace.error.find("has left") == std::string::npos &&
         trace.error.find("see its own error") == std::string::npos;
}

// True if the first parameters that a rank uses are those of a function with a backward of its own,
// whose forward runs without gradients.
bool begins_without_gradients(const Program& program, int rank) {
  for (const Layer& layer : program.layers) {
    const bool is_used = layer.times > 0 && (layer.ranks >> rank & 1) != 0;
    const bool has_parameters =
        layer.kind != "Gelu" && layer.kind != "ReluInPlace" && layer.kind != "Dropout";
    if (is_used && has_parameters) return layer.kind == "Custom";
  }
  return false;
}

bool tells_disagreement(const std::string& error) {
  return error.find("ranks wait for each other") != std::string::npos ||
         error.find("issued another collective at position") != std::string::npos ||
         // Over two process groups, each of which sees a rank that is late.
         error.find("which is the timeout") != std::string::npos ||
         error.find("failed before the timeout") != std::string::npos ||
         error.find("did not come in time") != std::string::npos;  // on the simulated accelerator
}

}  // namespace

// Ranks that use different layers have sent different gradients when a backward throws; and where
// parameters are freed, they must not wait for others between a forward and its backward, nor begin
// a pass of the module without gradients, as behind an evaluation of the module.
bool may_disagree(const Program& program, int at) {
  const unsigned all = (1U << program.ranks) - 1;
  const auto is_of_some = [&](const Layer& layer) { return (layer.ranks & all) != all; };
  if (std::ranges::none_of(program.layers, is_of_some)) return false;
  const bool frees = program.plan.level == ShardLevel::kParameters;
  bool begins_without = false, is_open = false, evaluates = false;
  for (int rank = 0; rank < program.ranks; ++rank)
    begins_without = begins_without || begins_without_gradients(program, rank);
  for (const Op& op : std::span(program.ops).first(std::min<size_t>(at + 1, program.ops.size()))) {
    if (op.kind == OpKind::kThrow && (frees || op.how == 1)) return true;
    if (op.kind == OpKind::kBackward) is_open = false;
    const bool is_alone = op.kind == OpKind::kForward || op.kind == OpKind::kEvaluate ||
                          op.kind == OpKind::kSchedule || op.kind == OpKind::kThaw;
    if (frees && is_open && !is_alone) return true;
    if (op.kind == OpKind::kEvaluate || op.kind == OpKind::kStep)
      evaluates = op.kind == OpKind::kEvaluate;
    if (op.kind != OpKind::kForward) continue;
    is_open = true;
    if (frees && (begins_without || evaluates) && !(op.how & kByHandle)) return true;
    evaluates = false;
  }
  return false;
}

Outcome judge(const Program& program, const std::vector<Trace>& ranks) {
  const auto when = [&](const Trace& trace) {
    return std::tuple(!is_cause(program, ranks, trace), trace.error.empty(), trace.op);
  };
  const Trace& failed = *std::ranges::min_element(ranks, {}, when);
  const bool fails = !failed.error.empty();
  const int limit = fails ? failed.op : static_cast<int>(program.ops.size());
  std::string plain, documented;
  int at = -1;
  try {
    train_plain(program, ranks, limit, at);
  } catch (const Difference& difference) {
    return {Verdict::kFinding, c10::str("operation ", at, ": ", difference.what())};
  } catch (const Refused& refused) {
    documented = refused.what();
  } catch (const std::exception& error) {
    plain = text_of(error);
  }
  if (!fails) {
    if (!documented.empty())
      return {Verdict::kFinding, c10::str("operation ", at, " is not refused: ", documented)};
    if (plain.empty()) return {};
    return {Verdict::kFinding, c10::str("operation ", at, ": LibTorch refuses: ", plain)};
  }
  const std::string text =
      c10::str("operation ", failed.op, " on rank ", &failed - ranks.data(), ": ", failed.error);
  // Others may notice in a later operation. Replicas that average now and then may need no more of
  // each other.
  const auto replica_of = [&](const Trace& trace) {
    return program.plan.outer ? (&trace - ranks.data()) / program.shard_size : 0;
  };
  const bool all_fail = std::ranges::all_of(ranks, [&](const Trace& trace) {
    return !trace.error.empty() || replica_of(trace) != replica_of(failed);
  });
  if (!all_fail) return {Verdict::kFinding, "some ranks only refuse " + text};
  if (!plain.empty()) return {Verdict::kBothRefuse, first_line(plain)};
  if (!documented.empty() && at == failed.op && failed.error.find(documented) != std::string::npos)
    return {Verdict::kRefused, documented};
  const bool recomputes = std::ranges::any_of(program.layers, &Layer::checkpoint);
  for (const auto& [change, reason] :
       {std::pair(OpKind::kThaw, kOtherRecomputation), std::pair(OpKind::kEdit, kChangedParameter),
        std::pair(OpKind::kStep, kChangedParameter),
        std::pair(OpKind::kFullState, kChangedParameter)})
    if (recomputes && has_since_forward(program, failed.op, change) &&
        failed.error.find(reason) != std::string::npos)
      return {Verdict::kRefused, reason};
  if (!program.plan.reduce_gradients && has_since_forward(program, failed.op, OpKind::kStep) &&
      failed.error.find(kStepped) != std::string::npos)
    return {Verdict::kRefused, kStepped};
  const int farthest = std::ranges::max(ranks, {}, &Trace::op).op;
  if (tells_disagreement(failed.error) && may_disagree(program, farthest))
    return {Verdict::kRefused, "ranks use different layers and wait for each other"};
  return {Verdict::kFinding, "Tessera refuses " + text};
}

}  // namespace tessera::differential

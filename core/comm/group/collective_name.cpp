#include "comm/group/collective_name.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "comm/group/differing_order.h"

namespace tessera {

namespace {

std::string place_of(const CollectiveName& name) {
  const std::string place = name.watch ? name.watch->place() : "";
  return place.empty() ? "" : ", " + place;
}

}  // namespace

std::string_view channel_name(Channel channel) {
  constexpr std::array<std::string_view, 3> kNames{"kParams", "kGrads", "kControl"};
  return kNames.at(static_cast<size_t>(channel));
}

std::string CollectiveName::describe() const {
  return fmt::format("[{}] unit '{}' (channel {}, #{}): rank {} of {}", collective, subject,
                     channel_name(channel), sequence, rank, size);
}

void throw_wait_failed(const CollectiveName& name, const Awaited& whom,
                       std::chrono::duration<double> waited, std::chrono::milliseconds timeout,
                       std::exception_ptr cause) {
  const double limit = std::chrono::duration<double>(timeout).count();
  const bool timed_out = waited.count() >= 0.99 * limit;
  WaitCause known;
  if (name.watch) known = name.watch->cause_of(name, whom.rank, timed_out, whom.has_ended);
  std::string why = known.why.empty() ? "" : "; the cause: " + known.why;
  if (known.rank < 0) {
    why += timed_out ? fmt::format(
                           "; likely causes: {} ended or is stuck, it issued its collectives in "
                           "another order, or it disagrees on the sizes",
                           whom.text)
                     : fmt::format(
                           "; likely causes: {} failed or ended, or an earlier collective "
                           "failed and closed the connections",
                           whom.text);
  }
  if (cause) why += "; the backend said: " + exception_text(cause);
  const std::string end = timed_out
                              ? ", which is the timeout"
                              : fmt::format(" and failed before the timeout of {:.1f} s", limit);
  const std::string error = fmt::format("{} waited {:.1f} s for {}{}{}{}", name.describe(),
                                        waited.count(), whom.text, end, place_of(name), why);
  if (name.watch) name.watch->failed(name, known, error);
  throw WaitError(error, known, timed_out);
}

void throw_disagreement(const CollectiveName& name, int rank, const std::string& how) {
  const std::string error = fmt::format("{}{}: {}", name.describe(), place_of(name), how);
  // The watch knows what this rank has issued.
  const WaitCause cause{name.watch ? name.watch->world_rank(rank) : rank, how, Evidence::kSeen,
                        Disagreement{}};
  if (name.watch) name.watch->failed(name, cause, error);
  throw WaitError(error, cause, /*timed_out=*/false);
}

void throw_wait_aborted(const CollectiveName& name, const WaitCause& cause) {
  const std::string error =
      fmt::format("{} gave up waiting{}: {}", name.describe(), place_of(name), cause.why);
  if (name.watch) name.watch->failed(name, cause, error);
  throw WaitError(error, cause, /*timed_out=*/false);
}

std::string differing_order(int64_t sequence, const std::string& own, int rank,
                            const std::string& theirs) {
  const char* const how = own == theirs ? " with other parts or pieces" : "";
  return fmt::format(
      "rank {} issued another collective at position #{} of this channel: {}; this rank issued "
      "{}{}. {}",
      rank, sequence, theirs, own, how, kExpectedCalls);
}

bool tells_differing_order(std::string_view error) {
  return error.find("issued another collective at position") != std::string_view::npos;
}

void check_process(const ProcessMark& mark, const CollectiveName& name) {
  TORCH_CHECK_WITH(
      DistBackendError, !mark.is_inherited(), name.describe(),
      ": only the process that joined the ranks may communicate; this one was forked "
      "from it. Leave collectives, and optimizers and checkpoints of sharded models, to "
      "the parent");
}

CollectiveName ChannelOrder::next(const ProcessGroup& process_group, const char* collective,
                                  const CollectiveTag& tag, const CollectiveForm& form) {
  std::atomic<int64_t>& sequence = sequences_.at(static_cast<size_t>(tag.channel));
  CollectiveName name{.collective = collective,
                      .subject = std::string(tag.subject),
                      .channel = tag.channel,
                      .sequence = sequence++,
                      .rank = process_group.rank(),
                      .size = process_group.size(),
                      .watch = watch_};
  check_process(mark_, name);
  if (watch_) name.record = watch_->issued(name, form);
  return name;
}

std::string exception_text(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace tessera

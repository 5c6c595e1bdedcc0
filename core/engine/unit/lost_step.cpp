#include "engine/unit/lost_step.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "comm/group/capability.h"
#include "comm/group/collective_watch.h"

namespace tessera {

void leave(UnitContext& context, const std::string& why) {
  context.lost = why;
  auto* const watchable = capability<Watchable>(context.mesh.shard());
  if (watchable && watchable->watch()) watchable->watch()->leave(why);
}

void rethrow_as_lost(UnitContext& context, const std::string& failed) {
  const ProcessGroup& ranks = context.mesh.shard();
  try {
    throw;
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (c10::Error& error) {
    const std::string what =
        fmt::format("rank {} of {} could not {}", ranks.rank(), ranks.size(), failed);
    leave(context, fmt::format("{}, and the ranks are out of step since: {}", what,
                               error.what_without_backtrace()));
    error.add_context(fmt::format(
        "[tessera] {}, and has told the others: the model is lost. Start again from a checkpoint. "
        "If memory was lacking: plan.prefetch, plan.unit_bytes and plan.level decide how much is "
        "gathered and reduced at a time",
        what));
    throw;
  }
}

void check_in_step(const UnitContext& context, std::string_view verb, std::string_view object) {
  TORCH_CHECK_WITH(DistBackendError, context.lost.empty(), "[tessera] this rank can't ", verb, " ",
                   object, " any more: ", context.lost);
}

}  // namespace tessera

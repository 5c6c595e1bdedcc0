#pragma once

#include <string>
#include <string_view>

#include "engine/unit/unit.h"

namespace tessera {

/// Declares the context's model lost, as the ranks are out of step, and tells the other ranks that
/// this one takes no further part.
void leave(UnitContext& context, const std::string& why);

/// Throws the exception that is being handled, with more text: this rank could not issue a
/// collective, "gather unit 'x'", that the others have issued or will. They would wait without end,
/// as would this one in its next, so it announces to them that it has left, and marks the context's
/// model as lost. If a connection has failed, only throws the exception.
[[noreturn]] void rethrow_as_lost(UnitContext& context, const std::string& failed);

/// Throws `c10::DistBackendError` if the context's model is lost: this rank can't "gather unit
/// 'x'", the verb and its object.
void check_in_step(const UnitContext& context, std::string_view verb, std::string_view object);

}  // namespace tessera

#pragma once

#include <tessera/export.h>

#include <map>
#include <string>

namespace tessera {

/// Returns the mean of the ranks' values, weighted, on every rank.
///
///     const double loss = mean_over_ranks(loss_sum / examples, examples);
///
/// Collective over this thread's default world; waits for all ranks. `weight`: how much this rank's
/// value counts, such as the number of its examples; a value of weight 0 is ignored, even if it is
/// not a number. Returns NaN if all weights are 0. The result has the same bits on all ranks.
/// Throws `c10::ValueError` on every rank if a weight is negative or not finite.
TESSERA_API double mean_over_ranks(double value, double weight = 1);

/// Returns the means of several values, with one message. All ranks must pass the same names;
/// otherwise throws `c10::ValueError` on every rank.
TESSERA_API std::map<std::string, double> mean_over_ranks(
    const std::map<std::string, double>& values, double weight = 1);

/// Returns the sum of the ranks' values on every rank. Collective, as above.
TESSERA_API double sum_over_ranks(double value);

}  // namespace tessera

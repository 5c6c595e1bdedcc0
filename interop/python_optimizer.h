#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/index.h"
#include "interop/pickle_machine.h"

namespace tessera {

// Optimizers of Python's `torch.optim`, as their `state_dict()` describes them.

/// The options of a param group: numbers, of which pairs (`betas`) have two; options that are no
/// numbers are left out.
struct PythonGroup {
  std::map<std::string, std::vector<double>> options;
  std::vector<std::string> params;  ///< names
};

/// Returns the numbers of a value: one, or those of a tuple or list; none for other values.
std::vector<double> numbers_of(const PickleValue& value);

/// Returns the record of such an optimizer, without counts. `wanted`: its class; empty: the class
/// is told from the options. Throws `c10::ValueError` for a class or an option that LibTorch has
/// not, and if the class can't be told.
OptimizerRecord optimizer_record(const std::vector<PythonGroup>& groups, const std::string& wanted);

/// Makes the tensor `record` of an index the state `state` of the parameter `param`, or its count.
/// Returns false if it is a count, and is to be removed. Throws `c10::ValueError` if the optimizer
/// has no such state, or if the shapes differ.
bool take_state(TensorRecord& record, const TensorRecord& param, const std::string& state,
                ChunkReader& reader, OptimizerRecord& optimizer);

/// Sets a count, and the steps of the optimizer. Throws `c10::ValueError` unless it is whole.
void set_count(OptimizerRecord& optimizer, const std::string& param, const std::string& name,
               double value);

/// Returns the options of a param group as Python has them, in its order, with the defaults of
/// those that LibTorch has not. Throws `c10::NotImplementedError` for an optimizer that Python has
/// not.
std::vector<std::pair<std::string, c10::IValue>> python_options(const OptimizerRecord& optimizer,
                                                                size_t group);

/// Returns the counts of a parameter as Python has them: tensors of one float, by their names.
std::vector<std::pair<std::string, at::Tensor>> python_counts(const OptimizerRecord& optimizer,
                                                              const std::string& param);

}  // namespace tessera

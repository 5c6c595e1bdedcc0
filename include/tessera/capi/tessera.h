#pragma once

// The interface in C, for bindings of other languages. A tensor is passed as a pointer to an
// `at::Tensor` of the LibTorch that this library is linked with: `as_mut_ptr()` of tch-rs,
// `address()` of JavaCPP, `Handle` of TorchSharp. The caller frees it; a model holds references of
// its own. Texts are UTF-8. Texts of options are JSON objects with the names of Python's arguments,
// null for {}; the error for an unknown name lists the known ones.
//
// A function that returns a status sets its results only with TESSERA_OK. No exception leaves it.
// All ranks make collective calls in one order. If an argument is wrong on one rank, the call fails
// there, and `tessera_shard` on all ranks, unless it is the world. Threads may take turns.

#include <stdint.h>
#include <tessera/export.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tessera_status {
  TESSERA_OK = 0,
  TESSERA_BAD_ARGUMENT = 1,  ///< also one that contradicts the model, a file or another rank
  TESSERA_NOT_IMPLEMENTED = 2,
  TESSERA_RANK_FAILED = 3,  ///< another rank has failed, ended or not come within the timeout
  TESSERA_FAILED = 4        ///< any other error, such as a step without a backward, or a full disk
} tessera_status;

typedef struct tessera_world tessera_world;  ///< the ranks of a job
typedef struct tessera_model tessera_model;  ///< a model sharded over them, with its optimizer

/// Returns the message of the last call that failed on this thread, valid until the next one fails.
TESSERA_API const char* tessera_error(void);

/// Joins the job that the environment describes: that of `tessera run`, torchrun, mpirun or srun; a
/// world of one rank without any. Collective. `backend`: for tensors on devices, such as "nccl"; or
/// null. `rank` and `size` may be null. Waits have the timeout of TESSERA_TIMEOUT, in seconds.
TESSERA_API tessera_status tessera_init(const char* backend, tessera_world** world, int* rank,
                                        int* size);

/// Shards tensors over a world, in place, and makes their optimizer. The first `parameters` of
/// `names` and `tensors` are parameters, best in the order of their use, and get rank 0's values;
/// the next `buffers` are buffers. Collective, with equal names and options on all ranks. From then
/// on an operator that uses a parameter gathers it, and backward reduces gradients: both are
/// collective. Gradients lie in the model, and not in `.grad`.
///
/// `plan`: {"level": "p_g_os", "unit_bytes": 1000000, "param_dtype": "bfloat16"} or other fields of
/// `ShardPlan` and `Precision`, but those that hold rules or objects of C++, and `sync_buffers` and
/// `cast_inputs`, which act in forwards of the C++ wrapper.
///
/// `optimizer`: {"name": "AdamW", "lr": 1e-3, "weight_decay": 0.1}: Adam, AdamW, SGD, Adagrad,
/// RMSprop, CPUAdam or Muon, with the options and defaults of C++, but 1e-3 for `lr`, and `beta1`
/// and `beta2` in place of `betas`. Null: none, and `tessera_step` fails.
TESSERA_API tessera_status tessera_shard(tessera_world* world, const char* const* names,
                                         void* const* tensors, int64_t parameters, int64_t buffers,
                                         const char* plan, const char* optimizer,
                                         tessera_model** model);

/// Clears the gradients. Not collective, but all ranks call it.
TESSERA_API tessera_status tessera_zero_grad(tessera_model* model);

/// Scales the gradients so that their total norm is at most `max_norm`. `norm_type`: 2, 1, another
/// positive number or infinity. `norm`: that before; may be null. Collective.
TESSERA_API tessera_status tessera_clip(tessera_model* model, double max_norm, double norm_type,
                                        double* norm);

/// Steps the optimizer, with the learning rate `lr` from now on unless it is negative. Collective.
/// Fails if there was no backward since the last `tessera_zero_grad`.
TESSERA_API tessera_status tessera_step(tessera_model* model, double lr);

/// Writes model, optimizer and the state of generators into the directory `path`, in place of an
/// older checkpoint only if all ranks succeed. Collective.
TESSERA_API tessera_status tessera_save(tessera_model* model, const char* path);

/// Reads a checkpoint, and changes nothing if entries are missing, unexpected or of another shape.
/// `steps`: those that the optimizer had made; may be null. Collective, at any number of ranks.
TESSERA_API tessera_status tessera_load(tessera_model* model, const char* path, int64_t* steps);

/// Assigns to `tensor` a copy of the whole value of a parameter, in the dtype that the optimizer
/// updates. Collective: all ranks get it.
TESSERA_API tessera_status tessera_gather(tessera_model* model, const char* name, void* tensor);

/// Bytes that this rank keeps for a model between steps, by kind; see `ShardMemory`.
typedef struct tessera_bytes {
  int64_t parameters, gradients, optimizer_state, master_weights, offloaded;
  int64_t peak_unsharded, peak_in_flight;  ///< of gathered parameters and of whole gradients
} tessera_bytes;
TESSERA_API tessera_status tessera_memory(tessera_model* model, tessera_bytes* bytes);

/// Frees a world or a model, in any order, on any thread; null is ignored. Waits for no rank. A
/// world ends with its last model. Parameters stay sharded, and can't be used after their world.
TESSERA_API void tessera_free(void* handle);

#ifdef __cplusplus
}  // extern "C"
#endif

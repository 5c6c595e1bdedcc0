#pragma once

// Includes everything that a training program needs, of the packages that were built.
#include <tessera/base/generator.h>
#include <tessera/base/memory_sample.h>
#include <tessera/base/page_heap.h>
#include <tessera/base/process_memory.h>
#include <tessera/checkpoint/async_checkpoint.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpoint_files.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/comm/process_group.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/comm/spawn.h>
#include <tessera/comm/world.h>
#include <tessera/engine/activation_checkpoint.h>
#include <tessera/engine/cpu_adam.h>
#include <tessera/engine/exponential_average.h>
#include <tessera/engine/foreign_optimizer.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/engine/join.h>
#include <tessera/engine/muon.h>
#include <tessera/engine/optimizer_state_dict.h>
#include <tessera/engine/optimizer_traits.h>
#include <tessera/engine/shard_plan.h>
#include <tessera/engine/sharded_optimizer.h>
#include <tessera/init/deferred_init.h>
#include <tessera/parallel/all_to_all.h>
#include <tessera/parallel/context_parallel.h>
#include <tessera/parallel/dist_dataloader.h>
#include <tessera/parallel/dist_optimizer.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/tensor/device_mesh.h>
#include <tessera/tensor/dist_debug.h>
#include <tessera/tensor/dist_factories.h>
#include <tessera/tensor/dist_tensor.h>
#include <tessera/tensor/local_map.h>
#include <tessera/tensor/operator_rules.h>
#include <tessera/tensor/placement.h>
#include <tessera/version.h>

#if __has_include(<tessera/dialects/colossalai.h>)
#include <tessera/dialects/colossalai.h>
#endif
#if __has_include(<tessera/dialects/fairscale.h>)
#include <tessera/dialects/fairscale.h>
#endif
#if __has_include(<tessera/dialects/paddle_group_sharded.h>)
#include <tessera/dialects/paddle_group_sharded.h>
#endif
#if __has_include(<tessera/dialects/paddle_shard_layer.h>)
#include <tessera/dialects/paddle_shard_layer.h>
#endif
#if __has_include(<tessera/interop/load_safetensors.h>)
#include <tessera/interop/exchange.h>
#include <tessera/interop/load_safetensors.h>
#endif
#if __has_include(<tessera/loop/lr_schedule.h>)
#include <tessera/loop/lr_schedule.h>
#include <tessera/loop/metrics.h>
#include <tessera/loop/metrics_log.h>
#include <tessera/loop/progress_line.h>
#include <tessera/loop/resumable_sampler.h>
#endif
#if __has_include(<tessera/trace/memory_tracer.h>)
#include <tessera/trace/memory_tracer.h>
#endif

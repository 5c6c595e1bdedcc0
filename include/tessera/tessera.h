#pragma once

// Everything that a training program needs.
#include <tessera/activation_checkpoint.h>
#include <tessera/checkpoint.h>
#include <tessera/deferred_init.h>
#include <tessera/device_mesh.h>
#include <tessera/dialects/fairscale.h>
#include <tessera/dialects/paddle_group_sharded.h>
#include <tessera/dialects/paddle_shard_layer.h>
#include <tessera/dist_dataloader.h>
#include <tessera/dist_debug.h>
#include <tessera/dist_optimizer.h>
#include <tessera/dist_tensor.h>
#include <tessera/distribute_module.h>
#include <tessera/fully_shard.h>
#include <tessera/generator.h>
#include <tessera/grad_scaler.h>
#include <tessera/join.h>
#include <tessera/optimizer_state_dict.h>
#include <tessera/page_heap.h>
#include <tessera/placement.h>
#include <tessera/process_group.h>
#include <tessera/shard_plan.h>
#include <tessera/sharded_optimizer.h>
#include <tessera/spawn.h>
#include <tessera/version.h>
#include <tessera/world.h>

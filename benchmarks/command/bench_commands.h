#pragma once

namespace CLI {
class App;
}

namespace tessera::tools {

/// Adds `bench comm`: collectives against c10d's own and against memcpy.
void add_comm_bench(CLI::App& bench, int& exit_code);

/// Adds `bench step`: sharded training steps against the local reference.
void add_step_bench(CLI::App& bench, int& exit_code);

/// Adds `bench link`: sharded training steps over slow links between hosts.
void add_link_bench(CLI::App& bench, int& exit_code);

/// Adds `bench dispatch`: operators on DistTensors against plain ones.
void add_dispatch_bench(CLI::App& bench, int& exit_code);

/// Adds `bench optim`: optimizer steps against the memory's bandwidth.
void add_optim_bench(CLI::App& bench, int& exit_code);

/// Adds `bench ckpt`: saving and loading against the disk and the memory.
void add_ckpt_bench(CLI::App& bench, int& exit_code);

/// Adds `bench ranks`: the processor time of a step by the number of ranks.
void add_ranks_bench(CLI::App& bench, int& exit_code);

}  // namespace tessera::tools

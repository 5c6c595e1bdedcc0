/* Trains a model from C, sharded over any number of ranks:
 *   tessera run -n 2 build/release/examples/train_c CHECKPOINT
 *
 * The model, its forward and its backward belong to a binding of LibTorch (binding.h); all that
 * shards is Tessera's interface in C. The losses are those of one process. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/capi/tessera.h>

#include "binding.h"

enum { kRows = 12, kSteps = 8, kSavedAfter = 4 };

static void check(tessera_status status) {
  if (status == TESSERA_OK) return;
  fprintf(stderr, "%s\n", tessera_error());
  exit(1);
}

static void check_binding(int error) {
  if (error) exit(1);
}

/* Trains from step `first` on; every rank takes its own rows. */
static void train(network* net, tessera_model* model, int64_t first, int rank, int size,
                  const char* checkpoint) {
  const int64_t rows = kRows / size;
  for (int64_t step = first; step < kSteps; ++step) {
    double norm = 0, loss = 0;
    check(tessera_zero_grad(model));
    check_binding(network_backward(net, rank * rows, rows));
    check(tessera_clip(model, 1.0, 2.0, &norm));
    check(tessera_step(model, 0.01 / (1 + (double)step)));
    check_binding(network_loss(net, 0, kRows, &loss)); /* all rows, on all ranks */
    if (rank == 0) printf("step %" PRId64 " loss %.5f norm %.4f\n", step, loss, norm);
    if (checkpoint && step + 1 == kSavedAfter) check(tessera_save(model, checkpoint));
  }
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "train_c CHECKPOINT: a directory to write\n");
    return 2;
  }
  tessera_world* world = NULL;
  int rank = 0, size = 1;
  check(tessera_init(NULL, &world, &rank, &size));
  if (kRows % size != 0) {
    fprintf(stderr, "the ranks share %d rows; got %d ranks\n", kRows, size);
    return 2;
  }

  network* net = network_new();
  const char* const* names = NULL;
  void* const* tensors = NULL;
  const int64_t count = network_parameters(net, &names, &tensors);
  tessera_model* model = NULL;
  check(tessera_shard(world, names, tensors, count, 0, "{\"level\": \"p_g_os\"}",
                      "{\"name\": \"AdamW\", \"lr\": 0.01, \"weight_decay\": 0.1}", &model));

  train(net, model, 0, rank, size, argv[1]);
  int64_t steps = 0;
  check(tessera_load(model, argv[1], &steps));
  if (rank == 0) printf("again from step %" PRId64 "\n", steps);
  train(net, model, steps, rank, size, NULL);

  void* weight = tensor_new();
  check(tessera_gather(model, names[0], weight));
  if (rank == 0) printf("norm of %s %.4f\n", names[0], tensor_norm(weight));
  tensor_free(weight);

  tessera_bytes bytes;
  check(tessera_memory(model, &bytes));
  fprintf(stderr, "rank %d keeps %" PRId64 " bytes of parameters and %" PRId64 " of state\n", rank,
          bytes.parameters, bytes.optimizer_state);

  tessera_free(model);
  tessera_free(world);
  network_free(net);
  return 0;
}

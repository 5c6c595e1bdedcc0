#pragma once

/* Stands in for a language's binding of LibTorch: the few functions of one that train.c needs. A
 * real one, such as tch-rs, has tensors, modules and backward for any model. */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A perceptron with its data: rows of inputs and targets. */
typedef struct network network;

network* network_new(void);
void network_free(network*);

/* Its parameters: their number, names and tensors, which are pointers to at::Tensor. */
int64_t network_parameters(network*, const char* const** names, void* const** tensors);

/* The loss of rows from `first` on, without gradients. Both return 0, or print an error. */
int network_loss(network*, int64_t first, int64_t rows, double* loss);
/* Adds the gradients of that loss. */
int network_backward(network*, int64_t first, int64_t rows);

/* A tensor to be assigned, and its norm. */
void* tensor_new(void);
double tensor_norm(void* tensor);
void tensor_free(void* tensor);

#ifdef __cplusplus
}
#endif

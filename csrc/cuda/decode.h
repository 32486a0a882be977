// SPDX-License-Identifier: Apache-2.0
// Decode attention of a plan on a CUDA device: snapshot of the slots, forward, merge. Every
// function only launches kernels on `stream`: no allocation, no synchronisation, so all of it can
// be captured in a CUDA graph, which then serves every plan that fits the buffers. Errors of a
// launch and arguments that the kernels do not support throw std::runtime_error and
// std::invalid_argument.
#pragma once

#include "cuda/params.h"

namespace pat {

// Bytes of shared memory that a block of the forward needs at least. Throws std::invalid_argument
// for a head dim that has no kernel.
int min_shared_bytes(int head_dim);

// Throws std::invalid_argument for what the kernels do not have. Looks at sizes, strides and
// numbers only, so that it needs no device.
void check_decode_args(const CudaDecodeArgs& args);

// Forward of all items, then the merge of queries with several splits.
void decode_cuda(const CudaDecodeArgs& args, void* stream);

// Copies the slots of every token that the plan's items read, and writes into the plan how many
// tokens each item has. Of a tail in a branch, no more than its room. Once a step.
void snapshot_cuda(const SnapshotArgs& args, void* stream);

}  // namespace pat

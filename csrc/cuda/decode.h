// SPDX-License-Identifier: Apache-2.0
// Decode attention of a plan on a CUDA device: snapshot of the slots, forward, merge. The functions
// only launch kernels on `stream`. They neither allocate nor synchronise, so a CUDA graph can
// capture them; it then serves every plan that fits the buffers. They throw std::runtime_error with
// the error of a launch, and std::invalid_argument for arguments that the kernels do not support.
#pragma once

#include "cuda/params.h"

namespace pat {

// Bytes of shared memory that a CTA of the forward needs at least. Throws std::invalid_argument
// for a head dim that has no kernel.
int min_shared_bytes(int head_dim);

// Throws std::invalid_argument for what the kernels do not support. Looks only at sizes, strides
// and numbers, so it needs no device.
void check_decode(const DecodeParams& params);

// Forward of all items, then the merge of queries with several splits.
void decode_cuda(const DecodeParams& params, void* stream);

// Copies the slots of every token that the plan's items read into the list whose address the plan's
// header has, and writes each item's number of tokens into the plan. A tail gets at most its room.
// Then writes down what each half of the forward's CTAs begins with. Called once per step.
void snapshot_cuda(const SnapshotArgs& args, void* stream);

}  // namespace pat

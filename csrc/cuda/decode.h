// SPDX-License-Identifier: Apache-2.0
// Decode attention of a plan on a CUDA device: snapshot of the slots, forward, merge. Functions
// that take a stream only launch kernels on it. They neither allocate nor synchronise, so a CUDA
// graph can capture them; it then serves every plan that fits the buffers. They throw
// std::runtime_error with the error of a launch, and std::invalid_argument for what the kernels do
// not support.
#pragma once

#include <string>

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

// Masks of draft tokens that are a tree: from a byte a cell, as serving engines write them, to the
// 64 bits a draft token that the forward reads.
struct DraftMaskArgs {
  // One query after the other, a row for each of its draft tokens, which has a cell for each of
  // these: not 0 where the row's token attends to it.
  const uint8_t* cells;
  int64_t num_cells;
  // Tokens of each query without the draft tokens. Null: rows have cells for draft tokens only.
  // Else a row begins with as many cells as its query has tokens here.
  const void* seq_lens;
  int32_t seq_lens_bytes;  // of an element, 4 or 8
  int32_t num_rows;        // queries, with those that pad the batch
  int32_t draft_tokens;    // 1 to 64
  uint64_t* masks;         // [num_rows, draft_tokens]
};

// Writes all masks on `stream`, with one launch. Bits of cells beyond `num_cells` are 0. Throws
// std::runtime_error with the error of the launch.
void draft_masks_cuda(const DraftMaskArgs& args, void* stream);

// Does the CUDA path work on this machine? One tiny kernel answers.
struct ProbeResult {
  bool ok;          // a kernel of ours ran on the device and its result came back right
  int device;       // ordinal that was asked for
  int arch;         // compute capability of the device, 10 * major + minor; 0 if unknown
  int kernel_arch;  // architecture the kernel was compiled for, e.g. 80 or 90; 0 if it did not run
  int driver_version;  // CUDA version of the driver, e.g. 13000; 0 without a driver
  std::string error;   // "" if ok, else the step that failed and CUDA's reason
};

// Runs the probe kernel on `device` and waits for it. Never throws: a machine without a GPU or
// driver is an answer, not an error. Leaves the calling thread's current device as it was.
ProbeResult cuda_probe(int device);

}  // namespace pat

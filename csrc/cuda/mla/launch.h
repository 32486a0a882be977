// SPDX-License-Identifier: Apache-2.0
// The launches of MLA, for head_dim 576. They are in builds for sm_90a (PAT_MLA is 1 then) and run
// on GPUs of compute capability 9.0; elsewhere they throw.
#pragma once

#include <cuda_runtime.h>

#include "cuda/params.h"

namespace pat::mla {

inline constexpr int kHeadDim = 576, kVHeadDim = 512;
inline constexpr int kMaxRows = 64;  // packed rows of a query

// Bytes of shared memory of a CTA of the forward.
inline constexpr int kMinSharedBytes = 224256;

// Throws std::invalid_argument for what these kernels do not have. Needs no device.
void check_decode(const DecodeParams& params);

// `forward`: of `params`, as launch.cu makes it of those of other models, too.
void launch_forward(const ForwardParams& forward, const DecodeParams& params, cudaStream_t stream);

// `params`: with the heads of all draft tokens of a query as its heads.
void launch_merge(const DecodeParams& params, cudaStream_t stream);

// Writes down what each CTA of the forward begins with, behind the snapshot.
void launch_first_units(const SnapshotArgs& args, cudaStream_t stream);

}  // namespace pat::mla

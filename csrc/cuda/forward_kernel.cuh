// SPDX-License-Identifier: Apache-2.0
// Entry of the forward kernel and its launch; one instance a head dimension (forward_hd*.cu).
#pragma once

#include <algorithm>

#include "cuda/error.h"
#include "cuda/forward_load.cuh"
#include "cuda/forward_mma.cuh"
#include "cuda/forward_wgmma.cuh"
#include "cuda/launch.h"

namespace pat {

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, Shape<kHeadDim>::kCtasPerSm)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  using S = Shape<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<kHeadDim> s{shared_address(memory), static_cast<uint32_t>(p.stages),
                           static_cast<uint32_t>(p.q_buffers)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(s.full(i), kLoaderWarps * 32);
      barrier_init(s.empty(i), kConsumers / 32);
    }
    for (int i = 0; i < p.q_buffers; ++i) {
      barrier_init(s.q_full(i), 32);
      barrier_init(s.q_empty(i), kConsumers / 32);
    }
    for (int i = 0; i < kUnits; ++i) {
      barrier_init(s.unit_full(i), 1);
      barrier_init(s.unit_empty(i), 1 + kLoaderWarps + kConsumers / 32);
    }
    for (int i = 0; i < kSlotTiles; ++i) {
      barrier_init(s.slot_full(i), 32);
      barrier_init(s.slot_empty(i), kLoaderWarps);
    }
    for (int i = 0; i < kNarrowUnits; ++i) {
      barrier_init(s.narrow_full(i), 32);
      barrier_init(s.narrow_empty(i), 1);
    }
    s.control().loaded_tiles = 0;
  }
  __syncthreads();
  allow_next_kernel();

  // Broadcasts, here and below, tell the compiler that a value is uniform in a warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < 4) {
#if PAT_WGMMA
    if constexpr (S::kWgmma) give_registers<64>();
#endif
    if (warp == 0) {
      schedule_units(p, s);
    } else if (warp <= kLoaderWarps) {
      Loader<kHeadDim> loader{p, s, warp - 1, static_cast<int>(threadIdx.x & 31)};
      loader.run();
    } else {
      Fetcher<kHeadDim> fetcher{p, s, static_cast<int>(threadIdx.x & 31)};
      fetcher.run();
    }
  } else {
#if PAT_WGMMA
    if constexpr (S::kWgmma) take_registers<192>();
#endif
    Consumer<kHeadDim> c{p, s, warp - 4};
    for (Cursor ring;; ring.advance(kUnits)) {
      barrier_wait(s.unit_full(ring.index), ring.phase);
      const Unit& u = s.control().units[ring.index];
      const int rows = __shfl_sync(~0u, u.rows, 0);
      if (u.tokens < 0) break;
      if (u.narrow) {
        // Of the units in a row, each warp takes every fourth, and passes by the others.
        const bool brief = u.narrow == kShort;
        if (c.narrow.index != c.warp) {
          c.pass_stage();
          if (!brief) c.pass_stage();
        } else if (brief) {
          attend_narrow<T, kHeadDim, kShortTokens>(c, u);
        } else {
          attend_narrow<T, kHeadDim, kTileTokens>(c, u);
        }
        c.narrow.advance(kNarrowUnits);
      } else if (rows <= 16) {
        attend_mma<T, kHeadDim, 1>(c, u);
      } else if (rows <= 32) {
        attend_mma<T, kHeadDim, 2>(c, u);
      } else {
#if PAT_WGMMA
        if constexpr (S::kWgmma) {
          attend_wgmma<T, kHeadDim>(c, u);
        } else
#endif
        {
          attend_mma<T, kHeadDim, 4>(c, u);
        }
      }
      c.release(s.unit_empty(ring.index));
    }
  }
}

// What a launch takes of an SM.
struct Footprint {
  int stages, q_buffers, bytes, ctas;
  bool narrow;
};

template <int kHeadDim>
Footprint footprint(const Device& device) {
  constexpr int kTile = Shape<kHeadDim>::kTileBytes;
  constexpr int kFixed = static_cast<int>(sizeof(Control));
  // Two CTAs an SM where both get three stages, else one with what there is.
  for (int ctas = Shape<kHeadDim>::kCtasPerSm; ctas > 0; --ctas) {
    const int room =
        std::min(device.shared_per_block, device.shared_per_sm / ctas - device.shared_reserved);
    for (int q_buffers = 2; q_buffers > 0; --q_buffers) {
      for (const bool narrow : {true, false}) {
        const int used = kFixed + q_buffers * kTile +
                         (narrow ? kNarrowUnits * Shape<kHeadDim>::kNarrowBytes : 0);
        const int stages = std::min((room - used) / kTile, kMaxStages);
        if (stages >= (ctas == 1 && q_buffers == 1 ? 2 : 3)) {
          return {stages, q_buffers, used + stages * kTile, ctas, narrow};
        }
      }
    }
  }
  throw_invalid("head_dim %d needs %d bytes of shared memory per block, the device has %d",
                kHeadDim, kFixed + 3 * kTile, device.shared_per_block);
}

template <typename T, int kHeadDim>
void launch_forward_as(ForwardParams params, cudaStream_t stream) {
  auto* kernel = forward_kernel<T, kHeadDim>;
  const Device& device = current_device();
  const Footprint use = footprint<kHeadDim>(device);
  params.stages = use.stages;
  params.q_buffers = use.q_buffers;
  params.narrow = use.narrow;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, use.bytes),
        "forward kernel: shared memory");
  kernel<<<device.num_sms * use.ctas, kThreads, use.bytes, stream>>>(params);
  check(cudaGetLastError(), "forward kernel: launch");
}

template <int kHeadDim>
void launch_forward_dim(const ForwardParams& params, CudaType type, cudaStream_t stream) {
  if (type == CudaType::kBF16) {
    launch_forward_as<__nv_bfloat16, kHeadDim>(params, stream);
  } else {
    launch_forward_as<__half, kHeadDim>(params, stream);
  }
}

}  // namespace pat

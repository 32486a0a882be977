// SPDX-License-Identifier: Apache-2.0
// Writes down once a step, behind the snapshot, the first work unit of every half, the slots of its
// first tiles and where its Q is. The forward of each layer would find the same by a chain of
// look-ups, which takes 2 to 3 us where its code is in no cache (docs/lessons.md).
#include "cuda/forward/footprint.cuh"
#include "cuda/forward/scheduler.cuh"
#include "cuda/launch.h"
#include "cuda/mla/launch.h"

namespace pat {
namespace {

// Where row `row` of the unit is in Q. It divides, unlike Fetcher::q_offset(): it runs once a step.
__device__ QRow q_row(const ForwardParams& p, const Control& control, const WorkUnit& unit,
                      int row) {
  const int packed_row = unit.first_packed_row + row, member = packed_row / p.group;
  const int in_member = packed_row - member * p.group;
  const int query = unit.single_query() ? unit.member.query
                                        : load_member(control, unit.member_offset + member).query;
  return {static_cast<uint32_t>(query),
          static_cast<uint16_t>(unit.kv_head * p.head_group + in_member),
          static_cast<uint16_t>(in_member / p.head_group)};
}

// A warp for each half of the forward's CTA of the same number.
template <int kHeadDim, Drafts kDrafts>
__global__ void first_units_kernel(const __grid_constant__ ForwardParams p, PlanHeader* plan,
                                   FirstUnit* units) {
  __shared__ Control controls[2];
  const int lane = threadIdx.x & 31;
  const int half = __shfl_sync(~0u, threadIdx.x / 32, 0);
  Control& control = controls[half];
  if (lane == 0) control.note_plan(plan, *plan);
  __syncwarp();
  const Shared<kHeadDim> s{shared_address(&control),         0, 0, 0, half,
                           static_cast<int>(blockDim.x / 32)};
  UnitScheduler<kHeadDim, kDrafts, true> scheduler{p, s, lane};
  scheduler.run();
  FirstUnit& to = units[2 * blockIdx.x + half];
  if (lane == scheduler.finder) {
    to.unit = scheduler.found;
    control.units[0] = scheduler.found;
  }
  __syncwarp();
  const WorkUnit unit = control.units[0];
  const int32_t* from = control.list + unit.list_start;
  int first = first_token(unit, half);
  for (auto& of_tile : to.slots) {
    for (int t = lane; t < kTileTokens; t += 32) {
      of_tile[t] = first + t < unit.num_tokens ? from[first + t] : 0;
    }
    if (first < unit.num_tokens) first = next_token(unit, half, first);
  }
  const int rows = consumers_copy_q<kHeadDim>(unit) ? unit.num_rows : 0;
  for (int row = lane; row < kTileRows; row += 32) {
    to.rows[row] = row < rows ? q_row(p, control, unit, row) : QRow{kNoQuery, 0, 0};
  }
  // A plan of more queries than the batch has rows is not run, and the snapshot has left it alone.
  if (blockIdx.x == 0 && threadIdx.x == 0) plan->first_units = control.num_queries <= p.num_rows;
}

}  // namespace

bool has_first_units(Launch launch) {
  // The other launches have a queue of units for each row tile.
  return launch == Launch::kQueue && current_device().num_sms <= kMostCtas;
}

void launch_first_units(const SnapshotArgs& args, cudaStream_t stream) {
  if (args.head_dim == mla::kHeadDim) return mla::launch_first_units(args, stream);
  with_head_dim(args.head_dim, [&](auto dim) {
    const Device& device = current_device();
    const Footprint use = footprint<dim>(device);
    ForwardParams p{};
    set_scheduling(p, args.num_rows, args.num_q_heads, args.num_kv_heads, args.draft_tokens);
    use.set(p);
    auto* kernel = args.draft_tokens > 1 ? first_units_kernel<dim, kChains>
                                         : first_units_kernel<dim, kNoDrafts>;
    kernel<<<device.num_sms, 32 * use.halves, 0, stream>>>(p, args.plan, args.first_units);
  });
  check(cudaGetLastError(), "first units kernel: launch");
}

}  // namespace pat

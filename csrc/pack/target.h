// SPDX-License-Identifier: Apache-2.0
// What a plan is made for: the machine, the model's heads and the rules to use. A value type, so
// that a machine without a GPU can make and test an H200's plan.
#pragma once

#include <cstdint>
#include <vector>

#include "../plan.h"

namespace pat {

enum class Policy : int {
  kBytes = 0,  // default: compares bytes exactly (GQA ratio, row tiles, partial dtype)
  kPaper = 1,  // PAT section 5.1: equations 1 and 2, with the tokens of the whole pack
  kNaive = 2,  // every node of the tree is a pack (the paper's PAT-naive)
  kRoot = 3,   // the first node of a path is a pack, all below is each query's own (RelayAttention)
  kQueries = 4,  // no packs: each query reads its whole sequence (PagedAttention)
  kPadding = 5,  // by what tiles that are not full compute in vain (FastTree)
};

enum class Split : int {
  kCost = 0,    // default: minimises the modelled makespan
  kMean = 1,    // PAT section 6: no item longer than the mean
  kFixed = 2,   // pieces of split_tokens tokens (PagedAttention V2)
  kChunks = 3,  // packs of several queries in pieces of split_tokens, what one query reads whole
                // (ChunkAttention's two phases)
  kNone = 4,    // no pack is cut (PagedAttention V1)
  kPhases = 5,  // pieces of split_tokens, or an eighth where these make few items (FastTree)
};

enum class Branching : int {
  kCost = 0,    // default: where the modelled time is shorter
  kAlways = 1,  // wherever queries share anything
  kNever = 2,
  kGroups = 3,  // PackInfer: as kAlways, but also of queries that share nothing, of about
                // split_tokens tokens each
};

struct Target {
  int32_t num_sms;  // SMs that run items; of a CPU its threads
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t draft_tokens;  // of a query (plan.h): 1 in a decode step
  int32_t head_dim;
  int32_t kv_bytes;        // bytes of a K or V element
  int32_t partial_bytes;   // bytes of an element of a partial output: 4 or 2
  double bytes_per_s;      // memory bandwidth of all SMs together
  double flops_per_s;      // matrix rate of all SMs together
  double item_overhead_s;  // fixed time of an item
  double sm_speedup;       // K/V rate of an SM that has the memory to itself, over its share; >= 1
  double merge_round_s;    // time of the splits that the merge joins at once (MergeRule)
  int32_t items_per_sm;    // that an SM runs side by side; a wide item takes all of it
  double reread_weight;    // the packer's: cost of a token read again, over a first read, in (0, 1]
  // What plan_seconds() charges, as fitted to measured plans. Zero or more.
  double reread_factor;            // a token read again, over a first read
  double wide_factor;              // a wide item's token, beside its read: arithmetic
  double merge_factor;             // a partial's bytes, as a multiple of their time in memory
  double branch_overhead_s;        // fixed time of a branch on its SM
  std::vector<int32_t> row_tiles;  // ascending, packed rows
  std::vector<int32_t> kv_tiles;   // ascending, tokens
  int32_t max_queries;             // capacities of the executor's buffers
  int32_t max_items;
  int32_t max_partials;
  int32_t max_segments;       // of branches
  int32_t max_branch_tokens;  // of the snapshot's list of their tokens
  Policy policy = Policy::kBytes;
  Split split = Split::kCost;
  Branching branching = Branching::kCost;
  // Of a piece, with Split::kFixed, kChunks and kPhases, and of a branch, with Branching::kGroups.
  int32_t split_tokens = 512;
  // The cuts into branches that are compared: packed rows of a branch, and tokens of a node or tail
  // beyond which it stays an item of its own.
  std::vector<int32_t> branch_rows;
  std::vector<int32_t> branch_limits;

  // Whether packs, splits and branches are what the cost model makes of them.
  bool has_default_rules() const {
    return policy == Policy::kBytes && split == Split::kCost && branching == Branching::kCost;
  }
  // Packed rows of a query and KV head.
  int32_t group() const { return draft_tokens * (num_q_heads / num_kv_heads); }
  // Queries of one KV head that fit the largest row tile.
  int32_t max_tile_queries() const {
    const int32_t queries = row_tiles.back() / group();
    return queries > 0 ? queries : 1;
  }
  // Row tiles, hence items, that `queries` queries take.
  int64_t num_row_tiles(int64_t queries) const {
    const int64_t most = max_tile_queries();
    return (queries + most - 1) / most;
  }
  // Places in which all SMs run items at once, and how many of them an item of a row tile takes.
  // These are no slots of the K/V cache.
  double slots() const { return static_cast<double>(num_sms) * items_per_sm; }
  int32_t slots_of(int32_t row_tile) const { return row_tile > kWideRows ? items_per_sm : 1; }
  // Whether both halves of an SM work on each of a plan's items (PlanHeader::joint): where all are
  // heavy and there is at most one for each SM, whose other half would have nothing to do.
  bool runs_jointly(int64_t items, int64_t heavy_items) const {
    return items_per_sm == 2 && items > 0 && items == heavy_items &&
           items * num_kv_heads <= num_sms;
  }
  // Whether work units that take an SM each, wide ones or pairs, have one for four fifths of the
  // SMs.
  bool fills_sms(int64_t units) const { return 5 * units >= int64_t{4} * num_sms; }
  // Whether the halves of an SM can run two branches as a pair (plan.h).
  bool pairs_branches() const { return items_per_sm == 2; }
  // Packed rows of the smallest row tile that holds `queries` queries, else of the largest: a pack
  // of more queries than fit takes several row tiles.
  int32_t row_tile_for(int32_t queries) const {
    const int64_t rows = int64_t{queries} * group();
    for (const int32_t tile : row_tiles) {
      if (tile >= rows) return tile;
    }
    return row_tiles.back();
  }
  // The same target without the row tile of wide items, if it has that and can do without.
  Target without_wide() const;
  // K and V bytes of one token and KV head.
  double token_bytes() const { return 2.0 * head_dim * kv_bytes; }
  // Bytes that one partial of a query costs per KV head: written once and read once, LSE included.
  double partial_cost_bytes() const {
    return 2.0 * group() * (static_cast<double>(head_dim) * partial_bytes + 4.0);
  }
  // Throws std::invalid_argument that names the field.
  void validate() const;
};

}  // namespace pat

// SPDX-License-Identifier: Apache-2.0
// Emit: the bytes of a plan (csrc/plan.h) from what the stages before have decided. Gives every
// item its tile (PAT section 5.2) and lists the items in the order in which they run.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "../plan.h"
#include "branch.h"
#include "cut.h"
#include "packs.h"
#include "target.h"

namespace pat {

// A plan on the host: its bytes, and for how long they hold.
struct Plan {
  std::vector<uint8_t> blob;  // laid out as plan.h says
  // The plan holds while min_seq_lens[q] <= seq_lens[q] <= max_seq_lens[q] for every query. The
  // room above the scheduled length grows with the tail, so that plans get rarer as sequences get
  // longer; a branch has little (kBranchHeadroom).
  std::vector<int64_t> min_seq_lens;
  std::vector<int64_t> max_seq_lens;
  // Tokens that the items read for one layer and KV head, re-reads counted, are fixed_tokens plus
  // sum(seq_lens): each query has at most one tail item, and its length enters once.
  int64_t fixed_tokens = 0;
  // What an executor's buffers must hold, so that a plan that comes from here need not be read for
  // it: where the last of the tokens ends that items read of any sequence, tails at their least,
  // and the most packed rows of an item.
  int64_t last_token = 0;
  int64_t most_rows = 0;
  // Why a simpler plan was made than the rules ask for: empty, or the capacity that was too small.
  std::string degraded;
  double seconds = 0.0;  // that the judge expects of forward and merge, the launch included

  const PlanHeader& header() const { return *reinterpret_cast<const PlanHeader*>(blob.data()); }
  // What begins at a byte of the blob.
  template <typename T>
  T* part(int32_t offset) {
    return reinterpret_cast<T*>(blob.data() + offset);
  }
};

// Of the lengths of items: eight per octave.
inline constexpr uint32_t kNumBuckets = 256;

// Writes plans. Keeps its working memory between calls.
class Emitter {
 public:
  // The items' partials are numbered (Items::assign).
  Plan emit(const Items& from);

 private:
  // An item before it has its place. Until then member_offset counts in Assignment::members.
  struct Draft {
    Item item;
    ItemSegments segments;
    int32_t piece;  // of its pack
    uint32_t key;   // where it sorts
  };
  void list_pack(const Items& from, int32_t index, Plan& plan);
  void list_branch(const Items& from, const Branch& branch, Plan& plan);
  bool is_joint(const Target& target) const;
  Draft& add(uint32_t weight, int32_t row_tile, int32_t tokens);
  void sort();
  void write_items(const Items& from, Item* items, ItemSegments* item_segments, Member* members);

  std::vector<Draft> drafts_;
  std::vector<int32_t> order_;                    // drafts, as the plan lists them
  std::array<int32_t, 4> weights_;                // wide, paired, heavy and light items
  std::array<int32_t, 4 * kNumBuckets> buckets_;  // by key: items, then where the next one goes
  std::vector<Segment> segments_;                 // one for each item that is no branch
  int32_t num_branch_segments_ = 0;               // which a plan has before them
  int64_t list_tokens_ = 0;                       // of the list, so far
  int32_t num_shared_ = 0;                        // items that several queries share tokens of
  int32_t tile_queries_ = 0;                      // that the largest row tile holds
};

}  // namespace pat

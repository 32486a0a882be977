// SPDX-License-Identifier: Apache-2.0
// Split: where long packs are cut along their tokens into pieces, each an item (PAT section 6).
#pragma once

#include "cost_model.h"
#include "packer.h"
#include "target.h"

namespace pat {

// Sets Pack::pieces and Pack::chunk. `enabled` false leaves every pack whole. `branches` run beside
// the packs. Returns whether the target's room for items and partials makes the plan clearly slower
// (10 %) than it could be.
bool split_packs(const Target& target, Packs& packs, bool enabled, const BranchLoad& branches = {});

// Cuts packs of `least_queries` queries or more, at least 1, into pieces of `tokens` tokens, or of
// more if these were too many. Others stay as they are.
void split_evenly(const Target& target, Packs& packs, int32_t tokens, int32_t least_queries);

}  // namespace pat

// SPDX-License-Identifier: Apache-2.0
// PAT to the letter: TreeHeuristic with equations 1 and 2 (section 5.1), and the split of long K/V
// (section 6). Its tiles, launches and merge are those of every plan (emit.h, csrc/cuda).
#pragma once

#include <cstdint>
#include <vector>

#include "packs.h"
#include "target.h"

namespace pat {

// Which children of `node` take its tokens over (algorithm 1).
void decide_by_paper(int32_t node, const Packs& packs, Below& below);

// Tokens of the pieces of each pack: what is longer than the mean of all items is cut into equal
// pieces no longer than that.
std::vector<int32_t> split_by_mean(const Target& target, const Packs& packs);

}  // namespace pat

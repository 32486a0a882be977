// SPDX-License-Identifier: Apache-2.0
// Masks of draft tokens that are a tree: from a byte a cell, as serving engines write them, to the
// 64 bits a draft token that the forward reads.
#pragma once

#include <cstdint>

namespace pat {

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

}  // namespace pat

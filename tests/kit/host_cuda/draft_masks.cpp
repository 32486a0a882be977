// SPDX-License-Identifier: Apache-2.0
// draft_masks HEAD_GROUP DRAFT_TOKENS TOKENS SEED: mask_drafts() of all tiles of a query's item, by
// every lane and for every 16 packed rows, against the definition. SEED 0: a chain without masks;
// else trees with masks, for the second of three queries. Prints how many scores were masked, and
// how many of those should not have been, or were not.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cuda/forward/softmax.cuh"

namespace {

using namespace pat;

struct Query {
  int head_group, draft_tokens, tokens;
  std::vector<uint64_t> masks;  // [draft_tokens], empty for a chain

  bool attends(int row, int token) const {
    const int from = row / head_group, to = token - (tokens - draft_tokens);
    if (to <= 0) return true;
    return masks.empty() ? to <= from : masks[from] >> to & 1;
  }
};

// Of every `kTokens` tokens of all tiles.
template <int kTokens, Drafts kDrafts>
void check(const ForwardParams& p, const Query& query, int& masked, int& wrong) {
  constexpr int kTiles = kTokens / 8;
  const int rows = query.head_group * query.draft_tokens;
  for (int first_row = 0; first_row < rows; first_row += 16) {
    for (int left = query.tokens; left > 0; left -= kTileTokens) {
      if (left >= p.masked_tokens + kTileTokens) continue;  // see drafts_below()
      for (int at = 0; at < kTileTokens / kTokens * 32; ++at) {
        const int first_token = at / 32 * kTokens;
        this_lane = at % 32;
        float scores[4 * kTiles] = {};
        mask_drafts<kTiles, kDrafts>(p, scores, 1, first_row, first_token, left);
        for (int i = 0; i < 4 * kTiles; ++i) {
          const int row = first_row + this_lane / 4 + (i & 2) * 4;
          const int column = first_token + (i >> 2) * 8 + 2 * (this_lane % 4) + (i & 1);
          if (row >= rows || column >= left) continue;
          const bool hidden = scores[i] == -INFINITY;
          masked += hidden;
          wrong += hidden == query.attends(row, query.tokens - left + column);
        }
      }
    }
  }
}

template <Drafts kDrafts>
void check_widths(const ForwardParams& p, const Query& query, int& masked, int& wrong) {
  check<16, kDrafts>(p, query, masked, wrong);
  check<32, kDrafts>(p, query, masked, wrong);
  check<64, kDrafts>(p, query, masked, wrong);
}

}  // namespace

int main(int, char** argv) {
  Query query{std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]), {}};
  const int seed = std::atoi(argv[4]);
  ForwardParams p{.masked_tokens = query.draft_tokens - 1, .head_group = query.head_group};
  p.head_group_magic = (65536 + query.head_group - 1) / query.head_group;
  std::mt19937 generator(seed);
  std::vector<uint64_t> all;
  for (int i = 0; seed > 0 && i < 3 * query.draft_tokens; ++i) {
    const int token = i % query.draft_tokens;
    const uint64_t parent = token == 0 ? 0 : all[i - token + generator() % token];
    all.push_back(parent | uint64_t{1} << token);
  }
  if (seed > 0) {
    p.draft_masks = all.data();
    query.masks.assign(all.begin() + query.draft_tokens, all.begin() + 2 * query.draft_tokens);
  }
  int masked = 0, wrong = 0;
  (query.masks.empty() ? check_widths<kChains> : check_widths<kTrees>)(p, query, masked, wrong);
  std::printf("%d %d\n", masked, wrong);
}

// SPDX-License-Identifier: Apache-2.0
#include "branch.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "../count_of.h"
#include "headroom.h"

namespace pat {
namespace {

// What a pair must have in common. With 256 tokens pairs gain little: they took 0.97 to 1.02 of the
// time without (docs/lessons.md).
constexpr int32_t kLeastCommonTokens = 5 * kBranchAlign;
// Pairs run before all other items, though branches and light items run well beside each other. So
// there are none if the others read more than one part in so many of what the branches read.
constexpr int64_t kBranchesToOthers = 16;

}  // namespace

void Brancher::read(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) {
  tree_ = &tree;
  seq_lens_ = seq_lens;
  const int32_t num_nodes = count_of(tree.nodes);
  position_.resize(num_nodes);
  cursor_.resize(num_nodes);
  int32_t end = 0;
  for (int32_t i = 0; i < num_nodes; ++i) {  // parents come before their children
    const PackNode& node = tree.nodes[i];
    int32_t& next = node.parent == kNoNode ? end : cursor_[node.parent];
    position_[i] = cursor_[i] = next;
    next += node.num_queries;
  }
  sorted_.resize(end);
  by_length_.clear();
  for (int32_t query = 0; query < num_queries; ++query) {
    if (tree.query_node[query] != kNoNode) by_length_.push_back(query);
  }
  // So that what a branch holds does not depend on the order of the batch.
  const auto longer = [&](int32_t a, int32_t b) { return seq_lens[a] > seq_lens[b]; };
  if (!std::is_sorted(by_length_.begin(), by_length_.end(), longer)) {
    std::stable_sort(by_length_.begin(), by_length_.end(), longer);
  }
  for (const int32_t query : by_length_) sorted_[cursor_[tree.query_node[query]]++] = query;
  clear();
}

void Brancher::clear() {
  branches_.clear();
  segments_.clear();
  members_.clear();
  list_tokens_ = 0;
}

int32_t Brancher::tail_tokens(int32_t query) const {
  const auto tokens = static_cast<int32_t>(seq_lens_[query] - tree_->query_prefix[query]);
  return has_own_item(tokens) ? 0 : tokens;
}

int32_t Brancher::own_item_from(int32_t node) const {
  if (node == kNoNode) return kNoNode;
  return has_own_item(tree_->nodes[node].end - tree_->nodes[node].start) ? node : above_[node];
}

BranchLoad Brancher::cut(const Target& target, const BranchCut& cut, Packs& packs) {
  cut_ = cut;
  others_ = 0;
  packs.num_nodes = count_of(tree_->nodes);
  packs.packs.resize(packs.num_nodes + count_of(tree_->query_node));
  cut_nodes(packs);
  const int64_t partials = cut_tails(packs);
  for (int32_t i = packs.num_nodes; i-- > 0;) {
    const int32_t parent = tree_->nodes[i].parent;
    if (parent != kNoNode) subtree_[parent] += subtree_[i];
  }
  find_tops();
  BranchLoad load = group(target);
  load.partials = partials;
  few_others_ = kBranchesToOthers * others_ <= load.tokens;
  return load;
}

void Brancher::cut_nodes(Packs& packs) {
  const int32_t num_nodes = packs.num_nodes;
  above_.resize(num_nodes);
  path_.resize(num_nodes);
  subtree_.resize(num_nodes);
  for (int32_t i = 0; i < num_nodes; ++i) {
    const PackNode& node = tree_->nodes[i];
    const int32_t tokens = node.end - node.start;
    const bool own_item = has_own_item(tokens);
    const bool root = node.parent == kNoNode;
    above_[i] = own_item_from(node.parent);
    subtree_[i] = own_item ? 0 : tokens;
    others_ += own_item ? tokens : 0;
    path_[i] = (root ? 0 : path_[node.parent]) + subtree_[i];
    packs.packs[i] = {node.start, node.end, own_item ? node.num_queries : 0, above_[i], 1, 0};
  }
}

void Brancher::find_tops() {
  const int32_t num_nodes = count_of(tree_->nodes);
  top_.resize(num_nodes);
  for (int32_t i = 0; i < num_nodes; ++i) {
    const PackNode& node = tree_->nodes[i];
    const bool root = node.parent == kNoNode;
    top_[i] = root ? kNoNode : top_[node.parent];
    if (top_[i] != kNoNode || node.num_queries > cut_.queries) continue;
    if ((root ? 0 : path_[node.parent]) + subtree_[i] <= cut_.capacity) top_[i] = i;
  }
}

// Returns the partials of queries that have a branch and other items.
int64_t Brancher::cut_tails(Packs& packs) {
  int64_t partials = 0;
  for (int32_t query = 0; query < count_of(tree_->query_node); ++query) {
    const int32_t node = tree_->query_node[query];
    const int32_t start = node == kNoNode ? 0 : tree_->query_prefix[query];
    const auto end = static_cast<int32_t>(seq_lens_[query]);
    const int32_t for_branch = node == kNoNode ? 0 : tail_tokens(query);
    const bool own_item = end - start > for_branch;
    others_ += own_item ? end - start : 0;
    const int32_t above = own_item_from(node);
    packs.packs[packs.num_nodes + query] = {start, end, own_item ? 1 : 0, above, 1, 0};
    if (node == kNoNode) continue;
    subtree_[node] += for_branch;
    const bool member = path_[node] + for_branch > 0;
    partials += member && (own_item || above != kNoNode);
  }
  return partials;
}

// Deals `queries` of sorted_ from `first` on out to groups of `most`, so that each has long ones
// and short ones.
void Brancher::deal(int32_t first, int32_t queries, int32_t most) {
  const int32_t groups = (queries + most - 1) / most;
  const int32_t* from = sorted_.data() + first;
  int32_t* to = order_.data() + first;
  if (groups == 1 || seq_lens_[from[0]] == seq_lens_[from[queries - 1]]) return;
  for (int32_t group = 0; group < groups; ++group) {
    for (int32_t i = group; i < queries; i += groups) *to++ = from[i];
  }
}

struct Brancher::Group {
  int32_t parent = kNoNode;  // of its subtrees, or where its queries end
  int32_t queries = 0;
  int32_t most = 0;
  int64_t tokens = 0;  // below the parent
};

// Makes groups of `queries` of sorted_ from `first` on, which end at one node (PackInfer, algorithm
// 1): each, the longest first, goes to the group of the fewest tokens, or begins another if the
// groups have no room.
void Brancher::deal_by_tokens(const Target& target, int32_t first, int32_t queries,
                              BranchLoad& load) {
  const int32_t* const from = sorted_.data() + first;
  const int32_t node = tree_->query_node[*from];
  const int64_t room = std::max<int64_t>(cut_.capacity - path_[node], 1);
  int64_t tokens = 0;
  for (int32_t i = 0; i < queries; ++i) tokens += tail_tokens(from[i]);
  const int64_t by_tokens = std::min<int64_t>((tokens + room - 1) / room, queries);
  const int64_t least = std::max<int64_t>(by_tokens, (queries + cut_.queries - 1) / cut_.queries);
  std::vector<Group> groups(least, Group{.parent = node});
  std::vector<int32_t> chosen(queries);
  // Groups with room for a query more, those of the fewest tokens on top.
  using Entry = std::pair<int64_t, int32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open;
  for (int32_t g = 0; g < count_of(groups); ++g) open.emplace(0, g);
  for (int32_t i = 0; i < queries; ++i) {
    const int32_t tail = tail_tokens(from[i]);
    int32_t best = open.empty() ? -1 : open.top().second;
    if (best >= 0 && groups[best].queries > 0 && groups[best].tokens + tail > room) best = -1;
    if (best < 0) {
      best = count_of(groups);
      groups.push_back({.parent = node});
    } else {
      open.pop();
    }
    chosen[i] = best;
    groups[best].tokens += tail;
    if (++groups[best].queries < cut_.queries) open.emplace(groups[best].tokens, best);
  }
  std::vector<int32_t> next(groups.size());  // positions in order_
  for (int32_t g = 0, at = first; g < count_of(groups); ++g) {
    next[g] = at;
    at += groups[g].queries;
  }
  for (int32_t i = 0; i < queries; ++i) order_[next[chosen[i]]++] = from[i];
  for (int32_t g = 0; g < count_of(groups); ++g) finish(target, groups[g], next[g], load);
}

// Ends a group before position `end` of order_ and adds what it asks for.
void Brancher::finish(const Target& target, Group& group, int32_t end, BranchLoad& load) {
  if (group.queries == 0) return;
  if (group.parent != kNoNode) group.tokens += path_[group.parent];
  if (group.tokens > 0) {
    const double seconds = item_seconds(target, kBranchRows, static_cast<double>(group.tokens));
    load.seconds += seconds;
    load.longest = std::max(load.longest, seconds);
    load.items += 1.0;
    load.tokens += group.tokens;
    load.longest_tokens = std::max(load.longest_tokens, group.tokens);
  }
  ends_.push_back(end);
  group.queries = 0;
  group.tokens = 0;
}

// Cuts order_ into groups: subtrees of few enough queries, and the queries that end at one larger
// node, side by side under the same node as long as they are few enough.
BranchLoad Brancher::group(const Target& target) {
  BranchLoad load;
  ends_.clear();
  order_ = sorted_;
  Group group;
  int32_t dealt = 0;
  for (int32_t i = 0; i < count_of(order_);) {
    const int32_t node = tree_->query_node[sorted_[i]];
    const bool whole = top_[node] != kNoNode;  // a subtree
    const int32_t first = whole ? top_[node] : node;
    const int32_t step = whole ? tree_->nodes[first].num_queries : 1;
    const int32_t under = whole ? tree_->nodes[first].parent : node;
    if (!whole && cut_.capacity < INT64_MAX) {
      finish(target, group, i, load);
      const int32_t rest = position_[first] + tree_->nodes[first].num_queries - i;
      deal_by_tokens(target, i, rest, load);
      i += rest;
      continue;
    }
    // A single query counts 0: with a capacity deal_by_tokens() has dealt these out.
    const int64_t tokens = whole ? subtree_[first] : 0;
    if (group.queries == 0 || under != group.parent || under == kNoNode ||
        group.queries + step > group.most || path_[under] + group.tokens + tokens > cut_.capacity) {
      finish(target, group, i, load);
      group.parent = under;
      group.most = cut_.queries;
      if (!whole) {  // the rest of the node's queries end there: groups of one size
        const int32_t rest = position_[first] + tree_->nodes[first].num_queries - i;
        const int32_t groups = (rest + group.most - 1) / group.most;
        group.most = (rest + groups - 1) / groups;
        if (i >= dealt) deal(i, rest, group.most);
        dealt = std::max(dealt, i + rest);
      }
    }
    group.queries += step;
    group.tokens += whole ? subtree_[first] : tail_tokens(order_[i]);
    i += step;
  }
  finish(target, group, count_of(order_), load);
  return load;
}

bool Brancher::build(const Target& target) {
  clear();
  list_members();
  pair(target);
  if (!count_segments()) {
    clear();
    return false;
  }
  list_nodes();
  list_tails();
  if (place(target)) return true;
  clear();
  return false;
}

void Brancher::list_members() {
  const int32_t num_groups = count_of(ends_);
  branch_at_.resize(order_.size());
  rank_.resize(order_.size() + 1);
  branch_of_.assign(tree_->query_node.size(), kNoNode);
  branches_.assign(num_groups, {});
  tail_counts_.assign(num_groups, 0);
  rank_[0] = 0;
  for (int32_t g = 0, i = 0; g < num_groups; ++g) {
    Branch& branch = branches_[g];
    branch.first_member = count_of(members_);
    branch.peer = kNoNode;
    for (; i < ends_[g]; ++i) {
      const int32_t query = order_[i];
      const int32_t tail = tail_tokens(query);
      branch_at_[i] = g;
      if (path_[tree_->query_node[query]] + tail > 0) {
        branch_of_[query] = g;
        members_.push_back(query);
      }
      tail_counts_[g] += tail > 0;
      rank_[i + 1] = count_of(members_);
    }
    branch.num_queries = count_of(members_) - branch.first_member;
  }
}

// Tokens that all queries of a branch and of the one before it attend to, as whole KV tiles.
int32_t Brancher::common_tokens(int32_t branch) const {
  const int32_t first = branch == 1 ? 0 : ends_[branch - 2];
  int32_t node = tree_->query_node[order_[first]];
  while (node != kNoNode && position_[node] + tree_->nodes[node].num_queries < ends_[branch]) {
    node = tree_->nodes[node].parent;
  }
  return node == kNoNode ? 0 : static_cast<int32_t>(path_[node] / kBranchAlign * kBranchAlign);
}

// Pairs neighbours so that all pairs together have the most tokens in common.
void Brancher::pair(const Target& target) {
  const int32_t num_branches = count_of(branches_);
  const int64_t pairs = int64_t{num_branches} / 2 * target.num_kv_heads;  // at most
  if (!target.pairs_branches() || !target.fills_sms(pairs) || !few_others_) return;
  common_.assign(num_branches, 0);
  most_common_.assign(num_branches + 1, 0);
  for (int32_t g = 1; g < num_branches; ++g) {
    const int32_t tokens = common_tokens(g);
    if (tokens >= kLeastCommonTokens) common_[g] = tokens;
    most_common_[g + 1] = std::max(most_common_[g], most_common_[g - 1] + common_[g]);
  }
  for (int32_t g = num_branches - 1; g > 0; --g) {
    if (most_common_[g + 1] == most_common_[g]) continue;
    branches_[g].common = branches_[g - 1].common = common_[g];
    branches_[g].peer = g - 1;
    branches_[g - 1].peer = g;
    --g;
  }
}

// Calls visit(branch, first position, end) for the branches that take tokens of a node.
template <typename Visit>
void Brancher::for_each_branch(int32_t node, const Visit& visit) {
  const int32_t tokens = tree_->nodes[node].end - tree_->nodes[node].start;
  if (tokens == 0 || has_own_item(tokens)) return;
  const int32_t end = position_[node] + tree_->nodes[node].num_queries;
  for (int32_t at = position_[node]; at < end;) {
    const int32_t branch = branch_at_[at];
    const int32_t to = std::min(end, ends_[branch]);
    visit(branch, at, to);
    at = to;
  }
}

// Gives the branches their ranges of segments. Returns false if one has too many.
bool Brancher::count_segments() {
  for (int32_t i = 0; i < count_of(tree_->nodes); ++i) {
    for_each_branch(i, [&](int32_t g, int32_t, int32_t) { ++branches_[g].num_segments; });
  }
  int32_t total = 0;
  next_node_.resize(branches_.size());
  next_tail_.resize(branches_.size());
  for (int32_t g = 0; g < count_of(branches_); ++g) {
    Branch& branch = branches_[g];
    const int32_t num_nodes = branch.num_segments;
    branch.num_segments += tail_counts_[g];
    if (branch.num_segments > kBranchSegments) return false;
    branch.first_segment = total;
    total += branch.num_segments;
    branch.tails_first = g % 2 == 1 && branch.peer == kNoNode;
    next_node_[g] = branch.tails_first ? total - 1 : branch.first_segment;
    next_tail_[g] = branch.first_segment + (branch.tails_first ? 0 : num_nodes);
  }
  segments_.resize(total);
  return true;
}

void Brancher::list_nodes() {
  for (int32_t i = 0; i < count_of(tree_->nodes); ++i) {
    const PackNode& node = tree_->nodes[i];
    for_each_branch(i, [&](int32_t g, int32_t begin, int32_t end) {
      Branch& branch = branches_[g];
      const int32_t first = rank_[begin];
      const int32_t queries = rank_[end] - first;
      const int32_t tokens = node.end - node.start;
      segments_[next_node_[g]] = {
          order_[begin], node.start, tokens, tokens, first - branch.first_member, queries};
      next_node_[g] += branch.tails_first ? -1 : 1;
      branch.tokens += tokens;
      if (queries == branch.num_queries) branch.unmasked += tokens;
    });
  }
}

void Brancher::list_tails() {
  for (int32_t i = 0; i < count_of(order_); ++i) {
    const int32_t query = order_[i];
    const int32_t tail = tail_tokens(query);
    if (tail == 0) continue;
    Branch& branch = branches_[branch_at_[i]];
    segments_[next_tail_[branch_at_[i]]++] = {query,
                                              tree_->query_prefix[query],
                                              kDynamic,
                                              tail + headroom(tail),
                                              rank_[i] - branch.first_member,
                                              1};
    branch.tokens += tail;
  }
}

// Gives the branches their places in the snapshot's list. Returns false if they do not fit.
bool Brancher::place(const Target& target) {
  int64_t tokens = 0;
  for (Branch& branch : branches_) {
    branch.list_start = static_cast<int32_t>(tokens);
    for (int32_t i = 0; i < branch.num_segments; ++i) {
      tokens += segments_[branch.first_segment + i].room;
    }
    tokens = (tokens + kBranchAlign - 1) / kBranchAlign * kBranchAlign;
    if (tokens > target.max_branch_tokens) return false;
  }
  list_tokens_ = static_cast<int32_t>(tokens);
  return count_of(segments_) <= target.max_segments;
}

}  // namespace pat

// SPDX-License-Identifier: Apache-2.0
#include "radix_paths.h"

#include <algorithm>
#include <utility>

#include "../check.h"
#include "../count_of.h"

namespace py = pybind11;

namespace pat {

RadixPaths::RadixPaths(std::unique_ptr<NodeSource> source, int64_t most_read, int64_t most_nodes)
    : source_(std::move(source)),
      most_read_(static_cast<size_t>(most_read)),
      most_nodes_(static_cast<size_t>(most_nodes)) {
  PAT_CHECK(most_read > 0 && most_nodes > 0, "bounds of ", most_read, " nodes a read and ",
            most_nodes, " in all: must be positive");
  forget();
}

void RadixPaths::forget() {
  nodes_.clear();
  free_.clear();
  table_.clear();
  leaves_.clear();
  frontier_.clear();
  unmeasured_.clear();
  deepest_ = 0;
  nodes_.emplace_back();
  nodes_[kRoot].end = 0;
  nodes_[kRoot].parent = kNoNode;
}

void RadixPaths::read(const Handle* handles, size_t count, size_t num_queries, const Leaf& leaf,
                      PathTable& out) {
  PAT_CHECK(num_queries >= count, count, " requests in a batch of ", num_queries, " rows");
  try {
    try_read(handles, count, leaf);
  } catch (...) {
    forget();
    throw;
  }
  out.clear();
  num_unread_ = 0;
  for (size_t query = 0; query < count; ++query) {
    if (query_leaf_[query] != kNoNode) write(query_leaf_[query], handles[query][1], out);
    out.end_query();
  }
  for (size_t query = count; query < num_queries; ++query) out.end_query();
}

// Brings the tree up to date for a batch.
void RadixPaths::try_read(const Handle* handles, size_t count, const Leaf& leaf) {
  ++read_;
  num_missing_ = num_uncached_ = 0;
  named_.clear();
  query_leaf_.assign(count, kNoNode);
  const size_t room = std::min(most_read_, most_nodes_ - std::min(most_nodes_, num_nodes()));
  short_paths_ = true;
  std::vector<size_t> unknown;
  const auto count_query = [&](size_t query, int32_t index) {
    Node& node = at(index);
    if (node.named_read != read_) {
      node.named_read = read_;
      node.next_ends = 0;
      named_.push_back(index);
    }
    ++node.next_ends;
    query_leaf_[query] = index;
  };
  for (size_t query = 0; query < count; ++query) {
    const int64_t id = handles[query][0];
    if (id < 0) {
      ++num_missing_;
    } else if (handles[query][1] <= 0) {
      ++num_uncached_;
    } else if (const int32_t index = table_.find(id); index != kNoNode) {
      count_query(query, index);
    } else {
      unknown.push_back(query);
      short_paths_ = short_paths_ && static_cast<size_t>(handles[query][1]) <= room;
    }
  }
  // Nodes of requests that have left may be gone, so they are forgotten before the tree is read.
  count_leaves();
  for (const size_t query : unknown) {
    const int64_t id = handles[query][0];
    int32_t index = table_.find(id);
    if (index == kNoNode) {
      index = add(id, leaf(query, id));
      frontier_.push_back(index);
    }
    count_query(query, index);
  }
  count_leaves();
  parents_of_new_.clear();
  read_upwards(room);
  find_split();
  measure();
}

// Counts the queries on the nodes that this read has named so far, and releases the leaves that it
// has not named. Those that gain come first: what stays is not freed in between.
void RadixPaths::count_leaves() {
  for (const int32_t index : named_) {
    Node& node = at(index);
    if (node.next_ends <= node.ends) continue;
    if (node.ends == 0) leaves_.push_back(index);
    add_count(index, node.next_ends - std::exchange(node.ends, node.next_ends));
  }
  size_t kept = 0;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const int32_t index = leaves_[i];
    const int32_t wanted = at(index).named_read == read_ ? at(index).next_ends : 0;
    if (wanted > 0) leaves_[kept++] = index;
    if (wanted < at(index).ends) release(index, at(index).ends - wanted);
  }
  leaves_.resize(kept);
}

int32_t RadixPaths::add(int64_t id, py::object object) {
  int32_t index = count_of(nodes_);
  if (free_.empty()) {
    nodes_.emplace_back();
  } else {
    index = free_.back();
    free_.pop_back();
    at(index) = Node{};
  }
  at(index).id = id;
  at(index).object = std::move(object);
  at(index).born = read_;
  table_.find_or_add(id, index);
  unmeasured_.push_back(index);
  return index;
}

void RadixPaths::add_count(int32_t index, int32_t delta) {
  for (; index >= 0; index = at(index).parent) at(index).count += delta;
}

// Takes queries off a leaf and frees the nodes that no query stands on any more.
void RadixPaths::release(int32_t leaf, int32_t queries) {
  at(leaf).ends -= queries;
  for (int32_t index = leaf; index >= 0;) {
    Node& node = at(index);
    const int32_t parent = node.parent;
    node.count -= queries;
    if (node.count == 0 && index != kRoot) {
      if (parent >= 0) detach(index);
      table_.erase(node.id);
      node.object = py::object();
      node.parent = kFree;
      free_.push_back(index);
    }
    index = parent;
  }
}

// Puts a node, and what stands below it, under a parent.
void RadixPaths::link(int32_t index, int32_t parent) {
  Node& node = at(index);
  for (int32_t above = parent; above >= 0; above = at(above).parent) {
    PAT_CHECK(above != index, "node ", node.id,
              " is among its own ancestors: the nodes are no tree");
    at(above).count += node.count;
  }
  node.parent = parent;
  node.previous = kNoNode;
  node.next = at(parent).child;
  if (node.next != kNoNode) at(node.next).previous = index;
  at(parent).child = index;
}

void RadixPaths::unlink(int32_t index) {
  add_count(at(index).parent, -at(index).count);
  detach(index);
  at(index).parent = kUnread;
}

// Takes a node out of its parent's list of children.
void RadixPaths::detach(int32_t index) {
  const Node& node = at(index);
  if (node.previous != kNoNode) at(node.previous).next = node.next;
  if (node.next != kNoNode) at(node.next).previous = node.previous;
  if (at(node.parent).child == index) at(node.parent).child = node.next;
}

// Reads the parents of the frontier, theirs and so on, up to nodes that are known. All nodes of one
// level are asked for together. Stops where more than `most` would be read, or kept in all, and
// then leaves the frontier to the next read.
void RadixPaths::read_upwards(size_t most) {
  std::vector<NodeRef> asked;
  std::vector<NodeAbove> above;
  for (int32_t levels = 0; !frontier_.empty(); ++levels) {
    // Entries may have been freed, or be there twice, since a read that stopped.
    std::erase_if(frontier_, [&](int32_t index) { return at(index).parent != kUnread; });
    std::sort(frontier_.begin(), frontier_.end());
    frontier_.erase(std::unique(frontier_.begin(), frontier_.end()), frontier_.end());
    if (frontier_.size() > most) return;
    most = std::min(most - frontier_.size(), most_nodes_ - std::min(most_nodes_, num_nodes()));
    // A path takes less time in one call, unless most of it is known already.
    const bool whole = source_->gives_paths() && short_paths_ && levels >= kClimbed &&
                       deepest_ <= kClimbed * levels;
    asked.clear();
    for (const int32_t index : frontier_) asked.push_back({at(index).id, at(index).object.ptr()});
    if (!whole) source_->read(asked, above);
    const std::vector<int32_t> level = std::exchange(frontier_, {});
    for (size_t i = 0; i < level.size(); ++i) {
      if (!whole) {
        place(level[i], above[i]);
        continue;
      }
      source_->read_path(asked[i], above);
      if (above.empty()) above.emplace_back().root = true;
      int32_t index = level[i];
      for (size_t up = 0; at(index).parent == kUnread; ++up) {
        index = place(index, above[up]);
        most -= std::min<size_t>(most, 1);
      }
      std::erase_if(frontier_, [&](int32_t one) { return at(one).parent != kUnread; });
    }
  }
}

// Puts a node below the parent that was read for it, which is added if it is not known. Returns the
// parent.
int32_t RadixPaths::place(int32_t index, NodeAbove& above) {
  at(index).length = static_cast<int32_t>(above.length);
  int32_t parent = kRoot;
  if (!above.root) {
    parent = table_.find(above.parent);
    if (parent == kNoNode) {
      parent = add(above.parent, std::move(above.object));
      frontier_.push_back(parent);
    }
  }
  if (at(parent).born != read_) parents_of_new_.push_back(parent);
  link(index, parent);
  return parent;
}

// Under known parents that have got a new child: finds the child that was split for it, if any, and
// puts it under the new node.
void RadixPaths::find_split() {
  std::sort(parents_of_new_.begin(), parents_of_new_.end());
  parents_of_new_.erase(std::unique(parents_of_new_.begin(), parents_of_new_.end()),
                        parents_of_new_.end());
  std::vector<KnownNode> known;
  std::vector<int32_t> indices;
  std::vector<size_t> split;
  for (const int32_t parent : parents_of_new_) {
    for (int32_t child = at(parent).child; child != kNoNode; child = at(child).next) {
      const Node& node = at(child);
      if (node.born == read_) continue;
      known.push_back({{node.id, node.object.ptr()}, node.length, at(parent).object.ptr()});
      indices.push_back(child);
    }
  }
  if (known.empty()) return;
  source_->find_split(known, split);
  if (split.empty()) return;
  const std::vector<int32_t> unfinished = std::exchange(frontier_, {});
  for (const size_t i : split) {
    unlink(indices[i]);
    frontier_.push_back(indices[i]);
  }
  // What was split has to find its place at once: its path is known to the requests on it.
  read_upwards(SIZE_MAX);
  frontier_.insert(frontier_.end(), unfinished.begin(), unfinished.end());
}

// Sets the ends of new nodes whose paths have reached the root.
void RadixPaths::measure() {
  std::erase_if(unmeasured_, [&](int32_t index) {
    climbed_.clear();
    for (; at(index).end == kUnknown; index = at(index).parent) {
      Node& node = at(index);
      // Not read to the root, as this read has found before of a node above, or finds here.
      if (node.parent == kUnread || node.unread_read == read_) {
        for (const int32_t below : climbed_) at(below).unread_read = read_;
        return false;
      }
      if (node.parent == kFree) return true;
      climbed_.push_back(index);
    }
    for (size_t i = climbed_.size(); i-- > 0;) {
      Node& node = at(climbed_[i]);
      node.end = at(node.parent).end + node.length;
      node.depth = at(node.parent).depth + 1;
      deepest_ = std::max(deepest_, node.depth);
    }
    return true;
  });
}

// The lowest node on a leaf's path on which several queries stand, or kRoot.
int32_t RadixPaths::lowest_shared(int32_t leaf) {
  int32_t index = leaf;
  if (at(leaf).count > 1) return leaf;
  // Counts grow upwards, so that with `top` all below it have one query still.
  if (const int32_t top = at(leaf).top; top != kNoNode && at(top).count == 1) index = top;
  while (at(index).parent != kRoot && at(at(index).parent).count == 1) index = at(index).parent;
  at(leaf).top = index;
  return at(index).parent;
}

// The highest node with the same queries as a node.
int32_t RadixPaths::chain_top(int32_t index) {
  Node& lowest = at(index);
  if (lowest.chain_read != read_) {
    int32_t top = index;
    while (at(top).parent != kRoot && at(at(top).parent).count == lowest.count) {
      top = at(top).parent;
    }
    lowest.chain_read = read_;
    lowest.chain_top = top;
  }
  return lowest.chain_top;
}

// Writes a query's path, from the root on, as far as it is shared and below `limit` tokens.
void RadixPaths::write(int32_t leaf, int64_t limit, PathTable& out) {
  if (at(leaf).end == kUnknown) {
    ++num_unread_;
    return;
  }
  path_.clear();
  for (int32_t index = lowest_shared(leaf); index != kRoot;) {
    const int32_t above = at(chain_top(index)).parent;
    const int64_t start = at(above).end;
    const int64_t end = std::min<int64_t>(at(index).end, limit);
    if (start < end) path_.push_back({at(index).id, start, end});
    index = above;
  }
  for (size_t level = path_.size(); level-- > 0;) {
    out.add(path_[level].id, path_[level].start, path_[level].end);
  }
}

}  // namespace pat

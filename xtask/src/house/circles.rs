//! Circles in a graph: its strongly connected components of two nodes and more (Tarjan, 1972).

use std::collections::BTreeSet;

/// The circles of a graph of so many nodes. Nodes of a circle are in ascending order.
pub(super) fn find_circles(nodes: usize, edges: &BTreeSet<(usize, usize)>) -> Vec<Vec<usize>> {
    let mut search = Search {
        edges,
        order: vec![None; nodes],
        lowest: vec![0; nodes],
        stack: Vec::new(),
        is_on_stack: vec![false; nodes],
        visited: 0,
        circles: Vec::new(),
    };
    for node in 0..nodes {
        if search.order[node].is_none() {
            search.visit(node);
        }
    }
    search.circles
}

struct Search<'e> {
    edges: &'e BTreeSet<(usize, usize)>,
    /// When each node was first visited.
    order: Vec<Option<usize>>,
    /// The earliest visit that can be reached from each node.
    lowest: Vec<usize>,
    stack: Vec<usize>,
    is_on_stack: Vec<bool>,
    visited: usize,
    circles: Vec<Vec<usize>>,
}

impl Search<'_> {
    /// Goes as deep as the longest chain of imports in a crate: a few hundred files.
    fn visit(&mut self, node: usize) {
        (self.order[node], self.lowest[node]) = (Some(self.visited), self.visited);
        self.visited += 1;
        self.stack.push(node);
        self.is_on_stack[node] = true;
        let edges = self.edges;
        for &(_, next) in edges.range((node, 0)..(node + 1, 0)) {
            match self.order[next] {
                None => {
                    self.visit(next);
                    self.lowest[node] = self.lowest[node].min(self.lowest[next]);
                }
                Some(order) if self.is_on_stack[next] => {
                    self.lowest[node] = self.lowest[node].min(order);
                }
                Some(_) => {}
            }
        }
        if self.order[node] == Some(self.lowest[node]) {
            self.close_component(node);
        }
    }

    fn close_component(&mut self, first: usize) {
        let start = self.stack.iter().rposition(|node| *node == first);
        let mut component = self.stack.split_off(start.unwrap_or(0));
        for node in &component {
            self.is_on_stack[*node] = false;
        }
        component.sort_unstable();
        if component.len() > 1 {
            self.circles.push(component);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(nodes: usize, edges: &[(usize, usize)]) -> Vec<Vec<usize>> {
        let mut found = find_circles(nodes, &edges.iter().copied().collect());
        found.sort();
        found
    }

    #[test]
    fn chain_has_no_circle() {
        assert!(circles(4, &[(0, 1), (1, 2), (0, 2), (2, 3)]).is_empty());
    }

    #[test]
    fn circles_that_share_a_node_are_one() {
        let edges = [(0, 1), (1, 0), (1, 2), (2, 1), (3, 0), (4, 5), (5, 4)];
        assert_eq!(circles(6, &edges), [vec![0, 1, 2], vec![4, 5]]);
    }
}

//! What a list of the catalog means for the nodes that were known before.

use std::collections::BTreeSet;

use bafs_proto::ids::ServerId;

use crate::event::NodeInfo;
use crate::policy::View;

/// What the entry of a node in a list of the catalog means.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ListedNode {
    /// Nothing new.
    Known,
    /// It is there, and is new, has changed, or is back.
    Present,
    /// The same, and the node that was at its address before is lost.
    Replaces(ServerId),
}

/// Judges an entry of a list of these nodes.
pub(crate) fn judge_entry(
    view: View<'_>,
    node: &NodeInfo,
    listed: &BTreeSet<ServerId>,
) -> ListedNode {
    if view.fleet.is_as_seen(node) {
        return ListedNode::Known;
    }
    // Of two that are told together nobody knows who came later, or has moved: the catalog
    // misses one soon.
    let other = view.fleet.at_address_of(node);
    match other.filter(|other| !listed.contains(other)) {
        None => ListedNode::Present,
        // The catalog lists who was there before for a while yet.
        Some(_) if view.is_lost(node.id) => ListedNode::Known,
        Some(other) => ListedNode::Replaces(other),
    }
}

/// What it means that a list of the catalog lacks a node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum UnlistedNode {
    /// Nothing new.
    Known,
    /// It may come back.
    Missing,
    /// It has left, as it had said.
    Left,
}

/// Judges a node that a list lacks.
pub(crate) fn judge_unlisted(view: View<'_>, server: ServerId) -> UnlistedNode {
    if !view.is_listed(server) {
        UnlistedNode::Known
    } else if view.fleet.is_draining(server) {
        UnlistedNode::Left
    } else {
        UnlistedNode::Missing
    }
}

/// Whether a node has been missing from lists for too long.
pub(crate) fn is_missing_too_long(view: View<'_>, server: ServerId) -> bool {
    let since = view.fleet.get(server).and_then(|node| node.missing_since);
    since.is_some_and(|since| view.now.ms_since(since) >= view.settings.node_timeout_ms)
}

//! Where each pipeline that has begun has its data, and which nodes need room on others.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;

use crate::space::Space;

/// Where pipelines are at home, and which borrow room of others.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Claims {
    /// The node on which each pipeline created scratch volumes last.
    pub(crate) home: BTreeMap<u32, ServerId>,
    /// Nodes whose pipelines need room on another one, with the most that one of them needs.
    pub(crate) borrowing: BTreeMap<ServerId, Space>,
}

//! Where each pipeline that has begun has its data, and which nodes need room on others.

use bafs_proto::ids::ServerId;

use crate::space::Space;
use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::Table;

/// Where pipelines are at home, and which borrow room of others.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Claims {
    /// The node on which each pipeline created scratch volumes last.
    pub(crate) home: Table<u32, ServerId>,
    /// Nodes whose pipelines need room on another one, with the most that one of them needs.
    pub(crate) borrowing: Table<ServerId, Space>,
}

whole_rows!(Space);

kept! {
    /// What was written of where pipelines are at home.
    ClaimChanges of Claims;
    values {}
    tables { home: Table<u32, ServerId>, borrowing: Table<ServerId, Space> }
    indexed {}
    parts {}
    rebuilt {}
}

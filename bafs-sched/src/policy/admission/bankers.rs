//! The banker's check of Dijkstra, node by node (`bankers_check.rs`).

use super::{Admission, Policy};

/// Admits a start when every pipeline that has begun can still end.
#[derive(Debug)]
pub(super) struct Bankers;

impl Policy for Bankers {
    fn name(&self) -> &'static str {
        "bankers"
    }

    fn summary(&self) -> &'static str {
        "a job starts when every started pipeline can still end with the space that is left"
    }
}

impl Admission for Bankers {}

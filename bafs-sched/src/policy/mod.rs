//! The rules of the scheduler by family: what they see, what a family is, and which there are.
//!
//! A policy is a type without state behind the trait of its family. It sees a read-only `View`
//! and answers with plain data, often a `Decision`; `transition/commit.rs` carries that out. Each
//! has a name that a user can give (`--policy placement=capacity`), so the simulator and a run use
//! the very same code.
//!
//! What several families must agree on is asked in `start_search.rs`; the loops that ask and commit
//! are in `transition/`.
//!
//! | Family | Decides |
//! |---|---|
//! | `admission` | whether work may begin: feasibility, limits, the banker's check, deadlock |
//! | `order` | which ready job goes first |
//! | `placement` | on which nodes a job is tried |
//! | `cache_space` | how much of a cache each node holds |
//! | `replication` | whether a scratch volume is copied to another node |
//! | `failure` | whether a node is to blame for failures |
//! | `strategy` | whether another allocation strategy is followed |
//!
//! To add one: write its module, and name it in the `mod.rs` of its family
//! (`docs/contributing/policy.md`).

pub(crate) mod admission;
pub(crate) mod cache_space;
pub(crate) mod failure;
pub mod order;
pub(crate) mod placement;
mod registry;
pub(crate) mod replication;
pub(crate) mod start_search;
pub(crate) mod strategy;
mod view;

use std::fmt::Debug;

pub(crate) use registry::PolicySet;
pub use registry::{PolicyDescription, list_policies};
pub(crate) use view::View;

/// What all policies have: a name, and what they do in a sentence.
pub(crate) trait Policy: Debug + Send + Sync {
    /// The name that a user gives, in small letters with hyphens; unique in its family.
    fn name(&self) -> &'static str;

    /// One sentence for `bafs policies`, without a full stop.
    fn summary(&self) -> &'static str;
}

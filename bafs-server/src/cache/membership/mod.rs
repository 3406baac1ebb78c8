//! Part 3 of a generation: the nodes that share the cache, and which of them is the primary node of
//! which blocks. Reads no block.
//!
//! | File | Content |
//! |---|---|
//! | `members.rs` | the membership: what the other parts call |
//! | `peers.rs` | what this server believes of other servers |
//! | `placement_view.rs` | the primary node of each extent, now and before |
//! | `joining.rs` | how members announce themselves, and what they tell a new one |
//! | `classes.rs` | reclassifies blocks when members or pins change |

pub(crate) mod classes;
pub(crate) mod joining;
pub(crate) mod members;
pub(crate) mod peers;
pub(crate) mod placement_view;

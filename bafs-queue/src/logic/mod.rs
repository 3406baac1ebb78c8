//! What the queue decides; pure.

pub mod accountant;
pub mod division;
pub mod order;
pub mod queue_state;
pub mod records;
mod refusal;

pub use refusal::{QueueRefusal, WaitReason};

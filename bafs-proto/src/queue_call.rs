//! Calls to the queue of a service. What they say is JSON in the body, in the words of the queue:
//! this crate knows who asks, and no more.

use serde::{Deserialize, Serialize};

/// Asks the queue of a service. The body of the request is what is asked, that of the reply the
/// answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallQueue {
    /// The user, whom the token must name; nobody for an operator, who has all rights.
    pub user: Option<String>,
}

/// The answer is in the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueAnswer {}

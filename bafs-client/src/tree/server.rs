//! The server that holds a volume: where it is, and what calls to it need. Calls nothing.

use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;

/// How to call the server that holds a volume.
#[derive(Debug, Clone)]
pub struct Server {
    /// Connections of this process.
    pub pool: Pool,
    /// Where it is, `host:port`.
    pub address: String,
    /// Capability for the volume.
    pub token: Token,
    /// Deadline of each operation, in milliseconds.
    pub op_deadline_ms: u64,
}

impl Server {
    /// The deadline of an operation that starts now.
    pub fn deadline(&self) -> Deadline {
        Deadline::after_ms(self.op_deadline_ms)
    }
}

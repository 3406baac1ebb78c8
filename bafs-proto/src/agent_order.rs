//! What a node and the process that starts its agents say to each other, as JSON in packets.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Node to spawner: start an agent. Its standard input, output and error come with the packet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AgentOrder {
    /// Directory for the temporary files of the job.
    pub temporary_directory: PathBuf,
    /// Memory that processes of the job may share by name, in bytes.
    pub shared_memory_bytes: u64,
    /// How the names of the files with the job's output begin.
    pub output_prefix: PathBuf,
    /// The control group in which the job starts, if the node has made one for it.
    #[serde(default)]
    pub control_group: Option<PathBuf>,
}

/// Spawner to node: the agent runs. A descriptor of its process comes with the packet.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct AgentStarted {
    /// Number of its process.
    pub pid: u32,
}

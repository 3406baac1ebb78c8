//! What the user may set about a run, with defaults and their reasons. Holds no state.

use serde::{Deserialize, Serialize};

use super::checkpoint::CheckpointPolicy;
use super::guide::Guide;
use super::rules::Rules;

/// Where jobs find their data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Io {
    /// In volumes near them.
    #[default]
    Volumes,
    /// Batch data in caches near them, private data at home: for comparison.
    CachesOnly,
    /// At home; nothing is cached.
    Remote,
}

/// How a workflow is run. Kept in the journal, so that a restart decides alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Where jobs find their data.
    pub io: Io,
    /// The person whose run it is, where nodes are shared with other runs: each asks the nodes to
    /// keep a part for it. Without one the run takes what it finds.
    pub user: Option<String>,
    /// What may be allocated at once, when the planner chose a strategy; as much as fits without.
    pub rules: Option<Rules>,
    /// What the scheduler needs to know to choose a strategy by itself, and to change it.
    pub guide: Option<Guide>,
    /// When volumes are copied to another node.
    pub checkpoint: CheckpointPolicy,
    /// Space of each node that stays unused, in thousandths: cooperative caches are never spread
    /// quite evenly.
    pub slack_permille: u32,
    /// A server that is missing in the catalog for so long is lost, in milliseconds. Adverts
    /// vanish after 4,000 ms.
    pub lost_after_ms: u64,
    /// Nodes may take so long to appear before the workflow fails, in milliseconds.
    pub nodes_wait_ms: u64,
    /// Nodes may appear one after the other: whether they are enough is judged so long after the
    /// first one, in milliseconds.
    pub settle_ms: u64,
    /// A workflow that can do nothing waits so long for space before it fails, in milliseconds.
    pub stuck_wait_ms: u64,
    /// A volume is deleted by its server so long after the last sign of interest, in milliseconds.
    pub volume_lifetime_ms: u64,
    /// After so many failures of the environment a job is held back as failed.
    pub environment_faults_max: u32,
    /// A node with so many failures of the environment in a row, while others have none, is set
    /// aside.
    pub node_faults_max: u32,
    /// A job is held back as failed when so many nodes in a row, not all the same, were lost while
    /// it ran, and most of all that were lost; on few nodes, where chance does that, up to twice as
    /// many.
    pub killed_nodes_max: u32,
    /// How long a node is set aside, in milliseconds.
    pub aside_ms: u64,
    /// First pause before something is tried again, in milliseconds; doubles each time.
    pub pause_ms_min: u64,
    /// Longest pause before something is tried again, in milliseconds.
    pub pause_ms_max: u64,
    /// A finished file is tried to be sent home for so long after the first failure, in
    /// milliseconds; then its volume is kept for the user.
    pub extract_wait_ms: u64,
    /// A volume that holds results is deleted by its server so long after the last sign of
    /// interest, in milliseconds: longer than others, as nobody has them yet.
    pub result_lifetime_ms: u64,
    /// Deleting what is left may take so long at the end, in milliseconds; after that the servers
    /// delete it by themselves when its lifetime ends.
    pub cleanup_ms: u64,
    /// Deadline of each remote operation of a job, in milliseconds.
    pub op_deadline_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            io: Io::Volumes,
            user: None,
            rules: None,
            guide: None,
            checkpoint: CheckpointPolicy::default(),
            slack_permille: 20,
            lost_after_ms: 6_000,
            nodes_wait_ms: 60_000,
            settle_ms: 5_000,
            stuck_wait_ms: 30_000,
            volume_lifetime_ms: 600_000,
            environment_faults_max: 10,
            node_faults_max: 3,
            killed_nodes_max: 3,
            aside_ms: 60_000,
            pause_ms_min: 250,
            pause_ms_max: 10_000,
            extract_wait_ms: 12 * 3_600_000,
            result_lifetime_ms: 3 * 24 * 3_600_000,
            cleanup_ms: 20_000,
            op_deadline_ms: 30_000,
        }
    }
}

impl Settings {
    /// Whether private data are read and written at home.
    pub(crate) fn is_private_at_home(&self) -> bool {
        self.io != Io::Volumes
    }

    /// Whether batch data are read at home each time.
    pub(super) fn caches_nothing(&self) -> bool {
        self.io == Io::Remote
    }

    /// The pause before try number `tries` + 1, in milliseconds.
    pub(super) fn pause_ms(&self, tries: u32) -> u64 {
        let doublings = tries.saturating_sub(1).min(20);
        (self.pause_ms_min << doublings).min(self.pause_ms_max)
    }
}

//! What the user may set about a run, with defaults and their reasons. Holds no state.

use serde::{Deserialize, Serialize};

use crate::policy_names::PolicyNames;
use crate::state::limits::AllocationRules;
use crate::strategy_selector::StrategySelectorConfig;

/// Where jobs find their data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum IoMode {
    /// In volumes near them.
    #[default]
    Volumes,
    /// Batch data in caches near them, private data at home: for comparison.
    CachesOnly,
    /// At home; nothing is cached.
    Remote,
}

/// How long the nodes of a run stay, which decides what a user can do about their disks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClusterLifetime {
    /// Longer than the run.
    #[default]
    BeyondRun,
    /// As long as the run: `bafs run --local` starts them, and the next run has others.
    OneRun,
}

/// How a workflow is run. Kept in the journal, so that a restart decides alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Where jobs find their data.
    pub io: IoMode,
    /// The person whose run it is, where nodes are shared with other runs: each asks the nodes to
    /// keep a part for it. Without one the run takes what it finds.
    pub user: Option<String>,
    /// What may be allocated at once, when the planner chose a strategy; as much as fits without.
    pub allocation_rules: Option<AllocationRules>,
    /// What the scheduler needs to know to choose a strategy by itself, and to change it.
    pub strategy_selector: Option<StrategySelectorConfig>,
    /// The policies that the user named.
    pub policies: PolicyNames,
    /// Whether a refusal of what only a plan makes possible says so.
    pub suggests_plan: bool,
    /// How long the nodes stay.
    pub cluster: ClusterLifetime,
    /// Space of each node that stays unused, in thousandths: cooperative caches are never spread
    /// quite evenly.
    pub slack_permille: u32,
    /// A server that is missing in the catalog for so long is lost, in milliseconds. Adverts
    /// vanish after 4,000 ms.
    pub node_timeout_ms: u64,
    /// Nodes may take so long to appear before the workflow fails, in milliseconds.
    pub nodes_timeout_ms: u64,
    /// Nodes may appear one after the other: whether they are enough is judged so long after the
    /// first one, in milliseconds.
    pub fleet_settle_ms: u64,
    /// A workflow that can do nothing waits so long for space before it fails, in milliseconds.
    pub space_timeout_ms: u64,
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
    pub quarantine_ms: u64,
    /// First pause before something is tried again, in milliseconds; doubles each time.
    pub retry_pause_ms_min: u64,
    /// Longest pause before something is tried again, in milliseconds.
    pub retry_pause_ms_max: u64,
    /// A finished file is tried to be sent home for so long after the first failure, in
    /// milliseconds; then its volume is kept for the user.
    pub extract_timeout_ms: u64,
    /// A volume that holds results is deleted by its server so long after the last sign of
    /// interest, in milliseconds: longer than others, as nobody has them yet.
    pub result_lifetime_ms: u64,
    /// Deleting what is left may take so long at the end, in milliseconds; after that the servers
    /// delete it by themselves when its lifetime ends.
    pub cleanup_timeout_ms: u64,
    /// Deadline of each remote operation of a job, in milliseconds.
    pub operation_timeout_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            io: IoMode::Volumes,
            user: None,
            allocation_rules: None,
            strategy_selector: None,
            policies: PolicyNames::default(),
            suggests_plan: true,
            cluster: ClusterLifetime::default(),
            slack_permille: 20,
            node_timeout_ms: 6_000,
            nodes_timeout_ms: 60_000,
            fleet_settle_ms: 5_000,
            space_timeout_ms: 30_000,
            volume_lifetime_ms: 600_000,
            environment_faults_max: 10,
            node_faults_max: 3,
            killed_nodes_max: 3,
            quarantine_ms: 60_000,
            retry_pause_ms_min: 250,
            retry_pause_ms_max: 10_000,
            extract_timeout_ms: 12 * 3_600_000,
            result_lifetime_ms: 3 * 24 * 3_600_000,
            cleanup_timeout_ms: 20_000,
            operation_timeout_ms: 30_000,
        }
    }
}

impl Settings {
    /// Whether private data are read and written at home.
    pub(crate) fn has_private_data_at_home(&self) -> bool {
        self.io != IoMode::Volumes
    }

    /// Whether batch data are read at home each time.
    pub(crate) fn caches_nothing(&self) -> bool {
        self.io == IoMode::Remote
    }

    /// The pause before try number `tries` + 1, in milliseconds.
    pub(crate) fn pause_ms(&self, tries: u32) -> u64 {
        let doublings = tries.saturating_sub(1).min(20);
        (self.retry_pause_ms_min << doublings).min(self.retry_pause_ms_max)
    }
}

//! What is simulated: a workflow, an environment, a policy of the scheduler, and a seed. Runs
//! nothing.

use std::fmt;

use crate::logic::{CheckpointPolicy, Guide, Io, Settings};
use crate::planner::{Environment, Shape, Strategy};

use super::load::Load;

/// How the scheduler allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Policy {
    /// By need alone, as it does without a plan.
    Need,
    /// By an allocation strategy.
    Strategy(Strategy),
    /// By the strategy that the scheduler chooses, and by others when they are better for the rest.
    Guided,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Need => f.pad("need"),
            Self::Strategy(strategy) => strategy.fmt(f),
            Self::Guided => f.pad("guided"),
        }
    }
}

/// What a simulation needs to know beside the workflow.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    /// The nodes and their links.
    pub environment: Environment,
    /// How the scheduler allocates.
    pub policy: Policy,
    /// What jobs do.
    pub load: Load,
    /// When scratch volumes are copied to other nodes.
    pub checkpoint: CheckpointPolicy,
    /// Of everything that is random.
    pub seed: u64,
    /// Whether to keep what happened when.
    pub is_recorded: bool,
}

impl Scenario {
    /// The settings of the scheduler under this policy, for a workload of this shape. Nodes are
    /// filled to the last byte, as the planner counts.
    pub fn settings(&self, shape: &Shape) -> Settings {
        let rules = match self.policy {
            Policy::Need | Policy::Guided | Policy::Strategy(Strategy::Remote) => None,
            Policy::Strategy(strategy) => {
                let allocation = strategy.allocate(shape, &self.environment);
                Some(allocation.rules())
            }
        };
        let is_remote = self.policy == Policy::Strategy(Strategy::Remote);
        Settings {
            io: if is_remote { Io::Remote } else { Io::Volumes },
            rules,
            guide: (self.policy == Policy::Guided).then(|| self.guide(shape)),
            checkpoint: self.checkpoint,
            slack_permille: 0,
            // Nodes are away for a while after a failure, and then it goes on.
            stuck_wait_ms: 100 * 1_000 * self.environment.restart_s,
            nodes_wait_ms: 100 * 1_000 * self.environment.restart_s,
            environment_faults_max: u32::MAX,
            ..Settings::default()
        }
    }

    fn guide(&self, shape: &Shape) -> Guide {
        Guide {
            home_bytes_per_s: self.environment.home_bytes_per_s,
            local_bytes_per_s: self.environment.local_bytes_per_s,
            mtbf_s: self.environment.mtbf_s,
            variability_ppm: match &self.load {
                Load::Declared { variability_ppm } => *variability_ppm,
                Load::Measured(_) => (shape.variability * 1e6).round() as u64,
            },
        }
    }
}

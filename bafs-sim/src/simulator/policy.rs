//! The input of a simulation: a workflow, an environment, a policy of the scheduler, and a seed.
//! Runs nothing.

use std::fmt;

use bafs_sched::{
    AllocationRules, IoMode, JobStartOrder, PolicyNames, Settings, StrategySelectorConfig,
};

use crate::planner::{Environment, Shape, SimulatedPlan, Strategy, StrategyAllocation};

use super::load::LoadModel;

/// Attempts for each job: a run that finishes needs far fewer.
const ATTEMPTS_PER_JOB_MAX: u32 = 100;

/// Records that may be examined until the next job finishes: some seconds' worth.
const WASTED_RECORDS_MAX: u64 = 200_000_000;

/// How the scheduler allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Policy {
    /// By need alone, as it does without a plan.
    Need,
    /// In an order, as much at once as fits: for comparison.
    Order(JobStartOrder),
    /// By an allocation strategy.
    Strategy(Strategy),
    /// By the strategy that the scheduler chooses, and by others when they are better for the rest.
    Adaptive,
}

impl From<Strategy> for Policy {
    fn from(strategy: Strategy) -> Self {
        match strategy {
            Strategy::Need => Self::Need,
            planned => Self::Strategy(planned),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Need | Self::Order(JobStartOrder::Need) => f.pad("need"),
            Self::Order(JobStartOrder::BreadthFirst) => f.pad("breadth-first"),
            Self::Order(JobStartOrder::DepthFirst) => f.pad("depth-first"),
            Self::Strategy(strategy) => strategy.fmt(f),
            Self::Adaptive => f.pad("adaptive"),
        }
    }
}

/// Conditions of a simulation: the environment, the policy, the loads and the seed.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    /// The nodes and their links.
    pub environment: Environment,
    /// How the scheduler allocates.
    pub policy: Policy,
    /// The load of jobs.
    pub load: LoadModel,
    /// The other policies of the scheduler.
    pub policies: PolicyNames,
    /// Whether the scheduler suggests a plan where only that would fit.
    pub suggests_plan: bool,
    /// The scheduler's slack on each node, in thousandths. The planner counts without.
    pub slack_permille: u32,
    /// Failures beside those that the environment draws: when, in microseconds, and the position of
    /// the node. Its server ends and loses its data, while its machine runs on.
    pub failures: Vec<(u64, u32)>,
    /// Executions and node failures for each job after which the run is stopped.
    pub attempts_per_job_max: u32,
    /// The run is stopped after so many examined records.
    pub records_examined_max: u64,
    /// Records that may be examined without a further finished job, besides some for each job and
    /// node, before the run is stopped.
    pub wasted_records_max: u64,
    /// Earlier simulations, for a scheduler that plans by itself.
    pub simulated_plan: Option<SimulatedPlan>,
    /// Of everything that is random.
    pub seed: u64,
    /// Whether to record the history.
    pub is_recorded: bool,
}

impl Scenario {
    /// As the planner sees things: nodes are filled to the last byte, nothing is copied, and
    /// nothing but the totals is kept.
    pub fn new(environment: Environment, policy: Policy, load: LoadModel, seed: u64) -> Self {
        Self {
            environment,
            policy,
            load,
            policies: PolicyNames::default().with("replication", "never"),
            suggests_plan: true,
            slack_permille: 0,
            failures: Vec::new(),
            attempts_per_job_max: ATTEMPTS_PER_JOB_MAX,
            records_examined_max: u64::MAX,
            wasted_records_max: WASTED_RECORDS_MAX,
            simulated_plan: None,
            seed,
            is_recorded: false,
        }
    }

    /// The settings of the scheduler under this policy, for a workload of this shape.
    pub fn settings(&self, shape: &Shape) -> Settings {
        let rules = match self.policy {
            Policy::Need | Policy::Adaptive | Policy::Strategy(Strategy::Remote) => None,
            Policy::Order(order) => AllocationRules::with_order(order),
            Policy::Strategy(strategy) => {
                let allocation = strategy.plan_allocation(shape, &self.environment);
                allocation.allocation_rules(shape)
            }
        };
        let is_remote = self.policy == Policy::Strategy(Strategy::Remote);
        let usual = Settings::default();
        let classes = self.environment.nodes.iter();
        let last_from_s = classes.map(|class| class.arrival_s).max().unwrap_or(0);
        let last_from_ms = last_from_s.saturating_mul(1_000);
        // Nodes are absent for a while after a failure, and then continue; some have yet to arrive.
        let away_ms = self.environment.restart_s.saturating_mul(100 * 1_000);
        let wait_ms = away_ms.saturating_add(last_from_ms);
        Settings {
            io: if is_remote {
                IoMode::Remote
            } else {
                IoMode::Volumes
            },
            allocation_rules: rules,
            strategy_selector: (self.policy == Policy::Adaptive)
                .then(|| self.selector_config(shape)),
            policies: self.policies.clone(),
            suggests_plan: self.suggests_plan,
            slack_permille: self.slack_permille,
            nodes_timeout_ms: wait_ms,
            fleet_settle_ms: usual.fleet_settle_ms.saturating_add(last_from_ms),
            space_timeout_ms: wait_ms,
            environment_faults_max: u32::MAX,
            ..usual
        }
    }

    fn selector_config(&self, shape: &Shape) -> StrategySelectorConfig {
        StrategySelectorConfig {
            home_bytes_per_s: self.environment.home_bytes_per_s,
            local_bytes_per_s: self.environment.local_bytes_per_s,
            mtbf_s: self.environment.mtbf_s,
            restart_s: self.environment.restart_s,
            variability_ppm: match &self.load {
                LoadModel::Declared { variability_ppm } => *variability_ppm,
                LoadModel::Measured(_) => (shape.variability * 1e6).round() as u64,
            },
            simulated_plan: self.simulated_plan.clone(),
        }
    }
}

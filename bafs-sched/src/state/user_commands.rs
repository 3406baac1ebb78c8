//! What users asked of pipelines.

use std::collections::BTreeMap;

use crate::state::jobs::Graph;
use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::{Keys, Table};

/// All wishes so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Steering {
    pub(crate) count: u64,
    pub(crate) priority: Table<u32, i32>,
    pub(crate) given_up: Keys<u32>,
    /// Pipelines of which no job starts.
    pub(crate) held: Keys<u32>,
    /// Whether no job of any pipeline starts.
    pub(crate) is_run_held: bool,
}

whole_rows!(i32);

kept! {
    /// What was written of what users asked.
    SteeringChanges of Steering;
    values { count: u64, is_run_held: bool }
    tables { priority: Table<u32, i32>, given_up: Keys<u32>, held: Keys<u32> }
    indexed {}
    parts {}
    rebuilt {}
}

impl Steering {
    /// What the workflow itself says.
    pub(crate) fn new(graph: &Graph) -> Self {
        let mut priority: BTreeMap<u32, i32> = BTreeMap::new();
        for job in graph.job_indexes() {
            let own = graph.workflow.job(job).priority;
            // Of pipelines where no job has one there may be a million.
            if own > 0 {
                let highest = priority.entry(graph.pipeline(job)).or_default();
                *highest = own.max(*highest);
            } else if own < 0 && graph.pipeline(job) == job.0 {
                let jobs = graph.members(job.0);
                let jobs = jobs.map(|job| graph.workflow.job(job).priority);
                priority.extend(jobs.max().map(|highest| (job.0, highest)));
            }
        }
        Self {
            priority: priority.into(),
            ..Self::default()
        }
    }
}

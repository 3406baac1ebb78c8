//! Which users of a volume count for rules: those that are near, those whose pipelines are under
//! way, those whose pipelines were never rolled back. Decides nothing.

use bafs_workflow::JobIndex;
use serde::{Deserialize, Serialize};

use crate::state::jobs::{Graph, JobState, adjust};
use crate::state::recorded::whole_rows;

/// What rules know of a pipeline.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Standing {
    /// It is under way.
    is_inside: bool,
    /// Something of it was done in vain.
    is_rolled_back: bool,
}

whole_rows!(Standing);

/// Whether a job counts among the users of its volumes, in each of their counts for rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counted {
    near: bool,
    near_outside: bool,
    steady: bool,
    steady_outside: bool,
}

impl Counted {
    pub(crate) const NOWHERE: Self = Self {
        near: false,
        near_outside: false,
        steady: false,
        steady_outside: false,
    };

    pub(crate) fn of(state: JobState, standing: Standing) -> Self {
        let (near, is_outside) = (state.is_near(), !standing.is_inside);
        let steady = !state.is_final() && !standing.is_rolled_back;
        Self {
            near,
            near_outside: near && is_outside,
            steady,
            steady_outside: steady && is_outside,
        }
    }
}

impl Graph {
    /// A pipeline is under way from now on, or not any more.
    pub(crate) fn set_inside(&mut self, pipeline: u32, is_inside: bool) {
        let before = self.standing[pipeline as usize];
        let standing = Standing {
            is_inside,
            ..before
        };
        self.change_standing(pipeline, standing);
    }

    /// Something of a pipeline was done in vain: batch volumes are not kept for it.
    pub(crate) fn set_rolled_back(&mut self, pipeline: u32) {
        let standing = Standing {
            is_rolled_back: true,
            ..self.standing[pipeline as usize]
        };
        self.change_standing(pipeline, standing);
    }

    /// Whether nothing of a job's pipeline was done in vain, as far as rules know.
    pub(crate) fn is_steady(&self, job: JobIndex) -> bool {
        !self.standing[self.pipeline(job) as usize].is_rolled_back
    }

    pub(crate) fn change_standing(&mut self, pipeline: u32, standing: Standing) {
        let before = self.standing[pipeline as usize];
        if before == standing {
            return;
        }
        self.standing[pipeline as usize] = standing;
        for job in self.members(pipeline).collect::<Vec<_>>() {
            let state = self.state(job);
            self.recount(
                job,
                Counted::of(state, before),
                Counted::of(state, standing),
            );
        }
    }

    /// A job counts otherwise among the users of its volumes from now on.
    pub(crate) fn recount(&mut self, job: JobIndex, before: Counted, after: Counted) {
        if before == after {
            return;
        }
        for (volume, _) in self.mounted(job) {
            let node = self.volume_counts_mut(volume);
            adjust(&mut node.users_near, before.near, after.near);
            adjust(
                &mut node.users_outside,
                before.near_outside,
                after.near_outside,
            );
            adjust(&mut node.users_steady, before.steady, after.steady);
            adjust(
                &mut node.steady_outside,
                before.steady_outside,
                after.steady_outside,
            );
        }
    }
}

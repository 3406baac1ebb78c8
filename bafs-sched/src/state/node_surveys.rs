//! What was found on nodes, remembered while nothing changes there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use bafs_proto::ids::ServerId;

use crate::space::Space;

/// What there is on nodes, remembered while nothing comes, goes or begins there: a search for a
/// place looks at the same nodes for one job after the other, and room for batch volumes is sought
/// on all nodes of a group at each start. Part of no state: forgetting it changes nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Surveys {
    /// Nodes that came and went.
    pub(crate) fleet: (u64, u64),
    pub(crate) of: SurveyIndex,
}

/// What was found on each node. Behind a lock, as whoever reads the state may fill it.
#[derive(Debug, Default)]
pub(crate) struct SurveyIndex(Mutex<BTreeMap<ServerId, Arc<Survey>>>);

impl SurveyIndex {
    pub(crate) fn get_or_insert(
        &self,
        server: ServerId,
        look: impl FnOnce() -> Arc<Survey>,
    ) -> Arc<Survey> {
        if let Some(known) = self.lock().get(&server) {
            return known.clone();
        }
        let found = look();
        self.lock().insert(server, found.clone());
        found
    }

    pub(crate) fn remove(&mut self, server: ServerId) {
        self.lock().remove(&server);
    }

    pub(crate) fn clear(&mut self) {
        self.lock().clear();
    }

    /// All that are known.
    pub(crate) fn known(&self) -> Vec<(ServerId, Arc<Survey>)> {
        let all = self.lock();
        let all = all.iter();
        all.map(|(server, survey)| (*server, survey.clone()))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ServerId, Arc<Survey>>> {
        self.0.lock().expect("nobody panics while it is locked")
    }
}

impl Clone for SurveyIndex {
    fn clone(&self) -> Self {
        Self(Mutex::new(self.lock().clone()))
    }
}

impl PartialEq for Surveys {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// What there is on a node, whoever starts next.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Survey {
    /// What goes without any further start.
    pub(crate) leaving: Space,
    /// What caches there have beyond the least part, which is in `leaving`.
    pub(crate) beyond: Space,
    /// What pipelines have, at home there or not.
    pub(crate) held: BTreeMap<u32, Space>,
    /// What must be free for the pipelines at home there to end, once somebody asked.
    pub(crate) to_end: OnceLock<Space>,
}

//! What there is on each node, whoever starts next: an index over the state, filled when somebody
//! asks, of which the changes of the state take out what they concern.

use std::sync::Arc;

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::state::cache_parts::{beyond_least, floor};
use crate::state::node_surveys::Survey;
use crate::state::planned_volumes::Create;
use crate::state::scheduler_state::State;
use crate::state::volumes::InstanceState;

impl State {
    /// Whether a volume on this node goes without any further start once `job` has started.
    pub(crate) fn lets_go(&self, job: JobIndex, server: ServerId) -> bool {
        let mounts = self.graph.workflow.job(job).mounts.iter();
        let mut here = mounts
            .map(|mount| mount.volume)
            .filter(|volume| !self.graph.volume(*volume).is_cache)
            .filter(|volume| self.volumes.live_at(*volume, Some(server)).is_some());
        here.any(|volume| self.is_leaving(volume, Some(job)))
    }

    /// Whether a volume goes without any further start, perhaps but for one.
    pub(crate) fn is_leaving(&self, volume: VolumeIndex, starting: Option<JobIndex>) -> bool {
        let users = &self.graph.workflow.volume(volume).users;
        let mut users = users.iter();
        users.all(|user| starting == Some(*user) || self.graph.state(*user).has_begun())
    }

    /// What there is on a node. Kept while nothing changes: whoever asks often has the changes
    /// taken out before ([`Self::refresh_surveys`]), else each question looks anew.
    pub(crate) fn survey(&self, server: ServerId) -> Arc<Survey> {
        let is_current = self.volumes.changed.is_empty()
            && self.graph.begun.is_empty()
            && self.surveys.fleet == (self.fleet.alive, self.fleet.lost);
        let look = || Arc::new(self.look(server, None));
        match is_current {
            true => self.surveys.of.get_or_insert(server, look),
            false => look(),
        }
    }

    /// Takes out what was found on nodes where something changed since.
    pub(crate) fn refresh_surveys(&mut self) {
        match self.changed_nodes() {
            Some(servers) => servers.iter().for_each(|it| self.surveys.of.remove(*it)),
            None => self.surveys.of.clear(),
        }
        self.surveys.fleet = (self.fleet.alive, self.fleet.lost);
        self.volumes.changed.forget();
        self.graph.begun.forget();
    }

    /// Nodes where something changed; nothing when it may be all of them.
    pub(crate) fn changed_nodes(&self) -> Option<Vec<ServerId>> {
        if self.surveys.fleet != (self.fleet.alive, self.fleet.lost) {
            return None;
        }
        let mut servers = self.volumes.changed.known()?.to_vec();
        for &job in self.graph.begun.known()? {
            // Its pipeline needs less to end.
            servers.extend(self.home_of(self.graph.pipeline(job)));
            // Where the last user of a volume begins, it goes without any further start.
            let mounts = self.graph.workflow.job(job).mounts.iter();
            let scratch = mounts.filter(|mount| !self.graph.volume(mount.volume).is_cache);
            servers
                .extend(scratch.flat_map(|mount| self.volumes.live(mount.volume).keys().flatten()));
        }
        Some(servers)
    }

    /// What there is on a node, once a job has started if one is given.
    pub(crate) fn look(&self, server: ServerId, start: Option<(JobIndex, &[Create])>) -> Survey {
        let starting = start.map(|(job, _)| job);
        let mut survey = Survey::default();
        let (leaving, held) = (&mut survey.leaving, &mut survey.held);
        let beyond = &mut survey.beyond;
        for (id, volume) in self.volumes.on_server(server) {
            let Some(instance) = self.volumes.get(id) else {
                continue;
            };
            let is_cache = self.graph.volume(volume).is_cache;
            match instance.state {
                InstanceState::Deleting
                | InstanceState::Held
                | InstanceState::Copying
                | InstanceState::Copy => {
                    *leaving = leaving.saturating_add(instance.size);
                }
                // The user fetches what it holds, long after the run.
                InstanceState::Ready if instance.is_kept => {}
                InstanceState::Creating | InstanceState::Ready if is_cache => {
                    *leaving = leaving.saturating_add(floor(instance.size));
                    *beyond = beyond.saturating_add(beyond_least(instance.size));
                }
                InstanceState::Creating | InstanceState::Ready
                    if self.is_leaving(volume, starting) =>
                {
                    *leaving = leaving.saturating_add(instance.size);
                }
                InstanceState::Creating | InstanceState::Ready => {
                    if let Some(pipeline) = self.graph.pipeline_of(volume) {
                        let there = held.entry(pipeline).or_default();
                        *there = there.saturating_add(instance.size);
                    }
                }
            }
        }
        survey
    }
}

//! What there is on each node, whoever starts next, looked at again only where something changed.
//! What follows from it is `policy/admission/bankers_check.rs`.

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

    /// What there is on a node.
    pub(crate) fn survey(&mut self, server: ServerId) -> Arc<Survey> {
        self.forget_changed();
        if let Some(known) = self.surveys.of.get(&server) {
            return known.clone();
        }
        let survey = Arc::new(self.look(server, None));
        self.surveys.of.insert(server, survey.clone());
        survey
    }

    /// The same where it is known.
    pub(crate) fn surveyed(&self, server: ServerId) -> Option<Arc<Survey>> {
        let is_unchanged = self.volumes.changed.is_empty() && self.graph.begun.is_empty();
        let is_unchanged =
            is_unchanged && self.surveys.fleet == (self.fleet.alive, self.fleet.lost);
        self.surveys
            .of
            .get(&server)
            .filter(|_| is_unchanged)
            .cloned()
    }

    /// Forgets what was found on nodes where something changed since.
    fn forget_changed(&mut self) {
        match self.changed() {
            Some(servers) => {
                for server in servers {
                    self.surveys.of.remove(&server);
                }
            }
            None => self.surveys.of.clear(),
        }
        self.surveys.fleet = (self.fleet.alive, self.fleet.lost);
        self.volumes.changed.forget();
        self.graph.begun.forget();
    }

    /// Nodes where something changed; nothing when it may be all of them.
    fn changed(&self) -> Option<Vec<ServerId>> {
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

    /// Asserts that what is remembered is what is found.
    pub(crate) fn check_surveys(&self) {
        let Some(changed) = self.changed() else {
            return;
        };
        for (server, known) in &self.surveys.of {
            if changed.contains(server) {
                continue;
            }
            let found = self.look(*server, None);
            if known.to_end.get().is_some() {
                self.needed_to_end(&found, *server);
            }
            assert_eq!(**known, found, "{server}: what is there");
        }
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

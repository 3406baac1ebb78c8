//! Nodes that come, are lost or lose volumes. What must run again for that says
//! `policy/failure/recovery.rs`, what a list of the catalog means `policy/failure/listed_nodes.rs`.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::VolumeIndex;

use crate::decision::Decision;
use crate::event::NodeInfo;
use crate::policy::View;
use crate::policy::failure::listed_nodes::{self, ListedNode, UnlistedNode};
use crate::state::attempts::AttemptState;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

impl State {
    /// Takes what a list of the catalog says that was not known.
    pub(crate) fn servers_seen(&mut self, nodes: Vec<NodeInfo>, missed: &[ServerId]) {
        let listed: BTreeSet<ServerId> = nodes.iter().map(|node| node.id).collect();
        let mut returned = Vec::new();
        for node in nodes {
            let server = node.id;
            match listed_nodes::judge_entry(View::new(self), &node, &listed) {
                ListedNode::Known => continue,
                ListedNode::Present => {}
                ListedNode::Replaces(node) => self.commit(Decision::GiveUpNode { node }),
            }
            let is_back = self.fleet.see(node);
            self.prefetching.look_again();
            self.queues.wake(server);
            if is_back {
                self.complete_caches(server);
                returned.push(server);
            }
        }
        // What one of them has may be of use only with what another has.
        for server in returned {
            self.take_back(server);
        }
        for &server in missed {
            match listed_nodes::judge_unlisted(View::new(self), server) {
                UnlistedNode::Known => continue,
                UnlistedNode::Missing => {}
                UnlistedNode::Left => {
                    self.commit(Decision::GiveUpNode { node: server });
                    continue;
                }
            }
            let now = self.now;
            self.fleet
                .update(server, |node| node.missing_since = Some(now));
            let at = now.plus_ms(self.settings.node_timeout_ms);
            self.timers.set(at, Timer::Missing(server));
        }
    }

    /// Gives a server up if it has been missing for too long.
    pub(crate) fn give_up_missing(&mut self, node: ServerId) {
        if listed_nodes::is_missing_too_long(View::new(self), node) {
            self.commit(Decision::GiveUpNode { node });
        }
    }

    /// A server is lost with all that was on it.
    pub(crate) fn lose_server(&mut self, server: ServerId) {
        let there = self.volumes.on_server(server);
        let is_first = self.fleet.update(server, |node| {
            let is_first = !node.is_lost;
            node.is_lost = true;
            is_first
        });
        if is_first != Some(true) {
            return;
        }
        self.checkpoints.overdue.forget(server);
        self.fleet.lost += 1;
        self.fleet.alive -= 1;
        self.note_lost_node(server);
        let mut gone = Vec::new();
        for (id, volume) in there {
            self.note_left(id);
            self.stale.insert(id, server);
            gone.extend(self.forget(id).then_some((volume, id)));
        }
        let jobs = self.under_way.on(server);
        self.graph.tally.add(jobs.len() as u64);
        let here = jobs.iter().filter_map(|job| self.attempts.get(job));
        let begun = here.filter(|attempt| attempt.stage != AttemptState::Preparing);
        self.orphaned_executions
            .extend(begun.map(|attempt| (attempt.execution, server)));
        for job in jobs {
            let stage = self.attempts.get(&job).map(|attempt| attempt.stage);
            match stage {
                Some(AttemptState::Preparing) => self.end_stopped(job),
                // It said that it would.
                _ if self.fleet.is_draining(server) => self.end_stopped(job),
                _ => self.end_with_node(job, "its node was lost"),
            }
        }
        self.lose_volumes(gone);
        if !self.fleet.is_draining(server) {
            self.note_loss();
        }
        self.drop_claims(server);
        self.forget_found(server);
        self.end_cut_off_without_nodes();
        // Whose unfulfilled needs changed is queued anew, awake. Space of others is as before, but
        // for batch volumes of which a part is gone.
        self.queues.wake(server);
    }

    /// A server is lost, and what was on it with its store: it need not be deleted there.
    pub(crate) fn lose_store(&mut self, server: ServerId) {
        self.lose_server(server);
        self.unanswered.retain(|_, at| *at != server);
        self.stale.retain(|_, at| *at != server);
        let stale = &self.stale;
        self.left.retain(|id, _| stale.contains_key(id));
    }

    /// Takes the answer of a server about volumes that it should have.
    pub(crate) fn volumes_probed(&mut self, server: ServerId, lost: &[VolumeId]) {
        let mut gone = Vec::new();
        for &id in lost {
            let Some(instance) = self.volumes.get(id) else {
                continue;
            };
            // A volume that is being created need not be there yet.
            if instance.server == Some(server) && !instance.state.is_being_made() {
                let volume = instance.volume;
                gone.extend(self.forget(id).then_some((volume, id)));
                self.queues.wake(server);
            }
        }
        let is_loss = !gone.is_empty();
        self.lose_volumes(gone);
        if is_loss {
            self.note_loss();
        }
    }

    /// Forgets a volume and its reservation; answers whether it was in use.
    pub(crate) fn forget(&mut self, id: VolumeId) -> bool {
        let Some(instance) = self.volumes.remove(id) else {
            return false;
        };
        if let Some(server) = instance.server {
            if instance.state.is_being_made() {
                self.unanswered.insert(id, server);
            }
            self.fleet.update(server, |node| {
                node.reserved = node.reserved.saturating_sub(instance.size)
            });
        }
        self.forget_copy(id, instance.volume);
        self.extractions.logs.drop_volume(id);
        self.has_left(id);
        !matches!(
            instance.state,
            InstanceState::Deleting | InstanceState::Held
        )
    }

    /// Stops who uses these volumes; where somebody still needs them, a copy takes their place, or
    /// their writers run again.
    fn lose_volumes(&mut self, gone: Vec<(VolumeIndex, VolumeId)>) {
        for &(volume, id) in &gone {
            self.take_back_extracts(volume, id);
            self.stop_users(id, volume);
        }
        for &(volume, _) in &gone {
            // Needs count what exists somewhere; a million readers need not be told of a part.
            if !self.volumes.is_live(volume) {
                self.prefetching.forget(volume);
                self.requeue_users(volume);
            }
        }
        let scratch = gone.iter().map(|(volume, _)| *volume);
        let scratch = scratch
            .filter(|volume| !self.graph.volume(*volume).is_cache)
            .collect();
        self.redo(Vec::new(), scratch);
    }
}

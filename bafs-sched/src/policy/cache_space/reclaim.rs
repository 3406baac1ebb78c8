//! Freeing what nobody needs any more, and the end of a run. When nothing goes on is
//! `policy/admission/deadlock.rs`.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::Action;
use crate::describe::{DELETE_FAULTS_TOLD, LEFT_SHOWN, describe_ms};
use crate::space::Space;
use crate::state::jobs::{JobState, VolumeNode};
use crate::state::lost_volumes::LostVolume;
use crate::state::observed_access::RunWarning;
use crate::state::progress::Outcome;
use crate::state::scheduler_state::{Phase, State};
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

impl State {
    /// Takes a volume out of use and has it deleted; its space counts until that is done.
    pub(crate) fn retire(&mut self, id: VolumeId) {
        let Some(instance) = self.volumes.get(id) else {
            return;
        };
        let (volume, server) = (instance.volume, instance.server);
        match server {
            _ if self.extractions.logs.holds(id) => {
                self.forget_copy(id, volume);
                self.volumes.retire(id, InstanceState::Held);
            }
            Some(server) => {
                if instance.state.is_being_made() {
                    self.unanswered.insert(id, server);
                }
                self.forget_copy(id, volume);
                self.volumes.retire(id, InstanceState::Deleting);
                if self.graph.volume(volume).is_cache {
                    let group = self.fleet.group_name(server).unwrap_or_default();
                    self.leaving.insert(id, server, group);
                }
                self.out.push(Action::DeleteVolume { id, server });
            }
            None => drop(self.volumes.remove(id)),
        }
        if !self.volumes.is_live(volume) {
            self.warming.give_up(volume);
            self.warming.forget(volume);
            self.idle_caches.remove(&volume);
            self.requeue_users(volume);
        }
    }

    /// Deletes a volume when its last user is done and its files are at home. A cache stays while
    /// a user of it may have to run again, unless its space is wanted.
    pub(crate) fn release_if_unneeded(&mut self, volume: VolumeIndex) {
        let node = self.graph.volume(volume);
        if node.is_needed() {
            if node.is_idle() {
                let is_new = self.idle_caches.insert(volume);
                self.warming.idled += u64::from(is_new && self.graph.is_batch(volume));
            }
            return;
        }
        self.retire_all(volume);
    }

    /// Deletes the caches and copies that only this pipeline could have needed again, if it is
    /// closed.
    pub(crate) fn release_kept(&mut self, pipeline: u32) {
        for cache in self.graph.caches_of_closed(pipeline) {
            self.release_if_unneeded(cache);
        }
        self.drop_copies_of_closed(pipeline);
    }

    /// Gives the space of caches that nobody will read unless something is lost to jobs that are
    /// ready: to fetch again is better than to wait. Answers whether there was one.
    pub(crate) fn free_idle_caches(&mut self) -> bool {
        let mut is_any = false;
        for cache in self.idle_caches.take() {
            if self.graph.volume(cache).is_idle() && self.volumes.is_live(cache) {
                self.retire_all(cache);
                is_any = true;
            }
        }
        is_any
    }

    /// Whether parts of caches are being deleted on nodes that share caches with this one.
    pub(crate) fn is_cache_leaving(&self, server: ServerId) -> bool {
        let group = self.fleet.group_name(server).unwrap_or_default();
        self.leaving.in_group(group).next().is_some()
    }

    /// What parts of caches that are being deleted hold of each node that shares caches with this
    /// one.
    pub(crate) fn leaving_bytes(&self, server: ServerId) -> BTreeMap<ServerId, Space> {
        let mut bytes = BTreeMap::<ServerId, Space>::new();
        let group = self.fleet.group_name(server).unwrap_or_default();
        for (id, server) in self.leaving.in_group(group) {
            let size = self.volumes.get(id).map(|instance| instance.size);
            let there = bytes.entry(server).or_default();
            *there = there.saturating_add(size.unwrap_or_default());
        }
        bytes
    }

    /// A part of a cache is gone, or will not go soon. With the last of its group those go on that
    /// waited for an even division.
    pub(crate) fn has_left(&mut self, id: VolumeId) {
        let server = self.leaving.remove(id);
        if server.is_some_and(|server| !self.is_cache_leaving(server)) {
            self.queues.wake_all();
            self.queues.feed();
        }
    }

    /// Gives the space of caches that no job which may start soon reads, when nobody runs: they are
    /// fetched again, but what has begun need not end one job after the other. Rules say themselves
    /// how many caches there are. Answers whether there was one.
    pub(crate) fn free_far_caches(&mut self) -> bool {
        self.settings.allocation_rules.is_none()
            && self.free_caches(|_, cache| cache.users_near == 0)
    }

    /// Gives the space of all caches but those that the first of these jobs reads to whoever
    /// waits, when nobody runs: they are fetched again. Answers whether there was one.
    pub(crate) fn free_unused_caches(&mut self, candidates: &[JobIndex]) -> bool {
        let first = candidates.first().map(|job| self.graph.mounted(*job));
        let read: BTreeSet<VolumeIndex> = first.into_iter().flatten().map(|(v, _)| v).collect();
        self.free_caches(|volume, _| !read.contains(&volume))
    }

    /// Gives up those that the next job reads too: they may lie where it finds no room for the
    /// rest. Answers whether there was one.
    pub(crate) fn free_all_caches(&mut self) -> bool {
        self.free_caches(|_, _| true)
    }

    /// Deletes the caches of this kind. Answers whether there was one.
    fn free_caches(&mut self, is_meant: impl Fn(VolumeIndex, &VolumeNode) -> bool) -> bool {
        let there: BTreeSet<VolumeIndex> = self.volumes.iter().map(|(_, i)| i.volume).collect();
        let is_freed = |volume: &VolumeIndex| {
            let node = self.graph.volume(*volume);
            node.is_cache && is_meant(*volume, node) && self.volumes.is_live(*volume)
        };
        let freed: Vec<VolumeIndex> = there.into_iter().filter(is_freed).collect();
        for &cache in &freed {
            self.retire_all(cache);
        }
        !freed.is_empty()
    }

    pub(crate) fn retire_all(&mut self, volume: VolumeIndex) {
        let ids: Vec<VolumeId> = self.volumes.live(volume).values().copied().collect();
        for id in ids {
            self.retire(id);
        }
    }

    pub(crate) fn volume_deleted(&mut self, id: VolumeId) {
        self.stale.remove(&id);
        self.left.remove(&id);
        self.late.remove(&id);
        let Some(instance) = self.volumes.get(id) else {
            return;
        };
        let server = instance.server;
        if instance.state == InstanceState::Deleting {
            self.forget(id);
            self.queues.feed();
            server
                .into_iter()
                .for_each(|server| self.settle_claims(server));
            server
                .into_iter()
                .for_each(|server| self.queues.wake(server));
        }
    }

    pub(crate) fn delete_failed(&mut self, id: VolumeId) {
        self.late.remove(&id);
        self.has_left(id);
        let pause_ms = match self.volumes.get_mut(id) {
            Some(instance) => {
                instance.delete_faults += 1;
                let faults = instance.delete_faults;
                if faults == DELETE_FAULTS_TOLD {
                    self.tell_undeleted(id);
                }
                self.settings.pause_ms(faults)
            }
            None if self.stale.contains_key(&id) => self.settings.retry_pause_ms_max,
            None => return,
        };
        self.timers
            .set(self.now.plus_ms(pause_ms), Timer::Delete(id));
    }

    fn tell_undeleted(&mut self, id: VolumeId) {
        let Some((volume, server)) = self.volumes.get(id).map(|i| (i.volume, i.server)) else {
            return;
        };
        let name = &self.graph.workflow.volume(volume).name;
        let node = server.map(|server| self.fleet.name(server));
        let text = format!(
            "volume '{name}' ({id}) cannot be deleted on node {}: its space is not available; see \
             the node's log; the scheduler retries",
            node.unwrap_or_default()
        );
        self.tell(RunWarning {
            job: None,
            volume: Some(volume),
            node: server,
            text,
        });
    }

    /// A volume that was given up while it was being created may exist now, even if it was deleted
    /// meanwhile: the two calls may have overtaken each other. It is deleted even if its server was
    /// given up: a new one may have answered at the address, where the old one lost all it had.
    pub(crate) fn delete_late(&mut self, id: VolumeId) {
        if let Some(server) = self.unanswered.remove(&id)
            && self.volumes.get(id).is_none()
        {
            self.stale.insert(id, server);
            self.late.insert(id);
            self.out.push(Action::DeleteVolume { id, server });
        } else {
            self.delete_again(id);
        }
    }

    /// The scheduler that asked for volumes, and gave them up, was killed: nobody is told any more
    /// that one was made after it was deleted.
    pub(crate) fn delete_unanswered(&mut self) {
        let is_gone = |id: &&VolumeId| self.volumes.get(**id).is_none();
        let gone: Vec<VolumeId> = self.unanswered.keys().filter(is_gone).copied().collect();
        gone.into_iter().for_each(|id| self.delete_late(id));
    }

    pub(crate) fn delete_again(&mut self, id: VolumeId) {
        // An earlier deletion may fail after the node is asked whether it has the volume.
        let is_awaited = self.left.get(&id).is_some_and(LostVolume::is_awaited);
        if let Some(&server) = self.stale.get(&id)
            && !self.is_lost(server)
            && !is_awaited
        {
            self.out.push(Action::DeleteVolume { id, server });
        }
        if let Some(instance) = self.volumes.get(id)
            && let (InstanceState::Deleting, Some(server)) = (instance.state, instance.server)
        {
            self.out.push(Action::DeleteVolume { id, server });
        }
    }

    /// Starts nothing any more; what is under way is stopped and what exists is deleted.
    pub(crate) fn finish(&mut self) {
        if matches!(self.phase, Phase::Finishing | Phase::Over) {
            return;
        }
        self.phase = Phase::Finishing;
        // Who gives the run up does not wait for them.
        self.extractions.logs.clear();
        self.keep_unsent();
        self.timers.set(
            self.now.plus_ms(self.settings.cleanup_timeout_ms),
            Timer::Cleanup,
        );
        for job in self.attempts.keys().copied().collect::<Vec<_>>() {
            self.stop(job, None);
        }
        self.delete_idle();
    }

    pub(crate) fn cancel(&mut self) {
        self.is_cancelled = true;
        self.finish();
    }

    /// Deletes volumes that no attempt uses any more.
    fn delete_idle(&mut self) {
        let live = self
            .volumes
            .iter()
            .filter(|(_, instance)| instance.state != InstanceState::Deleting);
        let live: Vec<VolumeId> = live.map(|(id, _)| id).collect();
        let kept = self.extractions.kept();
        let attempts = self.attempts.values();
        let used: BTreeSet<VolumeId> = attempts
            .flat_map(|attempt| attempt.uses.iter().map(|used| used.id))
            .collect();
        let is_idle = |id: &VolumeId| !used.contains(id) && !kept.contains(id);
        for id in live.into_iter().filter(is_idle) {
            self.retire(id);
        }
        self.cleaned_with = Some(self.attempts.len());
    }

    pub(crate) fn end_if_clean(&mut self) {
        // Only the end of an attempt lets go of a volume.
        if self.cleaned_with != Some(self.attempts.len()) {
            self.delete_idle();
        }
        let mut left = self.stale.values().chain(self.strays.values());
        let is_stale = left.any(|server| !self.is_lost(*server));
        if !self.attempts.is_empty() || is_stale || !self.late.is_empty() {
            return;
        }
        let kept = self.extractions.kept();
        if self.volumes.iter().all(|(id, _)| kept.contains(&id)) {
            self.end();
        }
    }

    /// What could not be deleted in time is deleted by its server when its lifetime ends.
    pub(crate) fn stop_cleaning(&mut self) {
        if self.phase == Phase::Finishing {
            self.end();
        }
    }

    /// Says which volumes nodes may still have, and what becomes of them.
    fn tell_left(&mut self) {
        let kept = self.extractions.kept();
        let undeleted = self.volumes.iter().filter(|(id, _)| !kept.contains(id));
        let undeleted = undeleted.filter_map(|(id, instance)| Some((instance.server?, id)));
        let stale = self.stale.iter().map(|(id, server)| (*server, *id));
        let mut left: BTreeMap<ServerId, Vec<VolumeId>> = BTreeMap::new();
        for (server, id) in undeleted.chain(stale) {
            left.entry(server).or_default().push(id);
        }
        for (server, ids) in left {
            let name = self.fleet.name(server);
            let shown = ids.iter().take(LEFT_SHOWN).map(VolumeId::to_string);
            let shown = shown.collect::<Vec<_>>().join(" ");
            let more = match ids.len().saturating_sub(LEFT_SHOWN) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let text = format!(
                "node {name} did not say that it deleted volumes of this run ({shown}{more}): if \
                 it has them, it deletes them {} after it is back, those with results after {}; \
                 sooner: bafs volume delete ID",
                describe_ms(self.settings.volume_lifetime_ms),
                describe_ms(self.settings.result_lifetime_ms),
            );
            self.tell(RunWarning {
                job: None,
                volume: None,
                node: Some(server),
                text,
            });
        }
    }

    fn end(&mut self) {
        self.phase = Phase::Over;
        self.tell_left();
        let unfinished = self
            .graph
            .job_indexes()
            .any(|job| self.graph.state(job) != JobState::Done);
        let unsent: Vec<RunWarning> = self.extractions.messages().cloned().collect();
        let messages = self.messages.iter();
        let messages = messages.chain(unsent.iter().map(|warning| &warning.text));
        let messages: Vec<String> = messages.cloned().collect();
        let outcome = if self.is_cancelled {
            // That outcome says nothing of results that stay.
            unsent.into_iter().for_each(|warning| self.tell(warning));
            Outcome::Cancelled
        } else if unfinished || self.extractions.failed > 0 || !messages.is_empty() {
            Outcome::Failed {
                jobs: self.failures.to_vec(),
                messages,
            }
        } else {
            Outcome::Complete
        };
        self.outcome = Some(outcome.clone());
        self.out.push(Action::Finish { outcome });
    }
}

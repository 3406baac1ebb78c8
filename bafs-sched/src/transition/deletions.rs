//! Volumes that go: from their retirement to the answer of their node, however late. Which go is
//! decided in `policy/cache_space/reclaim.rs` and by what is done.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::VolumeIndex;

use crate::action::Action;
use crate::decision::Decision;
use crate::describe::DELETE_FAULTS_TOLD;
use crate::policy::View;
use crate::policy::cache_space::reclaim::Retention;
use crate::state::lost_volumes::LostVolume;
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;
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
            self.prefetching.give_up(volume);
            self.prefetching.forget(volume);
            self.idle_caches.remove(&volume);
            self.requeue_users(volume);
        }
    }

    pub(crate) fn retire_all(&mut self, volume: VolumeIndex) {
        let ids: Vec<VolumeId> = self.volumes.live(volume).values().copied().collect();
        for id in ids {
            self.retire(id);
        }
    }

    /// Deletes a volume when its last user is done and its files are at home.
    pub(crate) fn release_if_unneeded(&mut self, volume: VolumeIndex) {
        match View::new(self).retention_of(volume) {
            Retention::Needed => {}
            Retention::Idle => {
                let is_new = self.idle_caches.insert(volume);
                self.prefetching.idled += u64::from(is_new && self.graph.is_batch(volume));
            }
            Retention::Unneeded => self.retire_all(volume),
        }
    }

    /// Deletes the caches and copies that only this pipeline could have needed again, if it is
    /// closed.
    pub(crate) fn release_kept(&mut self, pipeline: u32) {
        for cache in self.graph.caches_of_closed(pipeline) {
            self.release_if_unneeded(cache);
        }
        self.drop_copies_of_closed(pipeline);
    }

    /// A part of a cache is gone, or will not go soon. With the last one those go on that waited
    /// for its space.
    pub(crate) fn has_left(&mut self, id: VolumeId) {
        if self.leaving.remove(id) && self.leaving.is_empty() {
            self.queues.wake_all();
            self.queues.feed();
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

    /// Gives up caches. Answers whether there was one.
    pub(crate) fn evict(&mut self, volumes: Vec<VolumeIndex>) -> bool {
        let is_any = !volumes.is_empty();
        for volume in volumes {
            self.commit(Decision::EvictCache { volume });
        }
        is_any
    }

    /// Gives the space of caches that nobody will read unless something is lost to jobs that are
    /// ready. Answers whether there was one.
    pub(crate) fn evict_idle_caches(&mut self) -> bool {
        let kept = View::new(self).kept_to_evict();
        let idle = View::new(self).idle_caches_to_evict();
        drop(self.idle_caches.take());
        for &id in &kept {
            self.commit(Decision::DropVolume { id });
        }
        self.evict(idle) || !kept.is_empty()
    }

    /// A node came: it takes the parts of batch volumes that its group lacks.
    pub(crate) fn complete_caches(&mut self, server: ServerId) {
        for (volume, part) in View::new(self).parts_to_complete(server) {
            self.commit(Decision::CompleteCache {
                volume,
                server,
                part,
            });
        }
    }
}

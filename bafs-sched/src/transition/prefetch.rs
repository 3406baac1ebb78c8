//! The loop that has batch volumes come before their readers: it asks which, makes them and has
//! their parts fetched.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::VolumeIndex;

use crate::policy::View;
use crate::policy::cache_space::CachePlanning;
use crate::policy::cache_space::prefetch::{PrefetchLimits, PrefetchReview};
use crate::space::Space;
use crate::state::prefetch::Ahead;
use crate::state::scheduler_state::State;
use crate::state::volumes::InstanceState;

impl State {
    /// Goes on with the batch volume that comes before its readers, or begins with the next.
    pub(crate) fn prefetch_ahead(&mut self) {
        if View::new(self).has_usable_prefetch() {
            for volume in std::mem::take(&mut self.prefetching.behind) {
                self.requeue_users(volume);
            }
        }
        match View::new(self).review_prefetch() {
            PrefetchReview::Continue => return self.ask_to_warm(),
            PrefetchReview::Finished(volume) => self.prefetching.give_up(volume),
            PrefetchReview::Nothing => {}
        }
        self.prefetching.ahead = None;
        self.refresh_surveys();
        let (view, policies) = (View::new(self), self.policies());
        let search = view.find_prefetch(PrefetchLimits {
            planning: CachePlanning {
                partitioning: policies.cache_space,
                to_end: &|server, start| view.lacking_to_end(server, start).bytes,
            },
            can_spare: &|server, part| view.can_spare(server, part),
        });
        if search.looked_at.is_some() {
            self.prefetching.looked_at = search.looked_at;
        }
        self.evict(search.evicted);
        if let Some(prefetch) = search.prefetch {
            self.commit(prefetch);
        }
    }

    /// Makes a batch volume before its readers, and has it fetched.
    pub(super) fn begin_prefetch(&mut self, volume: VolumeIndex, parts: &[(ServerId, Space)]) {
        self.prefetching.ahead = Some(Ahead {
            volume,
            was_near: self.graph.volume(volume).users_near > 0,
            is_made: !parts.is_empty(),
            asked: BTreeSet::new(),
        });
        if !parts.is_empty() {
            self.prefetching.behind.push(volume);
            self.requeue_users(volume);
        }
        for (server, part) in parts {
            self.create(volume, Some(*server), *part);
        }
        self.ask_to_warm();
    }

    /// Gives the room of the volume that was made before its readers to jobs that can start now.
    pub(crate) fn evict_prefetched(&mut self) {
        let volume = View::new(self).prefetch_to_evict();
        self.evict(volume.into_iter().collect());
    }

    /// Has all parts fetch what they lack, once all are there; and again when one is gone, as the
    /// others have its share from then on.
    fn ask_to_warm(&mut self) {
        let Some(ahead) = &mut self.prefetching.ahead else {
            return;
        };
        let parts: BTreeSet<VolumeId> = self.volumes.live(ahead.volume).values().copied().collect();
        let instance = |id: &VolumeId| self.volumes.get(*id).map(|instance| instance.state);
        if parts == ahead.asked
            || !parts
                .iter()
                .all(|id| instance(id) == Some(InstanceState::Ready))
        {
            return;
        }
        ahead.asked = parts;
        let actions = self.asked_to_warm();
        self.out.extend(actions);
    }
}

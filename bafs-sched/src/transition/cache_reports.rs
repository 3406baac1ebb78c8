//! What nodes tell of their parts of caches.

use bafs_proto::ids::VolumeId;
use bafs_workflow::VolumeIndex;

use crate::action::Action;
use crate::policy::View;
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;
use crate::state::volumes::InstanceState;

impl State {
    /// Another reader of a cache is done: perhaps its parts are asked what they keep of it.
    pub(crate) fn inspect_cache(&mut self, volume: VolumeIndex) {
        let Some(plan) = View::new(self).plan_inspection(volume) else {
            return;
        };
        self.load_imbalance.asked.insert(volume, plan.inspection);
        let inspect = |(id, server)| Action::InspectCache { id, server };
        self.out.extend(plan.parts.into_iter().map(inspect));
    }

    /// A part of a cache keeps so much that nobody else does, or would keep if it had the room.
    pub(crate) fn cache_inspected(&mut self, id: VolumeId, kept_bytes: u64) {
        let there = self
            .volumes
            .get(id)
            .filter(|it| it.state == InstanceState::Ready);
        let Some((volume, Some(server))) = there.map(|it| (it.volume, it.server)) else {
            return;
        };
        let asked = self.load_imbalance.asked.get_mut(&volume);
        let (Some(asked), Some(node)) = (asked, self.fleet.get(server)) else {
            return;
        };
        if asked.kept.insert(id, kept_bytes).is_none()
            && let Some(left) = asked.left.get_mut(&node.seen.group)
        {
            *left = left.saturating_sub(1);
        }
        if let Some(found) = View::new(self).imbalance_of(volume, server) {
            self.load_imbalance.note(volume, found);
        }
    }

    /// A part of a cache got so many bytes once more since its node started.
    pub(crate) fn note_refetched(&mut self, id: VolumeId, bytes: u64) {
        let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) else {
            return;
        };
        let again = self.load_imbalance.refetched.note(volume, id, bytes);
        let Some(text) = View::new(self).describe_refetch(volume, again) else {
            return;
        };
        self.load_imbalance.refetched.parts.remove(&volume);
        self.load_imbalance.refetched.told.insert(volume);
        self.tell(RunWarning {
            job: None,
            volume: Some(volume),
            node: None,
            text,
        });
    }
}
